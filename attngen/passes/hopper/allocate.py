"""allocate: Schedule -> Schedule. Shared-memory offsets, and item scalars where they are used.

Before   buffers and barriers without offsets; each role computes all scalars of the item
After    constant offsets, one behind the other, aligned to each layout; a role computes what it uses
Why      all buffers are alive at once: the next item's tiles arrive while this one's output leaves"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from attngen.expr import Expr, Op, walk
from attngen.ir.ops import Stmt
from attngen.ir.schedule import Kernel, Role, Schedule

BARRIER_ALIGN = 16


def names(value: Any) -> Iterator[str]:
    """Names that expressions anywhere inside a part of a schedule mention."""
    if isinstance(value, Expr):
        yield from (x.name for x in walk(value) if x.op in (Op.VAR, Op.LOAD))
    elif isinstance(value, tuple):
        for v in value:
            yield from names(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from names(getattr(value, f.name))


def used_lets(role: Role) -> tuple[Stmt, ...]:
    wanted = set(names(role.item.body))
    # the index of an element follows from its tile's
    wanted |= {tile for index, tile in (("j", "n"), ("i", "m")) if index in wanted}
    kept: list[Stmt] = []
    for let in reversed(role.item.lets):
        if let.target in wanted:
            wanted |= set(names(let.value))
            kept.append(let)
    return tuple(reversed(kept))


def allocate_kernel(kernel: Kernel) -> Kernel:
    offset, buffers, rings = 0, [], []
    for b in kernel.buffers:
        offset += -offset % b.layout.align
        buffers.append(dataclasses.replace(b, offset=offset))
        offset += b.bytes
    for r in kernel.rings:
        offset += -offset % BARRIER_ALIGN
        rings.append(dataclasses.replace(r, offset=offset))
        offset += r.bytes
    roles = tuple(
        dataclasses.replace(r, item=dataclasses.replace(r.item, lets=used_lets(r))) for r in kernel.roles
    )
    return dataclasses.replace(kernel, buffers=tuple(buffers), rings=tuple(rings), roles=roles)


def allocate(schedule: Schedule) -> Schedule:
    (kernel,) = schedule.kernels
    return dataclasses.replace(schedule, kernels=(allocate_kernel(kernel),))
