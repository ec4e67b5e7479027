from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import evaluate, mask, masks, visible, worlds
from test_interval import EXACT

from attngen.errors import PassError
from attngen.expr import Expr
from attngen.exprtext import show
from attngen.passes.ranges import TileClass, Visit, VisitSource, ranges

BLOCKS = st.sampled_from([1, 2, 3, 4, 8, 64])


def tiles(v: Visit, names: dict[str, int], load: object, block_n: int) -> tuple[int, int, int, int]:
    """lo, hi, full_lo, full_hi; their order is checked on the way."""
    lo, hi, full_lo, full_hi = (evaluate(e, names, load) for e in (v.lo, v.hi, v.full_lo, v.full_hi))
    assert 0 <= lo <= full_lo <= full_hi <= hi <= -(-names["seqlen_k"] // block_n)
    return lo, hi, full_lo, full_hi


@settings(max_examples=1500, deadline=None)
@given(masks, worlds(), BLOCKS)
def test_visible_keys_are_visited_and_full_tiles_full(e: Expr, world: tuple, block_n: int) -> None:
    names, load = world
    seen = visible(e, names, load)
    assume(seen is not None)
    v = ranges(e, block_n)
    lo, hi, full_lo, full_hi = tiles(v, names, load, block_n)
    for n in range(-(-names["seqlen_k"] // block_n)):
        columns = [row[n * block_n : (n + 1) * block_n] for row in seen]
        if any(any(c) for c in columns):
            assert lo <= n < hi
        if full_lo <= n < full_hi:
            assert all(all(c) and len(c) == block_n for c in columns)
    if v.source is VisitSource.TABLE:
        assert (full_lo, full_hi) == (hi, hi)
        assert v.reason
    if len(v.ranges) == 2:
        assert full_lo == lo or v.source is VisitSource.TABLE


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("text", EXACT)
@given(world=worlds(), block_n=BLOCKS)
def test_no_empty_tile_visited_and_no_full_one_missed(text: str, world: tuple, block_n: int) -> None:
    names, load = world
    e = mask(text)
    seen = visible(e, names, load)
    v = ranges(e, block_n)
    assert v.source is VisitSource.CLOSED
    lo, hi, full_lo, full_hi = tiles(v, names, load, block_n)
    if any(any(row) for row in seen):
        for n in range(lo, hi):
            assert any(any(row[n * block_n : (n + 1) * block_n]) for row in seen)
    else:
        assert hi - lo <= 1
    if "i < 6" not in text:
        for n in range(lo, hi):
            columns = [row[n * block_n : (n + 1) * block_n] for row in seen]
            assert (full_lo <= n < full_hi) == all(all(c) and len(c) == block_n for c in columns)


CAUSAL_HI = "max(min((i_hi + seqlen_k - seqlen_q) // 64 + 1, (seqlen_k + 63) // 64), 0)"
WINDOW_FULL_LO = f"min(max((i_hi + seqlen_k - seqlen_q) // 64 - 3, 0), {CAUSAL_HI})"
CAUSAL_FULL_HI = "min((i_lo + seqlen_k - seqlen_q + 1) // 64, seqlen_k // 64)"


@pytest.mark.parametrize(
    ("text", "lo", "hi", "full_lo", "full_hi"),
    [
        ("true", "0", "(seqlen_k + 63) // 64", "0", "seqlen_k // 64"),
        ("false", "0", "0", "0", "0"),
        ("j <= i + (seqlen_k - seqlen_q)", "0", CAUSAL_HI, "0", f"max({CAUSAL_FULL_HI}, 0)"),
        (
            "j <= i",
            "0",
            "min(i_hi // 64 + 1, (seqlen_k + 63) // 64)",
            "0",
            "min((i_lo + 1) // 64, seqlen_k // 64)",
        ),
        (
            "i + seqlen_k - seqlen_q - j >= 0 & i + seqlen_k - seqlen_q - j < 256",
            f"min(max((i_lo + seqlen_k - seqlen_q - 255) // 64, 0), {CAUSAL_HI})",
            CAUSAL_HI,
            WINDOW_FULL_LO,
            f"max({CAUSAL_FULL_HI}, {WINDOW_FULL_LO})",
        ),
        (
            "j < 100 | j <= i",
            "0",
            "min(max(2, i_hi // 64 + 1), (seqlen_k + 63) // 64)",
            "0",
            "min(max(1, (i_lo + 1) // 64), seqlen_k // 64)",
        ),
        (
            "j < n[b]",
            "0",
            "max(min((min(n[b], 1073741824) + 63) // 64, (seqlen_k + 63) // 64), 0)",
            "0",
            "max(min(n[b] // 64, seqlen_k // 64), 0)",
        ),
    ],
)
def test_printed_forms(text: str, lo: str, hi: str, full_lo: str, full_hi: str) -> None:
    v = ranges(mask(text), 64)
    assert (show(v.lo), show(v.hi), show(v.full_lo), show(v.full_hi)) == (lo, hi, full_lo, full_hi)


def test_classes_in_visiting_order() -> None:
    masked, full = TileClass.MASKED, TileClass.FULL
    assert ranges(mask("true"), 64).ranges == (masked, full)
    assert ranges(mask("j <= i"), 64).ranges == (masked, full)
    assert ranges(mask("j <= i & i - j < 256"), 64).ranges == (masked, full, masked)


@pytest.mark.parametrize("block_n", [0, -64, 2**17])
def test_tile_size_is_checked(block_n: int) -> None:
    with pytest.raises(PassError, match="block_n"):
        ranges(mask("true"), block_n)


@pytest.mark.parametrize(
    "text", ["j <= i & i - j < 256", "j < n[b] + i", "j // 128 <= i", "j <= i * 3", "100 * j <= i"]
)
@pytest.mark.parametrize("limit", [-(2**31), 0, 2**31 - 1])
def test_long_sequences_stay_within_32_bits(text: str, limit: int) -> None:
    top = 2**24
    names = {"b": 0, "h": 0, "i_lo": top - 128, "i_hi": top - 1, "seqlen_q": top, "seqlen_k": top}
    tiles(ranges(mask(text), 64), names, lambda name, index: limit, 64)
