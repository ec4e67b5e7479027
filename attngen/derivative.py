"""Derivatives of scalar expressions: reverse mode over the expression's own graph, so that a shared subexpression is
differentiated once.

Where a function has a kink the value is torch's: 0 at abs(0), half to each operand of min and max that are equal.
What is rounded or compared (floor, //, integers, conditions) has the derivative 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from attngen.expr import ONE, ZERO, DType, Expr, Op, add, const, make, mul, neg, sub, walk, where

HALF, LN2 = const(0.5), const(math.log(2.0))


def gradients(root: Expr, wrt: Iterable[Expr]) -> dict[Expr, Expr]:
    """d root / d leaf for those of `wrt` that `root` depends on: variables, or loads, of type f32."""
    wanted = set(wrt)
    order = list(walk(root))
    reaches: set[Expr] = set()  # nodes with a wanted leaf below them, along paths that have a derivative
    for e in order:
        if e in wanted or (e.dtype is DType.F32 and e.op is not Op.LOAD and any(a in reaches for a in e.args)):
            reaches.add(e)
    adjoint: dict[Expr, Expr] = {root: ONE}
    for e in reversed(order):
        if e not in adjoint or e not in reaches or e in wanted:
            continue
        for operand, part in _step(e, adjoint[e]):
            if operand in reaches:
                adjoint[operand] = add(adjoint[operand], part) if operand in adjoint else part
    return {leaf: adjoint[leaf] for leaf in order if leaf in wanted and leaf in adjoint}


def _times(a: Expr, b: Expr) -> Expr:
    return b if a is ONE else a if b is ONE else mul(a, b)


def _step(e: Expr, g: Expr) -> Iterator[tuple[Expr, Expr]]:
    """(operand, what it gains) for a node with the adjoint `g`; e itself is reused where the rule needs its value."""
    match e.op, e.args:
        case Op.NEG, (x,):
            yield x, neg(g)
        case Op.ADD, (x, y):
            yield from ((x, g), (y, g))
        case Op.SUB, (x, y):
            yield from ((x, g), (y, neg(g)))
        case Op.MUL, (x, y):
            yield from ((x, _times(g, y)), (y, _times(g, x)))
        case Op.DIV, (x, y):
            yield from ((x, make(Op.DIV, g, y)), (y, neg(make(Op.DIV, _times(g, e), y))))
        case Op.FMA, (x, y, z):
            yield from ((x, _times(g, y)), (y, _times(g, x)), (z, g))
        case (Op.MIN | Op.MAX), (x, y):
            wins = Op.LT if e.op is Op.MIN else Op.GT
            tie = where(make(Op.EQ, x, y), mul(g, HALF), ZERO)
            yield from ((x, where(make(wins, x, y), g, tie)), (y, where(make(wins, y, x), g, tie)))
        case Op.WHERE, (c, x, y):
            yield from ((x, where(c, g, ZERO)), (y, where(c, ZERO, g)))
        case Op.ABS, (x,):
            yield x, where(make(Op.GT, x, ZERO), g, where(make(Op.LT, x, ZERO), neg(g), ZERO))
        case Op.EXP, (x,):
            yield x, _times(g, e)
        case Op.EXP2, (x,):
            yield x, _times(g, mul(e, LN2))
        case Op.LOG, (x,):
            yield x, make(Op.DIV, g, x)
        case Op.LOG2, (x,):
            yield x, make(Op.DIV, g, mul(x, LN2))
        case Op.TANH | Op.TANH_APPROX, (x,):
            yield x, _times(g, sub(ONE, mul(e, e)))
        case Op.SIGMOID, (x,):
            yield x, _times(g, mul(e, sub(ONE, e)))
        case Op.SQRT, (x,):
            yield x, make(Op.DIV, _times(g, HALF), e)
        case Op.RCP, (x,):
            yield x, neg(_times(g, mul(e, e)))
