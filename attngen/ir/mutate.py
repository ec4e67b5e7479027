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
class Mutant:
    name: str
    schedule: Schedule

    def __str__(self) -> str:
        return self.name


Edit = tuple[str, tuple[Step, ...]]


def edits(steps: tuple[Step, ...]) -> Iterator[Edit]:
    """Every shorter or reordered version of a straight line of ops; the bodies of guards are lines of their own."""
    for k, step in enumerate(steps):
        yield f"delete {describe(step)}", (*steps[:k], *steps[k + 1 :])
        if isinstance(step, Guard):
            for name, body in edits(step.body):
                ops = tuple(op for op in body if not isinstance(op, Guard))
                yield f"{name} in {step.id}", (*steps[:k], dataclasses.replace(step, body=ops), *steps[k + 1 :])
    for k, (one, two) in enumerate(itertools.pairwise(steps)):
        yield f"swap {describe(one)} <-> {describe(two)}", (*steps[:k], two, one, *steps[k + 2 :])


def _bodies(role: Role) -> Iterator[tuple[str, Role]]:
    def at(k: int, node: Block | Tiles) -> Role:
        body = (*role.item.body[:k], node, *role.item.body[k + 1 :])
        return dataclasses.replace(role, item=dataclasses.replace(role.item, body=body))

    for k, node in enumerate(role.item.body):
        if isinstance(node, Block):
            yield from ((name, at(k, dataclasses.replace(node, ops=ops))) for name, ops in edits(node.ops))
        else:
            yield from ((name, at(k, dataclasses.replace(node, step=ops))) for name, ops in edits(node.step))
            yield from ((name, at(k, dataclasses.replace(node, drain=ops))) for name, ops in edits(node.drain))
    yield from ((name, dataclasses.replace(role, exit=ops)) for name, ops in edits(role.exit))


def _with_role(kernel: Kernel, k: int, role: Role) -> Kernel:
    return dataclasses.replace(kernel, roles=(*kernel.roles[:k], role, *kernel.roles[k + 1 :]))


def mutants(schedule: Schedule) -> Iterator[Mutant]:
    """In textual order: of each straight line first the deletions, then the swaps."""
    for at, kernel in enumerate(schedule.kernels):
        for k, role in enumerate(kernel.roles):
            for name, changed in _bodies(role):
                kernels = (*schedule.kernels[:at], _with_role(kernel, k, changed), *schedule.kernels[at + 1 :])
                yield Mutant(name, dataclasses.replace(schedule, kernels=kernels))
