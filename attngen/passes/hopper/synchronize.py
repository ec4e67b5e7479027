"""synchronize: Schedule -> Schedule. Inserts what orders the roles: mbarriers of rings, groups of products, turns.

Before   copies, products and their readers in order, nothing between them
After    a ring for each copied buffer: `full` is awaited before its first reader, `free` arrived at when its last
         reader has retired; each window of products starts with `open`, ends with `commit`, and stands between
         `enter` and `leave` where warpgroups take turns; products are retired before the first op that needs them
Why      a copy engine and tensor cores answer to nothing else. What has to retire when follows from data alone
         (attngen.passes.hopper.flight)"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from attngen.expr import Expr, Op, const, make, sub
from attngen.ir.ops import MbarArrive, MbarWait, Ref, Retire, Wgmma
from attngen.ir.schedule import Block, Cursor, Kernel, Ring, Role, Schedule, Step, Tiles
from attngen.passes.hopper.flight import fly, product
from attngen.passes.hopper.handover import copies, hand_over
from attngen.passes.hopper.stage import GROUP_THREADS, T, ring_of, steps_of
from attngen.passes.hopper.windows import group_of, turn_ring, window


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What the copies of the load role fill: tiles of the loop, and of the item."""

    tile: frozenset[str]
    item: frozenset[str]

    def bar(self, ref: Ref, which: str) -> Ref:
        return Ref(name=f"{ring_of(ref.name)}.{which}", index=ref.index if ref.name in self.tile else ())


class Synchronizer:
    def __init__(self, buffers: Buffers, turns: bool, values: frozenset[str], late: frozenset[str]) -> None:
        self.buffers, self.turns, self.values = buffers, turns, values
        self.late = late  # tiles of the item that the drain still reads

    def line(self, steps: Sequence[Step], first: bool, last: Expr | None, turns: bool) -> Iterator[Step]:
        """A straight line of ops. `first`: the item's first tile, before which its copies have to arrive. `last`: when
        this is the item's last tile; None: always."""
        retired = fly(steps).retired
        waited: set[Ref] = set()
        position = 0
        while position < len(steps):
            yield from self.retire(steps, retired, position, last)
            if not isinstance(steps[position], Wgmma):
                yield steps[position]
                position += 1
                continue
            end = next((k for k in range(position, len(steps)) if not isinstance(steps[k], Wgmma)), len(steps))
            waits = partial(self.waits, waited=waited, first=first)
            yield from window(steps, retired, range(position, end), self.values, waits, turns)
            position = end
        yield from self.retire(steps, retired, len(steps), last)

    def waits(self, op: Wgmma, waited: set[Ref], first: bool) -> Iterator[Step]:
        for ref in (op.a, op.b):
            ref = dataclasses.replace(ref, transposed=False)
            once = ref.name in self.buffers.item
            if ref in waited or (once and not first) or ref.name not in self.buffers.tile | self.buffers.item:
                continue
            waited.add(ref)
            yield MbarWait(id="", bar=self.buffers.bar(ref, "full"))

    def retire(
        self, steps: Sequence[Step], retired: dict[int, int], position: int, last: Expr | None
    ) -> Iterator[Step]:
        done = [k for k, at in retired.items() if at == position and k < position]
        groups = dict.fromkeys(group_of(steps, retired, k) for k in done)
        yield from (Retire(id="", group=g) for g in groups)
        free: dict[Ref, Expr | None] = {}
        for k in done:
            op = product(steps[k])
            for ref in (op.a, op.b):
                plain = dataclasses.replace(ref, transposed=False)
                later = [n for n in range(len(steps)) if n not in done and retired.get(n, -1) > position]
                still = any(plain.name in (product(steps[n]).a.name, product(steps[n]).b.name) for n in later)
                if ref.name in self.buffers.tile and not still:
                    free[self.buffers.bar(plain, "free")] = None
                elif ref.name in self.buffers.item and not still and (last is None or ref.name not in self.late):
                    free[self.buffers.bar(plain, "free")] = last
        tiles = sorted(free.items(), key=lambda x: x[1] is not None)
        yield from (MbarArrive(id="", bar=bar, when=when) for bar, when in tiles)


def _math(role: Role, buffers: Buffers, turns: bool) -> Role:
    values = frozenset(v.name for v in role.values)
    (loop,) = (n for n in role.item.body if isinstance(n, Tiles))
    late = {r.name for op in loop.drain if isinstance(op, Wgmma) for r in (op.a, op.b)} & buffers.item
    s = Synchronizer(buffers, turns, values, frozenset(late))
    count = loop.ranges[-1].end
    body: list[Block | Tiles] = []
    for node in role.item.body:
        if isinstance(node, Tiles):
            step = s.line(node.step, False, make(Op.EQ, T, sub(count, const(1))), turns)
            drain = s.line(node.drain, False, None, False)
            body.append(dataclasses.replace(node, step=steps_of("S", step), drain=steps_of("D", drain)))
        elif any(isinstance(op, Wgmma) for op in node.ops):
            ops = s.line(node.ops, True, make(Op.EQ, count, const(1)), turns)
            body.append(dataclasses.replace(node, ops=steps_of("P", ops)))
        else:
            body.append(node)
    return dataclasses.replace(role, item=dataclasses.replace(role.item, body=tuple(body)))


def synchronize_kernel(kernel: Kernel, turns: bool) -> Kernel:
    load, compute = kernel.roles
    buffers = Buffers(
        frozenset(op.dst.name for op in copies(load) if op.when is None),
        frozenset(op.dst.name for op in copies(load) if op.when is not None),
    )
    filled = sorted((b for b in kernel.buffers if b.name in buffers.tile | buffers.item), key=lambda b: b.slots)
    rings = tuple(
        Ring(
            name=ring_of(b.name), slots=b.slots, full_arrivals=1 if load.single else GROUP_THREADS,
            full_bytes=b.layout.bytes if load.single else 0, free_arrivals=compute.warps, cursor=Cursor.RESTART,
            buffers=(b.name,),
        )
        for b in filled
    )  # fmt: skip
    shift = compute.split if turns else 0
    barriers = tuple(dataclasses.replace(b, first=b.first + shift) for b in kernel.barriers)
    return dataclasses.replace(
        kernel, rings=rings, orders=(turn_ring(compute.split),) if turns else (),
        barriers=barriers,
        roles=(hand_over(load, kernel), _math(compute, buffers, turns)),
    )  # fmt: skip


def synchronize(schedule: Schedule, turns: bool) -> Schedule:
    """`turns`: warpgroups take turns on the tensor cores; needs two or more."""
    (kernel,) = schedule.kernels
    return dataclasses.replace(schedule, kernels=(synchronize_kernel(kernel, turns),))
