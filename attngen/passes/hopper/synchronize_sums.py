"""synchronize_sums: Kernel -> Kernel. Inserts what orders the roles of a kernel of plain sums.

Before   copies, products and their readers in order, nothing between them; tiles indexed by the tile's counter
After    a ring for each copied tile (vectors travel with the tile that is awaited first) and for each tile that the
         math roles leave for another role. `full` is awaited before the first reader, `free` arrived at when the last
         one has retired; windows of products opened, committed, and retired before the first op that needs them
Why      as for the forward pass (attngen.passes.hopper.synchronize); here a tile may be read in the step after its
         own, and there are producers that write with ordinary instructions"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

from attngen.expr import Expr, Op, const, make, sub, substitute
from attngen.fold import fold
from attngen.ir.ops import (
    BulkLoad,
    Map,
    MbarArrive,
    MbarExpect,
    MbarWait,
    Proxy,
    Ref,
    Retire,
    StFrag,
    TmaLoad,
    Wgmma,
)
from attngen.ir.ops import Op as AnyOp
from attngen.ir.schedule import Block, Cursor, Kernel, Ring, Role, Step, Tiles
from attngen.ir.schedule import steps_of as all_steps
from attngen.passes.hopper.flight import fly, product, reads
from attngen.passes.hopper.stage import T, ring_of, steps_of
from attngen.passes.hopper.stage_sums import LOAD, MATH, SHED
from attngen.passes.hopper.windows import group_of, turn_ring, window


@dataclasses.dataclass(frozen=True)
class Rings:
    """`of`: the ring of each buffer that is handed over; `item`: those of them that an item has one tile of."""

    of: dict[str, str]
    item: frozenset[str]

    def bar(self, ref: Ref, side: str) -> Ref:
        index = () if ref.name in self.item else ref.index[:1]
        return Ref(name=f"{self.of[ref.name]}.{side}", index=index)


def behind(ref: Ref) -> int:
    """How many tiles before the counter's a tile is; one with a number is the counter's."""
    at = fold(substitute(ref.index[0], {T: const(0)}))
    assert at.value is not None
    return max(0, -int(at.value))


def ahead(ref: Ref) -> int:
    """How many tiles after the counter's a tile is."""
    at = fold(substitute(ref.index[0], {T: const(0)}))
    return 0 if ref.index[0].op is Op.CONST or at.value is None else max(0, int(at.value))


class Line:
    """A straight line of ops of one role, with what orders it."""

    def __init__(self, role: Role, rings: Rings, bytes_of: dict[str, int]) -> None:
        self.rings, self.bytes_of = rings, bytes_of
        self.values = frozenset(v.name for v in role.values)
        loop = next(n for n in role.item.body if isinstance(n, Tiles))
        self.count = loop.ranges[-1].end
        # in which steps, counted from its own, the tiles of a ring are read first and last
        steps: dict[str, list[int]] = {}
        for op in loop.step:
            for r in reads(op):
                if r.name in rings.of and r.name not in rings.item:
                    steps.setdefault(rings.of[r.name], []).append(behind(r))
        self.first_read = {ring: min(found) for ring, found in steps.items()}
        self.last_read = {ring: max(found) for ring, found in steps.items()}

    def __call__(self, steps: Sequence[Step], first: bool, last: Expr | None, turns: bool) -> Iterator[Step]:
        """`first`: the item's first tile. `last`: when this is its last one; None: never."""
        retired = fly(steps).retired
        waited: set[Ref] = set()
        position = 0
        while position < len(steps):
            yield from self.retire(steps, retired, position, last)
            step = steps[position]
            if isinstance(step, Wgmma):
                end = next((k for k in range(position, len(steps)) if not isinstance(steps[k], Wgmma)), len(steps))
                waits = partial(self.waits, waited=waited, first=first)
                yield from window(steps, retired, range(position, end), self.values, waits, turns)
                position = end
                continue
            yield from self.waits(step, waited, first)
            if isinstance(step, TmaLoad):
                yield from filled(step, self.bytes_of, waited)
                position += 1
                continue
            # a slot is awaited before the maps that make what goes there: what it takes to store is done beside them
            stored = next((s for s in steps[position:] if not isinstance(s, Map)), None)
            if isinstance(stored, StFrag) and stored.dst.name in self.rings.of:
                yield from self.free(stored, waited)
            yield step
            if isinstance(step, StFrag) and step.dst.name in self.rings.of and step.dst not in (
                s.dst for s in steps[position + 1 :] if isinstance(s, StFrag)
            ):  # fmt: skip
                yield Proxy(id="")
                yield MbarArrive(id="", bar=self.rings.bar(step.dst, "full"))
            position += 1
        yield from self.retire(steps, retired, len(steps), last)

    def waits(self, step: Step, waited: set[Ref], first: bool) -> Iterator[Step]:
        """A tile is awaited before its first reader."""
        for ref in sorted(reads(step), key=lambda r: r.name):
            if ref.name not in self.rings.of or (ref.name in self.rings.item and not first):
                continue
            bar = self.rings.bar(ref, "full")
            if bar in waited or (bar.index and behind(bar) != self.first_read[self.rings.of[ref.name]]):
                continue
            waited.add(bar)
            yield MbarWait(id="", bar=bar)

    def free(self, step: StFrag, waited: set[Ref]) -> Iterator[Step]:
        bar = self.rings.bar(step.dst, "free")
        if bar not in waited:
            waited.add(bar)
            yield MbarWait(id="", bar=bar)

    def retire(
        self, steps: Sequence[Step], retired: dict[int, int], position: int, last: Expr | None
    ) -> Iterator[Step]:
        """Groups that have to be complete here, and the tiles that nobody of this role reads any more."""
        done = [k for k, at in retired.items() if at == position and k < position]
        yield from (Retire(id="", group=g) for g in dict.fromkeys(group_of(steps, retired, k) for k in done))
        later = [steps[n] for n in range(len(steps)) if n not in done and retired.get(n, n) >= position]
        free: dict[Ref, Expr | None] = {}
        for k in done:
            for ref in (product(steps[k]).a, product(steps[k]).b):
                if ref.name not in self.rings.of:
                    continue
                bar = self.rings.bar(ref, "free")
                ring = self.rings.of[ref.name]
                if any(self.rings.of.get(r.name) == ring and r.index == ref.index for s in later for r in reads(s)):
                    continue
                if ref.name in self.rings.item:
                    if last is not None:
                        free[bar] = last
                elif behind(ref) == self.last_read[ring]:
                    free[bar] = None
        yield from (MbarArrive(id="", bar=bar, when=when) for bar, when in free.items())


def filled(op: TmaLoad, bytes_of: dict[str, int], begun: set[Ref]) -> Iterator[AnyOp]:
    """A copy, the first of a slot behind the wait for it; its barrier expects what travels with it, too."""
    if op.bar not in begun:
        begun.add(op.bar)
        free = dataclasses.replace(op.bar, name=op.bar.name.replace(".full", ".free"))
        yield MbarWait(id="", bar=free, when=op.when)
        yield MbarExpect(id="", bar=op.bar, bytes=bytes_of[op.bar.name.partition(".")[0]], when=op.when)
    yield op


def _role(role: Role, rings: Rings, turns: bool, bytes_of: dict[str, int]) -> Role:
    line = Line(role, rings, bytes_of)
    body: list[Block | Tiles] = []
    for node in role.item.body:
        if isinstance(node, Tiles):
            started = node.start > 0
            end = make(Op.EQ, T, sub(line.count, const(1)))
            step = line(node.step, False, end, turns)
            drain = line(node.drain, False, None, turns)
            body.append(dataclasses.replace(node, step=steps_of(node.step[0].id[0], step), drain=steps_of("D", drain)))
            if not started:
                body.insert(-1, Block(name="begin", ops=steps_of("B", _item_waits(node, rings))))
        elif any(isinstance(op, TmaLoad) for op in node.ops):
            body.append(dataclasses.replace(node, ops=steps_of("L", line(node.ops, False, None, False))))
        elif any(isinstance(op, Wgmma) or rings.of.keys() & {r.name for r in reads(op)} for op in node.ops):
            ops = line(node.ops, True, make(Op.EQ, line.count, const(1)), turns)
            body.append(dataclasses.replace(node, ops=steps_of("P", ops)))
        else:
            body.append(node)
    return dataclasses.replace(role, item=dataclasses.replace(role.item, body=tuple(body)))


def _item_waits(loop: Tiles, rings: Rings) -> Iterator[AnyOp]:
    """A role without a first tile of its own awaits the tiles of the item before its loop."""
    names = dict.fromkeys(r.name for op in loop.step for r in sorted(reads(op), key=lambda r: r.name))
    yield from (MbarWait(id="", bar=Ref(name=f"{rings.of[n]}.full")) for n in names if n in rings.item)


def _load(role: Role, bytes_of: dict[str, int]) -> Role:
    (loop,) = role.item.body
    assert isinstance(loop, Tiles)
    step, begun = list[Step](), set[Ref]()
    for op in loop.step:
        step += filled(op, bytes_of, begun) if isinstance(op, TmaLoad) else (op,)
    body = (dataclasses.replace(loop, step=steps_of("L", step)),)
    return dataclasses.replace(role, item=dataclasses.replace(role.item, body=body))


def synchronize_sums(kernel: Kernel, turns: bool) -> Kernel:
    """`turns`: warpgroups take turns on the tensor cores; needs two or more."""
    by_name = {r.name: r for r in kernel.roles}
    math = by_name[MATH]
    loads = [op for role in kernel.roles for op in all_steps(role) if isinstance(op, TmaLoad | BulkLoad)]
    of = {op.dst.name: op.bar.name.partition(".")[0] for op in loads}
    item = frozenset(op.dst.name for op in loads if not op.dst.index)
    handed = [op.dst.name for op in all_steps(math) if isinstance(op, StFrag) and len(op.dst.index) > 1]
    of |= {n: ring_of(n) for n in handed}
    rings = Rings(of, item)
    sizes = {b.name: b for b in kernel.buffers}
    made = []
    for name in dict.fromkeys(of.values()):
        buffers = tuple(n for n, r in of.items() if r == name)
        copied = buffers[0] not in handed
        readers = [r for r in kernel.roles if any(ref.name in buffers for op in all_steps(r) for ref in reads(op))]
        made.append(Ring(
            name=name, slots=sizes[buffers[0]].slots, full_arrivals=1 if copied else math.warps,
            full_bytes=sum(sizes[n].layout.bytes for n in buffers) if copied else 0,
            free_arrivals=sum(r.warps for r in readers), cursor=Cursor.RESTART, buffers=buffers,
        ))  # fmt: skip
    bytes_of = {r.name: r.full_bytes for r in made}
    shift = math.split if turns else 0
    barriers = tuple(dataclasses.replace(b, first=b.first + shift) for b in kernel.barriers)
    roles = [_load(by_name[LOAD], bytes_of)] if LOAD in by_name else []
    if SHED in by_name:
        roles.append(_role(by_name[SHED], rings, False, bytes_of))
    roles.append(_role(math, rings, turns, bytes_of))
    return dataclasses.replace(
        kernel, rings=tuple(made), orders=(turn_ring(math.split),) if turns else (), barriers=barriers,
        roles=tuple(roles),
    )
