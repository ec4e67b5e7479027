"""Products that are issued together: behind the waits for what they read, between `open` and `commit`, and in turns on
the tensor cores where warpgroups take them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from attngen.ir.ops import Commit, Enter, Leave, Open, Ref, Wgmma
from attngen.ir.schedule import OrderRing, Step
from attngen.passes.hopper.flight import product
from attngen.passes.hopper.stage import GROUP_THREADS

TURNS = "tc"

Waits = Callable[[Wgmma], Iterator[Step]]


def turn_ring(members: int) -> OrderRing:
    return OrderRing(name=TURNS, members=members, first=1, threads=2 * GROUP_THREADS)


def window(
    steps: Sequence[Step], retired: Mapping[int, int], span: range, values: frozenset[str], waits: Waits, turns: bool
) -> Iterator[Step]:
    """The products at `span`. Those that retire together are one group. `retired`: as in Flight. `values`: names of
    registers. `waits`: for what a product reads."""
    groups: list[list[int]] = []
    for k in span:
        if groups and retired[groups[-1][-1]] == retired[k]:
            groups[-1].append(k)
        else:
            groups.append([k])
    touched = tuple(dict.fromkeys(r for k in span for r in _registers(product(steps[k]), values)))
    for number, group in enumerate(groups):
        for k in group:
            yield from waits(product(steps[k]))
        if turns and number == 0:
            yield Enter(id="", ring=TURNS)
        yield Open(id="", regs=touched if number == 0 else ())
        name = product(steps[group[0]]).group
        for k in group:
            yield dataclasses.replace(product(steps[k]), group=name)
        yield Commit(id="", group=name)
    if turns:
        yield Leave(id="", ring=TURNS)


def _registers(op: Wgmma, values: frozenset[str]) -> Iterator[Ref]:
    """What ordinary instructions wrote and the product reads."""
    if not op.zero:
        yield op.d
    if op.a.name in values:
        yield op.a


def group_of(steps: Sequence[Step], retired: Mapping[int, int], k: int) -> str:
    """The name of the first product of its group."""
    while k and isinstance(steps[k - 1], Wgmma) and retired[k - 1] == retired[k]:
        k -= 1
    return product(steps[k]).group
