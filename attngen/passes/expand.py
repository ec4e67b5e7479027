"""expand: Schedule -> Schedule. Gives every copied buffer as many slots as tiles are alive in it at once.

Before   copies that run ahead of their readers, all in one buffer
After    slots, and slot indices `t % slots` on every use
Why      a tile copied d steps ahead of its last reader needs d slots if the copy stands behind that reader in the step,
         and d + 1 if it stands before it (modulo variable expansion, Lam 1988). The slot is computed at run time: on a
         target where addresses are immediates the loop would be unrolled by the number of slots instead"""

from __future__ import annotations

import dataclasses

from attngen.expr import Expr, Op, const, make
from attngen.ir.ops import CopyTile, CpAsync, CpVector, Map, MmaSync, Ref
from attngen.ir.schedule import Block, Kernel, Schedule, Step, Tiles
from attngen.passes.schedule import T
from attngen.passes.synchronize import tile_of


def slots_of(tiles: Tiles) -> dict[str, int]:
    result: dict[str, int] = {}
    for position, op in enumerate(tiles.step):
        if not isinstance(op, CpAsync | CpVector | CopyTile):
            continue
        distance = tile_of(op, 0) or 0
        readers = [
            i for i, other in enumerate(tiles.step)
            if isinstance(other, Map | MmaSync) and op.dst.name in {r.name for r in other.reads()}
        ]  # fmt: skip
        result[op.dst.name] = max(1, distance + (1 if position < max(readers) and distance else 0))
    return result


def expand_kernel(kernel: Kernel) -> Kernel:
    (role,) = kernel.roles
    tiles = next(n for n in role.item.body if isinstance(n, Tiles))
    slots = {name: n for name, n in slots_of(tiles).items() if n > 1}

    def use(ref: Ref, tile: Expr) -> Ref:
        n = slots.get(ref.name)
        return ref if n is None else dataclasses.replace(ref, index=(make(Op.MOD, tile, const(n)),))

    def one(step: Step) -> Step:
        if isinstance(step, CpAsync | CpVector | CopyTile) and step.when is not None:
            return dataclasses.replace(step, dst=use(step.dst, step.when.args[0]))
        if isinstance(step, MmaSync):
            return dataclasses.replace(step, a=use(step.a, T), b=use(step.b, T))
        if isinstance(step, Map):
            return dataclasses.replace(step, copies=tuple(use(r, T) for r in step.copies))
        return step

    body = tuple(
        dataclasses.replace(node, ops=tuple(one(s) for s in node.ops)) if isinstance(node, Block)
        else dataclasses.replace(node, step=tuple(one(s) for s in node.step))
        for node in role.item.body
    )  # fmt: skip
    return dataclasses.replace(
        kernel,
        buffers=tuple(dataclasses.replace(b, slots=slots.get(b.name, 1)) for b in kernel.buffers),
        roles=(dataclasses.replace(role, item=dataclasses.replace(role.item, body=body)),),
    )


def expand(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, kernels=tuple(expand_kernel(k) for k in schedule.kernels))
