"""The entry points: `attention` runs a description on tensors, `compile` makes its kernel without a GPU, `precompile`
fills a folder with compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from attngen import measured, ops, tune
from attngen.backward_pipeline import Asked, gradient_names
from attngen.config import AnyConfig, Config, HopperConfig
from attngen.configtext import parse_config
from attngen.described import described
from attngen.errors import SignatureError, SpecError
from attngen.execute import backward_target
from attngen.gradient import BackwardKernel, backward_for
from attngen.ir.graph import Graph
from attngen.ir.program import Program
from attngen.ir.schedule import Schedule
from attngen.kernel import Kernel, kernel_for, next_kernel, settled
from attngen.keywords import reject
from attngen.lower import Source
from attngen.prepare import prepare
from attngen.progress import Progress
from attngen.runtime import Resources, Unit, precompile_into
from attngen.signature import IoType, Shapes, Signature, alignment_of, signature_for, strided
from attngen.spec import Attention
from attngen.target import Target
from attngen.target import target as target_named
from attngen.variants import MaskLike, ScoreLike

TARGETS = ("sm80", "sm90")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike | None = None,
    score: ScoreLike | Sequence[ScoreLike] | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    normalizer: str = "softmax",
    target: str | None = None,
    *,
    spec: Attention | None = None,
    autotune: bool = False,
    **others: NoReturn,  # those of other libraries, for an error that says what to write
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D] over k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv]: out [B, Hq, Sq, Dv], or (out, lse)
    with return_lse.

    The description is that of `Attention`: given piece by piece, or made once and given as `spec`, which spares
    tracing a function on every call. target: the GPU generation to generate for; None: the one that fits the device.
    CPU tensors run in the emulator. autotune: where nothing was measured on this device for this description, head dims
    and type, measure the first configurations on this call's tensors, which takes seconds, and remember the fastest."""
    if others:
        reject(others, "q, k, v, mask, score, scale, sink, return_lse, normalizer, target, spec, autotune")
    on = None if target is None else _target(target)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise _not_a_tensor(q, k, v)
    if spec is None:
        spec = described(mask, score, scale, sink, return_lse, normalizer)
    elif (
        not isinstance(spec, Attention) or mask is not None or score is not None or scale is not None
        or sink is not None or return_lse is not False or normalizer != "softmax"
    ):  # fmt: skip
        _check_alone(spec, mask, score, scale, sink, return_lse, normalizer)
    key, captures = prepare(spec, on)
    if autotune:
        _autotune(spec, key, q, k, v, captures)
    out, lse = _call(spec, key, q, k, v, captures)
    return (out, lse) if spec.return_lse else out


def _call(spec: Attention, key: str, q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> tuple[Tensor, Tensor]:
    head_dim = q.size(3) if q.dim() == 4 else 0
    if head_dim == 0:
        raise SignatureError(
            f"q has the shape {list(q.shape)}. Allowed: 4 dimensions [batch, heads, seq, head_dim], head_dim > 0"
        )
    return ops.call(q, k, v, captures, key, spec.scale_for(head_dim))


def _autotune(
    spec: Attention, key: str, q: Tensor, k: Tensor, v: Tensor, captures: Sequence[Tensor]
) -> AnyConfig | None:
    """The configuration that is fastest on the device; None where the call launches nothing."""
    if torch.compiler.is_compiling():
        raise SpecError(
            "autotune=True inside torch.compile, which runs nothing while it traces. Call attngen.attention once with "
            "it outside; compiled calls then use what was measured"
        )
    if ops.is_empty(ops.entry(key).check(q, k, v, captures)):
        return None
    return tune.ensure(tune.Call(key, q, k, v, tuple(captures), spec.scale_for(q.size(3))))


def _not_a_tensor(*given: object) -> SignatureError:
    name, wrong = next((name, t) for name, t in zip("qkv", given, strict=True) if not isinstance(t, Tensor))
    return SignatureError(f"{name} is a {type(wrong).__name__}. Allowed: a tensor [batch, heads, seq, head_dim]")


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise SignatureError(f"target={name!r}. Allowed: {', '.join(map(repr, TARGETS))}")
    return target_named(name)


def _check_alone(spec: object, *others: object) -> None:
    if not isinstance(spec, Attention):
        raise SpecError(f"spec is a {type(spec).__name__}. Allowed: attngen.Attention(...)")
    names = ("mask", "score", "scale", "sink", "return_lse", "normalizer")
    defaults = (None, None, None, None, False, "softmax")
    for name, value, default in zip(names, others, defaults, strict=True):
        if value is not default and value != default:
            raise SpecError(
                f"{name} is given beside spec. Allowed: one of both; make it a part of the spec: Attention({name}=...)"
            )


class BoundKernel:
    """What `compile` makes: a kernel with the tensors and the scale of its description.

    Printable levels: `graph`, `program`, `schedule`, `source`; `resources`: registers, spills and shared memory.
    Called with q, k, v that fit `signature`, it gives what `attention` gives: out, or (out, lse) with return_lse."""

    def __init__(self, kernel: Kernel, spec: Attention) -> None:
        self.kernel, self.spec = kernel, spec
        # what is shown is what runs: its configuration, whatever was measured on the device
        self._key = ops.register(spec.variant, spec.shape_rules, kernel.target, kernel.config)
        self._captures = list(spec.tensors.values())

    @property
    def graph(self) -> Graph:
        return self.kernel.graph

    @property
    def program(self) -> Program:
        return self.kernel.program

    @property
    def schedule(self) -> Schedule:
        return self.kernel.schedule

    @property
    def source(self) -> Source:
        return self.kernel.source

    @property
    def signature(self) -> Signature:
        return self.kernel.signature

    @property
    def config(self) -> AnyConfig:
        return self.kernel.config

    @property
    def origin(self) -> str:
        """Where the configuration comes from: measured here, measured before, a place in rank, or the caller."""
        kernel = self.kernel
        on = measured.machine(torch.cuda.current_device()) if torch.cuda.is_available() else None
        return measured.origin(kernel.variant, kernel.signature, kernel.target, kernel.config, on)

    @property
    def target(self) -> Target:
        return self.kernel.target

    def explain(self) -> str:
        """Every level of the kernel with the reasons of its decisions, and the numbers that became constants."""
        kernel = self.kernel
        lines = [f"variant    {kernel.variant.description}", f"signature  {kernel.signature}"]
        lines += [f"target     {kernel.target.name}", f"config     {kernel.config}", f"from       {self.origin}"]
        lines += [f"refused    {text}" for text in kernel.rejected]
        lines += [f"constant   {name} = {value}" for name, value in kernel.variant.constants]
        lines += [f"{fact.subject}: {fact.text}" for fact in kernel.schedule.facts]
        for stage in kernel.levels.stages:
            lines += ["", f"---- {stage.name}", str(stage).rstrip()]
        return "\n".join(lines) + "\n"

    def backward(self, wanted: Sequence[str] | None = None, same_bits: bool = False) -> BackwardKernel:
        """The kernels of its gradients, to read: `graph`, `schedule`, `source`, `explain()`. A call of `backward()` on
        results makes its own.

        For the kernel's own target; where the rows of its signature do not start on 16 bytes, for sm80, whose kernels
        then serve Hopper too. wanted: names among q, k, v, captured tensors and `sink`; None: everything that may have
        a gradient. same_bits: as under torch.use_deterministic_algorithms(True)."""
        names = tuple(gradient_names(self.spec.variant))
        unknown = [n for n in wanted or () if n not in names]
        if unknown or (wanted is not None and not wanted):
            raise SpecError(f"wanted={wanted!r}. Allowed: some of {', '.join(names)}")
        asked = Asked(frozenset(names if wanted is None else wanted), dlse=self.spec.return_lse, same_bits=same_bits)
        return backward_for(self.spec.variant, self.signature, backward_target(self.target, self.signature), asked)

    @property
    def resources(self) -> dict[str, Resources]:
        """By kernel, for the target's first architecture; compiled when first asked for, which needs no GPU."""
        with Progress() as progress:
            progress.step(f"compiling {self.kernel.variant.description} for {self.target.archs[0]}")
            return self.kernel.resources

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self._check(q, k, v)
        out, lse = _call(self.spec, self._key, q, k, v, self._captures)
        return (out, lse) if self.spec.return_lse else out

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        want = self.signature
        dtype = want.dtype.torch_dtype
        for name, t, size in (("q", q, want.head_dim_qk), ("k", k, want.head_dim_qk), ("v", v, want.head_dim_v)):
            if t.dtype != dtype:
                raise SignatureError(f"{name} has dtype {t.dtype}. Allowed: {dtype}, which this kernel is compiled for")
            if t.dim() and t.size(-1) != size:
                raise SignatureError(
                    f"{name} has head_dim {t.size(-1)}. Allowed: {size}, which this kernel is compiled for"
                )
        # addresses are not known while torch.compile traces; the operator then takes the kernel of their alignment
        if not torch.compiler.is_compiling() and alignment_of(q, k, v) < want.alignment:
            raise SignatureError(
                f"a row of q, k or v is not aligned to {want.alignment} bytes. Allowed for this kernel: aligned rows. "
                f"Give attngen.compile(..., alignment={alignment_of(q, k, v)}), or copy the tensor with .clone()"
            )

    def __repr__(self) -> str:
        return f"attngen.compile({self.spec!r}): {self.signature}, {self.target.name}, {self.config}"


def compile(
    spec: Attention,
    head_dim: int = 128,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    target: str = TARGETS[0],
    alignment: int | None = None,
    config: AnyConfig | str | None = None,
    autotune: bool = False,
    shapes: tuple[int, int, int, int, int] | None = None,
) -> BoundKernel:
    """The kernel of a description. Needs no GPU; it is compiled to machine code when first asked for.

    head_dim: of q and k; head_dim_v: of v, None: the same. alignment: bytes that every row of q, k and v is aligned
    to: 16, 8, 4 or 2; None: 16, or what divides a row. config: tile sizes, also as the text that `explain` prints;
    None: measured before, or chosen by rules. autotune: measured on the current CUDA device instead, on random tensors
    of `shapes` (batch, heads, key heads, queries, keys), unless that was done."""
    if not isinstance(spec, Attention):
        raise SpecError(f"spec is a {type(spec).__name__}. Allowed: attngen.Attention(...)")
    types = {t.torch_dtype: t for t in IoType}
    if dtype not in types:
        raise SignatureError(f"dtype={dtype}. Allowed: {', '.join(map(str, types))}")
    signature = signature_for(types[dtype], head_dim, head_dim_v, alignment, strided(spec.tensors))
    on = _target(target)
    if isinstance(config, str):
        config = parse_config(config)
    if config is not None and not isinstance(config, (Config, HopperConfig)):
        raise SignatureError(
            f"config={config!r}. Allowed: attngen.Config(...) for sm80, attngen.HopperConfig(...) for sm90, or the "
            "text that explain prints: 'm128n64w4 s1 ctas2'"
        )
    if autotune:
        config = _tuned(spec, signature, on, config, shapes)
    elif shapes is not None:
        raise SpecError(f"shapes={shapes} without autotune=True. Allowed: both; a kernel is made for all shapes")
    return BoundKernel(kernel_for(spec.variant, signature, on, config), spec)


def _tuned(
    spec: Attention, signature: Signature, on: Target, config: AnyConfig | None,
    shapes: tuple[int, int, int, int, int] | None,
) -> AnyConfig:  # fmt: skip
    if config is not None:
        raise SpecError(f"config={config!r} beside autotune=True, which chooses it. Allowed: one of both")
    if shapes is None or len(shapes) != 5 or min(shapes) < 1:
        raise SpecError(
            f"shapes={shapes} with autotune=True. Allowed: (batch, heads, key heads, queries, keys), each at least 1: "
            "what is fastest depends on them"
        )
    return tune.ensure(tune.sample_call(spec, signature, on, Shapes(*shapes)))


def precompile(
    folder: str | Path, kernels: Iterable[BoundKernel], archs: Sequence[str] | None = None
) -> tuple[Path, ...]:
    """Compiles kernels into a folder that can be moved, and used by naming it in ATTNGEN_PRECOMPILED on a machine
    without a compiler. archs: such as ("sm_80",); None: every architecture of a kernel's target. Gives the entries."""
    units = [unit for bound in kernels for arch in archs or bound.target.archs for unit in _units(bound.kernel, arch)]
    with Progress() as progress:
        progress.step(f"compiling {len(units)} kernels into {folder}")
        return precompile_into(Path(folder), units)


def _units(kernel: Kernel, arch: str) -> list[Unit]:
    """The kernel, and where the build gate refuses it, what takes its place: the search is repeated where it is
    used."""
    if arch not in kernel.target.archs:
        raise SignatureError(f"archs has {arch!r}. Allowed for {kernel.target.name}: {', '.join(kernel.target.archs)}")
    chosen, found = settled(kernel, arch), [kernel]
    while found[-1] is not chosen:
        following, _ = next_kernel(found[-1])
        assert following is not None, "settled() took another way through the configurations"
        found.append(following)
    return [Unit(k.source.text, arch, k.symbols) for k in found]
