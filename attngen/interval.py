"""Which keys a tile of query rows sees: closed forms derived from the mask expression.

The analysis has two steps. `_keys` solves the mask for the key: the keys that row i sees, as a span whose
ends are expressions of i. `rows.over_rows` then takes the least and the greatest value of such an end over
the rows i_lo <= i <= i_hi of a tile. Every step errs on one side only: `any` never loses a key that some row
sees, `all` never holds a key that some row does not see.

Assumed: 0 <= i, j, b, h < 2**24, lengths <= 2**24, and a mask whose own integer arithmetic does not overflow.
What the analysis adds to the user's arithmetic stays within 32 bits under that assumption, whatever a
captured tensor holds; where that cannot be shown, the comparison counts as unknown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attngen.expr import COMPARES, DType, Expr, I, J, Op, conj, const, make, substitute, where
from attngen.exprtext import show
from attngen.fold import negated
from attngen.rows import over_rows
from attngen.sums import BIG, LENGTH, Sum, depends, extremes, linear, sum_extremes, tame, tidy

_NOTHING, _EVERYTHING = const(0), const(BIG)


@dataclass(frozen=True)
class Span:
    """Keys lo <= j < hi; None is no bound. Empty where lo >= hi."""

    lo: Expr | None = None
    hi: Expr | None = None


EVERY, EMPTY = Span(), Span(None, _NOTHING)


@dataclass(frozen=True)
class Visibility:
    """What the rows i_lo..i_hi see: outside `any` no row sees a key, inside `all` every row sees every key.

    `proved`: the spans are tight enough to be used alone. Otherwise `reason` says what is in the way."""

    any: Span
    all: Span
    proved: bool
    reason: str = ""


@lru_cache(maxsize=256)
def analyse(mask: Expr) -> Visibility:
    """Closed forms of the visibility of `mask`, a boolean expression over b, h, i, j and the lengths. Kept: each tile
    shape among the candidates asks for it."""
    keys = _keys(tidy(mask))
    reason = keys.reason

    def extreme(end: Expr | None, greatest: bool) -> Expr | None:
        nonlocal reason
        if end is None:
            return None
        extent = over_rows(end)
        reason = reason or extent.reason
        found = extent.hi if greatest else extent.lo
        return None if found is None else tidy(found)

    some = Span(extreme(keys.outer.lo, False), extreme(keys.outer.hi, True))
    every = Span(extreme(keys.inner.lo, True), extreme(keys.inner.hi, False))
    if (keys.inner.lo and not every.lo) or (keys.inner.hi and not every.hi):
        every = EMPTY  # an end that is not known
    reason = reason or _hole(keys.outer)
    return Visibility(some, every, not reason, reason)


# ---- the keys of one row -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Keys:
    """The keys that row i sees lie within `outer` and hold `inner`; the two agree where `reason` is empty."""

    outer: Span
    inner: Span
    reason: str = ""

    @staticmethod
    def exactly(span: Span) -> _Keys:
        return _Keys(span, span)


def _unknown(reason: str) -> _Keys:
    return _Keys(EVERY, EMPTY, reason)


def _keys(e: Expr, want: bool = True) -> _Keys:
    """The keys j for which `e` is `want`; a negation travels down to the comparisons."""
    if not depends(e, "j"):
        return _when(e if want else negated(e), _Keys.exactly(EVERY))
    if e.op is Op.NOT:
        return _keys(e.args[0], not want)
    if e.op in (Op.AND, Op.OR):
        parts = _flatten(e, want, (e.op is Op.AND) == want)
        return _meet(parts) if (e.op is Op.AND) == want else _join(parts, e)
    if e.op is Op.WHERE:
        return _choose(e.args[0], _keys(e.args[1], want), _keys(e.args[2], want), e)
    if e.op in (Op.EQ, Op.NE) and e.args[0].dtype is DType.BOOL:
        same = want == (e.op is Op.EQ)
        return _choose(e.args[0], _keys(e.args[1], same), _keys(e.args[1], not same), e)
    if e.op in COMPARES and e.args[0].dtype is DType.I32:
        return _compare(e if want else negated(e))
    return _unknown(f"`{show(e)}` is no comparison of integers")


def _flatten(e: Expr, want: bool, meet: bool) -> list[tuple[Expr, bool]]:
    """Operands of nested conjunctions (`meet`) or disjunctions, each with the truth value asked of it."""
    if e.op is Op.NOT:
        return _flatten(e.args[0], not want, meet)
    if e.op in (Op.AND, Op.OR) and ((e.op is Op.AND) == want) == meet:
        return [part for a in e.args for part in _flatten(a, want, meet)]
    return [(e, want)]


def _split(parts: list[tuple[Expr, bool]]) -> tuple[list[Expr], list[_Keys]]:
    """What does not depend on the key, as conditions; the rest, solved."""
    free = [e if want else negated(e) for e, want in parts if not depends(e, "j")]
    return free, [_keys(e, want) for e, want in parts if depends(e, "j")]


def _meet(parts: list[tuple[Expr, bool]]) -> _Keys:
    conditions, rest = _split(parts)
    result = rest[0]
    for keys in rest[1:]:
        reason = result.reason or keys.reason
        result = _Keys(_intersect(result.outer, keys.outer), _intersect(result.inner, keys.inner), reason)
    return _when(conj(*conditions), result)


def _join(parts: list[tuple[Expr, bool]], e: Expr) -> _Keys:
    conditions, rest = _split(parts)
    result = rest[0]
    for keys in rest[1:]:
        result = _unite(result, keys, e)
    if not conditions:
        return result
    condition = conditions[0]
    for c in conditions[1:]:
        condition = make(Op.OR, condition, c)
    return _select(condition, _Keys.exactly(EVERY), result)


def _intersect(a: Span, b: Span) -> Span:
    return Span(_extremum(Op.MAX, a.lo, b.lo), _extremum(Op.MIN, a.hi, b.hi))


def _extremum(op: Op, a: Expr | None, b: Expr | None) -> Expr | None:
    return b if a is None else a if b is None else make(op, a, b)


def _unite(a: _Keys, b: _Keys, e: Expr) -> _Keys:
    if a.inner == EVERY or b.outer == EMPTY:
        return a
    if b.inner == EVERY or a.outer == EMPTY:
        return b
    reason = a.reason or b.reason
    if not _touch(a.outer, b.outer):
        reason = reason or f"the union `{show(e)}` may leave a hole between its spans of keys"
    inner = _over(a.inner, b.inner) if _touch(a.inner, b.inner) else b.inner if a.inner == EMPTY else a.inner
    return _Keys(_over(a.outer, b.outer), inner, reason)


def _over(a: Span, b: Span) -> Span:
    """The smallest span around two."""
    lo = make(Op.MIN, a.lo, b.lo) if a.lo is not None and b.lo is not None else None
    return Span(lo, make(Op.MAX, a.hi, b.hi) if a.hi is not None and b.hi is not None else None)


def _touch(a: Span, b: Span) -> bool:
    """Whether two spans leave no hole between them in any row; an empty span within the hull is none."""
    return _at_least(a.hi, b.lo) and _at_least(b.hi, a.lo)


def _at_least(hi: Expr | None, lo: Expr | None) -> bool:
    """Whether hi >= lo can be shown for every value of the variables; no bound is beyond every value."""
    if hi is None or lo is None:
        return True
    if hi.op is Op.MIN or lo.op is Op.MAX:
        pairs = [(h, lo) for h in hi.args] if hi.op is Op.MIN else [(hi, x) for x in lo.args]
        return all(_at_least(h, x) for h, x in pairs)
    if hi.op is Op.MAX or lo.op is Op.MIN:
        pairs = [(h, lo) for h in hi.args] if hi.op is Op.MAX else [(hi, x) for x in lo.args]
        return any(_at_least(h, x) for h, x in pairs)
    return sum_extremes(linear(hi) - linear(lo))[0] >= 0


def _when(condition: Expr, keys: _Keys) -> _Keys:
    return _select(condition, keys, _Keys.exactly(EMPTY))


def _choose(condition: Expr, yes: _Keys, no: _Keys, e: Expr) -> _Keys:
    if not depends(condition, "j"):
        return _select(condition, yes, no)
    then, otherwise = _keys(condition), _keys(condition, False)
    parts = [
        _Keys(_intersect(a.outer, b.outer), _intersect(a.inner, b.inner), a.reason or b.reason)
        for a, b in ((then, yes), (otherwise, no))
    ]
    return _unite(parts[0], parts[1], e)


def _select(condition: Expr, yes: _Keys, no: _Keys) -> _Keys:
    """`yes` in the rows that fulfil `condition`, `no` in the others."""
    if condition.op is Op.CONST:
        return yes if condition.value else no
    outer, inner = _select_span(condition, yes.outer, no.outer), _select_span(condition, yes.inner, no.inner)
    return _Keys(outer, inner, yes.reason or no.reason)


def _select_span(condition: Expr, yes: Span, no: Span) -> Span:
    lo, hi = yes.lo, None
    if no != EMPTY and (yes.lo is not None or no.lo is not None):  # an empty span needs no lower end
        lo = where(condition, yes.lo or _NOTHING, no.lo or _NOTHING)
    if yes.hi is not None or no.hi is not None:
        hi = where(condition, yes.hi or _EVERYTHING, no.hi or _EVERYTHING)
    return Span(lo, hi)


# ---- comparisons -------------------------------------------------------------------------------------------


def _compare(e: Expr) -> _Keys:
    a, b = linear(e.args[0]), linear(e.args[1])
    match e.op:
        case Op.GE:
            return _not_negative(a - b, e)
        case Op.GT:
            return _not_negative((a - b).plus(-1), e)
        case Op.LE:
            return _not_negative(b - a, e)
        case Op.LT:
            return _not_negative((b - a).plus(-1), e)
        case Op.EQ:
            return _both(_not_negative(a - b, e), _not_negative(b - a, e))
        case _:
            return _unite(_not_negative((a - b).plus(-1), e), _not_negative((b - a).plus(-1), e), e)


def _both(a: _Keys, b: _Keys) -> _Keys:
    return _Keys(_intersect(a.outer, b.outer), _intersect(a.inner, b.inner), a.reason or b.reason)


def _not_negative(d: Sum, e: Expr) -> _Keys:
    """The keys where d >= 0; `e` is the comparison that asks."""
    lo, hi = sum_extremes(d)
    if lo >= 0 or hi < 0:
        return _Keys.exactly(EVERY if lo >= 0 else EMPTY)
    keyed = [(t, c) for t, c in d.terms if depends(t, "j")]
    if len(keyed) != 1:
        return _unknown(f"`{show(e)}` cannot be solved for the key j")
    term, c = keyed[0]
    rest = Sum.of(((t, n) for t, n in d.terms if t is not term), d.constant)
    if abs(c) > 1:
        tamed = tame(rest, _scaled(extremes(term), c))
        if tamed is None:
            return _too_large(e)
        rest = tamed.floordiv(abs(c))
    # c > 0: term >= ceil(-rest / c) = -(rest // c).  c < 0: term <= rest // -c
    return _half_line(term, c > 0, rest.times(-1) if c > 0 else rest, e)


def _scaled(bounds: tuple[int, int], factor: int) -> tuple[int, int]:
    return min(factor * b for b in bounds), max(factor * b for b in bounds)


def _too_large(e: Expr) -> _Keys:
    return _unknown(f"the bound that `{show(e)}` sets for the key may not fit 32 bits")


def _half_line(x: Expr, lower: bool, v: Sum, e: Expr) -> _Keys:
    """The keys where x >= v (`lower`) or x <= v."""
    if x is J:
        end = _end(v if lower else v.plus(1))
        if end is None:
            return _too_large(e)
        return _Keys.exactly(Span(end, None) if lower else Span(None, end))

    def again(y: Expr, bound: Sum, is_lower: bool) -> _Keys:
        return _not_negative(linear(y) - bound if is_lower else bound - linear(y), e)

    divisor = x.args[1].value if x.op is Op.FLOORDIV else None
    if isinstance(divisor, int) and divisor > 0:
        return again(x.args[0], v.times(divisor).plus(0 if lower else divisor - 1), lower)
    if x.op in (Op.MIN, Op.MAX):
        a, b = (again(y, v, lower) for y in x.args)
        return _both(a, b) if (x.op is Op.MIN) == lower else _unite(a, b, e)
    if x.op is Op.ABS:
        # |y| <= v: -v <= y and y <= v; |y| >= v: y >= v or y <= -v
        a, b = again(x.args[0], v, lower), again(x.args[0], v.times(-1), not lower)
        return _unite(a, b, e) if lower else _both(a, b)
    if x.op is Op.WHERE:
        return _choose(x.args[0], again(x.args[1], v, lower), again(x.args[2], v, lower), e)
    if x.op is Op.I32 and x.args[0].dtype is DType.BOOL:
        return _choose(x.args[0], again(const(1), v, lower), again(const(0), v, lower), e)
    return _unknown(f"`{show(e)}` cannot be solved for the key j")


def _end(v: Sum) -> Expr | None:
    """`v` as the end of a span of keys: within 32 bits at every step, whatever its loads hold."""
    if v.constant == 0 and len(v.terms) == 1 and v.terms[0][1] == 1:
        return v.terms[0][0]
    tamed = tame(v, (0, LENGTH))
    return None if tamed is None else tamed.expr()


# ---- holes -------------------------------------------------------------------------------------------------


def _hole(span: Span) -> str:
    """Why the spans of neighbouring rows may leave keys between them that no row sees, or nothing.

    Ends that move by at most one key a row leave no hole worth a tile."""
    lo, hi = span.lo, span.hi
    if lo is None or hi is None or not (depends(lo, "i") and depends(hi, "i")):
        return ""
    if hi.op is Op.WHERE or lo.op is Op.WHERE:
        condition = hi.args[0] if hi.op is Op.WHERE else lo.args[0]

        def case(end: Expr, k: int) -> Expr:
            return end.args[k] if end.op is Op.WHERE and end.args[0] is condition else end

        return _hole(Span(case(lo, 1), case(hi, 1))) or _hole(Span(case(lo, 2), case(hi, 2)))
    below = {I: make(Op.ADD, I, const(1))}
    if min(_jump(lo), _jump(hi)) <= 1 or _touch(span, Span(substitute(lo, below), substitute(hi, below))):
        return ""
    return f"the spans `{show(lo)}` to `{show(hi)}` of neighbouring rows may leave a hole"


def _jump(e: Expr) -> int:
    """The most by which an expression changes from one row to the next; BIG if not known."""
    if not depends(e, "i"):
        return 0
    if e is I:
        return 1
    if e.op in (Op.MIN, Op.MAX, Op.ABS):
        return max(_jump(a) for a in e.args)
    if e.op is Op.FLOORDIV and e.args[1].op is Op.CONST and extremes(e.args[1])[0] > 0:
        return -(-_jump(e.args[0]) // extremes(e.args[1])[0])
    s = linear(e)
    return BIG if s == Sum(((e, 1),)) else sum(abs(c) * _jump(t) for t, c in s.terms)
