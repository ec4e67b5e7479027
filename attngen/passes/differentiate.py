"""differentiate: Graph -> Graph. The gradients of attention, in reverse mode over its textbook formula.

Before   the formula of the forward pass, with the user's score expression
After    a graph that reads q, k, v, the saved `out` and `lse`, and the gradients of both, and gives dq, dk, dv, and
         what is added to the gradients of captured tensors and of the sink
Why      one source of truth: whatever the forward computes, its gradient is derived, not written

The derivation. A maximum that only moves the reference of a softmax has no gradient: out and lse do not depend on it,
which is checked. What is not saved is recomputed: the definitions of lse and of the weights are solved for the sum and
for the exponentials, so that p = exp(z - lse), and the reference cancels. Factors that are the same along an axis leave
a sum over it. A sum over keys of p * (dout . v) is reassociated to the sum over the head dimension of
dout * (p . v) = dout * out, which is saved: so a row needs one number, delta, before its keys are visited. A masked
element is selected to 0 after everything it would be multiplied with: 0 * inf is not 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from attngen.derivative import gradients
from attngen.errors import PassError
from attngen.expr import (
    ONE,
    SCALE,
    ZERO,
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
)  # fmt: skip
from attngen.exprtext import show
from attngen.fold import fold
from attngen.ir.graph import Axis, Contract, Graph, Input, Map, Mask, Node, Output, RowReduce
from attngen.ir.ops import Assign, Heads, ReduceKind
from attngen.passes.stream import factors, product, reference
from attngen.polynomial import Polynomial

ROWS = (Axis.B, Axis.H, Axis.M)
SEEDS = {"out": "dout", "lse": "dlse"}
KEY_SIDE = {"k", "v"}  # inputs that the query heads of a group share


def v(name: str) -> Expr:
    return var(name, DType.F32)


@dataclass(frozen=True)
class Part:
    """One summand of a node's gradient: an expression over nodes, 0 where `visible` is false."""

    value: Expr
    visible: Expr | None = None


def differentiate(forward: Graph, wanted: Iterable[str], seeds: Iterable[str] = ("out", "lse")) -> Graph:
    """`wanted`: names of inputs and captured tensors whose gradients are outputs. `seeds`: the results of the forward
    pass that have a gradient."""
    reverse = _Reverse(forward, frozenset(wanted), tuple(s for s in seeds if _is_output(forward, s)))
    return reverse.run()


def _is_output(graph: Graph, name: str) -> bool:
    return any(isinstance(n, Output) and n.x == name for n in graph.nodes)


@dataclass
class _Reverse:
    forward: Graph
    wanted: frozenset[str]
    seeds: tuple[str, ...]
    nodes: dict[str, Node] = field(default_factory=dict)  # of the derivative, in order
    parts: dict[str, list[Part]] = field(default_factory=dict)  # gradients of the forward's nodes
    row_terms: dict[Expr, Expr] = field(default_factory=dict)  # sums of row values that got a name
    outputs: list[Output] = field(default_factory=list)

    def run(self) -> Graph:
        self.solved = self._solve_saved()
        self._recompute()
        for name in self.seeds:
            self.parts[name] = [Part(v(SEEDS[name]))]
        for node in reversed(self.forward.nodes):
            if self.parts.get(node.id):
                self._step(node)
        return Graph(f"{self.forward.name}_backward", (*self.nodes.values(), *self.outputs)).live()

    # ---- what is saved, and what is recomputed from it ---------------------------------------------------------

    def _solve_saved(self) -> dict[Expr, Expr]:
        """Values that are not kept, in terms of results that are: the sum from lse, the exponentials from weights."""
        found: dict[Expr, Expr] = {}
        weights = {n.a for n in self.forward.of(Contract) if isinstance(n, Contract) and n.over is Axis.N}
        for node in self.forward.of(Map):
            assert isinstance(node, Map)
            for name in node.inputs:
                source = self.forward[name]
                summed = isinstance(source, RowReduce) and source.kind is ReduceKind.SUM
                if (summed and _is_output(self.forward, node.id)) or (node.id in weights and not summed):
                    found[v(name)] = _solve(node.expr, v(name), v(node.id))
        return found

    def _recompute(self) -> None:
        """Inputs, saved results and their gradients; scores and weights from them."""
        shift_free(self.forward)
        saved = [n for n in self.forward.nodes if _is_output(self.forward, n.id)]
        for node in (*self.forward.of(Input), *saved):
            self._put(Input(id=node.id, axes=node.axes))
            if node.id in self.seeds:
                self._put(Input(id=SEEDS[node.id], axes=node.axes))
        for node in self.forward.nodes:
            if isinstance(node, Map) and node not in saved and any(v(i) in self.solved for i in node.inputs):
                self._put_map(node.id, node.axes, self._weight(node))
            elif isinstance(node, Contract | Map | Mask) and node not in saved and v(node.id) not in self.solved:
                self._put(node)

    def _weight(self, node: Map) -> Expr:
        """The weights from scores and saved results: exponentials with the reference cancelled."""
        known: dict[Expr, Polynomial] = {}
        for name in node.inputs:
            source = self.forward[name]
            if isinstance(source, Map):
                known[v(name)] = Polynomial.of(source.expr)
            elif v(name) in self.solved:
                known[v(name)] = Polynomial.of(self.solved[v(name)])
        return self._without_references(Polynomial.of(node.expr, known))

    def _without_references(self, value: Polynomial) -> Expr:
        e = value.expr()
        left = {n.id for n in self.forward.of(RowReduce)} & variables(e)
        if left:
            raise PassError(f"differentiate: {show(e)} depends on {', '.join(sorted(left))}, which is not saved")
        saved = {v(n.x): reference(v(n.x)) for n in self.forward.of(Output) if isinstance(n, Output)}

        def guarded(x: Expr) -> Expr | None:
            # a row that sees nothing has lse = -inf, and exp(-inf - -inf) is no number
            return make(Op.EXP, substitute(x.args[0], saved)) if x.op is Op.EXP else None

        return rewrite(e, guarded)

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _put(self, node: Node) -> str:
        self.nodes[node.id] = node
        return node.id

    def _put_map(self, name: str, axes: tuple[Axis, ...], e: Expr) -> str:
        return self._put(Map(id=name, axes=axes, expr=e, inputs=tuple(n for n in self.nodes if n in variables(e))))

    def _masked(self, name: str, axes: tuple[Axis, ...], part: Part) -> str:
        """A node with the value of a part: the select comes last."""
        value = fold(part.value)
        if part.visible is None:
            return value.name if value.op is Op.VAR and value.name in self.nodes else self._put_map(name, axes, value)
        inner = self._put_map(f"{name}_all", axes, value)
        return self._put(Mask(id=name, axes=axes, x=inner, visible=part.visible, hidden=ZERO))

    # ---- the reverse sweep -----------------------------------------------------------------------------------------

    def _step(self, node: Node) -> None:
        match node:
            case Contract():
                self._contract(node)
            case Map():
                self._map(node)
            case Mask():
                value = self._collected(self._sum(self.parts[node.id]))
                name = self._masked(f"d{node.id}", node.axes, Part(value))
                self._gain(node.x, Part(v(name), node.visible))
            case RowReduce() if node.kind is ReduceKind.SUM:
                self._row_sum(node)
            case _:
                pass  # inputs; maxima, which are constants (see shift_free)

    def _gain(self, name: str, part: Part) -> None:
        self.parts.setdefault(name, []).append(part)

    def _sum(self, parts: list[Part]) -> Polynomial:
        if any(p.visible is not None for p in parts):
            raise PassError("differentiate: a masked score is read by more than the score function")
        total = Polynomial({})
        for p in parts:
            total += self._polynomial(p.value)
        return total

    def _polynomial(self, e: Expr) -> Polynomial:
        """Exponentials that are not kept as weights times sums."""
        weights = {name: Polynomial.of(e) for name, e in self.solved.items() if self._along_keys(name)}
        return Polynomial.of(e, weights)

    def _along_keys(self, e: Expr) -> bool:
        node = self.nodes.get(e.name) or next((n for n in self.forward.nodes if n.id == e.name), None)
        return e.op is Op.VAR and node is not None and Axis.N in node.axes

    def _contract(self, node: Contract) -> None:
        (part,) = self.parts[node.id]
        inner, outer = _constants(part.value)
        gradient = self._masked(f"d{node.id}", node.axes, dataclasses.replace(part, value=inner))
        for own, other in ((node.a, node.b), (node.b, node.a)):
            source = self.forward[own]
            if isinstance(source, Input) and own not in self.wanted:
                continue
            over = next(a for a in node.axes if a not in source.axes)
            name = f"d{own}" if outer is ONE else f"d{own}_sum"
            self._put(Contract(id=name, axes=source.axes, a=gradient, b=other, over=over))
            if outer is not ONE:
                name = self._put_map(f"d{own}", source.axes, mul(outer, v(name)))
            if isinstance(source, Input):
                heads = Heads.KV if own in KEY_SIDE else Heads.Q
                self.outputs.append(Output(id=f"{name}!", axes=source.axes, x=name, heads=heads))
            else:
                self._gain(own, Part(v(name)))

    def _map(self, node: Map) -> None:
        captured = [x for x in loads(node.expr) if x.dtype is DType.F32 and x.name in self.wanted]
        for leaf, slope in gradients(node.expr, [*map(v, node.inputs), *captured]).items():
            slope = fold(substitute(slope, {node.expr: v(node.id)}))
            if leaf.op is Op.LOAD:
                for part in self.parts[node.id]:
                    self._captured(node, leaf, dataclasses.replace(part, value=mul(part.value, slope)))
                continue
            source = self.forward[leaf.name]
            if isinstance(source, RowReduce) and source.kind is ReduceKind.MAX:
                continue
            for part in self.parts[node.id]:
                value = mul(part.value, slope)
                if node.axes == source.axes:
                    self._gain(leaf.name, dataclasses.replace(part, value=value))
                else:
                    self._gain(leaf.name, Part(self._summed(self._polynomial(value))))

    def _row_sum(self, node: RowReduce) -> None:
        total = self._sum(self.parts[node.id])
        self._gain(node.x, Part(total.expr()))
        if node.extra is None:
            return
        captured = [x for x in loads(node.extra) if x.name in self.wanted]
        for leaf, slope in gradients(node.extra, captured).items():
            sums = {e: Polynomial.of(s) for e, s in self.solved.items() if not self._along_keys(e)}
            value = Polynomial.of(mul(total.expr(), slope), sums)
            self._captured(node, leaf, Part(self._collected(value)))

    def _captured(self, node: Node, leaf: Expr, part: Part) -> None:
        """A summand of the gradient of a captured tensor."""
        number = sum(o.into == leaf.name for o in self.outputs)
        name = self._masked(f"d_{leaf.name}" + (f"_{number}" if number else ""), node.axes, part)
        self.outputs.append(
            Output(id=f"{name}!{leaf.name}", axes=node.axes, x=name, mode=Assign.REDUCE_ADD, into=leaf.name,
                   index=leaf.args)
        )  # fmt: skip

    # ---- sums over keys ----------------------------------------------------------------------------------------

    def _summed(self, value: Polynomial) -> Expr:
        """The sum over keys: row factors leave it, and what remains is reassociated."""
        result: Expr | None = None
        for outer, inner in value.split(self._along_keys):
            term = mul(outer.expr(), v(self._reassociated(inner)))
            result = term if result is None else add(result, term)
        assert result is not None
        return result

    def _reassociated(self, inner: Polynomial) -> str:
        """sum_n a[n] * sum_d g[d] b[n,d] as sum_d g[d] * sum_n a[n] b[n,d], where the inner sum is saved."""
        for saved in self.forward.of(Contract):
            assert isinstance(saved, Contract)
            if not _is_output(self.forward, saved.id):
                continue
            for atom in inner.atoms:
                found = self.nodes[atom.name]
                same = inner.terms == (Polynomial.of(v(saved.a)) * Polynomial.of(atom)).terms
                if isinstance(found, Contract) and found.b == saved.b and same:
                    axes = self.nodes[found.a].axes
                    name = self._put_map(f"{found.a}_{saved.id}", axes, mul(v(found.a), v(saved.id)))
                    return self._put(RowReduce(id="dot", axes=ROWS, kind=ReduceKind.SUM, x=name, over=found.over))
        raise PassError(f"differentiate: a row needs the sum over its keys of {show(inner.expr())} beforehand")

    def _collected(self, value: Polynomial) -> Expr:
        """Common factors in front; several row terms as one row value."""
        shared = value.common()
        if len(value.terms) == 1:
            return self._without_references(value)
        rest = value * shared.inverse()
        rows, keys = Polynomial({}), Polynomial({})
        for outer, inner in rest.split(self._along_keys):
            if inner.terms == Polynomial.of(ONE).terms:
                rows += outer
            else:
                keys += outer * inner
        if len(rows.terms) > 1:
            total = rows.times(-1.0).expr()
            if total not in self.row_terms:
                self.row_terms[total] = v(self._put_map("delta", ROWS, total))
            rows = Polynomial.of(self.row_terms[total]).times(-1.0)
        sums = (keys + rows).expr()
        return mul(self._without_references(shared), sums) if shared.terms != Polynomial.of(ONE).terms else sums


def _constants(e: Expr) -> tuple[Expr, Expr]:
    """(the rest, the factors that every element of the call shares): these leave a contraction."""
    parts = factors(e)
    shared = [(x, n) for x, n in parts if x is SCALE or x.op is Op.CONST]
    return product([p for p in parts if p not in shared]), product(shared)


def _solve(e: Expr, unknown: Expr, value: Expr) -> Expr:
    """`unknown` from e = value, for sums, products and logarithms."""
    while e is not unknown:
        at = next(n for n, a in enumerate(e.args) if unknown.name in variables(a))
        other = e.args[1 - at] if len(e.args) == 2 else None
        match e.op:
            case Op.ADD if other is not None:
                value = sub(value, other)
            case Op.MUL if other is not None:
                value = make(Op.DIV, value, other)
            case Op.DIV if other is not None and at == 0:
                value = mul(value, other)
            case Op.LOG:
                value = make(Op.EXP, value)
            case Op.NEG:
                value = neg(value)
            case _:
                raise PassError(f"differentiate: {show(e)} cannot be solved for {unknown.name}")
        e = e.args[at]
    return value


# ---- the reference of a softmax ------------------------------------------------------------------------------------


def shift_free(graph: Graph) -> None:
    """Checks that no output depends on a maximum: x -> x * exp(a*c) and x -> x + b*c are followed for r -> r + c."""
    for node in graph.of(RowReduce):
        assert isinstance(node, RowReduce)
        if node.kind is not ReduceKind.MAX:
            continue
        moved: dict[str, tuple[float, float]] = {node.id: (0.0, 1.0)}  # (a, b)
        for later in graph.nodes:
            if later.id != node.id and any(o in moved for o in later.operands()):
                moved[later.id] = _moved(later, moved)
        for out in graph.of(Output):
            assert isinstance(out, Output)
            if moved.get(out.x, (0.0, 0.0)) != (0.0, 0.0):
                raise PassError(f"differentiate: {out.x} depends on the maximum {node.id}, which has no gradient")


def _moved(node: Node, moved: dict[str, tuple[float, float]]) -> tuple[float, float]:
    match node:
        case Map():
            return _expr_moved(node.expr, moved)
        case RowReduce() if node.kind is ReduceKind.SUM:
            own = moved.get(node.x, (0.0, 0.0))
            if own[1] == 0 and (node.extra is None or _expr_moved(node.extra, moved) == own):
                return own
        case Contract() if moved.get(node.a, (0.0, 0.0))[1] == 0 and moved.get(node.b, (0.0, 0.0))[1] == 0:
            return moved.get(node.a, (0.0, 0.0))[0] + moved.get(node.b, (0.0, 0.0))[0], 0.0
        case Output():
            return moved[node.x]
    raise PassError(f"differentiate: how {node.id} depends on a maximum is not known")


def _expr_moved(e: Expr, moved: dict[str, tuple[float, float]]) -> tuple[float, float]:
    if not variables(e) & moved.keys():
        return 0.0, 0.0
    if e.op is Op.VAR:
        return moved[e.name]
    parts = [_expr_moved(a, moved) for a in e.args]
    match e.op:
        case (Op.ADD | Op.SUB) if all(a == 0 for a, _ in parts):
            return 0.0, parts[0][1] + (parts[1][1] if e.op is Op.ADD else -parts[1][1])
        case Op.EXP if parts[0][0] == 0:
            return parts[0][1], 0.0
        case Op.LOG if parts[0][1] == 0:
            return 0.0, parts[0][0]
        case (Op.MUL | Op.DIV) if all(b == 0 for _, b in parts):
            return parts[0][0] + (parts[1][0] if e.op is Op.MUL else -parts[1][0]), 0.0
    raise PassError(f"differentiate: how {show(e)} depends on a maximum is not known")
