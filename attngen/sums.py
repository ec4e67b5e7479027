"""Integer arithmetic in normal form, and how large its values can be.

`Sum` is the normal form. Lengths are at most `LENGTH` and indices below it; a captured tensor may hold any
32-bit value. What the compiler itself computes from them has to stay within `BIG`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from attngen.expr import COMPARES, DType, Expr, Op, const, make, rewrite, variables
from attngen.fold import fold

BIG = 2**30  # beyond every key; two such values can be added
LENGTH = 2**24  # no index reaches it and no length exceeds it
_INDICES = frozenset({"i", "j", "b", "h", "i_lo", "i_hi"})
_LENGTHS = frozenset({"seqlen_q", "seqlen_k"})
_ANY_I32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Sum:
    """The integer `constant + sum of coefficient * term`, terms distinct and coefficients not 0."""

    terms: tuple[tuple[Expr, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(terms: Iterable[tuple[Expr, int]], constant: int = 0) -> Sum:
        total: dict[Expr, int] = {}
        for term, coefficient in terms:
            total[term] = total.get(term, 0) + coefficient
        return Sum(tuple((t, c) for t, c in total.items() if c), constant)

    def __add__(self, other: Sum) -> Sum:
        return Sum.of(self.terms + other.terms, self.constant + other.constant)

    def __sub__(self, other: Sum) -> Sum:
        return self + other.times(-1)

    def plus(self, constant: int) -> Sum:
        return Sum(self.terms, self.constant + constant)

    def times(self, factor: int) -> Sum:
        return Sum.of(((t, c * factor) for t, c in self.terms), self.constant * factor)

    def floordiv(self, k: int) -> Sum:
        """`self // k`, k > 0: multiples of k leave the division."""
        out = tuple((t, c // k) for t, c in self.terms if c % k == 0)
        rest = tuple((t, c) for t, c in self.terms if c % k)
        if not rest:
            return Sum(out, self.constant // k)
        kept, left = (self.constant // k, 0) if self.constant % k == 0 else (0, self.constant)
        inner = Sum(rest, left).expr()
        divisor = inner.args[1].value if inner.op is Op.FLOORDIV else None
        if isinstance(divisor, int) and 0 < divisor * k < 2**31:
            return Sum.of((*out, (make(Op.FLOORDIV, inner.args[0], const(divisor * k)), 1)), kept)
        return Sum.of((*out, (make(Op.FLOORDIV, inner, const(k)), 1)), kept)

    def expr(self) -> Expr:
        """As an expression: what is added first, then what is subtracted, then the constant."""
        added = [_product(t, c) for t, c in self.terms if c > 0]
        taken = [_product(t, -c) for t, c in self.terms if c < 0]
        constant = self.constant
        if not added and (constant > 0 or not taken):
            added, constant = [const(constant)], 0
        result = added.pop(0) if added else make(Op.NEG, taken.pop(0))
        for term in added:
            result = make(Op.ADD, result, term)
        for term in taken:
            result = make(Op.SUB, result, term)
        if constant == 0:
            return result
        return make(Op.ADD if constant > 0 else Op.SUB, result, const(abs(constant)))


def _product(term: Expr, factor: int) -> Expr:
    return term if factor == 1 else make(Op.MUL, term, const(factor))


def linear(e: Expr) -> Sum:
    """The i32 expression `e` as a sum. `x % k` is written as `x - x // k * k`, so that only divisions by
    positive constants are left; any other operation is a term.

    What only lengths and captured tensors make up is a term as the user wrote it where it may be large: in
    another order it could leave 32 bits."""
    value = e.args[1].value if e.op in (Op.FLOORDIV, Op.MOD) else e.value
    if e.op is Op.CONST and isinstance(value, int):
        return Sum((), value)
    if not depends(e, "i", "j") and max(map(abs, extremes(e))) > BIG:
        return Sum(((e, 1),))
    if e.op in (Op.ADD, Op.SUB, Op.MUL):
        a, b = linear(e.args[0]), linear(e.args[1])
        if e.op is Op.ADD:
            return a + b
        if e.op is Op.SUB:
            return a - b
        if not a.terms or not b.terms:
            return a.times(b.constant) if not b.terms else b.times(a.constant)
    if e.op is Op.NEG:
        return linear(e.args[0]).times(-1)
    if e.op in (Op.FLOORDIV, Op.MOD) and isinstance(value, int) and value > 0:
        x = linear(e.args[0])
        quotient = x.floordiv(value)
        return quotient if e.op is Op.FLOORDIV else x - quotient.times(value)
    return Sum(((e, 1),))


# ---- how large a value can be ------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def extremes(e: Expr) -> tuple[int, int]:
    """Bounds of an i32 or boolean expression as mathematical integers; beyond 32 bits: not known."""
    if e.op is Op.CONST and e.value is not None and e.dtype is not DType.F32:
        return int(e.value), int(e.value)
    if e.dtype is DType.BOOL:
        return 0, 1
    if e.op is Op.VAR:
        return (0, LENGTH - 1) if e.name in _INDICES else (0, LENGTH) if e.name in _LENGTHS else _ANY_I32
    if e.op is Op.LOAD or any(a.dtype is DType.F32 for a in e.args):
        return _ANY_I32
    if e.op is Op.WHERE:
        return _hull(extremes(e.args[1]), extremes(e.args[2]))
    parts = [extremes(a) for a in e.args]
    (a_lo, a_hi), (b_lo, b_hi) = parts[0], parts[-1]
    match e.op:
        case Op.I32:
            return parts[0]
        case Op.NEG:
            return -a_hi, -a_lo
        case Op.ADD:
            return a_lo + b_lo, a_hi + b_hi
        case Op.SUB:
            return a_lo - b_hi, a_hi - b_lo
        case Op.MUL:
            corners = [x * y for x in (a_lo, a_hi) for y in (b_lo, b_hi)]
            return min(corners), max(corners)
        case Op.FLOORDIV if b_lo == b_hi > 0:
            return a_lo // b_lo, a_hi // b_lo
        case Op.MOD if b_lo == b_hi > 0:
            return 0, b_lo - 1
        case Op.MIN:
            return min(a_lo, b_lo), min(a_hi, b_hi)
        case Op.MAX:
            return max(a_lo, b_lo), max(a_hi, b_hi)
        case Op.ABS:
            return max(a_lo, -a_hi, 0), max(-a_lo, a_hi)
        case _:
            return _ANY_I32


def _hull(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return min(a[0], b[0]), max(a[1], b[1])


def tidy(e: Expr) -> Expr:
    """`fold`, and what follows from the sizes of lengths and indices: decided comparisons and extrema."""
    return fold(rewrite(fold(e), _decide))


def _decide(e: Expr) -> Expr | None:
    if (e.op not in COMPARES and e.op not in (Op.MIN, Op.MAX)) or e.args[0].dtype is DType.F32:
        return None
    (a_lo, a_hi), (b_lo, b_hi) = extremes(e.args[0]), extremes(e.args[1])
    match e.op:
        case Op.MIN | Op.MAX if a_hi <= b_lo or b_hi <= a_lo:
            return e.args[0] if (a_hi <= b_lo) == (e.op is Op.MIN) else e.args[1]
        case Op.LT | Op.GE if a_hi < b_lo or b_hi <= a_lo:
            return const((a_hi < b_lo) == (e.op is Op.LT))
        case Op.GT | Op.LE if b_hi < a_lo or a_hi <= b_lo:
            return const((b_hi < a_lo) == (e.op is Op.GT))
        case Op.EQ | Op.NE if a_hi < b_lo or b_hi < a_lo:
            return const(e.op is Op.NE)
        case _:
            return None


# ---- sums of bounded size ----------------------------------------------------------------------------------


def depends(e: Expr, *names: str) -> bool:
    return not variables(e).isdisjoint(names)


def sum_extremes(s: Sum) -> tuple[int, int]:
    """Bounds of a sum. c * (x // k), k dividing c, moves with x: as c / k * (x - x % k) it may cancel."""
    lo, hi = s.constant, s.constant
    for term, c in s.terms:
        ends = [c * x for x in extremes(term)]
        lo, hi = lo + min(ends), hi + max(ends)
    for term, c in s.terms:
        k = term.args[1].value if term.op is Op.FLOORDIV else None
        if isinstance(k, int) and k > 0 and c % k == 0:
            rest = Sum.of(((t, n) for t, n in s.terms if t is not term), s.constant)
            below, above = sum_extremes(rest + linear(term.args[0]).times(c // k))
            slack = c // k * (k - 1)
            return max(lo, below - max(slack, 0)), min(hi, above - min(slack, 0))
    return lo, hi


def reach(s: Sum) -> int:
    """No partial sum of `s` is larger in magnitude."""
    return abs(s.constant) + sum(max(abs(c * x) for x in extremes(t)) for t, c in s.terms)


def tame(s: Sum, others: tuple[int, int]) -> Sum | None:
    """`s` with its value bounded, unchanged as far as a comparison with a value in `others` can tell."""
    if reach(s) <= BIG:
        return s
    large = [(t, c) for t, c in s.terms if reach(Sum(((t, c),))) > BIG]
    if len(large) != 1:
        return None
    term, c = large[0]
    rest = Sum.of(((t, n) for t, n in s.terms if t is not term), s.constant)
    largest = reach(rest) + max(abs(others[0]), abs(others[1])) + 1
    limit = largest // abs(c) + 1
    if largest + abs(c) * limit > BIG:
        return None
    clamped = make(Op.MIN, make(Op.MAX, term, const(-limit)), const(limit))
    return Sum.of(((clamped, c),)) + rest
