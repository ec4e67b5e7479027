"""The same call again and again on a GPU: the same bits each time. What has no order in a kernel (which CTA takes an
item first, when a copy arrives, which warpgroup has its turn) decides nothing."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Sizes
from support import DEVICES, randn, run, same_bits, target_name
from test_copies_sm90 import strided

import attngen
from attngen.spec import Attention

__all__ = ["target_name"]  # a fixture: tests that use it hold on every target
RUNS = 50
SIZES = (2, 6, 2, 700, 900)
GPU = DEVICES[1]
WORDS = [  # variant, head dims, alignment of rows, whether the maxima grow from tile to tile
    ("full", 64, 64, 16, False), ("causal", 64, 64, 16, True), ("softcap_alibi", 64, 64, 16, False),
    ("full", 128, 128, 16, True), ("causal", 128, 128, 16, False), ("sliding", 128, 128, 16, False),
    ("causal", 256, 256, 16, True), ("full", 256, 256, 16, False), ("sink", 192, 128, 16, False),
    ("bias", 40, 24, 16, False), ("causal", 64, 64, 2, True), ("full", 128, 128, 4, False),
    ("causal", 128, 128, 8, False),
]  # fmt: skip


@pytest.mark.usefixtures("target_name")
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize(("name", "d", "dv", "alignment", "growing"), WORDS)
def test_every_run_gives_the_same_bits(device: str, name: str, d: int, dv: int, alignment: int, growing: bool) -> None:
    b, h, hkv, sq, sk = SIZES
    spec: Attention = CASES[name](Sizes(b, h, sq, sk, device))[0]
    q, k, v = (
        strided(*s, alignment, n, device) for n, s in enumerate(((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv)))
    )
    if growing:  # towards the first key, so that tiles are done again
        k *= torch.linspace(8, 0.1, sk, device=device).to(k.dtype)[:, None]
    first, first_lse = run(spec, q, k, v)
    assert torch.isfinite(first).all()
    for _ in range(RUNS - 1):
        out, lse = run(spec, q, k, v)
        assert same_bits(out, first)
        assert same_bits(lse, first_lse)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("d", [64, 128])
def test_every_run_gives_the_same_gradients(device: str, d: int) -> None:
    """Where torch asks for it."""
    b, h, hkv, sq, sk = SIZES
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, d))
    tensors = [randn(*s, seed=n, device=device).requires_grad_() for n, s in enumerate(shapes)]
    dout = randn(b, h, sq, d, seed=9, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attngen.attention(*tensors, mask=attngen.causal()), tensors, dout)

    torch.use_deterministic_algorithms(True)
    try:
        first = gradients()
        assert all(torch.isfinite(t).all() for t in first)
        for _ in range(RUNS - 1):
            assert all(same_bits(x, y) for x, y in zip(gradients(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
