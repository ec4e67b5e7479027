"""simplify: Graph -> Graph. Rewrites every scalar expression into what the hardware has.

Before   exp, log, tanh, sigmoid, user arithmetic as written
After    exp2, log2, rcp, constants folded; integer index arithmetic split so that conversions to float can be hoisted
Why      ex2 and lg2 are single instructions; an int-to-float conversion per element competes with ex2 for its unit"""

from __future__ import annotations

import dataclasses
import math

from attngen.expr import (
    ONE,
    DType,
    Expr,
    Op,
    add,
    const,
    make,
    mul,
    rewrite,
    sub,
    to_f32,
    variables,
)  # fmt: skip
from attngen.fold import fold
from attngen.ir.graph import Graph, Map, Mask, Node, RowReduce

LOG2E, LN2 = const(math.log2(math.e)), const(math.log(2.0))


def exp_of(x: Expr) -> Expr:
    return make(Op.EXP2, mul(x, LOG2E))


def _hardware(e: Expr) -> Expr | None:
    """One rewriting step of a node over already rewritten operands."""
    match e.op:
        case Op.EXP:
            return exp_of(e.args[0])
        case Op.LOG:
            return mul(make(Op.LOG2, e.args[0]), LN2)
        case Op.TANH:
            # 1 - 2 / (1 + e^2x): exact limits at +-inf, absolute error of one rounding near 0
            return sub(ONE, mul(const(2.0), make(Op.RCP, add(ONE, exp_of(mul(const(2.0), e.args[0]))))))
        case Op.SIGMOID:
            return make(Op.RCP, add(ONE, exp_of(make(Op.NEG, e.args[0]))))
        case Op.DIV if e.args[1].op is Op.CONST and e.args[1].value:
            return mul(e.args[0], const(1.0 / float(e.args[1].value)))
        case Op.MUL if e.args[1].op is Op.CONST and e.args[0].op is Op.MUL and e.args[0].args[1].op is Op.CONST:
            if e.dtype is DType.F32:  # (x * c1) * c2, as nested rules leave it
                c1, c2 = e.args[0].args[1].value, e.args[1].value
                assert c1 is not None and c2 is not None
                return mul(e.args[0].args[0], const(float(c1) * float(c2)))
        case Op.F32:
            return _convert(e.args[0])
        case _:
            pass
    return None


def _convert(x: Expr) -> Expr | None:
    """float(x) for an integer x: distributed over sums of terms that depend on different indices (exact below 2^24,
    far beyond any sequence length that fits a GPU), so that each part is converted once a row or column."""
    if x.op is Op.ABS:
        return make(Op.ABS, to_f32(x.args[0])) if _convert(x.args[0]) is None else make(Op.ABS, _converted(x.args[0]))
    if x.op in (Op.ADD, Op.SUB) and variables(x.args[0]) & {"i", "j"} != variables(x.args[1]) & {"i", "j"}:
        return make(x.op, _converted(x.args[0]), _converted(x.args[1]))
    return None


def _converted(x: Expr) -> Expr:
    return _convert(x) or to_f32(x)


def simplify_expr(e: Expr) -> Expr:
    """`e` in hardware operations, folded."""
    return fold(rewrite(fold(e), _hardware))


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
