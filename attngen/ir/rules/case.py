"""What a rule is given: one kernel of a schedule, its target, and its walks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from attngen.errors import VerifyError
from attngen.ir.ops import Op, Ref, Unit
from attngen.ir.rules.uses import Use, Uses
from attngen.ir.rules.views import View, Walk, view
from attngen.ir.schedule import PERSISTENT, Block, Buffer, Guard, Kernel, Ring, Role, Schedule, Step
from attngen.ir.walk import Edge, Event, Facts, Scenario, Walker, facts_of, scenarios
from attngen.target import Target


class Case:
    def __init__(self, schedule: Schedule, kernel: Kernel, target: Target) -> None:
        self.schedule, self.kernel, self.target = schedule, kernel, target
        self.buffers: dict[str, Buffer] = {b.name: b for b in kernel.buffers}
        self.rings: dict[str, Ring] = {r.name: r for r in kernel.rings}

    @cached_property
    def facts(self) -> Mapping[int, Facts]:
        return facts_of(self.kernel)

    @cached_property
    def scenarios(self) -> Mapping[Scenario, tuple[Walk[Event], ...]]:
        """Every part of every role in every scenario."""
        persistent = self.kernel.work.source in PERSISTENT
        walkers = [Walker(role) for role in self.kernel.roles]
        return {
            scenario: tuple(
                Walk(walker.role, w, scenario, tuple(walker.walk(w, scenario)))
                for walker in walkers
                for w in range(walker.role.split)
            )
            for scenario in scenarios(self.kernel, 2 if persistent else 1)
        }

    @cached_property
    def pieces(self) -> tuple[tuple[Role, tuple[Event, ...]], ...]:
        """Everything that happens on some walk, once, in the order in which it first happens."""
        walks = (walk for part in self.scenarios.values() for walk in part)
        found = {(id(w.role), id(s.events)): (w.role, s.events) for w in walks for s in w.stretches}
        return tuple(found.values())

    @cached_property
    def registers(self) -> View[Use]:
        """Everything that happens, as far as register values are concerned."""
        return view(self.scenarios, Uses(self.kernel.roles, self.facts), timed=False)

    @cached_property
    def memory(self) -> View[Event]:
        """What touches shared memory or synchronises, and where items begin and end."""
        return view(self.scenarios, self._in_memory, timed=True)

    def _in_memory(self, role: Role, event: Event) -> tuple[Hashable, Event] | None:
        op = event.op
        if op is None:
            return (event.edge, event) if event.edge in (Edge.ITEM, Edge.EXIT) else None
        facts = self.facts[id(op)]
        if op.unit is Unit.ALU and not any(r.name in self.buffers for r in (*facts.reads, *facts.references)):
            return None
        return (id(op), *(event.index(r) for r in facts.references)), event

    def slot(self, event: Event, ref: Ref) -> tuple[int, int | None]:
        """(slot, block of rows) that a reference to a buffer means; block None: the whole tile."""
        index, several = event.index(ref), self.buffers[ref.name].slots > 1
        slot = index[0] if several and index else 0
        rest = index[1:] if several else index
        return slot or 0, rest[0] if rest else None


Finding = VerifyError
Check = Callable[[Case], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """`name` is stable: tests and tables of fault injection refer to it."""

    name: str
    check: Check


def groups(role: Role) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """The straight-line parts of a role by name."""
    for node in role.item.body:
        if isinstance(node, Block):
            yield node.name, node.ops
        else:
            yield "step", node.step
            yield "drain", node.drain
    yield "exit", role.exit


def ops(role: Role) -> Iterator[Op]:
    for _, steps in groups(role):
        for step in steps:
            yield from step.body if isinstance(step, Guard) else (step,)
