"""What no order can beat: the cycles of a step that the busiest unit needs, and those of the longest recurrence.

The graph has a node for each op of a step and part of a role, and edges with a latency and a distance in steps: the
order of the stream, values, products and the waits for them, slots of rings, turns. A step of T cycles is possible only
if no cycle of the graph has more latency than T times its distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from attngen.ir import ops as o
from attngen.ir.ops import Op
from attngen.ir.schedule import Kernel, Role
from attngen.ir.walk import Event, Scenario, Share, Walker, facts_of
from attngen.model.actions import Action, Builder, Does, loops
from attngen.model.rates import Rates, rates
from attngen.target import Target

Node = tuple[str, str]  # lane, op


@dataclass(frozen=True)
class Bound:
    """`units`: cycles of a step that each unit is needed for. `recurrence`: those of the longest cycle of dependences,
    and its ops. `step`: the larger; `binding`: which it is."""

    units: tuple[tuple[str, float], ...]
    recurrence: float
    cycle: tuple[Node, ...]

    @property
    def step(self) -> float:
        return max(self.recurrence, *(cycles for _, cycles in self.units))

    @property
    def binding(self) -> str:
        unit, cycles = max(self.units, key=lambda u: u[1])
        return unit if cycles >= self.recurrence else "recurrence"


@dataclass(frozen=True)
class _Use:
    """An op that is executed: in which step, by which part, at which place of the part's sequence."""

    node: Node
    step: int
    place: int


def bound(kernel: Kernel, target: Target, *, table: Rates | None = None) -> Bound:
    """The bounds of a step in the tiles of the last class, all parts of all roles of one CTA together."""
    table = table or rates(target)
    graph = dependences(kernel, table)
    least, cycle = recurrence(graph)
    return Bound(units=_units(kernel, graph, table), recurrence=least, cycle=cycle)


def dependences(kernel: Kernel, table: Rates) -> nx.MultiDiGraph[Node]:
    """Nodes carry their `actions`, edges `latency`, `distance` and `kind`."""
    found = loops(kernel)
    unroll = max(loop.unroll for loop in found)
    slots = max((r.slots for r in kernel.rings), default=1)
    tiles = 2 * (unroll + slots) + max(loop.start for loop in found) + 2
    return _Graph(kernel, table, tiles, unroll).build()


def recurrence(graph: nx.MultiDiGraph[Node]) -> tuple[float, tuple[Node, ...]]:
    """The least step for which no cycle of the graph is positive, to a cycle, and the ops of one that is tight."""
    high = sum(d["latency"] for _, _, d in graph.edges(data=True)) + 1.0
    low, found = 0.0, _positive(graph, 0.0)
    while found and high - low > 0.5:
        middle = (low + high) / 2
        cycle = _positive(graph, middle)
        if cycle:
            low, found = middle, cycle
        else:
            high = middle
    return low, found


def _positive(graph: nx.MultiDiGraph[Node], step: float) -> tuple[Node, ...]:
    """The ops of a cycle with more latency than `step` times its distance; none: empty. Longest paths by relaxation
    (networkx.find_negative_cycle detects some cycles that it then does not find)."""
    edges = [(a, b, d["latency"] - step * d["distance"]) for a, b, d in graph.edges(data=True)]
    reach = dict.fromkeys(graph, 0.0)
    before: dict[Node, Node] = {}
    for _ in range(len(graph)):
        changed: Node | None = None
        for a, b, gain in edges:
            if reach[a] + gain > reach[b] + 1e-9:
                reach[b], before[b], changed = reach[a] + gain, a, b
        if changed is None:
            return ()
    assert changed is not None
    for _ in range(len(graph)):  # from a node behind the cycle into it
        changed = before[changed]
    cycle = [changed]
    while before[cycle[-1]] != changed:
        cycle.append(before[cycle[-1]])
    return tuple(reversed(cycle))


class _Graph:
    def __init__(self, kernel: Kernel, table: Rates, tiles: int, window: int) -> None:
        self.kernel, self.table, self.tiles = kernel, table, tiles
        self.facts = facts_of(kernel)
        self.window = range(tiles - 1 - window, tiles - 1)  # the steps whose incoming edges are kept
        self.graph: nx.MultiDiGraph[Node] = nx.MultiDiGraph()
        self.arrivals: dict[tuple[object, ...], list[tuple[_Use, float, float]]] = {}  # with count and latency
        self.waits: dict[tuple[object, ...], list[_Use]] = {}
        self.turns: dict[tuple[str, int, str], list[_Use]] = {}

    def build(self) -> nx.MultiDiGraph[Node]:
        for role in self.kernel.roles:
            for part in range(role.split):
                self.stream(role, part)
        for key, waits in self.waits.items():
            self.phases(key, waits)
        for ring in self.kernel.orders:
            self.order(ring.name, ring.members)
        return self.graph

    def edge(self, kind: str, src: _Use, dst: _Use, latency: float) -> None:
        if dst.step in self.window and src.step >= 0:
            distance = dst.step - src.step
            found = self.graph.get_edge_data(src.node, dst.node) or {}
            if all((d["kind"], d["distance"]) != (kind, distance) for d in found.values()):
                self.graph.add_edge(src.node, dst.node, kind=kind, latency=latency, distance=distance)

    # ---- inside a stream -----------------------------------------------------------------------------------------

    def events(self, role: Role, part: int) -> Iterator[tuple[int, Event, Op]]:
        """With the step of each."""
        walked = Walker(role).walk(part, Scenario((self.tiles,), Share.LAST, rare=False))
        return ((s.step, e, e.op) for s in walked for e in s.events if e.op is not None)

    def stream(self, role: Role, part: int) -> None:
        table, lane = self.table, f"{role.name}{part}" if role.split > 1 else role.name
        builder = Builder(self.kernel, role, table, 1)
        previous: tuple[_Use, float] | None = None
        product: tuple[_Use, float] | None = None
        written: dict[tuple[object, ...], tuple[_Use, float]] = {}
        groups: dict[str, tuple[_Use, float]] = {}
        for place, (step, event, op) in enumerate(self.events(role, part)):
            actions = builder.of(op, event)
            use = _Use((lane, op.id), step, place)
            took = occupancy(actions, table)
            if step in self.window:
                self.graph.add_node(use.node, actions=actions)
            if previous is not None:
                self.edge("order", previous[0], use, previous[1])
            previous = use, took
            if isinstance(op, o.Wgmma):
                cycles = sum(a.product.cycles for a in actions if a.product)
                if product is not None:
                    self.edge("tensor", product[0], use, product[1])
                product = groups[op.group] = use, cycles
            elif isinstance(op, o.Retire) and op.group in groups:
                src, cycles = groups[op.group]
                self.edge("product", src, use, cycles + table.product_latency)
            self.values(op, event, use, took, written)
            self.barriers(op, actions, use)
            if isinstance(op, o.Enter | o.Leave):
                self.turns.setdefault((op.ring, part, type(op).__name__), []).append(use)

    def values(
        self, op: Op, event: Event, use: _Use, took: float, written: dict[tuple[object, ...], tuple[_Use, float]]
    ) -> None:
        """From who made a register value to who reads it; copies are values of their own."""
        for ref in self.facts[id(op)].reads:
            key = (ref.name, *event.index(ref))
            made = written.get(key)
            if made is not None:
                self.edge("value", made[0], use, made[1])
        for ref in self.facts[id(op)].writes:
            key = (ref.name, *event.index(ref))
            written[key] = use, took

    def barriers(self, op: Op, actions: tuple[Action, ...], use: _Use) -> None:
        table = self.table
        for a in actions:
            if a.does is Does.WAIT:
                self.waits.setdefault(a.key, []).append(use)
            elif a.does is Does.ARRIVE:
                self.arrivals.setdefault(a.key, []).append((use, a.amount, table.issue + table.arrive))
            elif a.does is Does.LOAD:
                latency = table.copy_latency + a.moved / table.copy_bytes
                self.arrivals.setdefault(a.key, []).append((use, -a.amount, latency))

    # ---- between streams -----------------------------------------------------------------------------------------

    def phases(self, key: tuple[object, ...], waits: list[_Use]) -> None:
        """The n-th wait of a stream is for the n-th phase; the first wait for a free slot is for none."""
        name, _, side = str(key[0]).partition(".")
        ring = next(r for r in self.kernel.rings if r.name == name)
        need = float(ring.free_arrivals if side == "free" else -ring.full_bytes)
        phases: list[list[tuple[_Use, float]]] = [[]] if side == "free" else []
        current, total = [], 0.0
        for use, count, latency in sorted(self.arrivals.get(key, ()), key=lambda x: (x[0].step, x[0].place)):
            current.append((use, latency))
            total += count
            if abs(total) >= abs(need):
                phases.append(current)
                current, total = [], 0.0
        by_lane: dict[str, int] = {}
        for use in waits:
            phase = by_lane.get(use.node[0], 0)
            by_lane[use.node[0]] = phase + 1
            for src, latency in phases[phase] if phase < len(phases) else ():
                self.edge("slot", src, use, latency + self.table.wait)

    def order(self, ring: str, members: int) -> None:
        """The turn goes from each part to the next, and from the last to the first part's next window."""
        for part in range(members):
            following = (part + 1) % members
            left = self.turns.get((ring, part, "Leave"), [])
            entered = self.turns.get((ring, following, "Enter"), [])
            for k, use in enumerate(left):
                at = k + (0 if following else 1)
                if at < len(entered):
                    self.edge("turn", use, entered[at], self.table.handover)


def occupancy(actions: tuple[Action, ...], table: Rates) -> float:
    """Cycles for which a stream cannot go on to its next op, if it waits for nobody."""
    total = 0.0
    for a in actions:
        if a.burst is not None:
            total += a.burst.alone
        elif a.product is not None:
            total += max(table.issue, a.product.cycles - table.product_queue * a.product.step)
        elif a.does is Does.PASS:
            total += a.amount
        elif a.does is Does.WAIT:
            total += table.wait
        elif a.does is Does.SYNC:
            total += table.barrier
        else:
            total += table.issue
    return total


def _units(kernel: Kernel, graph: nx.MultiDiGraph[Node], table: Rates) -> tuple[tuple[str, float], ...]:
    fill = {r.name: min(1.0, r.warps / r.split / 4) for r in kernel.roles}
    units = dict.fromkeys(("tensor", "mufu", "alu", "fma", "shared", "ports", "copy"), 0.0)
    streams: dict[str, float] = {}
    for (lane, _), data in graph.nodes(data=True):
        actions: tuple[Action, ...] = data["actions"]
        share = next(f for name, f in fill.items() if lane.startswith(name))
        streams[lane] = streams.get(lane, 0.0) + occupancy(actions, table)
        for a in actions:
            if a.burst is not None:
                b = a.burst
                for unit, cycles in (
                    ("mufu", b.slow), ("alu", b.alu), ("fma", b.fma), ("shared", b.shared), ("tensor", b.tensor),
                    ("ports", b.ports),
                ):  # fmt: skip
                    units[unit] += share * cycles
            if a.product is not None:
                units["tensor"] += a.product.cycles
                units["ports"] += a.product.cycles * table.product_ports
            if a.does in (Does.LOAD, Does.COPY):
                units["copy"] += a.moved / table.copy_bandwidth
    return (*units.items(), *sorted(streams.items()))
