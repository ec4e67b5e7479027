"""expand: Schedule -> Schedule. Gives what exists once a tile as many slots or copies as tiles are alive in it.

Before   buffers and registers indexed by the tile's counter: `sK[t]`, `rP[t - 1]`
After    slots and copies; indices are phase variables, which unrolling turns into numbers
Why      addresses, descriptors and parity bits have to be immediates (modulo variable expansion, Lam 1988). A register
         written in tile t and read by a product of tile t - 1 needs a second copy only if that product is still in
         flight at the write"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from attngen.expr import DType, Op, const, make, substitute, var
from attngen.fold import fold
from attngen.ir.ops import CopyTile, CpAsync, Map, Ref, Scope, Stmt, TmaLoad, Wgmma
from attngen.ir.ops import Op as AnyOp
from attngen.ir.schedule import Block, Guard, Kernel, Role, Schedule, Step, Tiles
from attngen.passes.hopper.flight import fly, reads, writes
from attngen.passes.hopper.stage import T

SLOT = var("slot", DType.I32)
COPIES = (TmaLoad, CpAsync, CopyTile)
_NAMES = (("k", "u"), ("p", "v"))  # of this tile's and the last tile's slot, and copy


def behind(ref: Ref) -> int | None:
    """How many tiles before the counter's an index is; None: it is no tile counter."""
    if len(ref.index) != 1:
        return None
    at = fold(substitute(ref.index[0], {T: const(0)}))
    return None if at.op is not Op.CONST or ref.index[0].op is Op.CONST or at.value is None else -int(at.value)


def copies_of(steps: tuple[Step, ...], name: str) -> int:
    """Copies of a register value that products read a tile or more after it was written."""
    retired = fly(steps).retired
    written = [k for k, s in enumerate(steps) if any(r.name == name for r in writes(s))]
    needed = 1
    for k, step in enumerate(steps):
        for r in reads(step) if isinstance(step, Wgmma) else ():
            distance = behind(r) if r.name == name else None
            if distance:
                needed = max(needed, distance + (1 if any(retired[k] > w for w in written) else 0))
    return needed


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Slots of each buffer and copies of each register value that a tile has of its own."""

    slots: dict[str, int]
    copies: dict[str, int]

    def of(self, name: str) -> int:
        return self.slots.get(name) or self.copies.get(name) or 1


def sizes_of(math_role: Role, load_role: Role, slots: int) -> Sizes:
    loaded = {op.dst.name for op in _steps(load_role) if isinstance(op, COPIES) and op.when is None}
    steps = next(n.step for n in math_role.item.body if isinstance(n, Tiles))
    indexed = {r.name for s in steps for r in (*reads(s), *writes(s)) if behind(r) is not None} - loaded
    return Sizes(dict.fromkeys(sorted(loaded), slots), {n: copies_of(steps, n) for n in sorted(indexed)})


def _steps(role: Role) -> Iterator[Step]:
    for node in role.item.body:
        yield from node.ops if isinstance(node, Block) else (*node.step, *node.drain)


class Phases:
    """The index variables of an unrolled loop: one for each distance and modulus."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.lets = sizes, dict[tuple[int, int], Stmt]()

    def __call__(self, ref: Ref) -> Ref:
        distance, size = behind(ref), self.sizes.of(ref.name.split(".")[0])
        if distance is None:
            return self.fixed(ref)
        if size == 1:
            return dataclasses.replace(ref, index=())
        key = (distance % size, size)
        if key not in self.lets:
            name = _NAMES[ref.name in self.sizes.copies][min(distance, 1)]
            value = make(Op.MOD, fold(make(Op.ADD, T, const((size - distance) % size))), const(size))
            self.lets[key] = Stmt(scope=Scope.ITEM, target=name, value=value)
        return dataclasses.replace(ref, index=(var(self.lets[key].target, DType.I32),))

    def fixed(self, ref: Ref) -> Ref:
        """Outside of the loop: the first tile."""
        one = len(ref.index) == 1 and ref.index[0].op is Op.CONST and self.sizes.of(ref.name) == 1
        return dataclasses.replace(ref, index=()) if one else ref


def indexed(step: Step, change: Callable[[Ref], Ref]) -> Step:
    """The op with its references changed."""
    if isinstance(step, Guard):
        body = tuple(op for op in (indexed(op, change) for op in step.body) if isinstance(op, AnyOp))
        return dataclasses.replace(step, body=body, touches=tuple(change(r) for r in step.touches))
    if isinstance(step, Map):
        copies = tuple(r for r in map(change, step.copies) if r.index)
        return dataclasses.replace(step, copies=copies)
    found: dict[str, Any] = {
        f.name: change(v) for f in dataclasses.fields(step) if isinstance(v := getattr(step, f.name), Ref)
    }
    return dataclasses.replace(step, **found)


def _math(role: Role, sizes: Sizes) -> Role:
    body: list[Block | Tiles] = []
    for node in role.item.body:
        phases = Phases(sizes)
        if isinstance(node, Block):
            body.append(dataclasses.replace(node, ops=tuple(indexed(s, phases) for s in node.ops)))
            continue
        step, drain = (tuple(indexed(s, phases) for s in part) for part in (node.step, node.drain))
        unroll = math.lcm(*(m for _, m in phases.lets), 1)
        body.append(
            dataclasses.replace(node, step=step, drain=drain, unroll=unroll, phase=tuple(phases.lets.values()))
        )
    values = tuple(dataclasses.replace(v, copies=sizes.copies.get(v.name, 1)) for v in role.values)
    return dataclasses.replace(role, values=values, item=dataclasses.replace(role.item, body=tuple(body)))


def _load(role: Role, slots: int) -> Role:
    def slot(ref: Ref) -> Ref:
        if behind(ref) is None:
            return ref
        return dataclasses.replace(ref, index=(SLOT,) if slots > 1 else ())

    (tiles,) = role.item.body
    assert isinstance(tiles, Tiles)
    lets = tiles.lets
    if slots > 1:  # one thread: computed, not unrolled
        lets = (*lets, Stmt(scope=Scope.ITEM, target=SLOT.name, value=make(Op.MOD, T, const(slots))))
    tiles = dataclasses.replace(tiles, lets=lets, step=tuple(indexed(s, slot) for s in tiles.step))
    return dataclasses.replace(role, item=dataclasses.replace(role.item, body=(tiles,)))


def expand_kernel(kernel: Kernel, slots: int) -> Kernel:
    load, compute = kernel.roles
    sizes = sizes_of(compute, load, slots)
    buffers = tuple(dataclasses.replace(b, slots=sizes.slots.get(b.name, 1)) for b in kernel.buffers)
    return dataclasses.replace(kernel, buffers=buffers, roles=(_load(load, slots), _math(compute, sizes)))


def expand(schedule: Schedule, slots: int) -> Schedule:
    (kernel,) = schedule.kernels
    return dataclasses.replace(schedule, kernels=(expand_kernel(kernel, slots),))
