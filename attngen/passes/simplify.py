"""simplify: Graph -> Graph. Rewrites every scalar expression into what the hardware has.

Before   exp, log, tanh, sigmoid, user arithmetic as written
After    exp2, log2, rcp, constants folded; integer index arithmetic split so that conversions to float can be hoisted
Why      ex2 and lg2 are single instructions; an int-to-float conversion per element competes with ex2 for its unit"""

from __future__ import annotations

import dataclasses
import math

from attngen.expr import (
    COMPARES,
    FLOAT_RANGE,
    ONE,
    SCALE,
    SEQLEN_K,
    SEQLEN_Q,
    DType,
    Expr,
    I,
    J,
    Op,
    add,
    const,
    make,
    minimum,
    mul,
    rewrite,
    sub,
    substitute,
    to_f32,
    variables,
    walk,
)  # fmt: skip
from attngen.fold import fold
from attngen.ir.graph import Graph, Map, Mask, Node, RowReduce
from attngen.sums import extremes

LOG2E, LN2 = const(math.log2(math.e)), const(math.log(2.0))

EXACT = 2**24  # integers up to here have a float32 each
# Positions and lengths are taken to be this small, so that a difference of two and a shift to the diagonal are exact.
# Beyond, their differences may be off by the rounding of a position, one part in 2^24.
POSITION = const(2**22)
_SMALL = {x: minimum(x, POSITION) for x in (I, J, SEQLEN_Q, SEQLEN_K)}

_STEPS = COMPARES | {Op.FLOOR, Op.I32}  # a rounding in their operand can become a step of their value


def exp_of(x: Expr) -> Expr:
    """A sum stays whole: the fold's references are found in differences."""
    return make(Op.EXP2, scaled(x, LOG2E) if x.op is Op.MUL else mul(x, LOG2E))


def scaled(e: Expr, c: Expr) -> Expr:
    """e * c for a positive constant, taken up by what costs nothing: constants and scalars of the item. A sum without
    the logit is multiplied as a whole: its parts may be large and cancel."""
    match e.op:
        case Op.ADD | Op.SUB if _has_logit(e):
            return make(e.op, scaled(e.args[0], c), scaled(e.args[1], c))
        case Op.NEG:
            return make(Op.NEG, scaled(e.args[0], c))
        case Op.WHERE:
            return make(Op.WHERE, e.args[0], scaled(e.args[1], c), scaled(e.args[2], c))
        case Op.MIN | Op.MAX:
            return make(e.op, scaled(e.args[0], c), scaled(e.args[1], c))
        case Op.MUL:
            free = next((k for k in (1, 0) if not _varies(e.args[k])), None)
            if free is not None:
                return mul(e.args[1 - free], _product(e.args[free], c))
        case _:
            pass
    return mul(e, c)


def _product(a: Expr, c: Expr) -> Expr:
    """Of two scalars; constants are multiplied here, whichever part of a product they are."""
    if a.op is Op.CONST and c.op is Op.CONST and a.value is not None and c.value is not None:
        return const(float(a.value) * float(c.value))
    if a.op is Op.MUL and a.args[1].op is Op.CONST:
        return mul(a.args[0], _product(a.args[1], c))
    return mul(a, c)


def _has_logit(e: Expr) -> bool:
    return any(x.op is Op.VAR and x.dtype is DType.F32 and x is not SCALE for x in walk(e))


def _varies(e: Expr) -> bool:
    """Depends on a position or on the logit."""
    return bool(variables(e) - {"b", "h", SCALE.name, "seqlen_q", "seqlen_k"})


def _hardware(e: Expr) -> Expr | None:
    """One rewriting step of a node over already rewritten operands."""
    match e.op:
        case Op.EXP:
            return exp_of(e.args[0])
        case Op.LOG:
            return mul(make(Op.LOG2, e.args[0]), LN2)
        case Op.TANH:
            # 1 - 2 / (1 + e^2x): exact limits at +-inf, absolute error of one rounding near 0
            return sub(ONE, mul(make(Op.RCP, add(ONE, exp_of(scaled(e.args[0], const(2.0))))), const(2.0)))
        case Op.SIGMOID:
            return make(Op.RCP, add(ONE, exp_of(make(Op.NEG, e.args[0]))))
        case Op.DIV:
            inverse = _reciprocal(e.args[1])
            return mul(e.args[0], const(inverse)) if inverse and abs(math.frexp(inverse)[0]) == 0.5 else None
        case Op.MUL if e.args[1].op is Op.CONST and e.args[0].op is Op.MUL and e.args[0].args[1].op is Op.CONST:
            if e.dtype is DType.F32:  # (x * c1) * c2, as nested rules leave it
                return mul(e.args[0].args[0], _product(e.args[0].args[1], e.args[1]))
        case Op.MUL if e.dtype is DType.F32 and e.args[1].op is Op.CONST and e.args[0].op is Op.MUL:
            # (scale * s) * c: one multiplication an element, by a scalar of the item
            return scaled(*e.args) if any(not _varies(a) for a in e.args[0].args) and _varies(e.args[0]) else None
        case Op.F32:
            return _convert(e.args[0])
        case _:
            pass
    return None


def _reciprocal(divisor: Expr) -> float | None:
    """1 / divisor where the divisor is a constant and float32 has both with all their bits."""
    if divisor.op is not Op.CONST or not divisor.value:
        return None
    inverse = 1.0 / float(divisor.value)
    return inverse if FLOAT_RANGE[0] <= abs(inverse) <= FLOAT_RANGE[1] else None


def _multiply(root: Expr) -> Expr:
    """Divisions by constants as multiplications by reciprocals, which round once more: not below a step, where 41 / 41
    has to be 1. Those by powers of two are exact anywhere, and left to `_hardware`."""
    exact = set(walk(*(a for e in walk(root) if e.op in _STEPS for a in e.args)))

    def one(e: Expr) -> Expr | None:
        # below a step nothing is changed here, so that a node is still the one that was noted
        inverse = _reciprocal(e.args[1]) if e.op is Op.DIV and e not in exact else None
        return mul(e.args[0], const(inverse)) if inverse else None

    return rewrite(root, one)


def _convert(x: Expr) -> Expr | None:
    """float(x) for an integer x: distributed over sums of terms that depend on different indices, so that each part is
    converted once a row or column. Only where both parts are exact in float32: an element of a tensor need not be."""
    if x.op is Op.ABS:
        return make(Op.ABS, _converted(x.args[0]))
    if x.op not in (Op.ADD, Op.SUB) or not all(is_within(a, EXACT) for a in x.args):
        return None
    apart = variables(x.args[0]) & {"i", "j"} != variables(x.args[1]) & {"i", "j"}
    return make(x.op, _converted(x.args[0]), _converted(x.args[1])) if apart else None


def is_within(x: Expr, limit: int) -> bool:
    """|x| <= limit for an integer, at positions and lengths as they are taken to be."""
    lo, hi = extremes(substitute(x, _SMALL))
    return max(-lo, hi) <= limit


def _converted(x: Expr) -> Expr:
    return _convert(x) or to_f32(x)


def simplify_expr(e: Expr) -> Expr:
    """`e` in hardware operations, folded."""
    return fold(rewrite(_multiply(fold(e)), _hardware))


def simplify(graph: Graph) -> Graph:
    def one(node: Node) -> Node:
        if isinstance(node, Map):
            expr = simplify_expr(node.expr)  # may need fewer nodes: a score of the positions alone reads no logits
            return dataclasses.replace(node, expr=expr, inputs=tuple(n for n in node.inputs if n in variables(expr)))
        if isinstance(node, Mask):
            return dataclasses.replace(node, visible=simplify_expr(node.visible))
        if isinstance(node, RowReduce) and node.extra is not None:
            return dataclasses.replace(node, extra=simplify_expr(node.extra))
        return node

    return Graph(graph.name, tuple(one(n) for n in graph.nodes)).live()
