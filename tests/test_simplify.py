"""What `simplify` may round, and what it may not: conversions of integers, divisions by constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Truth, check, qkv, run

from attngen import functions as fn
from attngen.cprint import Printer
from attngen.expr import Expr
from attngen.passes.simplify import simplify_expr
from attngen.spec import Attention
from attngen.variants import alibi

TIMES = 1_700_000_000 + torch.arange(70, dtype=torch.int32)  # seconds: float32 has every 128th there


def simplified(score: Any) -> Expr:
    return simplify_expr(Attention(score=score).variant.score)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, i, j: s + (i - j), "score + (f32(i) - f32(j))"),
        (lambda s, b, h, i, j: s + abs(i + 5 - j), "score + abs(f32(i) + 5.0 - f32(j))"),
        (lambda s, b, h, i, j: s + (i + 2**30 - j), "score + f32(i + 1073741824 - j)"),
        (lambda s, b, h, i, j: s + (i * 1000 - j), "score + f32(i * 1000 - j)"),
        (lambda s, b, h, i, j: s + abs(TIMES[i] - TIMES[j]), "score + abs(f32(TIMES[i] - TIMES[j]))"),
        (lambda s, b, h, i, j: s + (TIMES[i] % 60 - j), "score + (f32(TIMES[i] % 60) - f32(j))"),
    ],
)
def test_a_conversion_is_distributed_over_exact_parts(score: Any, text: str) -> None:
    assert repr(simplified(score)) == text


def test_alibi_converts_a_row_and_a_column() -> None:
    text = repr(simplified(alibi(torch.zeros(2))))
    assert text == "score - slopes[h] * abs(f32(i) + f32(seqlen_k - seqlen_q) - f32(j))"


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, i, j: s / 3, "score * 0.3333333333333333"),
        (lambda s, b, h, i, j: s / -8, "score * (-0.125)"),
        (lambda s, b, h, i, j: torch.floor(s / 8), "floor(score * 0.125)"),
        (lambda s, b, h, i, j: torch.floor(s / 41), "floor(score / 41.0)"),
        (lambda s, b, h, i, j: s + (i / 41).int(), "score + f32(i32(f32(i) / 41.0))"),
        (lambda s, b, h, i, j: fn.where(s / 3 > 1, s / 5, s), "where(score / 3.0 > 1.0, score * 0.2, score)"),
        (lambda s, b, h, i, j: s / 1e-39, "score / 1e-39"),
        (lambda s, b, h, i, j: s / 1e39, "score / 1e+39"),
    ],
)
def test_a_division_by_a_constant(score: Any, text: str) -> None:
    assert repr(simplified(score)) == text


def test_a_division_below_a_step_is_known_after_other_rewritings() -> None:
    text = repr(simplified(lambda s, b, h, i, j: torch.floor(torch.exp(s / 4) / 3)))
    assert text == "floor(exp2(score * 0.36067376022224085) / 3.0)"


def test_large_captured_integers() -> None:
    q, k, v = qkv(sq=70, sk=70)
    spec = Attention(score=lambda s, b, h, i, j: s - 0.05 * abs(TIMES[i] - TIMES[j]))
    out, lse = run(spec, q, k, v)
    check(out, lse, Truth(score=lambda s, b, h, i, j: s - 0.05 * (i - j).abs()), q, k, v)


def test_blocks_by_floating_point_division() -> None:
    """47, 55, 61 and 82 are among the divisors whose own quotient is below 1 with a rounded reciprocal."""
    q, k, v = qkv(sq=130, sk=130)
    for n in (41, 47, 55, 61, 82):
        spec = Attention(mask=lambda b, h, i, j, n=n: fn.floor(i / n) == (j / n).int())
        out, lse = run(spec, q, k, v)
        check(out, lse, Truth(mask=lambda b, h, i, j, n=n: i // n == j // n), q, k, v)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, i, j: s + -torch.full_like(i, -(2**31)), "f32_of_s32((-(-2147483647 - 1)))"),
        (lambda s, b, h, i, j: s + -torch.full_like(s, -float("inf")), "(-(-INF))"),
    ],
)
def test_no_negative_constant_is_printed_behind_a_minus(score: Any, text: str) -> None:
    assert text in Printer(lambda e: e.name, {})(Attention(score=score).variant.score)
