"""The pass `ranges`: which tiles of keys a tile of query rows visits, and which of them need no mask.

The mask's visibility (`attngen.interval`) is rounded to tiles of `block_n` keys. The result holds for
0 <= i_lo <= i_hi < seqlen_q; host, kernel and emulator evaluate the same expressions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attngen.errors import PassError
from attngen.expr import SEQLEN_K, Expr, Op, const, make, maximum, minimum, where
from attngen.interval import analyse
from attngen.sums import BIG, extremes, linear, tidy


class TileClass(Enum):
    MASKED = "masked"  # the mask and the end of the keys are applied to each element
    FULL = "full"  # every row sees every key of the tile


class VisitSource(Enum):
    CLOSED = "closed"  # the ends are the closed forms of `Visit`
    TABLE = "table"  # a table built on the device lists the tiles; lo and hi bound what its builder looks at


@dataclass(frozen=True)
class Visit:
    """The tiles of one tile of rows: 0 <= lo <= full_lo <= full_hi <= hi <= ceil(seqlen_k / block_n).

    CLOSED: tiles lo..hi-1 are visited, full_lo..full_hi-1 of them are FULL. `ranges` lists the classes in
    visiting order, n descending: below hi, below full_hi and below full_lo; the last is left out where no
    mask bounds the keys from below.
    TABLE: full_lo = full_hi = hi, and only the table knows; `ranges` lists the classes it may hold."""

    source: VisitSource
    lo: Expr
    hi: Expr
    full_lo: Expr
    full_hi: Expr
    ranges: tuple[TileClass, ...]
    reason: str


def ranges(mask: Expr, block_n: int) -> Visit:
    """The tiles of `block_n` keys that rows i_lo..i_hi visit under `mask`."""
    if not 0 < block_n <= 2**16:
        raise PassError(f"ranges: block_n must be in 1..65536, not {block_n}")
    seen = analyse(mask)
    zero, up, down = const(0), _Rounded(block_n, up=True), _Rounded(block_n, up=False)
    hi = up(SEQLEN_K) if seen.any.hi is None else minimum(up(seen.any.hi), up(SEQLEN_K))
    hi = tidy(maximum(hi, zero))
    lo = zero if seen.any.lo is None else tidy(minimum(maximum(down(seen.any.lo), zero), hi))
    if not seen.proved:
        return Visit(VisitSource.TABLE, lo, hi, hi, hi, (TileClass.MASKED, TileClass.FULL), seen.reason)
    # all lies within any, so that each end of the full tiles is already on its side of lo and hi
    full_lo = zero if seen.all.lo is None else tidy(minimum(maximum(up(seen.all.lo), zero), hi))
    full_hi = down(SEQLEN_K) if seen.all.hi is None else minimum(down(seen.all.hi), down(SEQLEN_K))
    full_hi = tidy(maximum(full_hi, full_lo))
    classes: tuple[TileClass, ...] = (TileClass.MASKED, TileClass.FULL)
    if full_lo is not lo:
        classes = (*classes, TileClass.MASKED)
    return Visit(VisitSource.CLOSED, lo, hi, full_lo, full_hi, classes, "")


@dataclass(frozen=True)
class _Rounded:
    """A key index over the tile size, rounded; monotone, so that it moves inside extrema and choices."""

    block_n: int
    up: bool

    def __call__(self, key: Expr) -> Expr:
        if key.op in (Op.MIN, Op.MAX):
            return make(key.op, self(key.args[0]), self(key.args[1]))
        if key.op is Op.WHERE:
            return where(key.args[0], self(key.args[1]), self(key.args[2]))
        if not self.up:
            return self._divide(key, 0)
        # a captured tensor may hold any value: no key lies beyond BIG, and BIG + block_n still fits
        return self._divide(key if extremes(key)[1] <= BIG else minimum(key, const(BIG)), self.block_n - 1)

    def _divide(self, key: Expr, plus: int) -> Expr:
        return linear(key).plus(plus).floordiv(self.block_n).expr()
