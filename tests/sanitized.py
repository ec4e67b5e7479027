"""What tests/test_sanitizer.py runs under compute-sanitizer: python tests/sanitized.py NAME.

Inputs are made on the CPU and compared there, so that hardly any kernel runs on the GPU but attngen's. Exits with 1
where a result is wrong: a kernel that did nothing is no clean one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from support import Truth, causal_grid, check, randn
from test_copies_sm90 import strided
from torch import Tensor

import attngen
from attngen import causal, document, sliding_window, softcap
from attngen.reference import reference
from attngen.spec import Attention

Sizes = tuple[int, int, int, int, int]
SIZES: tuple[Sizes, ...] = ((2, 2, 1, 150, 203), (1, 1, 1, 65, 30))


def tensors(sizes: Sizes, d: int, dv: int, alignment: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    b, h, hkv, sq, sk = sizes
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    q, k, v = (strided(*s, alignment, n) for n, s in enumerate(shapes))
    return q, k, v


def on_gpu(t: Tensor) -> Tensor:
    """With the same strides and the same distance from a multiple of 16 bytes; torch's `.cuda()` packs a view."""
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def forward(target: str, dims: tuple[tuple[int, int], ...], alignments: tuple[int, ...] = (16,)) -> None:
    for d, dv in dims:
        for alignment in alignments:
            for sizes in SIZES:
                q, k, v = tensors(sizes, d, dv, alignment)
                sq, sk = sizes[3:]
                there = [on_gpu(t) for t in (q, k, v)]
                for spec, truth in (
                    (Attention(mask=causal(), return_lse=True), Truth(causal_grid(sq, sk))),
                    (Attention(return_lse=True), Truth()),
                ):
                    out, lse = attngen.attention(*there, spec=spec, target=target)
                    check(out.cpu(), lse.cpu(), truth, q, k, v)


def variants(target: str) -> None:
    """A visit table made on the device, a window, a score."""
    ids = torch.arange(150, dtype=torch.int32) // 40
    for spec in (
        Attention(mask=causal() & document(ids.cuda())),
        Attention(mask=causal() & sliding_window(40)),
        Attention(mask=causal(), score=softcap(5.0)),
    ):
        q, k, v = tensors((1, 2, 1, 150, 150), 64, 64)
        out = attngen.attention(*(on_gpu(t) for t in (q, k, v)), spec=spec, target=target)
        cpu = Attention(mask=causal() & document(ids)) if "document" in spec.description else spec
        want, _ = reference(cpu, q, k, v)
        close(out, want)


def close(got: Tensor, want: Tensor) -> None:
    apart = (got.cpu().double() - want).abs().nan_to_num(nan=float("inf")).max().item()
    largest = want.abs().max().item()
    assert apart <= 0.05 * max(largest, 1.0), f"off by {apart}, values to {largest}"


def backward() -> None:
    for d in (64, 128):
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic, warn_only=False)
            q, k, v = tensors((1, 2, 1, 150, 203), d, d)
            dout = randn(1, 2, 150, d, seed=9)
            there = [on_gpu(t).requires_grad_() for t in (q, k, v)]
            out = attngen.attention(*there, mask=causal())
            got = torch.autograd.grad(out, there, dout.cuda())
            exact = [t.double().requires_grad_() for t in (q, k, v)]
            want = torch.autograd.grad(reference(Attention(mask=causal()), *exact)[0], exact, dout.double())
            for g, w in zip(got, want, strict=True):
                close(g, w)
    torch.use_deterministic_algorithms(False)


def planted(statements: str) -> None:
    """A kernel with a fault that the tool has to find, else its silence about others says nothing."""
    from emulator_kernels import words
    from hopper_kernels import device_maker

    device_maker()(statements)(words(128))


def ampere() -> None:
    forward("sm80", ((64, 64), (128, 128), (40, 24)))
    variants("sm80")


def hopper() -> None:
    forward("sm90", ((64, 64), (128, 128), (256, 256), (40, 24)))
    variants("sm90")


NAMES: dict[str, Callable[[], None]] = {
    "sm80": ampere,
    "sm80 rows": lambda: forward("sm80", ((64, 64),), (2, 4, 8)),
    "sm90": hopper,
    "sm90 rows": lambda: forward("sm90", ((64, 64), (128, 128)), (2, 4, 8)),
    "backward": backward,
    "planted memcheck": lambda: planted("st_u32(p.y + (1 << 28) + t, t);"),
    "planted racecheck": lambda: planted("st_shared_u32(s, t);"),
    "planted synccheck": lambda: planted("if (t < 16) cta_sync();"),
}

if __name__ == "__main__":
    NAMES[sys.argv[1]]()
    torch.cuda.synchronize()
    print("computed")
