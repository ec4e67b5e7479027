"""expand_sums: Kernel -> Kernel. Tile counters become slots.

Before   buffers and barriers indexed by the tile's counter: `sQ[t]`, `sQ[t - 1]`
After    by its remainder. In an unrolled loop addresses, descriptors and parity bits are numbers; else the loop keeps
         the slot, which is added to them
Why      numbers cost neither registers nor instructions, but the code of a step is long, and the compiler gives up on
         some loops that are longer"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from attngen.expr import DType, Expr, Op, add, const, make, var
from attngen.ir.ops import Ref, Scope, Stmt, TmaLoad
from attngen.ir.schedule import Block, Kernel, Role, Tiles, steps_of
from attngen.passes.hopper.expand import indexed
from attngen.passes.hopper.stage import T
from attngen.passes.hopper.synchronize_sums import ahead, behind


class Slots:
    """What the remainders of counters are called in one loop, and their values."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots = slots
        self.lets: dict[tuple[int, int], Stmt] = {}

    def __call__(self, ref: Ref) -> Ref:
        size = self.slots.get(ref.name.partition(".")[0])
        if size is None or not ref.index:
            return ref
        return dataclasses.replace(ref, index=(*self.slot(ref, size), *ref.index[1:]))

    def slot(self, ref: Ref, size: int) -> Iterator[Expr]:
        at = ref.index[0]
        if size == 1:
            return
        if at.op is Op.CONST:
            assert isinstance(at.value, int)
            yield const(at.value % size)
            return
        distance = behind(ref) - ahead(ref)
        key = (distance, size)
        if key not in self.lets:
            value = make(Op.MOD, add(T, const((size - distance) % size)) if distance else T, const(size))
            name = "slot" if not distance else "last" if distance > 0 else "next"
            self.lets[key] = Stmt(scope=Scope.ITEM, target=f"{name}{size}", value=value)
        yield var(self.lets[key].target, DType.I32)


def _role(role: Role, slots: dict[str, int], unroll: bool) -> Role:
    body: list[Block | Tiles] = []
    for node in role.item.body:
        names = Slots(slots)
        if isinstance(node, Block):
            body.append(dataclasses.replace(node, ops=tuple(indexed(s, names) for s in node.ops)))
            continue
        step, drain = (tuple(indexed(s, names) for s in part) for part in (node.step, node.drain))
        lets = tuple(names.lets.values())
        if unroll and not role.single:
            node = dataclasses.replace(node, unroll=math.lcm(*(size for _, size in names.lets)), phase=lets)
        else:
            node = dataclasses.replace(node, lets=(*node.lets, *lets))
        body.append(dataclasses.replace(node, step=step, drain=drain))
    return dataclasses.replace(role, item=dataclasses.replace(role.item, body=tuple(body)))


def expand_sums(kernel: Kernel, unroll: bool) -> Kernel:
    item = {op.bar.name.partition(".")[0] for r in kernel.roles for op in steps_of(r)
            if isinstance(op, TmaLoad) and not op.bar.index}  # fmt: skip
    streamed = [r for r in kernel.rings if r.name not in item]
    slots = {r.name: r.slots for r in streamed} | {name: r.slots for r in streamed for name in r.buffers}
    return dataclasses.replace(kernel, roles=tuple(_role(r, slots, unroll) for r in kernel.roles))
