"""What a rule is given: one kernel of a schedule, its target, and its walks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from attngen.errors import VerifyError
from attngen.ir.ops import Op, Ref
from attngen.ir.schedule import Block, Buffer, Guard, Kernel, Ring, Role, Schedule, Step, WorkSource
from attngen.ir.walk import Event, Scenario, scenarios, walk_role
from attngen.target import Target


@dataclass(frozen=True)
class Walk:
    """One role part in one scenario."""

    role: Role
    warpgroup: int
    scenario: Scenario
    events: tuple[Event, ...]


class Case:
    def __init__(self, schedule: Schedule, kernel: Kernel, target: Target) -> None:
        self.schedule, self.kernel, self.target = schedule, kernel, target
        self.buffers: dict[str, Buffer] = {b.name: b for b in kernel.buffers}
        self.rings: dict[str, Ring] = {r.name: r for r in kernel.rings}

    @cached_property
    def scenarios(self) -> tuple[Scenario, ...]:
        persistent = self.kernel.work.source in (WorkSource.TABLE, WorkSource.DEVICE_TABLE)
        return scenarios(self.kernel, 2 if persistent else 1)

    @cached_property
    def walks(self) -> tuple[Walk, ...]:
        """Every part of every role in every scenario."""
        return tuple(
            Walk(role, w, scenario, tuple(walk_role(role, w, scenario)))
            for scenario in self.scenarios
            for role in self.kernel.roles
            for w in range(role.split)
        )

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
