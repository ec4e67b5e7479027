"""signs: Graph -> Graph. Drops absolute values whose sign the mask decides.

Before   |i + shift - j| in a score under a causal mask
After    i + shift - j
Why      a hidden score is replaced anyway, so a score has to be right only where the mask is true. Without the absolute
         value ALiBi's distance is a sum of a part of the row and one of the column, which costs an element next to
         nothing"""

from __future__ import annotations

import dataclasses

from attngen.expr import DType, Expr, I, J, Op, make, rewrite, substitute, var
from attngen.interval import Span, analyse
from attngen.ir.graph import Graph, Map, Mask, Node
from attngen.sums import linear, sum_extremes

_ROWS: dict[Expr, Expr] = {var("i_lo", DType.I32): I, var("i_hi", DType.I32): I}


def signs(graph: Graph) -> Graph:
    mask = next((n for n in graph.of(Mask)), None)
    if not isinstance(mask, Mask):
        return graph
    seen = analyse(mask.visible).any
    span = Span(*(None if e is None else substitute(e, _ROWS) for e in (seen.lo, seen.hi)))

    def one(e: Expr) -> Expr | None:
        if e.op is not Op.ABS or e.dtype is not DType.I32:
            return None
        if _positive(e.args[0], span):
            return e.args[0]
        return make(Op.NEG, e.args[0]) if _positive(make(Op.NEG, e.args[0]), span) else None

    def node(n: Node) -> Node:
        return dataclasses.replace(n, expr=rewrite(n.expr, one)) if n.id == mask.x and isinstance(n, Map) else n

    return Graph(graph.name, tuple(node(n) for n in graph.nodes))


def _positive(e: Expr, span: Span) -> bool:
    """e >= 0 for each key of the span: at the end where it is least."""
    total = linear(e)
    slope = dict(total.terms).get(J, 0)
    end = span.hi if slope < 0 else span.lo
    if slope == 0 or end is None:
        return False
    rest = type(total).of((t, c) for t, c in total.terms if t is not J).plus(total.constant)
    # a minimum of ends is below each of them, a maximum above
    ends = _alternatives(end, Op.MIN if slope < 0 else Op.MAX)
    return any(
        sum_extremes(rest + linear(x).plus(-1 if slope < 0 else 0).times(slope))[0] >= 0 for x in ends
    )  # fmt: skip


def _alternatives(e: Expr, op: Op) -> list[Expr]:
    return [x for a in e.args for x in _alternatives(a, op)] if e.op is op else [e]
