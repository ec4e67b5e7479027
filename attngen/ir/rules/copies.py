"""Copies by threads: in units that the hardware has and rows are made of; groups of cp.async are closed, waited for by
name, and none is left at the end."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir import ops as o
from attngen.ir.rules.case import Case, Finding
from attngen.ir.schedule import ops_of
from attngen.ir.walk import Edge

UNITS = (4, 8, 16)  # bytes that one cp.async moves
EVERY = "all"  # `cp_wait group=all`: whatever was committed


def copy_units(case: Case) -> Iterator[Finding]:
    """A unit that is no part of a row would bring what lies behind the row; threads that divide a tile in two ways
    would overwrite each other's."""
    units: dict[str, int] = {}
    for store in (op for _, op in ops_of(case.kernel) if isinstance(op, o.StTile)):
        row = case.schedule.head_dim(store.dst) * case.buffers[store.src.name].layout.itemsize
        if store.bytes not in (4, 16) or row % store.bytes:
            message = f"stores {store.bytes} bytes at once to rows of {row}. Allowed: 16 where it divides them, or 4"
            yield Finding("copy-units", message, store.id)
    for op in (op for _, op in ops_of(case.kernel) if isinstance(op, o.CpAsync)):
        row = case.schedule.head_dim(op.src) * case.buffers[op.dst.name].layout.itemsize
        if op.bytes not in UNITS:
            yield Finding("copy-units", f"copies {op.bytes} bytes at once; cp.async has {UNITS}", op.id)
        elif row % op.bytes:
            yield Finding("copy-units", f"copies {op.bytes} bytes at once of rows of {row}", op.id)
        if units.setdefault(op.dst.name, op.bytes) != op.bytes:
            message = f"copies {op.bytes} bytes at once to {op.dst.name}, and another op {units[op.dst.name]}"
            yield Finding("copy-units", message, op.id)


def copy_groups(case: Case) -> Iterator[Finding]:
    """cp_wait counts groups, it does not name them: a count that is too large for the named group waits for nothing,
    one
    that is never needed waits for copies that could stay in flight. Whether the data had arrived is the rule `race`."""
    loose: dict[str, tuple[int, o.CpWait]] = {}  # smallest number of newer groups that a wait has met
    told: set[tuple[str, str]] = set()

    def once(op: o.Op, message: str) -> Iterator[Finding]:
        if (op.id, message) not in told:
            told.add((op.id, message))
            yield Finding("copy-groups", message, op.id)

    for walked in case.memory.walks:
        closed: list[str] = []
        copies: list[o.CpAsync | o.CpVector] = []
        arrived = 0
        for event in walked.events:
            op = event.op
            if isinstance(op, o.CpAsync | o.CpVector):
                copies.append(op)
            elif isinstance(op, o.CpCommit):
                closed.append(op.group)
                copies.clear()
            elif isinstance(op, o.CpWait):
                if copies:
                    yield from once(op, f"waits while the copy {copies[0].id} is in no group yet")
                newest = next((k for k in reversed(range(len(closed))) if op.group in (closed[k], EVERY)), None)
                if newest is None:
                    yield from once(op, f"no group {op.group} was committed")
                    continue
                newer = len(closed) - 1 - newest
                if op.pending > newer:
                    yield from once(
                        op,
                        f"leaves {op.pending} groups in flight; behind {newer} newer ones group {op.group} may be too",
                    )
                if newer < loose.get(op.id, (newer + 1, op))[0]:
                    loose[op.id] = (newer, op)
                arrived = max(arrived, len(closed) - op.pending)
            elif event.edge is Edge.EXIT:
                for copy in copies:
                    yield from once(copy, "is in no group: no wait covers it")
                for group in closed[max(arrived, 0) :]:
                    if (group, "") not in told:
                        told.add((group, ""))
                        yield Finding("copy-groups", f"group {group} is still in flight at the end")
    for newer, op in loose.values():
        if op.pending < newer:
            yield from once(
                op, f"leaves {op.pending} groups in flight where {newer} may be: it waits for newer groups, too"
            )
