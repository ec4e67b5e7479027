"""The kernels of a derivative, and a call of them: on a GPU, or for CPU tensors in the emulator."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attngen import emulator
from attngen.backward_pipeline import Asked, BackwardLevels, choices, derive_backward, following
from attngen.config import SumsConfig
from attngen.errors import CompileError
from attngen.evaluate import evaluate
from attngen.execute import device_arch, empty_like_rows, head_bytes, launch_module, scalars_of
from attngen.expr import B, DType, H, I, Op, walk
from attngen.ir.graph import Graph, Output
from attngen.ir.ops import Assign
from attngen.ir.schedule import VerifiedSchedule
from attngen.kernel import Generated
from attngen.passes.sum_names import element_sums
from attngen.plan import Launches, Layout, empty_on, launches, layouts
from attngen.predict import Bounds, Counts, predicted
from attngen.progress import Progress
from attngen.signature import ELEMENT_BYTES, VECTOR_BYTES, Signature, alignment_of
from attngen.spec import Variant
from attngen.target import Feature, Target

_log = logging.getLogger("attngen")


class BackwardKernel(Generated):
    """The module of a derivative: a kernel of rows, one for each axis that CTAs own, in launch order."""

    def __init__(
        self, variant: Variant, signature: Signature, target: Target, asked: Asked, levels: BackwardLevels
    ) -> None:
        self.variant, self.signature, self.asked, self.levels = variant, signature, asked, levels
        self.rejected: tuple[str, ...] = ()
        configs = ", ".join(f"{name} {config}" for name, config in levels.configs)
        super().__init__(levels.verified, target, f"{variant.description}: {asked}", str(signature), configs)

    @property
    def expected(self) -> Mapping[str, Counts]:
        """No more than a least count: the compiler clones parts of the long loops of these kernels."""
        return {
            symbol: {name: Bounds(b.least, sys.maxsize) for name, b in counts.items()}
            for symbol, counts in predicted(self.schedule).items()
        }

    @property
    def spilled(self) -> float:
        """Masked tiles are few, and their maps may keep a register less: of some hundred instructions of a step, one.
        Measured on an H200 at head_dim 128: two addresses spilled in each step cost less than 1 %; the kernels that
        come next in rank take 1.2 times as long."""
        return 0.01

    @property
    def graph(self) -> Graph:
        graph = next(s.level for s in self.levels.stages if s.name == "simplify")
        assert isinstance(graph, Graph)
        return graph

    def explain(self) -> str:
        """Every level with the reasons of its decisions."""
        lines = [f"variant    {self.variant.description}", f"asked      {self.asked}", f"signature  {self.signature}"]
        lines += [f"target     {self.target.name}{self._also}"]
        lines += [f"config     {name} {config}" for name, config in self.levels.configs]
        lines += [f"refused    {text}" for text in self.rejected]
        lines += [f"{fact.subject}: {fact.text}" for fact in self.schedule.facts]
        for stage in self.levels.stages:
            lines += ["", f"---- {stage.name}", str(stage).rstrip()]
        return "\n".join(lines) + "\n"

    @property
    def _also(self) -> str:
        """What these kernels serve beside their target (attngen.execute.backward_target)."""
        if self.signature.alignment == VECTOR_BYTES or self.target.has(Feature.WGMMA):
            return ""
        return f", on Hopper too: its copy engine reads no rows on {self.signature.alignment} bytes"

    def with_schedule(self, schedule: VerifiedSchedule) -> BackwardKernel:
        """The same gradients by another schedule."""
        levels = replace(self.levels, verified=schedule)
        return BackwardKernel(self.variant, self.signature, self.target, self.asked, levels)

    @property
    def configs(self) -> tuple[SumsConfig, ...]:
        return tuple(c for _, c in self.levels.configs)


_kernels: dict[tuple[str, Signature, str, Asked, tuple[SumsConfig, ...] | None], BackwardKernel] = {}
_settled: dict[tuple[BackwardKernel, str], BackwardKernel] = {}


def backward_for(
    variant: Variant, signature: Signature, target: Target, asked: Asked, configs: tuple[SumsConfig, ...] | None = None
) -> BackwardKernel:
    """The derivative of a variant, made once a process."""
    key = (variant.variant_key(), signature, target.name, asked, configs)
    if key not in _kernels:
        levels = derive_backward(variant, signature, target, asked, configs)
        _kernels[key] = BackwardKernel(variant, signature, target, asked, levels)
    return _kernels[key]


def settled(kernel: BackwardKernel, arch: str) -> BackwardKernel:
    """The kernel itself if its compiled form passes the build gate, else with the next tile shapes in rank: those of
    the kernels that the gate names; when the one kernel that adds parts in memory has no further, the kernels without
    such parts, whose bits are the same in every run. CompileError when they have no further."""
    key = (kernel, arch)
    if key not in _settled:
        current, rejected = kernel, list[str]()
        while True:
            try:
                current.artifact(arch)
                break
            except CompileError as error:
                asked = current.asked
                ranked = choices(kernel.variant, kernel.signature, kernel.target, asked)
                configs = following(ranked, current.configs, error)
                if configs is None:
                    if asked.same_bits:
                        raise
                    asked = replace(asked, same_bits=True)
                rejected.append(f"{', '.join(map(str, current.configs))}: {error}")
                _log.info("%s was refused for %s, the next is used: %s", current.configs, arch, error)
                current = backward_for(kernel.variant, kernel.signature, kernel.target, asked, configs)
        current.rejected = tuple(rejected)
        _settled[key] = current
    return _settled[key]


def backward_signature(forward: Signature, out: Tensor, dout: Tensor) -> Signature:
    """Rows of the output and of its gradient may start anywhere, and need not be contiguous; what is not all aligned is
    copied element by element."""
    aligned = forward.alignment == VECTOR_BYTES and rows_are_vectors(out) and rows_are_vectors(dout)
    return forward if aligned else replace(forward, alignment=ELEMENT_BYTES)


def rows_are_vectors(t: Tensor) -> bool:
    """Rows are contiguous, and all start and end at multiples of 16 bytes."""
    return (t.stride(3) == 1 or t.size(3) == 1) and alignment_of(t) == VECTOR_BYTES


def unordered(kernel: BackwardKernel, sizes: Mapping[str, int]) -> list[str]:
    """Captured tensors to an element of which several elements of scores are added, in an order that is not that of
    another run. `sizes`: of the indices b, h, i, j."""
    found = []
    for out in element_sums(kernel.graph):
        alone = {e.name for e in out.index if e.op is Op.VAR} | {n for n, size in sizes.items() if size == 1}
        if not alone >= {"b", "h", "i", "j"}:
            found.append(out.into)
    return found


@dataclass(frozen=True)
class Result:
    """A tensor that a derivative writes: a gradient, or what is summed up to one."""

    out: Output
    layout: Layout
    dtype: torch.dtype
    zero: bool  # elements are added to it

    @property
    def name(self) -> str:
        return self.out.x


def results(kernel: BackwardKernel, tensors: Mapping[str, Tensor], captures: Mapping[str, Tensor]) -> list[Result]:
    """What a call of a derivative makes, in the order of its outputs."""
    q, elements, found = tensors["q"], {out.x for out in element_sums(kernel.graph)}, list[Result]()
    for out in kernel.graph.of(Output):
        assert isinstance(out, Output)
        zero = out.x in elements
        if out.mode is Assign.REDUCE_ADD:
            like = torch.empty(captures[out.into].shape if zero else q.shape[:3], dtype=torch.float32, device="meta")
        else:
            t = tensors[out.x[1:]]
            like = empty_like_rows(t.to("meta"), t.size(3))
        found.append(Result(out, (tuple(like.shape), like.stride()), like.dtype, zero))
    return found


def given(tensors: Mapping[str, Tensor], captures: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a derivative reads. The lse that the forward pass makes is contiguous already."""
    return {**{n: t.contiguous() if n == "lse" else t for n, t in tensors.items()}, **captures}


def finished(
    made: Sequence[tuple[Result, Tensor]], captures: Mapping[str, Tensor], seqlen_k: int
) -> dict[str, Tensor]:
    """Gradients by the names of what they belong to, in the types of these."""
    result = {x.name[1:]: t for x, t in made if x.out.mode is not Assign.REDUCE_ADD}
    for x, t in made:
        if x.out.mode is Assign.REDUCE_ADD:
            part = t if x.zero else sum_rows(x.out, t, captures, seqlen_k)
            result[x.out.into] = result[x.out.into] + part if x.out.into in result else part
    return {n: t.to(captures[n].dtype) if n in captures else t for n, t in result.items()}


def run(
    kernel: BackwardKernel, tensors: Mapping[str, Tensor], captures: Mapping[str, Tensor], scale: float,
    mode: emulator.Mode = emulator.Mode.LATE, seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients by the names of what they belong to, in the types of these. `tensors`: q, k, v, out, dout; lse, and
    dlse where it has a gradient. No size may be 0."""
    q, k = tensors["q"], tensors["k"]
    if q.is_cuda:
        return plan(kernel, tensors, captures, scale).run(tensors, captures)
    made = [(x, torch.empty_strided(*x.layout, dtype=x.dtype)) for x in results(kernel, tensors, captures)]
    for x, t in made:
        t.fill_(0.0 if x.zero else math.nan)  # what is not written shows
    held = {**given(tensors, captures), **{x.name: t for x, t in made}}
    launch_module(kernel, held, scalars_of(q, k, scale), mode, seed)
    return finished(made, captures, k.size(2))


@dataclass(frozen=True)
class GradientPlan:
    """A call of a derivative on a GPU, with given shapes and strides. Refers to no tensor of the caller."""

    results: tuple[Result, ...]
    launches: Launches

    def run(self, tensors: Mapping[str, Tensor], captures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `run`, for tensors like those that the plan was made for, in their order."""
        empty = empty_on(self.launches.device)
        made = [(x, empty(*x.layout, x.dtype)) for x in self.results]
        for x, t in made:
            if x.zero:
                t.zero_()
        held = given(tensors, captures)
        self.launches.run([t.data_ptr() for t in (*held.values(), *(t for _, t in made))])
        return finished(made, captures, tensors["k"].size(2))


def plan(
    kernel: BackwardKernel, tensors: Mapping[str, Tensor], captures: Mapping[str, Tensor], scale: float
) -> GradientPlan:
    """Compiles and loads what the call needs. No size may be 0."""
    q, k = tensors["q"], tensors["k"]
    with Progress() as progress:
        arch = device_arch(kernel.target, q.device.index)
        progress.step(f"compiling {kernel.asked} of {kernel.variant.description} for {arch}")
        chosen = settled(kernel, arch)
        made = tuple(results(chosen, tensors, captures))
        shapes = {**layouts(given(tensors, captures)), **{x.name: x.layout for x in made}}
        return GradientPlan(
            made, launches(chosen, arch, shapes, scalars_of(q, k, scale), head_bytes(tensors), q.device)
        )


def sum_rows(out: Output, rows: Tensor, captures: Mapping[str, Tensor], seqlen_k: int) -> Tensor:
    """The sum of row values [B, H, Sq] at the elements of a captured tensor that the rows read."""
    captured = captures[out.into]
    env: dict[str, Tensor | int] = {"seqlen_q": rows.size(2), "seqlen_k": seqlen_k}
    for at, (x, n) in enumerate(zip((B, H, I), rows.shape, strict=True)):
        env[x.name] = torch.arange(n, device=rows.device).view([-1 if d == at else 1 for d in range(3)])
    result = torch.zeros(captured.shape, dtype=torch.float32, device=rows.device)
    used = {x for e in out.index for x in walk(e) if x.op is Op.VAR and x.dtype is DType.I32}
    for at, x in enumerate((B, H, I)):
        if x not in used:  # summed first: no two summands for an element where the index names it
            rows = rows.sum(at, keepdim=True)
            env[x.name] = torch.zeros((1, 1, 1), dtype=torch.int64, device=rows.device)
    if not out.index:
        return result + rows.sum()
    index = [
        evaluate(e, env, captures).clamp(0, n - 1).expand(rows.shape).flatten()
        for e, n in zip(out.index, captured.shape, strict=True)
    ]
    return result.index_put_(tuple(index), rows.flatten(), accumulate=True)
