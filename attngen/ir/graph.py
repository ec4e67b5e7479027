"""Level 1: the mathematics. A dataflow graph over named axes, attention written as its textbook formula.

Nodes are typed; networkx holds the edges. A `Fold` is what `stream` makes of the row reductions: a monoid with state,
lift, update, merge and finalize (Rabe and Staats 2021, Dao et al. 2022 give the softmax instance; it is derived
here)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from attngen.expr import Expr
from attngen.exprtext import show
from attngen.ir.ops import Assign, Heads, ReduceKind

if TYPE_CHECKING:
    import networkx as nx


class Axis(Enum):
    B = "B"
    H = "H"
    M = "M"
    N = "N"
    D = "D"
    DV = "Dv"


@dataclass(frozen=True, kw_only=True)
class Node:
    """`id` is the name other nodes refer to; `axes` the axes of its value."""

    id: str
    axes: tuple[Axis, ...]

    def operands(self) -> tuple[str, ...]:
        return ()

    def text(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Input(Node):
    def text(self) -> str:
        return "input"


@dataclass(frozen=True, kw_only=True)
class Contract(Node):
    """Sum over `over` of a * b."""

    a: str
    b: str
    over: Axis

    def operands(self) -> tuple[str, ...]:
        return (self.a, self.b)

    def text(self) -> str:
        return f"contract {self.a} . {self.b} over {self.over.value}"


@dataclass(frozen=True, kw_only=True)
class Map(Node):
    """A scalar expression for each element; nodes are its variables (beside the indices and captured tensors)."""

    expr: Expr
    inputs: tuple[str, ...]

    def operands(self) -> tuple[str, ...]:
        return self.inputs

    def text(self) -> str:
        return f"map {show(self.expr)}"


@dataclass(frozen=True, kw_only=True)
class Mask(Node):
    """x where `visible`, else `hidden`; keys beyond seqlen_k are hidden too."""

    x: str
    visible: Expr
    hidden: Expr

    def operands(self) -> tuple[str, ...]:
        return (self.x,)

    def text(self) -> str:
        return f"mask {self.x} where {show(self.visible)} else {show(self.hidden)}"


@dataclass(frozen=True, kw_only=True)
class RowReduce(Node):
    """Reduction over one axis; `extra` is one more element of each row (the sink), over row nodes and scalars."""

    kind: ReduceKind
    x: str
    over: Axis
    extra: Expr | None = None
    extra_inputs: tuple[str, ...] = ()

    def operands(self) -> tuple[str, ...]:
        return (self.x, *self.extra_inputs)

    def text(self) -> str:
        tail = f" with {show(self.extra)}" if self.extra is not None else ""
        return f"reduce {self.kind.value} {self.x} over {self.over.value}{tail}"


@dataclass(frozen=True, kw_only=True)
class State:
    """One component of a fold's state.

    A tile contributes `reduce(element)` (for a contraction: element . operand), where `element` is an expression in
    the tile's score and in the *references* of other components. When a reference moves from its value before the
    tile to the one after, what was summed so far is multiplied by `correction` (None: not affected). `extra` is the
    contribution of one more element that is no key (the sink); None: none."""

    name: str
    kind: ReduceKind
    element: Expr
    operand: str = ""
    correction: Expr | None = None
    extra: Expr | None = None
    units: Expr | None = None  # a positive row constant taken out of a MAX: value = units * max(element)

    def text(self) -> str:
        what = f"{show(self.element)}" + (f" . {self.operand}" if self.operand else "")
        units = f", times {show(self.units)}" if self.units is not None else ""
        tail = f" | correction {show(self.correction)}" if self.correction is not None else ""
        tail += f" | extra {show(self.extra)}" if self.extra is not None else ""
        return f"{self.name} = {self.kind.value} {what}{units}{tail}"


@dataclass(frozen=True, kw_only=True)
class Fold(Node):
    """A streamed reduction over `over` of the elements `x`: see attngen.passes.stream for lift, update, merge.

    `finals` maps the ids that later nodes read to expressions over the final state."""

    x: str
    over: Axis
    states: tuple[State, ...]

    def operands(self) -> tuple[str, ...]:
        return (self.x, *(s.operand for s in self.states if s.operand))

    def text(self) -> str:
        return f"fold {self.x} over {self.over.value}" + "".join(f"\n      {s.text()}" for s in self.states)


@dataclass(frozen=True, kw_only=True)
class Output(Node):
    """The value of a node as a result. REDUCE_ADD: each element is added to element `index` of `into`. heads KV: summed
    over the query heads of a key head."""

    x: str
    mode: Assign = Assign.ASSIGN
    into: str = ""
    index: tuple[Expr, ...] = ()
    heads: Heads = Heads.Q

    def operands(self) -> tuple[str, ...]:
        return (self.x,)

    def text(self) -> str:
        if self.mode is Assign.REDUCE_ADD:
            return f"add {self.x} to {self.into}[{', '.join(map(show, self.index))}]"
        return f"output {self.x}" + (" summed over the group" if self.heads is Heads.KV else "")


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which operands come first."""

    name: str
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            for operand in node.operands():
                if operand not in seen:
                    raise ValueError(f"{node.id} reads {operand}, which is not defined before it")
            seen.add(node.id)

    @cached_property
    def edges(self) -> nx.DiGraph:
        """From operands to what reads them."""
        import networkx as nx  # a third of a second of a process that may need no more than the order of the nodes

        g = nx.DiGraph()
        g.add_nodes_from(n.id for n in self.nodes)
        g.add_edges_from((operand, n.id) for n in self.nodes for operand in n.operands())
        return g

    def __getitem__(self, node_id: str) -> Node:
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)

    def of(self, kind: type[Node]) -> Iterator[Node]:
        return (n for n in self.nodes if isinstance(n, kind))

    def live(self) -> Graph:
        """Without the nodes that no output needs."""
        wanted: set[str] = set()
        for node in reversed(self.nodes):
            if isinstance(node, Output) or node.id in wanted:
                wanted |= {node.id, *node.operands()}
        return Graph(self.name, tuple(n for n in self.nodes if n.id in wanted))

    def __str__(self) -> str:
        lines = [f"graph {self.name}"]
        for n in self.nodes:
            axes = f" [{','.join(a.value for a in n.axes)}]" if n.axes else ""
            lines.append(f"  {n.id}{axes} = {n.text()}")
        return "\n".join(lines) + "\n"
