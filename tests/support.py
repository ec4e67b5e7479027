"""What the numerical tests share: running a description on a device, and attention written down once more, in plain
torch.

`formula` uses nothing of attngen: masks and scores are torch functions of index grids. In float64 it is the
reference, in the dtype of the inputs it is torch's own eager attention, whose error is the measure of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attngen import execute
from attngen.config import AnyConfig, Config, FoldPolicy, HopperConfig
from attngen.emulator import Mode
from attngen.errors import SpecError
from attngen.kernel import Kernel, kernel_for
from attngen.runtime.load import runs_on
from attngen.signature import Signature, check_tensors, signature_of
from attngen.spec import Attention, Normalizer
from attngen.target import target

# tensors are tiny here, and tests run in several processes: threads would only wait for one another
torch.set_num_threads(1)

DEVICES = [
    pytest.param("cpu", id="emulator"),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]
    ),
]
TARGETS = ("sm80", "sm90")
MODES = ((Mode.EAGER, 0), (Mode.LATE, 0), (Mode.RANDOM, 1), (Mode.RANDOM, 2))

Grid = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (b, h, i, j) -> bool
ScoreGrid = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # (s, b, h, i, j) -> s


def randn(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0, std: float = 1.0
) -> Tensor:
    """The same numbers on every device."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype).to(device)


def qkv(
    device: str = "cpu", b: int = 1, h: int = 2, hkv: int = 1, sq: int = 65, sk: int = 65, d: int = 64,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0, std: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Random q, k and v."""
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, d if dv is None else dv))
    q, k, v = (randn(*s, dtype=dtype, device=device, seed=10 * seed + n, std=std) for n, s in enumerate(shapes))
    return q, k, v


def causal_grid(sq: int, sk: int) -> Grid:
    return lambda b, h, i, j: j <= i + sk - sq


# ---- running a kernel ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised tensors hold NaN meanwhile: what a kernel does not write shows."""
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.utils.deterministic.fill_uninitialized_memory = fill


_wanted = ["sm80"]


@contextlib.contextmanager
def kernels_of(name: str) -> Iterator[None]:
    """Kernels are those of this target meanwhile."""
    _wanted.append(name)
    try:
        yield
    finally:
        _wanted.pop()


@pytest.fixture(params=TARGETS)
def target_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """For tests that hold on every target: `run`, `run_mode` and `compiled` take it."""
    with kernels_of(request.param):
        yield request.param


def has_schedule(spec: Attention, signature: Signature, name: str) -> bool:
    """Whether a target computes a description; what it does not is a SpecError that says so."""
    try:
        kernel_for(spec.variant, signature, target(name), small(spec) if name != "sm80" else None)
    except SpecError as error:
        if "has no schedule for" in str(error):
            return False
        raise
    return True


def small(spec: Attention) -> HopperConfig:
    """A configuration whose kernel is quickly built and emulated: one warpgroup, few keys a tile, so that short
    sequences have tiles of every class."""
    weighed = spec.normalizer is Normalizer.SOFTMAX
    policy = FoldPolicy.REFERENCE if weighed else FoldPolicy.RUNNING
    return HopperConfig(1, 32, 2, policy, turns=False)


def compiled(spec: Attention, q: Tensor, k: Tensor, v: Tensor, config: AnyConfig | None = None) -> Kernel:
    """The kernel; the test is skipped where its target has none yet, or the GPU is another."""
    check_tensors(q, k, v, spec)
    chip, signature = target(_wanted[-1]), signature_of(q, k, v, spec.tensors)
    if chip.name != "sm80":
        if q.is_cuda and not any(runs_on(arch, torch.cuda.get_device_capability()) for arch in chip.archs):
            pytest.skip(f"the kernels of {chip.name} do not run on this GPU")
        if isinstance(config, Config) or not has_schedule(spec, signature, chip.name):
            pytest.skip(f"{chip.name} has no schedule for {spec.variant.description}, {signature}, config {config}")
        if config is None and not q.is_cuda:
            config = small(spec)
    return kernel_for(spec.variant, signature, chip, config)


def run(spec: Attention, q: Tensor, k: Tensor, v: Tensor, config: AnyConfig | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse) on the tensors' device, from outputs that held NaN; lse is empty for an unnormalized variant."""
    with poisoned():
        return execute.run(compiled(spec, q, k, v, config), q, k, v, spec.tensors, spec.scale_for(q.size(3)))


def run_mode(
    spec: Attention, q: Tensor, k: Tensor, v: Tensor, mode: Mode, seed: int = 0, config: AnyConfig | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in the emulator, with asynchronous copies completing as `mode` says. No size may be 0."""
    kernel = compiled(spec, q, k, v, config)
    out = q.new_full((*q.shape[:3], v.size(3)), float("nan"))
    lse = torch.full(q.shape[:3] if kernel.has_lse else (0,), float("nan"))
    with poisoned():
        execute.run_into(kernel, q, k, v, spec.tensors, spec.scale_for(q.size(3)), out, lse, mode, seed)
    return out, lse


# ---- attention, once more ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """A description in plain torch, beside the `Attention` that says the same."""

    mask: Grid | None = None
    score: ScoreGrid | None = None
    scale: float | None = None
    sink: Tensor | None = None
    softmax: bool = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return formula(self, q, k, v, dtype)


def grids(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (q.size(0), q.size(1), q.size(2), k.size(2))
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(sizes)
    )
    return b, h, i, j


def formula(truth: Truth, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """out [B, Hq, Sq, Dv] and lse [B, Hq, Sq], every step in `dtype`."""
    group = q.size(1) // k.size(1) if k.size(1) else 1
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(group, 1), v.to(dtype).repeat_interleave(group, 1)
    at = grids(q, k)
    scale = q.size(3) ** -0.5 if truth.scale is None else truth.scale
    shape = (*q.shape[:3], k.size(2))
    visible = (
        torch.ones(shape, dtype=torch.bool, device=q.device) if truth.mask is None else truth.mask(*at).expand(shape)
    )
    # a key that nobody sees may hold anything
    seen = visible.any(2)[..., None]
    k, v = k.where(seen, 0), v.where(seen, 0)
    s = (q @ k.transpose(2, 3)) * scale
    if truth.score is not None:
        s = truth.score(s, *at).to(dtype).expand(shape)
    if not truth.softmax:
        return s.where(visible, 0) @ v, None
    s = s.where(visible, float("-inf"))
    if truth.sink is not None:  # one more key, whose value is zero
        s = torch.cat([s, truth.sink.to(dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)], 3)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    if s.size(3) == 0:
        return q.new_zeros((*shape[:3], v.size(3))), q.new_full(shape[:3], float("-inf"))
    empty = (s == float("-inf")).all(3, keepdim=True)
    p = s.masked_fill(empty, 0).softmax(3).masked_fill(empty, 0)
    return p @ v, s.logsumexp(3)


def check(out: Tensor, lse: Tensor, truth: Truth, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Asserts the tolerance of the project: twice the error of torch's eager attention in the same dtype, plus 1e-5.

    Gives the error of out as a share of what is allowed."""
    want, want_lse = truth(q, k, v, torch.float64)
    eager, _ = truth(q, k, v, q.dtype)
    assert out.shape == want.shape
    assert out.dtype == q.dtype
    if not out.numel():
        return 0.0
    error, allowed = (out.double() - want).abs().max().item(), 2 * (eager.double() - want).abs().max().item() + 1e-5
    assert error <= allowed, f"out is off by {error:.3e}; torch's eager attention by {(allowed - 1e-5) / 2:.3e}"
    check_lse(lse, want_lse)
    return error / allowed


def check_lse(lse: Tensor, want: Tensor | None) -> None:
    if want is None:
        assert lse.numel() == 0
        return
    assert lse.dtype == torch.float32
    assert lse.shape == want.shape
    infinite = want.isinf()
    assert torch.equal(lse[infinite].double(), want[infinite])
    off, size = (lse.double() - want)[~infinite].abs(), want[~infinite].abs()
    assert (off <= (1e-6 * size).clamp(min=1e-3)).all(), f"lse is off by {off.max().item():.3e}"


def verify(
    spec: Attention, truth: Truth, q: Tensor, k: Tensor, v: Tensor, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Runs a description and checks it against its formula."""
    out, lse = run(spec, q, k, v, config)
    check(out, lse, truth, q, k, v)
    return out, lse


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bytes, also NaN and signed zeros."""
    integer: Mapping[int, torch.dtype] = {2: torch.int16, 4: torch.int32}
    kind = integer[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().contiguous().view(kind), b.cpu().contiguous().view(kind))
