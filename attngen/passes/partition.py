"""partition: Graph -> kernels. Which values of a derivative one kernel computes, and which axis its CTAs own.

Before   one graph with sums over queries (dk, dv) and sums over keys (dq, what is added to captured tensors)
After    a graph of rows (one number a row, before any key is visited), and graphs whose CTAs own a tile of one axis and
         stream the other: sums over the streamed axis stay in registers
Why      a sum over the axis that a CTA owns has to leave the CTA for each tile, by atomics, whose order differs from
         run to run (`shed`). Where the same bits are wanted, scores are computed once more for the other axis instead:
         7 contractions for 5"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.errors import PassError
from attngen.expr import variables
from attngen.ir.graph import Axis, Contract, Graph, Input, Map, Node, Output, RowReduce
from attngen.ir.ops import Assign
from attngen.passes.textbook import ROWS

OTHER = {Axis.M: Axis.N, Axis.N: Axis.M}


@dataclass(frozen=True)
class Owned:
    """A kernel whose CTAs own tiles of `own`."""

    own: Axis
    graph: Graph

    @property
    def stream(self) -> Axis:
        return OTHER[self.own]

    def sums(self) -> tuple[tuple[Output, Contract], ...]:
        """The contractions over the streamed axis with the outputs they give."""
        return tuple((out, node) for out, node in self._contractions() if node.over is self.stream)

    def shed(self) -> tuple[tuple[Output, Contract], ...]:
        """Those over the owned axis: a CTA has a part of each of their elements."""
        return tuple((out, node) for out, node in self._contractions() if node.over is self.own)

    def _contractions(self) -> Iterator[tuple[Output, Contract]]:
        for out in self.graph.of(Output):
            assert isinstance(out, Output)
            node = contraction(self.graph, out)
            if node is not None:
                yield out, node


@dataclass(frozen=True)
class Parts:
    rows: Graph | None
    owned: tuple[Owned, ...]

    def __str__(self) -> str:
        texts = [] if self.rows is None else [f"rows: {self.rows}"]
        texts += [f"owns {o.own.value}, streams {o.stream.value}: {o.graph}" for o in self.owned]
        return "\n".join(texts)


def contraction(graph: Graph, out: Output) -> Contract | None:
    """The contraction behind an output, below a factor."""
    node = graph[out.x]
    if isinstance(node, Map) and len(node.inputs) == 1:
        node = graph[node.inputs[0]]
    return node if isinstance(node, Contract) and node.over in OTHER else None


def can_shed(graph: Graph) -> bool:
    """Whether sums over keys may be added up by the kernel that owns keys: it computes all that they are made of, and
    their weights are in 16 bits as those of a sum that it keeps. What is summed over the keys of a row would have to
    leave it, too; what is added at an element's own index may."""
    outputs = [out for out in graph.of(Output) if isinstance(out, Output)]
    weights: dict[Axis, set[str]] = {}
    for out in outputs:
        node = contraction(graph, out)
        if node is not None:
            weights.setdefault(node.over, set()).update(_weights(graph, out))
    others = (out for out in outputs if out.mode is Assign.REDUCE_ADD)
    leave = all(set(out.axes) == set(ROWS) or "j" in variables(*out.index) for out in others)
    return set(weights) == {Axis.M, Axis.N} and weights[Axis.N] <= weights[Axis.M] and leave


def partition(graph: Graph, apart: bool = False, shed: bool = False) -> Parts:
    """`apart`: a kernel for each sum over queries, where two accumulators exceed the registers. `shed`: what is
    summed over keys is added up by the kernel that has its weights, and all kernels own keys."""
    groups: dict[Axis, list[list[Output]]] = {Axis.N: [], Axis.M: []}
    row_outputs, added = list[Output](), list[Output]()
    for out in graph.of(Output):
        assert isinstance(out, Output)
        if set(out.axes) == set(ROWS):
            row_outputs.append(out)
            continue
        node = contraction(graph, out)
        own = Axis.N if shed else Axis.M if node is None else OTHER[node.over]
        if shed and (node is None or node.over is Axis.N):
            added.append(out)
        elif groups[own] and not (apart and own is Axis.N):
            groups[own][0].append(out)
        else:
            groups[own].append([out])
    # a part of a sum comes from the kernel that has its weights; what is added to captured tensors is made of them, too
    shares = {n for out in added if contraction(graph, out) for n in _weights(graph, out)}
    for out in added:
        next(outs for outs in groups[Axis.N] if shares <= _weights(graph, *outs)).append(out)
    owned, saved = [], dict[str, Node]()
    for own, lists in groups.items():
        for outputs in lists:
            part, rows = _with_rows_given(graph, outputs)
            owned.append(Owned(own, part))
            saved.update(rows)
    row_outputs += [Output(id=f"{name}!", axes=node.axes, x=name) for name, node in saved.items()]
    return Parts(Graph("rows", (*_plain(graph), *row_outputs)).live() if row_outputs else None, tuple(owned))


def _weights(graph: Graph, *outputs: Output) -> set[str]:
    """Values of pairs that are summed up to outputs."""
    operands = (n for out in outputs for node in [contraction(graph, out)] if node for n in node.operands())
    return {n for n in operands if {Axis.M, Axis.N} <= set(graph[n].axes)}


def _plain(graph: Graph) -> tuple[Node, ...]:
    return tuple(n for n in graph.nodes if not isinstance(n, Output))


def _with_rows_given(graph: Graph, outputs: list[Output]) -> tuple[Graph, dict[str, Node]]:
    """The graph of some outputs, with the row values that they read as inputs; these row values."""
    needed = Graph(graph.name, (*_plain(graph), *outputs)).live()
    rows: dict[str, Node] = {}
    for node in needed.nodes:
        for name in node.operands():
            source = graph[name]
            if _computed_row(source) and not _computed_row(node):
                rows[name] = source
    nodes = [
        Input(id=n.id, axes=n.axes) if n.id in rows else n
        for n in needed.nodes
    ]  # fmt: skip
    return Graph(graph.name, tuple(nodes)).live(), rows


def _computed_row(node: Node) -> bool:
    """A row value, or what only a row value is made of."""
    if isinstance(node, Output | Input):
        return False
    if isinstance(node, RowReduce):
        if node.over is Axis.N:
            raise PassError(f"partition: {node.id} is a reduction over keys, which a derivative has none of")
        return True
    return isinstance(node, Map) and (set(node.axes) == set(ROWS) or set(node.axes) == {*ROWS, Axis.DV})


