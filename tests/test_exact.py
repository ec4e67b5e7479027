"""Integers in, powers of two between: nothing is rounded but the result, so emulator, GPU and exact arithmetic agree in
every bit. On random inputs the GPU's approximate exponentials may differ; by how much is bounded and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import DEVICES, MODES, qkv, run, run_mode, same_bits, target_name
from torch import Tensor

from attngen.emulator import Mode
from attngen.signature import signature_of
from attngen.spec import Attention
from attngen.variants import causal, sliding_window, softcap

__all__ = ["target_name"]  # a fixture: tests that use it hold on every target
EVERY_TARGET = pytest.mark.usefixtures("target_name")
DTYPES = [torch.bfloat16, torch.float16]
GPU = DEVICES[1]
LOG2E = np.float32(math.log2(math.e))


def unit_scale() -> float:
    """A scale whose product with log2(e) is 1 in fp32: exponentials of integers are then powers of two."""
    scale = np.float32(math.log(2.0))
    for candidate in (scale, np.nextafter(scale, np.float32(0)), np.nextafter(scale, np.float32(1))):
        if candidate * LOG2E == np.float32(1.0):
            return float(candidate)
    raise AssertionError("no float beside ln 2 gives exactly 1")


def depths(leaves: int, deepest: int, rng: np.random.Generator) -> list[int]:
    """Depths of the leaves of a random binary tree: the sum of 2^-depth is 1."""
    result = [0]
    while len(result) < leaves:
        at = int(rng.choice([n for n, d in enumerate(result) if d < deepest]))
        result[at : at + 1] = [result[at] + 1] * 2
    return list(rng.permutation(result))


def powers(
    sq: int, sk: int, d: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v; out before its rounding, in float64; the integer log2 of each row's sum.

    Row i of q picks column i % d of k, which holds minus the depths of a tree's leaves, plus a shift."""
    rng = np.random.default_rng(seed)
    q, k = torch.zeros(1, 1, sq, d, dtype=dtype), torch.zeros(1, 1, sk, d, dtype=dtype)
    shifts = torch.from_numpy(rng.integers(-20, 20, d))
    for column in range(d):
        k[0, 0, :, column] = shifts[column] - torch.tensor(depths(sk, 12, rng))
    pick = torch.arange(sq) % d
    q[0, 0, torch.arange(sq), pick] = 1
    v = torch.from_numpy(rng.integers(-8, 9, (1, 1, sk, d))).to(dtype)
    weights = torch.exp2(k[0, 0, :, pick].double() - shifts[pick]).T
    assert (weights.sum(1) == 1).all()
    return q, k, v, (weights @ v[0, 0].double())[None, None], shifts[pick]


@EVERY_TARGET
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sq", "sk", "d"), [(70, 150, 64), (33, 257, 32), (140, 300, 128), (90, 200, 256)])
def test_powers_of_two(device: str, dtype: torch.dtype, sq: int, sk: int, d: int) -> None:
    """Softmax whose weights are powers of two with sum 1: out is one rounding of an exact sum, lse = shift * ln 2."""
    q, k, v, exact, shifts = powers(sq, sk, d, dtype)
    spec = Attention(scale=unit_scale())
    out, lse = run(spec, *(t.to(device) for t in (q, k, v)))
    assert same_bits(out, exact.to(dtype))
    want = shifts.numpy().astype(np.float32) * np.float32(math.log(2.0))
    assert same_bits(lse.cpu()[0, 0], torch.from_numpy(want))


def causal_powers(
    s: int, d: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `powers` for a causal mask: what row i sees of its column sums to a power of two, whatever i is.

    Rows c, c + d, c + 2 d, .. pick column c. Its keys up to c are a tree whose weights sum to 1, and each d keys after
    those are one that doubles the sum."""
    rng = np.random.default_rng(seed)
    q, k = torch.zeros(1, 1, s, d, dtype=dtype), torch.zeros(1, 1, s, d, dtype=dtype)
    shifts = torch.from_numpy(rng.integers(-20, 20, d))
    for column in range(min(s, d)):
        ends = [*range(column + 1, s, d), s]
        start, logarithm = 0, 0
        for n, end in enumerate(ends):
            # the last keys are seen by no row of this column as a whole: any weights do
            logs = logarithm - torch.tensor(depths(end - start, 12, rng))
            k[0, 0, start:end, column] = (shifts[column] + logs).to(dtype)
            start, logarithm = end, n
    pick = torch.arange(s) % d
    q[0, 0, torch.arange(s), pick] = 1
    v = torch.from_numpy(rng.integers(-8, 9, (1, 1, s, d))).to(dtype)
    weights = torch.exp2(k[0, 0, :, pick].double() - shifts[pick]).T.tril()
    logs = torch.arange(s) // d
    assert torch.equal(weights.sum(1), torch.exp2(logs.double()))
    return q, k, v, (weights @ v[0, 0].double() / torch.exp2(logs.double())[:, None])[None, None], shifts[pick] + logs


@EVERY_TARGET
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("s", "d"), [(150, 64), (300, 128), (90, 256)])
def test_powers_of_two_under_a_causal_mask(device: str, dtype: torch.dtype, s: int, d: int) -> None:
    """Rows of every length: on targets that keep the reference of the first tile, some tiles are done again."""
    q, k, v, exact, logs = causal_powers(s, d, dtype)
    out, lse = run(Attention(mask=causal(), scale=unit_scale()), *(t.to(device) for t in (q, k, v)))
    assert same_bits(out, exact.to(dtype))
    want = logs.numpy().astype(np.float32) * np.float32(math.log(2.0))
    assert same_bits(lse.cpu()[0, 0], torch.from_numpy(want))


@EVERY_TARGET
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize(("s", "d"), [(150, 64), (140, 128)])
def test_powers_of_two_in_rows_off_16_bytes(device: str, alignment: int, s: int, d: int) -> None:
    """Copied by threads, on every target."""
    q, k, v, exact, logs = causal_powers(s, d, torch.bfloat16)
    for spec, want in ((Attention(mask=causal(), scale=unit_scale()), exact), (Attention(scale=unit_scale()), None)):
        if want is None:
            q, k, v, want, logs = powers(s, s, d, torch.bfloat16)
        there = [off_16_bytes(t, alignment, device) for t in (q, k, v)]
        assert signature_of(*there).alignment == alignment
        out, lse = run(spec, *there)
        assert same_bits(out, want.to(torch.bfloat16))
        assert same_bits(lse.cpu()[0, 0], torch.from_numpy(logs.numpy().astype(np.float32) * np.float32(math.log(2.0))))


def off_16_bytes(t: Tensor, alignment: int, device: str) -> Tensor:
    """The same values in rows that start on multiples of so many bytes."""
    late = alignment // t.element_size()
    room = torch.zeros(*t.shape[:3], t.size(3) + 8 + late, dtype=t.dtype, device=device)
    return room[..., late : late + t.size(3)].copy_(t)


@EVERY_TARGET
@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_in_every_order_of_copies(dtype: torch.dtype) -> None:
    q, k, v, exact, _ = powers(70, 150, 64, dtype, seed=1)
    for mode, seed in MODES:
        out, _ = run_mode(Attention(scale=unit_scale()), q, k, v, mode, seed)
        assert same_bits(out, exact.to(dtype))


def integers(device: str, dtype: torch.dtype, sq: int, sk: int, d: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(0)
    shapes = ((1, 2, sq, d), (1, 1, sk, d), (1, 1, sk, d))
    q, k, v = (torch.from_numpy(rng.integers(-largest, largest + 1, s)).to(dtype).to(device) for s in shapes)
    return q, k, v


@EVERY_TARGET
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, causal(), causal() & sliding_window(9)], ids=str)
def test_integer_weights(device: str, dtype: torch.dtype, mask: object) -> None:
    """Without a normalizer the scores are the weights: sums of products of integers, rounded once."""
    sq, sk, d = 65, 97, 32
    q, k, v = integers(device, dtype, sq, sk, d, largest=2)  # |score| <= 128: exact also as a 16-bit weight
    spec = Attention(mask=mask, scale=1.0, score=lambda s, b, h, i, j: s, normalizer="none")
    out, _ = run(spec, q, k, v)
    distance = torch.arange(sq, device=device)[:, None] + sk - sq - torch.arange(sk, device=device)
    seen = {0: distance > -sk, 1: distance >= 0, 2: (distance >= 0) & (distance < 9)}
    which = 0 if mask is None else 2 if "sliding" in str(mask) else 1
    scores = (q.double() @ k.double().transpose(2, 3)).where(seen[which], 0)
    assert same_bits(out, (scores @ v.double()).to(dtype))


@EVERY_TARGET
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sk", [1, 2, 64, 128, 256])
def test_means_of_equal_keys(device: str, dtype: torch.dtype, sk: int) -> None:
    """All scores equal, a power of two of them: out is the exact mean, lse = s + ln Sk."""
    q, k, v = integers(device, dtype, 33, sk, 64, largest=8)
    q = torch.zeros_like(q)
    out, lse = run(Attention(), q, k, v)
    assert same_bits(out, v.double().mean(2, keepdim=True).expand(1, 2, 33, 64).to(dtype))
    assert (lse.cpu().numpy() == np.float32(math.log2(sk)) * np.float32(math.log(2.0))).all()


# ---- emulator and GPU ----------------------------------------------------------------------------------------------


def ulps(a: Tensor, b: Tensor) -> int:
    """The largest distance between two 16-bit tensors, in steps from one number of their type to the next."""

    def ordered(t: Tensor) -> Tensor:
        bits = t.cpu().contiguous().view(torch.int16).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(a) - ordered(b)).abs().max())


def test_ulps() -> None:
    one = torch.tensor([1.0, -1.0, 0.0], dtype=torch.bfloat16)
    assert ulps(one, one) == 0
    assert ulps(one, torch.tensor([1.0078125, -1.0, -0.0], dtype=torch.bfloat16)) == 1
    assert (
        ulps(torch.tensor([2.0**-133], dtype=torch.bfloat16), torch.tensor([-(2.0**-133)], dtype=torch.bfloat16)) == 2
    )


ULPS_OF_THE_ROW = 2.0
"""How far the GPU's out may lie from the emulator's, in units of the last place of the row's largest element. The
exponentials differ in their last bits, and so, rarely, does the rounding of a weight or of the output. An H200 shows
1.0, in at most 1.5% of the elements."""
LSE_APART = 4e-6


@EVERY_TARGET
@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "spec", [Attention(), Attention(mask=causal()), Attention(mask=causal(), score=softcap(5.0))],
    ids=lambda s: s.description
)
def test_random_inputs_on_both(
    device: str, dtype: torch.dtype, d: int, spec: Attention, record_property: Callable[[str, object], None]
) -> None:
    q, k, v = qkv("cpu", h=2, sq=130, sk=190, d=d, dtype=dtype)
    here, here_lse = run_mode(spec, q, k, v, Mode.LATE)
    there, there_lse = (t.cpu() for t in run(spec, *(t.to(device) for t in (q, k, v))))
    mantissa = 7 if dtype is torch.bfloat16 else 10
    unit = torch.exp2(here.double().abs().amax(3, keepdim=True).log2().floor() - mantissa)
    apart = ((here.double() - there.double()).abs() / unit).max().item()
    record_property("largest difference in ulps of the element", ulps(here, there))
    record_property("largest difference in ulps of the row's largest element", apart)
    record_property("share of elements that differ", (here != there).double().mean().item())
    assert apart <= ULPS_OF_THE_ROW
    assert (here_lse - there_lse).abs().max() <= LSE_APART
