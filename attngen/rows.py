"""Interval arithmetic over the rows of a tile: the least and the greatest value that an expression takes for
i_lo <= i <= i_hi, as expressions of i_lo and i_hi."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attngen.expr import COMPARES, FALSE, TRUE, DType, Expr, I, Op, conj, const, make, var, where
from attngen.exprtext import show
from attngen.fold import negated
from attngen.sums import BIG, Sum, depends, extremes, linear, reach, tidy

I_LO, I_HI = var("i_lo", DType.I32), var("i_hi", DType.I32)


class Trend(Enum):
    FLAT = 0
    UP = 1
    DOWN = -1
    MIXED = None


@dataclass(frozen=True)
class Extent:
    """lo <= e <= hi for the rows i_lo..i_hi (None: not known); both are attained where `reason` is empty."""

    lo: Expr | None
    hi: Expr | None
    trend: Trend
    reason: str = ""


def over_rows(e: Expr) -> Extent:
    """The values of an i32 expression over the rows of a tile."""
    if not depends(e, "i"):
        return Extent(e, e, Trend.FLAT)
    s = linear(e)
    if s != Sum(((e, 1),)):
        return _sum_over_rows(s, e)
    if e is I:
        return Extent(I_LO, I_HI, Trend.UP)
    if e.op is Op.FLOORDIV and e.args[1].op is Op.CONST and extremes(e.args[1])[0] > 0:
        x, k = over_rows(e.args[0]), e.args[1]
        lo, hi = (None if end is None else make(Op.FLOORDIV, end, k) for end in (x.lo, x.hi))
        return Extent(lo, hi, x.trend, x.reason)
    if e.op in (Op.MIN, Op.MAX):
        return _extremum_over_rows(e)
    if e.op is Op.WHERE:
        return _where_over_rows(e)
    if e.op is Op.ABS:
        x = over_rows(e.args[0])
        if x.lo is not None and x.hi is not None:
            down, up = linear(x.lo).times(-1).expr(), linear(x.hi).times(-1).expr()
            lo = make(Op.MAX, make(Op.MAX, x.lo, up), const(0))
            return Extent(lo, make(Op.MAX, x.hi, down), Trend.MIXED, x.reason)
    return Extent(None, None, Trend.MIXED, f"how `{show(e)}` depends on the row i is not known")


def _sum_over_rows(s: Sum, e: Expr) -> Extent:
    parts = [(over_rows(t), c) for t, c in s.terms]
    reason = next((x.reason for x, _ in parts if x.reason), "")
    trends = [_turned(x.trend, c) for x, c in parts if x.trend is not Trend.FLAT]
    trend = trends[0] if trends else Trend.FLAT
    monotone = len(trends) < 2 or (set(trends) == {trend} and trend is not Trend.MIXED)
    if not monotone:
        reason = reason or f"`{show(e)}` is not monotone in the row i"
    lo = hi = Sum((), s.constant)
    for x, c in parts:
        # a mix of both ends of the tile is no value the user's arithmetic takes: it must fit by itself
        if x.lo is None or x.hi is None or (not monotone and reach(s) > BIG):
            return Extent(None, None, Trend.MIXED, reason)
        lo += linear(x.lo if c > 0 else x.hi).times(c)
        hi += linear(x.hi if c > 0 else x.lo).times(c)
    return Extent(lo.expr(), hi.expr(), trend if monotone else Trend.MIXED, reason)


def _turned(trend: Trend, sign: int) -> Trend:
    if sign > 0 or trend not in (Trend.UP, Trend.DOWN):
        return trend
    return Trend.DOWN if trend is Trend.UP else Trend.UP


def _common(a: Trend, b: Trend) -> Trend:
    """The trend of a choice between two expressions that does not depend on the row."""
    return b if a is Trend.FLAT else a if b in (a, Trend.FLAT) else Trend.MIXED


def _extremum_over_rows(e: Expr) -> Extent:
    a, b = (over_rows(x) for x in e.args)
    lo = make(e.op, a.lo, b.lo) if a.lo is not None and b.lo is not None else None
    hi = make(e.op, a.hi, b.hi) if a.hi is not None and b.hi is not None else None
    if e.op is Op.MIN and hi is None:
        hi = b.hi if a.hi is None else a.hi
    if e.op is Op.MAX and lo is None:
        lo = b.lo if a.lo is None else a.lo
    reason = a.reason or b.reason
    trend = _common(a.trend, b.trend)
    if trend is Trend.MIXED and Trend.FLAT not in (a.trend, b.trend):
        reason = reason or f"`{show(e)}` is not monotone in the row i"
    return Extent(lo, hi, trend, reason)


def _where_over_rows(e: Expr) -> Extent:
    maybe, always, reason = _condition(e.args[0])
    a, b = over_rows(e.args[1]), over_rows(e.args[2])
    trend = _common(a.trend, b.trend) if maybe is always else Trend.MIXED
    ends: list[Expr | None] = []
    for op, x, y in ((Op.MIN, a.lo, b.lo), (Op.MAX, a.hi, b.hi)):
        if x is None or y is None:
            ends.append(None)
            continue
        x, y = tidy(x), tidy(y)
        extremum = tidy(make(op, x, y))
        if extremum is x or maybe is always:
            ends.append(where(maybe, x, y))
        elif extremum is y:
            ends.append(where(always, x, y))
        else:
            ends.append(where(always, x, where(maybe, extremum, y)))
    return Extent(ends[0], ends[1], trend, reason or a.reason or b.reason)


def _condition(c: Expr) -> tuple[Expr, Expr, str]:
    """(true in some row at most where, true in every row at least where, why the two may be loose)."""
    if not depends(c, "i"):
        return c, c, ""
    if c.op is Op.NOT:
        maybe, always, reason = _condition(c.args[0])
        return negated(always), negated(maybe), reason
    if c.op in (Op.AND, Op.OR):
        a, b = (_condition(x) for x in c.args)
        return make(c.op, a[0], b[0]), make(c.op, a[1], b[1]), a[2] or b[2]
    if c.op is Op.NE:
        maybe, always, reason = _condition(make(Op.EQ, *c.args))
        return negated(always), negated(maybe), reason
    if c.op in COMPARES and c.args[0].dtype is DType.I32:
        x, y = (over_rows(a) for a in c.args)
        if Trend.FLAT not in (x.trend, y.trend):
            difference = linear(c.args[0]) - linear(c.args[1])
            if reach(difference) <= BIG:
                x, y = over_rows(difference.expr()), over_rows(const(0))
        if x.lo is not None and x.hi is not None and y.lo is not None and y.hi is not None:
            return (*_compare_over_rows(c.op, (x.lo, x.hi), (y.lo, y.hi)), x.reason or y.reason)
    return TRUE, FALSE, f"how `{show(c)}` depends on the row i is not known"


def _compare_over_rows(op: Op, x: tuple[Expr, Expr], y: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
    if op is Op.EQ:
        maybe = conj(make(Op.LE, x[0], y[1]), make(Op.LE, y[0], x[1]))
        return maybe, conj(make(Op.GE, x[0], y[1]), make(Op.LE, x[1], y[0]))
    if op in (Op.LT, Op.LE):
        return make(op, x[0], y[1]), make(op, x[1], y[0])
    return make(op, x[1], y[0]), make(op, x[0], y[1])
