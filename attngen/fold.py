"""Smaller equal expressions: constant folding and the identities of integers, booleans and floats.

The value is kept bit for bit. Integers are exact integers here: a constant is not folded when the result
leaves 32 bits. Floats are folded only where nothing is rounded and no NaN or signed zero can tell."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

from attngen.expr import COMPARES, FALSE, TRUE, DType, Expr, Op, const, make, rewrite

_NEGATED = {Op.EQ: Op.NE, Op.NE: Op.EQ, Op.LT: Op.GE, Op.GE: Op.LT, Op.GT: Op.LE, Op.LE: Op.GT}
_REFLEXIVE = frozenset({Op.EQ, Op.LE, Op.GE})


def fold(root: Expr) -> Expr:
    """An expression of the same value, with constants folded and neutral elements removed."""
    return rewrite(root, _fold_node)


def _fold_node(e: Expr) -> Expr | None:
    """One rewriting step; operands are folded already. A rule that builds a new node folds that one again."""
    while (smaller := _step(e)) is not None and smaller is not e:
        e = smaller
    return e


def _step(e: Expr) -> Expr | None:
    if e.args and all(a.op is Op.CONST for a in e.args) and e.op is not Op.LOAD:
        known = _constant(e)
        if known is not None:
            return known
    if e.op is Op.WHERE:
        return _where(*e.args)
    if e.op in (Op.AND, Op.OR):
        return _connective(e.op, *e.args)
    if e.op is Op.NOT:
        return _not(e.args[0])
    if e.op in (Op.MIN, Op.MAX):
        return _extremum(e.op, *e.args)
    if e.op in COMPARES:
        same = e.args[0] is e.args[1] and e.args[0].dtype is not DType.F32  # NaN differs from itself
        return const(e.op in _REFLEXIVE) if same else None
    if e.op is Op.NEG:
        return e.args[0].args[0] if e.args[0].op is Op.NEG else None
    if e.op is Op.ABS:
        return make(Op.ABS, *e.args[0].args) if e.args[0].op in (Op.ABS, Op.NEG) else None
    if e.op is Op.ADD and e.args[1].op is Op.NEG:
        return make(Op.SUB, e.args[0], *e.args[1].args)
    if e.op is Op.SUB and e.args[1].op is Op.NEG:
        return make(Op.ADD, e.args[0], *e.args[1].args)
    if e.op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.FLOORDIV, Op.MOD):
        return _integer(e.op, *e.args) if e.dtype is DType.I32 else _float(e.op, *e.args)
    return None


# ---- constants ---------------------------------------------------------------------------------------------

_INTEGER: dict[Op, Callable[..., int]] = {
    Op.NEG: lambda a: -a,
    Op.ABS: abs,
    Op.ADD: lambda a, b: a + b,
    Op.SUB: lambda a, b: a - b,
    Op.MUL: lambda a, b: a * b,
    Op.FLOORDIV: lambda a, b: a // b,
    Op.MOD: lambda a, b: a % b,
    Op.MIN: min,
    Op.MAX: max,
}
_COMPARE: dict[Op, Callable[..., bool]] = {
    Op.EQ: lambda a, b: a == b,
    Op.NE: lambda a, b: a != b,
    Op.LT: lambda a, b: a < b,
    Op.LE: lambda a, b: a <= b,
    Op.GT: lambda a, b: a > b,
    Op.GE: lambda a, b: a >= b,
}


def _constant(e: Expr) -> Expr | None:
    """The value of `e` over constants, or None where it is not exact."""
    values = [a.value for a in e.args]
    if e.op in _COMPARE:
        return const(bool(_COMPARE[e.op](*values)))
    if e.dtype is DType.F32:
        return _constant_float(e.op, *(a.value for a in e.args if isinstance(a.value, float)))
    if e.op is Op.I32 and isinstance(values[0], float):
        return _small(math.trunc(values[0])) if math.isfinite(values[0]) else None
    if e.dtype is DType.I32 and e.op in _INTEGER:
        if e.op in (Op.FLOORDIV, Op.MOD) and values[1] == 0:
            return None
        return _small(int(_INTEGER[e.op](*values)))
    return None


def _small(value: int) -> Expr | None:
    return const(value) if -(2**31) <= value < 2**31 else None


def _constant_float(op: Op, *values: float) -> Expr | None:
    if not values or any(not math.isfinite(v) or v == 0 or not _representable(v) for v in values):
        return None
    a, b = Fraction(values[0]), Fraction(values[-1])
    exact = {
        Op.NEG: lambda: -a,
        Op.ABS: lambda: abs(a),
        Op.ADD: lambda: a + b,
        Op.SUB: lambda: a - b,
        Op.MUL: lambda: a * b,
        Op.DIV: lambda: a / b,
        Op.MIN: lambda: min(a, b),
        Op.MAX: lambda: max(a, b),
    }.get(op)
    if exact is None:
        return None
    result = exact()
    try:
        rounded = float(result)
    except OverflowError:
        return None
    return const(rounded) if Fraction(rounded) == result and _representable(rounded) else None


def _representable(value: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False


# ---- identities --------------------------------------------------------------------------------------------


def _where(cond: Expr, yes: Expr, no: Expr) -> Expr | None:
    if cond.op is Op.CONST:
        return yes if cond.value else no
    if yes is no:
        return yes
    if cond.op is Op.NOT:
        return make(Op.WHERE, cond.args[0], no, yes)
    if yes is TRUE and no is FALSE:
        return cond
    if yes is FALSE and no is TRUE:
        return _fold_node(make(Op.NOT, cond))
    if no.op is Op.WHERE and no.args[0] is cond:
        return make(Op.WHERE, cond, yes, no.args[2])
    if yes.op is Op.WHERE and yes.args[0] is cond:
        return make(Op.WHERE, cond, yes.args[1], no)
    return None


def _connective(op: Op, a: Expr, b: Expr) -> Expr | None:
    neutral, absorbing = (TRUE, FALSE) if op is Op.AND else (FALSE, TRUE)
    if a is absorbing or b is absorbing:
        return absorbing
    if a is neutral or a is b:
        return b
    if b is neutral:
        return a
    if negated(a) is b or negated(b) is a:
        return absorbing
    return None


def _not(a: Expr) -> Expr | None:
    if a.op is Op.CONST:
        return const(not a.value)
    opposite = negated(a)
    return opposite if opposite.op is not Op.NOT else None


def negated(e: Expr) -> Expr:
    """`~e` with the negation moved into a comparison; not where a NaN would make both orders false."""
    if e.op is Op.NOT:
        return e.args[0]
    if e.op in (Op.EQ, Op.NE) or (e.op in COMPARES and e.args[0].dtype is not DType.F32):
        return make(_NEGATED[e.op], *e.args)
    return make(Op.NOT, e)


def _extremum(op: Op, a: Expr, b: Expr) -> Expr | None:
    if a is b:
        return a
    if a.dtype is DType.F32:
        return None  # which operand a NaN selects depends on the order
    other = Op.MAX if op is Op.MIN else Op.MIN
    for x, y in ((a, b), (b, a)):
        if y.op is op and x in y.args:
            return y
        if y.op is other and x in y.args:
            return x
    if a.op is op and a.args[1].op is Op.CONST and b.op is Op.CONST:
        bound = _constant(make(op, a.args[1], b))
        return make(op, a.args[0], bound) if bound is not None else None
    return None


def _is(e: Expr, value: int) -> bool:
    return e.op is Op.CONST and e.value == value


def _integer(op: Op, a: Expr, b: Expr) -> Expr | None:
    if (op in (Op.ADD, Op.SUB) and _is(b, 0)) or (op in (Op.MUL, Op.FLOORDIV) and _is(b, 1)):
        return a
    if (op is Op.ADD and _is(a, 0)) or (op is Op.MUL and _is(a, 1)):
        return b
    if op is Op.MUL and (_is(a, 0) or _is(b, 0)):
        return const(0)
    if (op is Op.MOD and _is(b, 1)) or (op is Op.SUB and a is b):
        return const(0)
    if (op is Op.SUB and _is(a, 0)) or (op is Op.MUL and _is(a, -1)):
        return make(Op.NEG, b)
    if op is Op.MUL and _is(b, -1):
        return make(Op.NEG, a)
    return _merge_constants(op, a, b)


def _merge_constants(op: Op, a: Expr, b: Expr) -> Expr | None:
    """(x + c) + d, with either sign, as x + (c + d)."""
    if op not in (Op.ADD, Op.SUB) or a.op not in (Op.ADD, Op.SUB):
        return None
    c, d = a.args[1].value, b.value
    if not isinstance(c, int) or not isinstance(d, int):
        return None
    total = (c if a.op is Op.ADD else -c) + (d if op is Op.ADD else -d)
    if abs(total) >= 2**31:
        return None
    return make(Op.ADD if total >= 0 else Op.SUB, a.args[0], const(abs(total)))


def _float(op: Op, a: Expr, b: Expr) -> Expr | None:
    if op in (Op.MUL, Op.DIV) and _is(b, 1):
        return a
    if op is Op.MUL and _is(a, 1):
        return b
    if b.op is Op.CONST and isinstance(b.value, float) and b.value == 0:
        # x + 0.0 turns -0.0 into 0.0; x - 0.0 and x + -0.0 change nothing
        positive = math.copysign(1.0, b.value) > 0
        return a if (op is Op.SUB and positive) or (op is Op.ADD and not positive) else None
    return None
