"""Measures the first configurations in rank on the GPU, on the shapes of a call, and remembers the fastest.

What is measured is what a call launches. Candidates take turns in random order with rests between them
(attngen.bench.timing): the clock of a GPU follows what ran just before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attngen import measured, ops
from attngen.bench.timing import Launch, Mode, Settings, Time
from attngen.bench.timing import measure as measure_time
from attngen.config import AnyConfig
from attngen.dispatch import addresses
from attngen.errors import CompileError, MissingToolError, PassError, SpecError, VerifyError
from attngen.execute import device_arch, target_for
from attngen.kernel import Kernel, kernel_for
from attngen.pipelines import ranked
from attngen.plan import plan
from attngen.progress import Progress
from attngen.signature import VECTOR_BYTES, Shapes, Signature, signature_of
from attngen.spec import Attention, Variant
from attngen.target import Target
from attngen.tuned import Entry

FIRST = 5
Measure = Callable[[Sequence[Kernel]], Sequence[Time]]  # each has compiled already


@dataclass(frozen=True)
class Call:
    """What is called: a key of `attngen.ops`, and plain tensors on a GPU."""

    key: str
    q: Tensor
    k: Tensor
    v: Tensor
    captures: tuple[Tensor, ...]
    scale: float

    @property
    def shapes(self) -> Shapes:
        return ops.entry(self.key).check(self.q, self.k, self.v, self.captures)

    @property
    def variant(self) -> Variant:
        return ops.entry(self.key).variant

    @property
    def signature(self) -> Signature:
        names = ops.entry(self.key).names
        return signature_of(self.q, self.k, self.v, dict(zip(names, self.captures, strict=True)))

    @property
    def target(self) -> Target:
        return ops.entry(self.key).target or target_for(self.variant, self.signature, self.q.device)


@dataclass(frozen=True)
class Outcome:
    """`trials`: configurations with their times, fastest first. `refused`: those before them in rank that do not verify
    or compile, and why."""

    trials: tuple[tuple[AnyConfig, Time], ...]
    refused: tuple[tuple[AnyConfig, str], ...]

    @property
    def config(self) -> AnyConfig:
        return self.trials[0][0]

    def entry(self, variant: Variant, shapes: Shapes) -> Entry:
        s = shapes
        heads = f"{s.Hq}" if s.Hq == s.Hkv else f"{s.Hq}/{s.Hkv}"
        what = f"{variant.description}, B={s.B} H={heads} Sq={s.Sq} Sk={s.Sk}, fastest of {len(self.trials)}"
        return Entry(self.config, "ms", tuple((str(c), float(f"{t.ms:.4g}")) for c, t in self.trials), what)


def admitted(
    variant: Variant, signature: Signature, target: Target, arch: str, count: int = FIRST
) -> tuple[list[Kernel], list[tuple[AnyConfig, str]]]:
    """The first so many in rank that pass the verifier and the build gate, and what was refused before them.

    Raises CompileError where there is none."""
    kernels, refused = list[Kernel](), list[tuple[AnyConfig, str]]()
    every = ranked(variant, signature, target)
    with Progress() as progress:
        for config in every:
            if len(kernels) == count:
                break
            progress.step(f"compiling {variant.description} with {config} for {arch}")
            try:
                kernel = kernel_for(variant, signature, target, config)
                kernel.artifact(arch)
            except (CompileError, PassError, VerifyError) as error:
                refused.append((config, str(error)))
            else:
                kernels.append(kernel)
    if not kernels:
        reasons = "".join(f"\n  {config}: {reason}" for config, reason in refused)
        raise CompileError(
            f"{variant.description}: none of {len(every)} configurations for {arch} compiles, so there is nothing to "
            f"measure:{reasons}"
        )
    return kernels, refused


def compare(
    variant: Variant, signature: Signature, target: Target, arch: str, measure: Measure, count: int = FIRST
) -> Outcome:
    """Measures the first so many in rank; of equally fast ones the first in rank comes first."""
    kernels, refused = admitted(variant, signature, target, arch, count)
    times = measure(kernels)
    trials = sorted(zip((k.config for k in kernels), times, strict=True), key=lambda trial: trial[1].ms)
    return Outcome(tuple(trials), tuple(refused))


def launches_of(call: Call, kernels: Sequence[Kernel]) -> dict[str, Launch]:
    """The work of a call by each kernel, by configuration."""
    names = ops.entry(call.key).names
    pointers = [t.data_ptr() for t in (call.q, call.k, call.v, *call.captures)]
    plans = {str(k.config): plan(k, call.q, call.k, call.v, call.captures, names, call.scale) for k in kernels}
    return {name: partial(made.run, pointers) for name, made in plans.items()}


def on_device(call: Call, settings: Settings) -> Measure:
    """What a call launches, on its own tensors."""

    def measure(kernels: Sequence[Kernel]) -> Sequence[Time]:
        with torch.cuda.device(call.q.device):
            launches = launches_of(call, kernels)
            for launch in launches.values():  # loads, and what else a first launch does
                launch()
            torch.cuda.synchronize()
            times = measure_time(launches, Mode.GAPS, settings)
        return [times[str(k.config)] for k in kernels]

    return measure


def tune(
    call: Call, on: measured.Machine, arch: str, measure: Measure, count: int = FIRST
) -> tuple[Outcome, Entry]:
    """Measures, remembers the fastest for this device and compiler, and lets later calls take it."""
    shapes = call.shapes
    if ops.is_empty(shapes):
        raise SpecError(f"a call of {shapes} launches nothing that could be measured. Allowed: sizes of at least 1")
    outcome = compare(call.variant, call.signature, call.target, arch, measure, count)
    entry = outcome.entry(call.variant, shapes)
    measured.remember(on, call.variant, call.signature, call.target, entry)
    ops.forget_plans()
    return outcome, entry


def device() -> torch.device:
    """The current one."""
    if not torch.cuda.is_available():
        raise MissingToolError("tuning measures on a GPU, and torch finds none; `attngen doctor` says why")
    return torch.device("cuda", torch.cuda.current_device())


def sample_call(spec: Attention, signature: Signature, target: Target, shapes: Shapes) -> Call:
    """Random tensors of these shapes on the current device, beside those of the description."""
    on, dtype = device(), signature.dtype.torch_dtype
    width = VECTOR_BYTES // dtype.itemsize

    def tensor(heads: int, length: int, size: int) -> Tensor:
        """With a row stride that is as aligned as the signature says and no more."""
        late = signature.alignment // dtype.itemsize
        stride = size if signature.alignment == VECTOR_BYTES else -(-size // width) * width + late
        return torch.randn(shapes.B, heads, length, stride, device=on, dtype=dtype)[..., :size]

    key = ops.register(spec.variant, spec.shape_rules, target)
    return Call(
        key, tensor(shapes.Hq, shapes.Sq, signature.head_dim_qk), tensor(shapes.Hkv, shapes.Sk, signature.head_dim_qk),
        tensor(shapes.Hkv, shapes.Sk, signature.head_dim_v), tuple(t.to(on) for t in spec.tensors.values()),
        spec.scale_for(signature.head_dim_qk),
    )  # fmt: skip


def machine_of(call: Call) -> measured.Machine:
    """Raises where nothing can be measured."""
    if not call.q.is_cuda:
        raise SpecError(
            f"autotune=True measures on a GPU, and q is on {call.q.device}. Allowed: CUDA tensors. Leave autotune out "
            "for the emulator"
        )
    if torch.cuda.is_current_stream_capturing():
        raise SpecError("autotune=True while a CUDA graph is captured. Call once with it before capturing")
    with torch.no_grad():  # what is measured is the forward pass, also of a call that records gradients
        plain = addresses((call.q, call.k, call.v, *call.captures))
    if plain is None:
        raise SpecError(
            "autotune=True needs plain tensors: no transforms, modes, profiler, fake or subclassed tensors. Call once "
            "with it outside of them"
        )
    on = measured.machine(call.q.device.index)
    if on is None:
        raise MissingToolError("autotune=True compiles candidates, and there is no NVRTC; `attngen doctor` says why")
    return on


def ensure(call: Call, settings: Settings | None = None) -> AnyConfig:
    """The configuration that was measured fastest on the device of this call: from disk, else measured now."""
    on = machine_of(call)
    found = measured.lookup(on, call.variant, call.signature, call.target)
    if found is not None:
        return found
    arch = device_arch(call.target, call.q.device.index)
    outcome, _ = tune(call, on, arch, on_device(call, settings or Settings()))
    return outcome.config
