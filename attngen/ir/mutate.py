"""Broken schedules for fault injection: each op deleted, each pair of neighbours swapped, one at a time.

Every mutant is a schedule that prints and parses. Who notices it, verifier or emulator, is the measure of both."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from attngen.ir.schedule import Block, Guard, Kernel, Role, Schedule, Step, Tiles
from attngen.ir.text import describe


@dataclass(frozen=True)
class Swap:
    """Two neighbours in their right order, and the role and kernel that they belong to."""

    one: Step
    two: Step
    role: Role
    kernel: Kernel


@dataclass(frozen=True)
class Mutant:
    """`swap`: what was swapped; None for a deletion."""

    name: str
    schedule: Schedule
    swap: Swap | None = None

    def __str__(self) -> str:
        return self.name


Pair = tuple[Step, Step]
Edit = tuple[str, tuple[Step, ...], Pair | None]


def edits(steps: tuple[Step, ...]) -> Iterator[Edit]:
    """Every shorter or reordered version of a straight line of ops; the bodies of guards are lines of their own."""
    for k, step in enumerate(steps):
        yield f"delete {describe(step)}", (*steps[:k], *steps[k + 1 :]), None
        if isinstance(step, Guard):
            for name, body, pair in edits(step.body):
                ops = tuple(op for op in body if not isinstance(op, Guard))
                changed = (*steps[:k], dataclasses.replace(step, body=ops), *steps[k + 1 :])
                yield f"{name} in {step.id}", changed, pair
    for k, (one, two) in enumerate(itertools.pairwise(steps)):
        yield f"swap {describe(one)} <-> {describe(two)}", (*steps[:k], two, one, *steps[k + 2 :]), (one, two)


def _bodies(role: Role) -> Iterator[tuple[str, Role, Pair | None]]:
    def at(k: int, node: Block | Tiles) -> Role:
        body = (*role.item.body[:k], node, *role.item.body[k + 1 :])
        return dataclasses.replace(role, item=dataclasses.replace(role.item, body=body))

    for k, node in enumerate(role.item.body):
        if isinstance(node, Block):
            for name, ops, pair in edits(node.ops):
                yield name, at(k, dataclasses.replace(node, ops=ops)), pair
        else:
            for name, ops, pair in edits(node.step):
                yield name, at(k, dataclasses.replace(node, step=ops)), pair
            for name, ops, pair in edits(node.drain):
                yield name, at(k, dataclasses.replace(node, drain=ops)), pair
    for name, ops, pair in edits(role.exit):
        yield name, dataclasses.replace(role, exit=ops), pair


def _with_role(kernel: Kernel, k: int, role: Role) -> Kernel:
    return dataclasses.replace(kernel, roles=(*kernel.roles[:k], role, *kernel.roles[k + 1 :]))


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """In textual order: of each straight line first the deletions, then the swaps."""
    for at, kernel in enumerate(schedule.kernels):
        for k, role in enumerate(kernel.roles):
            for name, changed, pair in _bodies(role):
                kernels = (*schedule.kernels[:at], _with_role(kernel, k, changed), *schedule.kernels[at + 1 :])
                swap = Swap(*pair, role, kernel) if pair else None
                yield Mutant(name, dataclasses.replace(schedule, kernels=kernels), swap)
