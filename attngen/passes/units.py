"""units: Graph -> Graph. Chooses the unit in which a fold keeps its scores and its reference.

Before   elements exp2((z - r) * log2e): a subtraction and a multiplication an element
After    scale * s alone: the reference in log2 units of the raw scores, exp2(s*c - r) with c = scale*log2e, one FMA.
         Any other score: multiplied by log2e, which its own constants and scalars take up, exp2(z - r)
Needs    a scale that is positive and of a usual size. Scores that cannot come near the end of float32's range: log2e
         times a bias of finfo.min, from a constant or a table read by position, would be -inf. Those keep natural units
Why      what an element costs beside its exponential competes with the tensor cores for issue slots"""

from __future__ import annotations

import dataclasses
import math

from attngen.expr import (
    SCALE,
    DType,
    Expr,
    Op,
    add,
    loads,
    make,
    mul,
    neg,
    rewrite,
    sub,
    substitute,
    var,
    variables,
    walk,
)
from attngen.fold import fold as fold_expr
from attngen.ir.graph import Fold, Graph, Map, Mask, Node, State
from attngen.ir.ops import ReduceKind
from attngen.passes.simplify import LN2, LOG2E, scaled, simplify_expr
from attngen.passes.stream import before

USUAL = 1e30  # constants up to it leave room for log2e and for a sum


def units(graph: Graph, scale_positive: bool) -> Graph:
    fold = next(iter(graph.of(Fold)), None)
    mask = graph[fold.x] if isinstance(fold, Fold) else None
    score = graph[mask.x] if isinstance(mask, Mask) else None
    if not (scale_positive and isinstance(fold, Fold) and isinstance(mask, Mask) and isinstance(score, Map)):
        return graph
    maxima = [s.name for s in fold.states if s.kind is ReduceKind.MAX]
    raw = next((i for i in score.inputs if score.expr is mul(SCALE, var(i, DType.F32))), None)
    if len(maxima) != 1 or (raw is None and not tame(score.expr)):
        return graph
    z, r = var(mask.id, DType.F32), var(maxima[0], DType.F32)
    c = mul(SCALE, LOG2E)

    def element(e: Expr) -> Expr | None:
        """(x - r) * log2e with x = scale*z, r = r'/log2e: an FMA; a subtraction of what has r's unit."""
        if e.op is not Op.MUL or e.args[1] is not LOG2E or e.args[0].op is not Op.SUB:
            return None
        x, y = e.args[0].args
        if y is not r:
            return None
        if x is z:
            return sub(z, r) if raw is None else make(Op.FMA, z, c, neg(r))
        # the extra element rounds as the reference does: if it is the maximum, its power is 0
        return make(Op.SUB, x if x is before(r.name) else mul(x, LOG2E), r)

    def one(s: State) -> State:
        if s.kind is ReduceKind.MAX:
            extra = None if s.extra is None else mul(s.extra, LOG2E)
            return dataclasses.replace(s, units=None if raw is None else c, extra=extra)
        rewritten = {
            k: None if v is None else rewrite(v, element)
            for k, v in (("element", s.element), ("correction", s.correction), ("extra", s.extra))
        }
        return dataclasses.replace(s, **rewritten)  # type: ignore[arg-type]

    states = tuple(one(s) for s in fold.states)
    after = {n.id for n in graph.nodes if r.name in n.operands()}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node is fold:
            nodes.append(dataclasses.replace(fold, states=states))
        elif node is mask and raw is not None:
            nodes.append(dataclasses.replace(mask, x=raw))
        elif node is score and raw is None:
            nodes.append(dataclasses.replace(score, expr=simplify_expr(scaled(score.expr, LOG2E))))
        elif isinstance(node, Map) and node.id in after:
            nodes.append(dataclasses.replace(node, expr=fold_expr(_factored(substitute(node.expr, {r: mul(r, LN2)})))))
        else:
            nodes.append(node)
    return Graph(graph.name, tuple(nodes)).live()


def tame(e: Expr) -> bool:
    """No value of the expression is beyond what logits, usual constants and scalars of a head make: nothing is read by
    position, nothing read is an addend, and all constants together are of a usual size, as factors or divisors."""
    constants = [x.value for x in walk(e) if x.op is Op.CONST and x.dtype is DType.F32]
    sizes = [max(abs(c), 1 / abs(c)) for c in constants if isinstance(c, float) and c and math.isfinite(c)]
    by_position = any(variables(*x.args) & {"i", "j"} for x in loads(e))
    return not by_position and not _adds_what_is_read(e) and math.prod(sizes) <= USUAL


def _adds_what_is_read(e: Expr) -> bool:
    if e.op is Op.LOAD:
        return True
    return e.op is not Op.MUL and any(_adds_what_is_read(a) for a in e.args)


def _factored(e: Expr) -> Expr:
    """a*k + b*k -> (a + b)*k."""
    if e.op is Op.ADD and all(a.op is Op.MUL for a in e.args) and e.args[0].args[1] is e.args[1].args[1]:
        return mul(add(e.args[0].args[0], e.args[1].args[0]), e.args[0].args[1])
    return e
