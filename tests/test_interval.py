from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from masks import NAMES, TENSORS, atoms, evaluate, mask, masks, visible, worlds

from attngen.expr import DType, Expr, Op, const, make, var
from attngen.exprtext import parse, show
from attngen.fold import fold
from attngen.interval import Span, analyse
from attngen.sums import Sum, extremes, linear, tidy


def keys(span: Span, names: dict[str, int], load: object) -> range:
    lo = 0 if span.lo is None else max(0, evaluate(span.lo, names, load))
    hi = names["seqlen_k"] if span.hi is None else min(names["seqlen_k"], evaluate(span.hi, names, load))
    return range(lo, hi)


@settings(max_examples=1500, deadline=None)
@given(masks, worlds())
def test_no_visible_key_is_lost_and_no_hidden_key_is_called_full(e: Expr, world: tuple) -> None:
    names, load = world
    seen = visible(e, names, load)
    assume(seen is not None)
    found = analyse(e)
    some, every = keys(found.any, names, load), keys(found.all, names, load)
    for j in range(names["seqlen_k"]):
        assert j in some or not any(row[j] for row in seen)
        assert j not in every or all(row[j] for row in seen)
    assert found.proved == (not found.reason)


# masks whose spans have to be exact: every end of a span of keys that some (every) row sees
EXACT = [
    "true",
    "j <= i",
    "j <= i + seqlen_k - seqlen_q",
    "j <= i + (seqlen_k - seqlen_q) & i + seqlen_k - seqlen_q - j < 5",
    "abs(i - j) <= 3",
    "j < 7 | j <= i",
    "j // 4 == i // 4",
    "j // 4 == i // 4 & j <= i",
    "j // 4 <= i // 4 & j // 4 > i // 4 - 2",
    "h == 1 | j <= i & i - j < 4",
    "(h == 1 | i - j < 4) & j <= i",
    "h != 1 & j > i",
    "where(h < 2, j <= i, j <= i & i - j < 4)",
    "j < n[b]",
    "j >= 3 & j < n[b]",
    "j < n[b] | j <= i",
    "i < 6 | j <= i",
    "~(j > i | i - j >= 4)",
    "j <= max(i, 9)",
    "2 * j <= i",
    "j % 4 == 0 | true",
]


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("text", EXACT)
@given(world=worlds())
def test_proved_spans_are_exact(text: str, world: tuple) -> None:
    names, load = world
    e = mask(text)
    seen = visible(e, names, load)
    found = analyse(e)
    assert found.proved, found.reason
    every_key = range(names["seqlen_k"])
    assert list(keys(found.any, names, load)) == [j for j in every_key if any(row[j] for row in seen)]
    if "i < 6" not in text:  # a condition on the row makes `all` the better of two spans
        assert list(keys(found.all, names, load)) == [j for j in every_key if all(row[j] for row in seen)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("j % 3 == 0", "`j % 3 == 0` cannot be solved for the key j"),
        ("j <= i & doc[i] == doc[j]", "`doc[i] == doc[j]` cannot be solved for the key j"),
        ("keep[j]", "`keep[j]` is no comparison of integers"),
        ("j < 4 | j <= i & i - j < 8", "the union `U` may leave a hole between its spans of keys"),
        ("j <= 9 * i & j >= 9 * i", "the spans `i * 9` to `i * 9 + 1` of neighbouring rows may leave a hole"),
        ("j <= n[i]", "how `n[i]` depends on the row i is not known"),
        ("i % 2 == 0", "`i % 2` is not monotone in the row i"),
        ("j - n[b] <= n[h]", "the bound that `j - n[b] <= n[h]` sets for the key may not fit 32 bits"),
    ],
)
def test_reason(text: str, reason: str) -> None:
    found = analyse(mask(text))
    assert not found.proved
    assert found.reason == reason.replace("U", text)


def test_the_known_part_of_an_unproved_mask_still_bounds_the_keys() -> None:
    found = analyse(mask("j <= i & i - j < 100 & doc[i] == doc[j]"))
    assert (show(found.any.lo), show(found.any.hi)) == ("i_lo - 99", "i_hi + 1")
    assert found.all.hi is const(0)


# ---- what the analysis is built of ----------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(masks, worlds())
def test_folding_keeps_the_value(e: Expr, world: tuple) -> None:
    names, load = world
    assume(visible(e, names, load) is not None)
    assert visible(fold(e), names, load) == visible(e, names, load) == visible(tidy(e), names, load)


@settings(max_examples=300, deadline=None)
@given(atoms, worlds())
def test_sums_and_extremes(e: Expr, world: tuple) -> None:
    names, load = world
    assume(e.args and e.args[0].dtype is DType.I32 and names["seqlen_k"] > 0)
    assume(visible(e, names, load) is not None)
    for x in e.args:
        s = linear(x)
        at = names | {"i": names["i_hi"], "j": names["seqlen_k"] - 1}
        value = evaluate(x, at, load)
        assert sum(c * evaluate(t, at, load) for t, c in s.terms) + s.constant == value
        assert extremes(x)[0] <= value <= extremes(x)[1]
        for term, _ in s.terms:
            assert linear(term) == Sum(((term, 1),))


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        ("i + 0", "i"), ("0 + i", "i"), ("i * 1", "i"), ("i * 0", "0"), ("i // 1", "i"), ("i % 1", "0"),
        ("i - i", "0"), ("i + 3 - 1", "i + 2"), ("i - 3 + 1", "i - 2"), ("i + 3 - 3", "i"),
        ("2 + 3 * 4", "14"), ("-7 // 2", "-4"), ("2147483647 + 1", "2147483647 + 1"), ("min(i, i)", "i"),
        ("max(min(i, j), i)", "i"), ("min(min(i, 5), 3)", "min(i, 3)"), ("~~(i < j)", "i < j"),
        ("~(i < j)", "i >= j"), ("i < j | true", "true"), ("i < j & i >= j", "false"),
        ("i < j & i < j", "i < j"), ("where(true, i, j)", "i"), ("where(i < j, b, b)", "b"),
        ("where(i < j, true, false)", "i < j"), ("abs(-i)", "abs(i)"), ("i == i", "true"),
        ("x == x", "x == x"), ("~(x < 1.0)", "~(x < 1.0)"), ("x * 1.0", "x"), ("x + 0.0", "x + 0.0"),
        ("x - 0.0", "x"), ("0.5 + 0.25", "0.75"), ("0.1 + 0.2", "0.1 + 0.2"), ("1.0 / 3.0", "1.0 / 3.0"),
        ("1.0 / 4.0", "0.25"), ("x * 0.0", "x * 0.0"), ("n[b + 0]", "n[b]"), ("i32(2.75)", "2"),
        ("min(x, x)", "x"), ("1.5 < 2.0", "true"),
    ],
)  # fmt: skip
def test_fold(text: str, folded: str) -> None:
    names = NAMES | {"x": DType.F32}
    assert show(fold(parse(text, names, TENSORS))) == folded


def test_folding_leaves_nan_and_infinity_alone() -> None:
    e = make(Op.SUB, const(math.inf), const(math.inf))
    assert fold(e) is e
    assert fold(make(Op.SUB, const(math.inf), var("x", DType.F32))).op is Op.SUB
