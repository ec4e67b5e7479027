"""stream: Graph -> Graph. Turns the reductions over the streamed axis into one fold: online softmax, derived.

Before   row reductions and contractions over N that depend on one another (max, then sum of exp, then p . v)
After    one Fold whose state is updated tile by tile, and maps of the final state
Why      the scores of a row never have to exist at once

The derivation. Take the reductions over N in order. Write each one's element as an expression of the element z of the
row and of earlier results. (1) Factors without z leave a sum or contraction by linearity: 1/l leaves p . v. (2) If the
rest depends on an earlier maximum r, it must be a product in which r occurs as exp2(a*r + b): then moving the
reference from r_old to r multiplies everything summed so far by exp2(a*(r - r_old)), the *correction*. Anything else
cannot be streamed, which is an error here. The merge of two states, with r = max(r1, r2), follows: each sum is
x1 * correction(r1) + x2 * correction(r2). An empty state is (r = -inf, 0, 0); a reference of -inf is used as 0, so
exp2 of a difference never sees inf - inf: elements and corrections are then 0."""

from __future__ import annotations

import dataclasses

from attngen.errors import PassError
from attngen.expr import (
    NEG_INF,
    ONE,
    ZERO,
    DType,
    Expr,
    Op,
    add,
    const,
    make,
    maximum,
    mul,
    sub,
    substitute,
    var,
    variables,
    walk,
    where,
)  # fmt: skip
from attngen.exprtext import show
from attngen.fold import fold as fold_expr
from attngen.ir.graph import Axis, Contract, Fold, Graph, Input, Map, Node, RowReduce, State
from attngen.ir.ops import ReduceKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component(Node):
    """One component of a fold's final state."""

    fold: str

    def operands(self) -> tuple[str, ...]:
        return (self.fold,)

    def text(self) -> str:
        return f"state of {self.fold}"


def _var(name: str) -> Expr:
    return var(name, DType.F32)


def before(name: str) -> Expr:
    """The reference before a tile, in a correction."""
    return _var(f"{name}_old")


def reference(r: Expr) -> Expr:
    """What is subtracted: r, or 0 where nothing was visible yet."""
    return where(make(Op.EQ, r, NEG_INF), ZERO, r)


def factors(e: Expr, power: int = 1) -> list[tuple[Expr, int]]:
    """e as a product of powers +1 and -1."""
    if e.op is Op.MUL:
        return factors(e.args[0], power) + factors(e.args[1], power)
    if e.op is Op.DIV:
        return factors(e.args[0], power) + factors(e.args[1], -power)
    return [(e, power)]


def product(parts: list[tuple[Expr, int]]) -> Expr:
    result = ONE
    for e, power in parts:
        if result is ONE and power > 0:
            result = e
        else:
            result = mul(result, e) if power > 0 else make(Op.DIV, result, e)
    return result


def slope(e: Expr, name: str) -> float | None:
    """a, if e = a * name + (terms without name); None otherwise."""
    if name not in variables(e):
        return 0.0
    if e.op is Op.VAR:
        return 1.0
    parts = [slope(a, name) for a in e.args]
    if e.op is Op.NEG and parts[0] is not None:
        return -parts[0]
    if e.op in (Op.ADD, Op.SUB) and parts[0] is not None and parts[1] is not None:
        return parts[0] + (parts[1] if e.op is Op.ADD else -parts[1])
    if e.op is Op.MUL:
        for x, other in ((parts[0], e.args[1]), (parts[1], e.args[0])):
            if x and other.op is Op.CONST and other.value is not None:
                return x * float(other.value)
    return None


def correction(element: Expr, name: str) -> Expr | None:
    """element(name) / element(name_old), which has to be free of everything but the two references."""
    exponent = 0.0
    for part, power in factors(element):
        if name not in variables(part):
            continue
        a = slope(part.args[0], name) if part.op is Op.EXP2 and power == 1 else None
        if a is None:
            raise PassError(
                f"stream: {show(element)} depends on the running maximum {name} through {show(part)}, which is not "
                f"exp2 of something linear in {name}; moving the reference cannot be corrected by a factor"
            )
        exponent += a
    if exponent == 0.0:
        return None
    return make(Op.EXP2, mul(sub(before(name), _var(name)), const(-exponent)))


def stream(graph: Graph, axis: Axis = Axis.N) -> Graph:
    order = [n for n in graph.nodes if isinstance(n, RowReduce | Contract) and n.over is axis]
    reduced = {n.id for n in order}
    along = {n.id for n in graph.nodes if axis in n.axes}  # values with an element for each key

    def dependent(node: Node) -> bool:
        return any(o in reduced or dependent(graph[o]) for o in node.operands())

    def element(node_id: str) -> Expr:
        """The value of a node along the axis, down to values that depend on no reduction."""
        node = graph[node_id]
        if isinstance(node, Map) and dependent(node):
            return substitute(node.expr, {_var(i): element(i) for i in node.inputs if i in along})
        return _var(node_id)

    states: list[State] = []
    finals: dict[str, Expr] = {}
    kept: list[str] = []  # ids that come straight out of the fold
    for node in order:
        source = element(node.a if isinstance(node, Contract) else node.x)
        inner = [(e, p) for e, p in factors(source) if variables(e) & along]
        outer = [(e, p) for e, p in factors(source) if not variables(e) & along]
        kind = ReduceKind.SUM if isinstance(node, Contract) else node.kind
        if kind is ReduceKind.MAX and outer:
            inner, outer = factors(source), []  # a maximum is not linear
        body = product(inner)
        references = [s.name for s in states if s.name in variables(body)]
        if any(s.kind is not ReduceKind.MAX for s in states if s.name in references):
            raise PassError(f"stream: {node.id} depends on {references} other than as a factor")
        fix = correction(body, references[0]) if references else None
        name = f"{node.id}_sum" if outer else node.id
        states.append(
            State(
                name=name, kind=kind, element=body, operand=node.b if isinstance(node, Contract) else "",
                correction=fix,
                extra=getattr(node, "extra", None),
            )
        )  # fmt: skip
        if outer:
            finals[node.id] = mul(_var(name), _guarded(outer))
        else:
            kept.append(node.id)
    elements = {v for s in states for v in variables(s.element) if v in along}
    if len(elements) != 1:
        raise PassError(f"stream: the reductions read {sorted(elements)} along the axis; one is expected")
    fold = Fold(id="fold", axes=graph[order[-1].id].axes, x=elements.pop(), over=axis, states=tuple(states))
    return Graph(graph.name, tuple(_rebuilt(graph, fold, finals, reduced, dependent, along))).live()


def _guarded(outer: list[tuple[Expr, int]]) -> Expr:
    """The product of row factors; the reciprocal of a sum that is 0 (nothing was visible) is 0."""
    result: Expr | None = None
    for e, power in outer:
        part = e if power > 0 else where(make(Op.EQ, e, ZERO), ZERO, make(Op.RCP, e))
        result = part if result is None else mul(result, part)
    assert result is not None
    return result


def _rebuilt(graph: Graph, fold: Fold, finals: dict[str, Expr], reduced: set[str], dependent, along: set[str]):  # type: ignore[no-untyped-def]
    """The nodes of the new graph: what precedes the fold, the fold, its components, the maps that follow."""
    placed = False
    for node in graph.nodes:
        if node.id in reduced:
            if not placed:
                placed = True
                # operands of later contractions (v) may be defined after the first reduction; inputs come first
                yield fold
                for s in fold.states:
                    axes = fold.axes if s.operand else fold.axes[:3]
                    yield Component(id=s.name, axes=axes, fold=fold.id)
            if node.id in finals:
                expr = fold_expr(finals[node.id])
                inputs = tuple(s.name for s in fold.states if s.name in variables(expr))
                yield Map(id=node.id, axes=node.axes, expr=expr, inputs=inputs)
        elif not (dependent(node) and node.id in along and not isinstance(node, Input)):
            yield node


# ---- the monoid, as statements -----------------------------------------------------------------------------------

Assignments = tuple[tuple[str, Expr], ...]


def neutral(state: State) -> Expr:
    return NEG_INF if state.kind is ReduceKind.MAX else ZERO


def _corrected(state: State, suffix: str, new: dict[Expr, Expr]) -> Expr:
    own = _var(state.name + suffix)
    if state.correction is None:
        return own
    old = {e: _var(e.name.removesuffix("_old") + suffix) for e in walk(state.correction) if e.name.endswith("_old")}
    return mul(own, substitute(state.correction, {**old, **new}))


def merge(fold: Fold, first: str = "_1", second: str = "_2") -> Assignments:
    """state = merge(state_1, state_2): assignments in order, over the components' names with these suffixes."""
    result: list[tuple[str, Expr]] = []
    new: dict[Expr, Expr] = {}
    for s in fold.states:
        if s.kind is ReduceKind.MAX:
            result.append((s.name, maximum(_var(s.name + first), _var(s.name + second))))
            new[_var(s.name)] = _var(s.name + "_ref")
            result.append((s.name + "_ref", reference(_var(s.name))))
        else:
            result.append((s.name, add(_corrected(s, first, new), _corrected(s, second, new))))
    return tuple(result)


def lift_extra(fold: Fold) -> Assignments:
    """The state of the one extra element (the sink): a maximum of itself, its weight, and nothing for contractions."""
    result: list[tuple[str, Expr]] = []
    new: dict[Expr, Expr] = {}
    for s in fold.states:
        if s.extra is None:
            result.append((s.name, neutral(s)))
            continue
        value = substitute(s.extra, new)
        result.append((s.name, value))
        if s.kind is ReduceKind.MAX:
            new[_var(s.name)] = reference(value)
    return tuple(result)


