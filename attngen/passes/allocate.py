"""allocate: Schedule -> Schedule. Shared-memory offsets by lifetime.

Before   buffers without offsets
After    constant offsets, aligned to each layout; buffers that are never live together may share bytes
Why      the output's staging tile is written when the last key tile has been read; the barrier before it (synchronize)
         separates the two, so it costs no memory of its own"""

from __future__ import annotations

import dataclasses

from attngen.ir.schedule import Block, Buffer, Guard, Kernel, Schedule, Step, Tiles


def _names(step: Step) -> set[str]:
    ops = step.body if isinstance(step, Guard) else (step,)
    return {r.name for op in ops for r in (*op.reads(), *op.writes())}


def lifetimes(kernel: Kernel) -> dict[str, tuple[int, int]]:
    """(first, last) node of the body that touches a buffer; a loop counts as one node."""
    spans: dict[str, tuple[int, int]] = {}
    for role in kernel.roles:
        for position, node in enumerate(role.item.body):
            steps = (
                node.ops if isinstance(node, Block) else (*node.step, *node.drain) if isinstance(node, Tiles) else ()
            )
            for name in {n for s in steps for n in _names(s)}:
                first, last = spans.get(name, (position, position))
                spans[name] = (min(first, position), max(last, position))
    return spans


def allocate_kernel(kernel: Kernel) -> Kernel:
    spans = lifetimes(kernel)
    placed: list[Buffer] = []
    for buffer in kernel.buffers:
        first, last = spans[buffer.name]
        offset = 0
        for other in sorted(placed, key=lambda b: b.offset or 0):
            start, end = spans[other.name]
            assert other.offset is not None
            if (
                start <= last
                and first <= end
                and offset < other.offset + other.bytes
                and other.offset < offset + buffer.bytes
            ):
                offset = other.offset + other.bytes
                offset += -offset % buffer.layout.align
        placed.append(dataclasses.replace(buffer, offset=offset))
    return dataclasses.replace(kernel, buffers=tuple(placed))


def allocate(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, kernels=tuple(allocate_kernel(k) for k in schedule.kernels))
