"""Launching on a GPU with little work in Python: all that follows from shapes and strides is worked out once."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngen.arguments import TORCH, grid, number
from attngen.execute import device_arch, empty_like_rows, scalars_of
from attngen.ir.schedule import Kernel as KernelText
from attngen.kernel import Kernel, settled
from attngen.params import Kind, fields, packer, stride_count
from attngen.progress import Progress
from attngen.runtime.launch import launch
from attngen.runtime.load import LoadedKernel, load

Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


@dataclass(frozen=True)
class Step:
    """One launch. Parameters are pointers, which change from call to call, and `rest`, which does not."""

    loaded: LoadedKernel
    grid: int
    threads: int
    pointers: struct.Struct
    arguments: tuple[int, ...]  # numbers of the tensors, in the order q, k, v, out, lse, captures, workspaces
    rest: bytes


@dataclass(frozen=True)
class Plan:
    """The launches of a call with given shapes and strides. Refers to no tensor."""

    out: Layout
    lse: tuple[int, ...]
    workspaces: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    steps: tuple[Step, ...]

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = q.new_empty_strided(*self.out)
        lse = q.new_empty(self.lse, dtype=torch.float32)
        work = [q.new_empty(shape, dtype=dtype) for shape, dtype in self.workspaces]
        pointers = [t.data_ptr() for t in (q, k, v, out, lse, *captures, *work)]
        for step in self.steps:
            params = step.pointers.pack(*[pointers[n] for n in step.arguments]) + step.rest
            launch(step.loaded, grid=step.grid, threads=step.threads, params=params)
        return out, lse


def plan(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    captures: Sequence[torch.Tensor], names: Sequence[str], scale: float,
) -> Plan:  # fmt: skip
    """Compiles and loads what the call needs. No size may be 0."""
    index = q.device.index
    with Progress() as progress:
        arch = device_arch(kernel, index)
        progress.step(f"compiling {kernel.variant.description} for {arch}")
        chosen = settled(kernel, arch)
        scalars = scalars_of(q, k, scale)
        sizes = {n: x for n, x in scalars.items() if isinstance(x, int)}
        spaces = chosen.schedule.workspaces
        work = [(tuple(number(e, sizes) for e in w.shape), TORCH[w.elem]) for w in spaces]
        out, lse = empty_like_rows(q, v.size(3)), q.shape[:3] if chosen.has_lse else (0,)
        shapes: dict[str, Layout] = {n: (tuple(t.shape), t.stride()) for n, t in zip("qkv", (q, k, v), strict=True)}
        shapes["out"] = tuple(out.shape), out.stride()
        shapes["lse"] = _contiguous(lse)
        shapes.update({n: (tuple(t.shape), t.stride()) for n, t in zip(names, captures, strict=True)})
        shapes.update({w.name: _contiguous(shape) for w, (shape, _) in zip(spaces, work, strict=True)})
        artifact = chosen.artifact(arch)
        steps = tuple(
            _step(text, load(artifact, text.name, text.smem_bytes, device_index=index), shapes, scalars)
            for text in chosen.schedule.kernels
        )
    return Plan(shapes["out"], tuple(lse), tuple(work), steps)


def _contiguous(shape: Sequence[int]) -> Layout:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(shape), tuple(strides)


def _step(text: KernelText, loaded: LoadedKernel, shapes: dict[str, Layout], scalars: dict[str, int | float]) -> Step:
    values: dict[str, int | float] = {s.name: scalars[s.name] for s in text.scalars}
    for t in text.tensors:
        shape, strides = shapes[t.name]
        values.update({f"{t.name}_s{n}": strides[n] for n in range(stride_count(t.access, t.rank))})
        values.update({f"{t.name}_n{n}": shape[n] for n in range(t.rank)})
        values[t.name] = 0
    pointers = [f.name for f in fields(text) if f.kind is Kind.POINTER]  # they come first
    layout, names = packer(text)
    whole = layout.pack(*(values[n] for n in names))
    numbers = {name: n for n, name in enumerate(shapes)}
    sizes = {n: x for n, x in scalars.items() if isinstance(x, int)}
    front = struct.Struct(f"={len(pointers)}Q")
    return Step(
        loaded, grid(text, sizes), text.threads, front, tuple(numbers[n] for n in pointers), whole[front.size :]
    )
