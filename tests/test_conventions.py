"""The cases that must hold: forward, dense, unsplit. In the emulator, and on a GPU where there is one; on every target,
where it has a schedule for the description."""

from __future__ import annotations

import math

import pytest
import torch
from support import (
    DEVICES,
    Truth,
    causal_grid,
    check,
    check_lse,
    compiled,
    has_schedule,
    kernels_of,
    qkv,
    randn,
    run,
    same_bits,
    target_name,
    verify,
)
from torch import Tensor

from attngen.signature import IoType, Signature, signature_of
from attngen.spec import Attention
from attngen.variants import bias, causal, softcap, window

__all__ = ["target_name"]  # a fixture
pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.usefixtures("target_name")]
INF = float("inf")
CAUSAL = Attention(mask=causal())


# ---- C01, C02: nothing to see --------------------------------------------------------------------------------------


def test_c01_more_queries_than_keys(device: str) -> None:
    q, k, v = qkv(device, h=2, hkv=2, sq=5, sk=3)
    out, lse = verify(Attention(mask=causal()), Truth(causal_grid(5, 3)), q, k, v)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -INF).all()
    assert out[:, :, 2:].isfinite().all()
    assert lse[:, :, 2:].isfinite().all()


@pytest.mark.parametrize(
    ("b", "h", "sq", "sk"),
    [(2, 2, 5, 0), (0, 2, 5, 7), (2, 2, 0, 7), (2, 0, 5, 7), (0, 0, 0, 0)],
    ids=["Sk", "B", "Sq", "H", "all"],
)
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
@pytest.mark.parametrize("dv", [48, 64])
def test_c02_nothing(device: str, dv: int, mask: object, b: int, h: int, sq: int, sk: int) -> None:
    q, k, v = qkv(device, b=b, h=h, hkv=h, sq=sq, sk=sk, d=64, dv=dv)
    out, lse = run(Attention(mask=mask), q, k, v)
    assert out.shape == (b, h, sq, dv)
    assert lse.shape == (b, h, sq)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.device == lse.device == q.device
    assert (out == 0).all()
    assert (lse == -INF).all()


# ---- C05, C06: where the diagonal lies -----------------------------------------------------------------------------


def counting(device: str, dtype: torch.dtype, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Equal scores of two queries and five keys, and values that show which keys a query saw."""
    q, k = torch.zeros(1, 1, 2, 64, dtype=dtype, device=device), randn(1, 1, 5, 64, dtype=dtype, device=device)
    v = torch.zeros(1, 1, 5, dv, dtype=dtype, device=device)
    v[0, 0, :, :5] = torch.eye(5)
    return q, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dv", [8, 64])
def test_c05_alignment_of_causal(device: str, dtype: torch.dtype, dv: int) -> None:
    q, k, v = counting(device, dtype, dv)
    out, lse = run(Attention(mask=causal()), q, k, v)
    rows = torch.tensor([[1, 1, 1, 1, 0], [0.8, 0.8, 0.8, 0.8, 0.8]]) / 4
    assert torch.equal(out[0, 0, :, :5].cpu(), rows.to(dtype))
    torch.testing.assert_close(lse[0, 0].cpu(), torch.tensor([4.0, 5.0]).log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dv", [8, 64])
def test_c05_alignment_of_causal_by_name(device: str, dtype: torch.dtype, dv: int) -> None:
    q, k, v = counting(device, dtype, dv)
    out, lse = run(Attention(mask=causal(align="top_left")), q, k, v)
    assert torch.equal(out[0, 0, :, :5].cpu(), torch.tensor([[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]).to(dtype))
    torch.testing.assert_close(lse[0, 0].cpu(), torch.tensor([0.0, math.log(2)]), rtol=0, atol=1e-6)


def test_c06_causal_of_half_precision(device: str) -> None:
    q, k, v = qkv(device, h=1, sq=512, sk=512, d=128, dtype=torch.float16)
    verify(Attention(mask=causal()), Truth(causal_grid(512, 512)), q, k, v)


def test_c06_windows(device: str) -> None:
    s = 512
    q, k, v = qkv(device, h=1, sq=s, sk=s, d=128, dtype=torch.float16)
    truth = Truth(causal_grid(s, s))
    whole = verify(Attention(mask=causal()), truth, q, k, v)
    for left in (-1, s, s - 1):
        verify(Attention(mask=window(left, 0)), truth, q, k, v)
    out, lse = run(Attention(mask=window(s - 2, 0)), q, k, v)
    check(out, lse, Truth(lambda b, h, i, j: (j <= i) & (j >= i - (s - 2))), q, k, v)
    torch.testing.assert_close(out[:, :, :-1], whole[0][:, :, :-1], rtol=0, atol=2e-3)
    assert (lse[:, :, :-1] - whole[1][:, :, :-1]).abs().max() <= 1e-5
    last = (lse[:, :, -1] - whole[1][:, :, -1]).item()  # the last row has lost key 0
    score = (q[0, 0, -1].double() @ k[0, 0, 0].double()) / math.sqrt(128)
    assert last < 0
    assert last == pytest.approx(math.log1p(-math.exp(score.item() - whole[1][0, 0, -1].item())), abs=2e-6)


# ---- C07: any scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, -0.125, 1])
def test_c07_scale(device: str, scale: float) -> None:
    q, k, v = qkv(device, h=1, sq=130, sk=130)
    _, lse = verify(Attention(mask=causal(), scale=scale), Truth(causal_grid(130, 130), scale=scale), q, k, v)
    if scale == 0:  # out, checked above, is the running mean of v
        check_lse(lse[0, 0], torch.arange(1, 131, device=device).double().log())


# ---- C08: biases at the ends of the number line ----------------------------------------------------------------------


def c08_rows(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = qkv(device, h=2, hkv=2, sq=3, sk=43)
    rows = torch.full((1, 1, 3, 43), -INF, device=device)
    rows[0, 0, 1] = torch.finfo(torch.float32).min
    rows[0, 0, 2, 17] = 0.0
    return q, k, v, rows


def test_c08_bias(device: str) -> None:
    q, k, v, rows = c08_rows(device)
    out, lse = run(Attention(score=bias(rows)), q, k, v)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -INF).all()
    # finfo.min is an ordinary number: scores vanish beside it, and all keys are equal
    mean = v.double().mean(2)
    assert (out[:, :, 1].double() - mean).abs().max() <= 2 * (mean.to(v.dtype).double() - mean).abs().max() + 1e-5
    low = torch.finfo(torch.float32).min
    assert ((lse[:, :, 1].double() - low).abs() <= 1e-6 * abs(low)).all()
    assert torch.equal(out[:, :, 2], v[:, :, 17])
    want = (q[:, :, 2].double() * k[:, :, 17].double()).sum(-1) / 8
    assert (lse[:, :, 2].double() - want).abs().max() <= 1e-3


def test_c08_bias_beside_a_sink(device: str) -> None:
    q, k, v, rows = c08_rows(device)
    sink = torch.tensor([0.5, -INF], device=device)
    out, lse = run(Attention(score=bias(rows), sink=sink), q, k, v)
    assert torch.equal(lse[0, :, 0].cpu(), torch.tensor([0.5, -INF]))
    assert (out[:, :, 0] == 0).all()
    assert (out[:, 0, 1] == 0).all()  # beside the sink of head 0, finfo.min is nothing
    assert (out[:, 1, 1].double() - v[:, 1].double().mean(1)).abs().max() <= 2e-3


def test_c08_expanded_bias(device: str) -> None:
    q, k, v = qkv(device, b=2, h=3, hkv=3, sq=37, sk=43)
    for shape in ((1, 1, 37, 43), (2, 1, 1, 43), (1, 3, 37, 1), (37, 43)):
        small = randn(*shape, dtype=torch.float32, device=device, seed=3)
        wide = small.expand(2, 3, 37, 43)
        assert 0 in wide.stride()
        first, second, third = (run(Attention(score=bias(t)), q, k, v) for t in (small, wide, wide.contiguous()))
        check(*first, Truth(score=lambda s, b, h, i, j, t=wide: s + t), q, k, v)  # type: ignore[misc]
        assert all(same_bits(a, b) for a, b in zip(second, third, strict=True))


def test_c08_bool_bias_keeps_where_true(device: str) -> None:
    q, k, v = qkv(device, h=2, hkv=2, sq=37, sk=43)
    keep = randn(1, 1, 37, 43, dtype=torch.float32, device=device, seed=3) > 0
    keep[0, 0, 5] = False
    out, lse = verify(Attention(score=bias(keep)), Truth(lambda b, h, i, j: keep[0, 0, i, j]), q, k, v)
    assert (out[:, :, 5] == 0).all()
    assert (lse[:, :, 5] == -INF).all()


# ---- C09: strides --------------------------------------------------------------------------------------------------


def as_clones(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in tensors)
    return q, k, v


def strided(kind: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    s, h, d = 137, 3, 64
    if kind == "packed":
        q, k, v = (t.transpose(1, 2) for t in randn(2, s, 3, h, d, device=device).unbind(2))
        return q, k, v
    if kind == "transposed":
        q, k, v = (randn(2, s, h, d, device=device, seed=n).transpose(1, 2) for n in range(3))
        return q, k, v
    if kind == "sequence first":
        q, k, v = (randn(s, 2, h, d, device=device, seed=n).permute(1, 2, 0, 3) for n in range(3))
        return q, k, v
    if kind == "expanded":
        k, v = (randn(2, s, 1, d, device=device, seed=n).transpose(1, 2).expand(2, h, s, d) for n in (1, 2))
        return randn(2, h, s, d, device=device), k, v
    if kind == "same":
        x = randn(2, h, s, d, device=device)
        return x, x, x
    assert kind == "odd rows"
    q, k, v = (randn(2, h, s, d + 1, device=device, seed=n)[..., :d] for n in range(3))
    return q, k, v


@pytest.mark.parametrize("kind", ["packed", "transposed", "sequence first", "expanded", "same"])
def test_c09_strides(device: str, kind: str) -> None:
    tensors = strided(kind, device)
    clones = as_clones(tensors)
    assert kind == "same" or any(t.stride() != c.stride() for t, c in zip(tensors, clones, strict=True))
    out, lse = run(CAUSAL, *tensors)
    want, want_lse = verify(CAUSAL, Truth(causal_grid(137, 137)), *clones)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


def equal_at_one_tile_shape(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Rows off the 16-byte grid have a kernel of their own; at one tile shape it computes the same bits."""
    clones = as_clones(tensors)
    config = compiled(CAUSAL, *tensors).config
    out, lse = verify(CAUSAL, Truth(causal_grid(137, 137)), *tensors)
    want, want_lse = run(CAUSAL, *clones, config)
    assert signature_of(*tensors).alignment == 2
    assert signature_of(*clones).alignment == 16
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


def test_c09_odd_row_strides(device: str) -> None:
    equal_at_one_tile_shape(strided("odd rows", device))


def test_c09_offset_of_one_element(device: str) -> None:
    q, k, v = (randn(2 * 3 * 137 * 64 + 1, device=device, seed=n)[1:].view(2, 3, 137, 64) for n in range(3))
    assert all(t.data_ptr() % 16 == 2 for t in (q, k, v))
    equal_at_one_tile_shape((q, k, v))
    equal_at_one_tile_shape((q.clone(), k, v.clone()))


def test_c09_output_follows_the_memory_order_of_q(device: str) -> None:
    q, k, v = strided("transposed", device)
    out, _ = run(Attention(mask=causal()), q, k, v)
    assert out.transpose(1, 2).is_contiguous()


# ---- C12: softcap --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [15.0, 2.0])
@pytest.mark.parametrize(("sq", "sk"), [(5, 7), (257, 257)])
@pytest.mark.parametrize("std", [4.0, 100.0])
def test_c12_softcap(device: str, cap: float, sq: int, sk: int, std: float) -> None:
    """Values of 100 saturate the logits."""
    q, k, v = qkv(device, h=1, sq=sq, sk=sk, std=std)
    at = sk - sq
    truth = Truth(lambda b, h, i, j: (j <= i + at) & (j >= i + at - 3), lambda s, b, h, i, j: cap * torch.tanh(s / cap))
    out, lse = verify(Attention(mask=window(3, 0), score=softcap(cap)), truth, q, k, v)
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_c12_softcap_causal(device: str) -> None:
    q, k, v = qkv(device, h=1, sq=257, sk=257, std=4.0)
    truth = Truth(causal_grid(257, 257), lambda s, b, h, i, j: 15 * torch.tanh(s / 15))
    verify(Attention(mask=causal(), score=softcap(15.0)), truth, q, k, v)


# ---- C13: sinks ------------------------------------------------------------------------------------------------------


def test_c13_sink_without_keys(device: str) -> None:
    sink = torch.tensor([0.5, 0.5], device=device)
    for sk in (0, 3):  # none at all, and none that rows 0 and 1 of five see
        q, k, v = qkv(device, h=2, hkv=2, sq=5, sk=sk)
        out, lse = run(Attention(mask=causal(), sink=sink), q, k, v)
        assert (out[:, :, : 5 - sk] == 0).all()
        assert (lse[:, :, : 5 - sk] == 0.5).all()


def test_c13_large_sink(device: str) -> None:
    q, k, v = qkv(device, h=2, sq=33, sk=65)
    sink = torch.full((2,), 100.0, device=device)
    out, lse = run(Attention(mask=causal(), sink=sink), q, k, v)
    assert (lse == 100).all()
    assert out.abs().max() < 1e-30


def test_c13_sink_of_minus_infinity_is_none(device: str) -> None:
    q, k, v = qkv(device, h=2, sq=70, sk=65)
    out, lse = run(Attention(mask=causal(), sink=torch.full((2,), -INF, device=device)), q, k, v)
    want, want_lse = run(Attention(mask=causal()), q, k, v)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c13_random_sink(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(device, b=2, h=4, hkv=2, sq=100, sk=130)
    sink = randn(4, dtype=dtype, device=device, seed=5)
    verify(Attention(mask=causal(), sink=sink), Truth(causal_grid(100, 130), sink=sink), q, k, v)


# ---- C14: learnable parts --------------------------------------------------------------------------------------------


def test_c14_learnable_scale(device: str) -> None:
    q, k, v = qkv(device, h=2, sq=130, sk=130)
    for value in (1.7, -0.4):  # a run-time argument: one kernel
        t = torch.tensor(value, device=device)
        verify(
            Attention(score=lambda s, b, h, i, j, t=t: s * t), Truth(score=lambda s, b, h, i, j, t=t: s * t), q, k, v
        )


def test_c14_shared_bias(device: str) -> None:
    q, k, v = qkv(device, b=3, h=2, sq=130, sk=130)
    table = randn(1, 2, 130, 130, dtype=torch.float32, device=device, seed=4)
    verify(Attention(score=bias(table)), Truth(score=lambda s, b, h, i, j: s + table), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_c14_relative_table(device: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(device, h=2, sq=130, sk=130)
    table = randn(2 * 130 - 1, dtype=dtype, device=device, seed=4)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[i - j + 129]

    verify(Attention(mask=causal(), score=score), Truth(causal_grid(130, 130), score), q, k, v)


# ---- what each target has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
def test_no_target_is_skipped_altogether(device: str, target_name: str, mask: object, d: int) -> None:
    """The tests above skip what a target has no schedule for; these it has."""
    for dtype in IoType:
        assert has_schedule(Attention(mask=mask), Signature(dtype, d, d), target_name)
    with kernels_of(target_name):
        q, k, v = qkv(device, sq=1, sk=1, d=d)
        assert compiled(Attention(mask=mask), q, k, v).target.name == target_name


# ---- C15: head dims, groups, lengths ---------------------------------------------------------------------------------

HEAD_DIMS = [8, 16, 24, 40, 56, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 224, 256]


@pytest.mark.parametrize(("d", "dv"), [*((d, d) for d in HEAD_DIMS), (192, 128), (64, 128)])
def test_c15_head_dims(device: str, d: int, dv: int) -> None:
    spec = Attention(mask=causal())
    for s in (63, 129):
        q, k, v = qkv(device, h=3, hkv=1, sq=s, sk=s, d=d, dv=dv)
        verify(spec, Truth(causal_grid(s, s)), q, k, v)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8])
def test_c15_groups(device: str, group: int) -> None:
    q, k, v = qkv(device, b=2, h=2 * group, hkv=2, sq=33, sk=65)
    verify(Attention(mask=causal()), Truth(causal_grid(33, 65)), q, k, v)


@pytest.mark.parametrize("s", [1, 2, 63, 65, 127, 129, 296])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_c15_lengths(device: str, s: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(device, h=2, sq=s, sk=s, dtype=dtype)
    verify(Attention(mask=causal()), Truth(causal_grid(s, s)), q, k, v)
    verify(Attention(mask=causal()), Truth(causal_grid(s, 65)), q, *qkv(device, h=2, sk=65, dtype=dtype)[1:])
