"""The library masks and scores against their formulas, and the reference against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attngen.errors import SpecError
from attngen.evaluate import Operand, evaluate
from attngen.reference import reference
from attngen.spec import Attention
from attngen.variants import (
    Mask,
    alibi,
    bias,
    causal,
    document,
    full,
    prefix_lm,
    sliding_window,
    softcap,
    window,
)

INF = float("inf")


def grid(mask: Any, sq: int, sk: int, batch: int = 1) -> Tensor:
    """The mask of head 0, [batch, sq, sk]."""
    spec = Attention(mask=mask)
    b, i, j = torch.arange(batch)[:, None, None], torch.arange(sq)[:, None], torch.arange(sk)
    env: dict[str, Operand] = {"b": b, "h": 0, "i": i, "j": j, "seqlen_q": sq, "seqlen_k": sk}
    return evaluate(spec.variant.mask, env, spec.tensors).expand(batch, sq, sk)


def qkv(
    b: int, hq: int, hkv: int, sq: int, sk: int, d: int = 16, dv: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv or d)
    q, k, v = (torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)
    return q, k, v


def close(a: Tensor | None, b: Tensor) -> None:
    assert a is not None
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (3, 7), (7, 3)])
def test_positional_masks(sq: int, sk: int) -> None:
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    d = i + sk - sq
    assert torch.equal(grid(causal(), sq, sk)[0], j <= d)
    assert torch.equal(grid(causal(align="top_left"), sq, sk)[0], j <= i)
    assert torch.equal(grid(window(2, 1), sq, sk)[0], (j >= d - 2) & (j <= d + 1))
    assert torch.equal(grid(window(-1, 0), sq, sk)[0], j <= d)
    assert torch.equal(grid(window(0, -1), sq, sk)[0], j >= d)
    assert torch.equal(grid(sliding_window(2), sq, sk)[0], (j >= d - 1) & (j <= d))
    assert torch.equal(grid(prefix_lm(2), sq, sk)[0], (j < 2) | (j <= d))
    assert torch.equal(grid(prefix_lm(torch.tensor(2)), sq, sk)[0], (j < 2) | (j <= d))
    assert grid(full(), sq, sk).all()
    assert grid(window(-1, -1), sq, sk).all()


def test_masks_with_tensors() -> None:
    ids, lengths = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]]), torch.tensor([1, 3])
    assert torch.equal(grid(document(ids), 4, 4, 2), ids[:, :, None] == ids[:, None, :])
    assert torch.equal(grid(document(ids[0]), 4, 4, 2)[1], ids[0][:, None] == ids[0])
    pair = grid(document(ids[:, 2:], ids), 2, 4, 2)
    assert torch.equal(pair, ids[:, 2:, None] == ids[:, None, :])
    i, j = torch.arange(4)[:, None], torch.arange(4)
    assert torch.equal(grid(prefix_lm(lengths), 4, 4, 2), (j < lengths[:, None, None]) | (j <= i))


def test_composition_and_descriptions() -> None:
    def even(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j % 2 == 0

    i, j = torch.arange(6)[:, None], torch.arange(6)
    both: list[tuple[Mask, str, Tensor]] = [
        (causal() & sliding_window(3), "causal & sliding_window(3)", (j <= i) & (j > i - 3)),
        (causal() & even, "causal & even", (j <= i) & (j % 2 == 0)),
        (even | ~causal(), "even | ~causal", (j % 2 == 0) | (j > i)),
        (
            (causal() | even) & window(1, 2),
            "(causal | even) & window(1, 2)",
            ((j <= i) | (j % 2 == 0)) & (j >= i - 1) & (j <= i + 2),
        ),
        (~(causal() & even), "~(causal & even)", ~((j <= i) & (j % 2 == 0))),
        (full() & causal(), "full & causal", j <= i),
        (full() | causal(), "full | causal", torch.ones(6, 6).bool()),
        (~full(), "~full", torch.zeros(6, 6).bool()),
    ]
    for mask, text, want in both:
        assert str(mask) == text
        assert torch.equal(grid(mask, 6, 6)[0], want), text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: causal(align="left"), "'bottom_right', 'top_left'"),
        (lambda: window(-2, 0), "left=-2"),
        (lambda: window(0, True), "right=True"),
        (lambda: sliding_window(0), ">= 1"),
        (lambda: prefix_lm(-1), ">= 0"),
        (lambda: prefix_lm(torch.zeros(2)), "float32"),
        (lambda: document(torch.zeros(2, 2)), "integer tensor"),
        (lambda: softcap(0), "leave softcap out"),
        (lambda: softcap(None), "leave softcap out"),  # type: ignore[arg-type]
        (lambda: softcap(INF), "finite"),
        (lambda: alibi(torch.zeros(2, 2)), r"\[Hq\]"),
        (lambda: bias(torch.zeros(3)), "rank 2 to 4"),
        (lambda: bias(torch.zeros(3, 3, dtype=torch.int64)), "float or bool"),
    ],
)
def test_bad_arguments(make: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()


def test_reference_is_sdpa_on_plain_causal_and_bool_masks() -> None:
    q, k, v = qkv(2, 4, 4, 9, 9, dv=24)
    close(reference(Attention(), q, k, v)[0], sdpa(q, k, v))
    close(reference(Attention(causal()), q, k, v)[0], sdpa(q, k, v, is_causal=True))
    close(reference(Attention(scale=-0.3), q, k, v)[0], sdpa(q, k, v, scale=-0.3))
    keep = torch.rand(2, 1, 9, 9) < 0.5
    keep[..., 0] = True
    out, lse = reference(Attention(lambda b, h, i, j: keep[b, 0, i, j]), q, k, v)
    close(out, sdpa(q, k, v, attn_mask=keep))
    close(reference(Attention(score=bias(keep)), q, k, v)[0], out)
    logits = (q @ k.transpose(2, 3) / 4).masked_fill(~keep, -INF)
    close(lse, logits.logsumexp(-1))


def test_grouped_heads_and_head_dependent_scores() -> None:
    q, k, v = qkv(1, 6, 2, 5, 8)
    wide_k, wide_v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    close(reference(Attention(), q, k, v)[0], sdpa(q, wide_k, wide_v))
    slopes = torch.rand(6)
    i, j = torch.arange(5)[:, None], torch.arange(8)
    distance = -slopes.double()[:, None, None] * (i + 3 - j).abs()
    close(
        reference(Attention(score=alibi(slopes)), q, k, v)[0],
        sdpa(q, wide_k, wide_v, attn_mask=distance[None]),
    )


def test_an_approximate_softcap_is_another_description() -> None:
    exact, fast = Attention(score=softcap(30.0)), Attention(score=softcap(30.0, approximate=True))
    assert exact.variant.variant_key() != fast.variant.variant_key()
    assert str(softcap(30.0, approximate=True)) == "softcap(30, approximate)"
    q, k, v = (torch.randn(1, 2, 9, 64) * 4 for _ in range(3))
    close(reference(exact, q, k, v)[0], reference(fast, q, k, v)[0])


def test_softcap_window_and_order_of_a_list() -> None:
    q, k, v = qkv(1, 2, 2, 6, 6)
    extra = torch.randn(2, 6, 6)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    raw = q @ k.transpose(2, 3) / 4
    inside = (j >= i - 2) & (j <= i)
    capped = (2 * torch.tanh(raw / 2) + extra).masked_fill(~inside, -INF)
    close(reference(Attention(window(2, 0), [softcap(2), bias(extra)]), q, k, v)[0], capped.softmax(-1) @ v)
    other = (2 * torch.tanh((raw + extra) / 2)).masked_fill(~inside, -INF)
    close(reference(Attention(window(2, 0), [bias(extra), softcap(2)]), q, k, v)[0], other.softmax(-1) @ v)


def test_unnormalized_sigmoid_attention() -> None:
    q, k, v = qkv(1, 2, 2, 6, 6)
    spec = Attention(causal(), lambda s, b, h, i, j: torch.sigmoid(s - 2), normalizer="none")
    out, lse = reference(spec, q, k, v)
    want = (q @ k.transpose(2, 3) / 4 - 2).sigmoid() * torch.ones(6, 6).tril()
    close(out, want @ v)
    assert lse is None


def test_causal_alignment_of_unequal_lengths() -> None:
    q, k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8), torch.eye(5, 8)[None, None]
    out, lse = reference(Attention(causal()), q, k, v)
    close(
        out[0, 0, :, :5] * torch.tensor([[4.0], [5.0]]),
        torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).double(),
    )
    close(lse, torch.tensor([[[4.0, 5.0]]], dtype=torch.float64).log())
    out, lse = reference(Attention(causal(align="top_left")), q, k, v)
    close(out[0, 0, :, :5], torch.tensor([[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]).double())
    close(lse, torch.tensor([[[0.0, math.log(2)]]], dtype=torch.float64))


def test_rows_of_infinite_and_of_smallest_bias() -> None:
    q, k, v = qkv(1, 1, 1, 3, 4)
    lowest = torch.finfo(torch.float32).min
    rows = torch.tensor([[-INF] * 4, [lowest] * 4, [-INF, -INF, 0, -INF]])
    out, lse = reference(Attention(score=bias(rows[None, None])), q, k, v)
    assert torch.equal(out[0, 0, 0], torch.zeros(16, dtype=torch.float64))
    assert lse is not None
    assert lse[0, 0, 0] == -INF
    single, _ = reference(Attention(score=bias(rows)), q, k, v, torch.float32)
    torch.testing.assert_close(single[0, 0, 1], v[0, 0].mean(0).float())
    close(out[0, 0, 2], v[0, 0, 2])


def test_sink() -> None:
    q, k, v = qkv(1, 2, 2, 3, 4)
    empty = k[:, :, :0], v[:, :, :0]
    out, lse = reference(Attention(sink=torch.tensor([0.5, 0.5])), q, *empty)
    assert not out.any()
    close(lse, torch.full((1, 2, 3), 0.5, dtype=torch.float64))
    out, lse = reference(Attention(sink=torch.tensor([100.0, 100.0])), q, k, v)
    close(lse, torch.full((1, 2, 3), 100.0, dtype=torch.float64))
    assert out.abs().max() < 1e-30
    plain, plain_lse = reference(Attention(), q, k, v)
    out, lse = reference(Attention(sink=torch.tensor([-INF, -INF])), q, k, v)
    assert torch.equal(out, plain)
    assert plain_lse is not None
    close(lse, plain_lse)


def test_empty_rows_and_sizes_of_zero() -> None:
    q, k, v = qkv(1, 2, 2, 5, 3)
    q.requires_grad_()
    out, lse = reference(Attention(causal()), q, k, v)
    assert not out[:, :, :2].any()
    assert lse is not None
    assert torch.equal(lse[:, :, :2], torch.full((1, 2, 2), -INF, dtype=torch.float64))
    (out.sum() + lse[:, :, 2:].sum()).backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert not q.grad[:, :, :2].any()
    for sizes in ((0, 2, 2, 5, 3), (1, 2, 2, 0, 3), (1, 2, 2, 5, 0)):
        out, lse = reference(Attention(causal()), *qkv(*sizes))
        assert out.shape == (sizes[0], 2, sizes[3], 16)
        assert lse is not None
        assert lse.shape == (sizes[0], 2, sizes[3])
        assert not out.any()


@pytest.mark.parametrize("junk", [float("nan"), INF])
def test_invisible_keys_and_values_have_no_part(junk: float) -> None:
    q, k, v = qkv(2, 2, 2, 4, 6)
    lengths = torch.tensor([3, 5])
    visible = causal() & (lambda b, h, i, j: j < lengths[b])
    clean, lse = reference(Attention(visible), q, k, v)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = junk, junk
    out, dirty_lse = reference(Attention(visible), q, k, v)
    assert torch.equal(out, clean)
    assert lse is not None
    assert dirty_lse is not None
    assert torch.equal(lse, dirty_lse)
    v[:, :, 2] = junk  # the future of some rows only
    out, _ = reference(Attention(causal(align="top_left")), q, k, v)
    assert out[:, :, :2].isfinite().all()
    assert not out[:, :, 2:].isfinite().any()
