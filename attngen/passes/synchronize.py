"""synchronize: Schedule -> Schedule. Inserts groups, waits and CTA barriers for asynchronous and shared copies.

Before   copies and their readers in order, nothing between them
After    every issue point of the loop is preceded by `cp_wait` and `cta_sync`, followed by `cp_commit`
         what is staged for other warps is followed by a `cta_sync` before it is read
Why      one barrier serves two purposes there: what is read until the next issue point has arrived for all threads, and
         the slots written next have been read by all of them. cp.async groups complete in order, so the number of newer
         groups that may stay in flight follows from counting commits backwards over the steady state."""

from __future__ import annotations

import dataclasses

from attngen.expr import Expr, Op, const, substitute
from attngen.fold import fold
from attngen.ir.ops import CopyTile, CpAsync, CpCommit, CpVector, CpWait, CtaSync, StFrag, StTile
from attngen.ir.ops import Op as AnyOp
from attngen.ir.schedule import Block, Kernel, Schedule, Step, Tiles
from attngen.passes.schedule import T

STEADY = 8  # steps simulated; the counts are constant from the first on


def is_copy(op: Step) -> bool:
    return isinstance(op, CpAsync | CpVector | CopyTile)


def runs(ops: tuple[Step, ...]) -> list[list[Step]]:
    """Maximal runs of copies, and the ops between them one by one."""
    result: list[list[Step]] = []
    for op in ops:
        if result and is_copy(op) and is_copy(result[-1][0]):
            result[-1].append(op)
        else:
            result.append([op])
    return result


def tile_of(copy: CpAsync | CpVector | CopyTile, step: int) -> int | None:
    """Which tile counter a copy of the loop is for, when executed in `step`."""
    when = copy.when
    if when is None or when.op is not Op.LT:
        return None
    value = fold(substitute(when.args[0], {T: const(step)}))
    return int(value.value) if value.op is Op.CONST and value.value is not None else None


def group_name(run: list[Step]) -> str:
    return "".join(dict.fromkeys(op.dst.name.removeprefix("s") for op in run if isinstance(op, CpAsync | CpVector)))


def reads(op: Step) -> set[str]:
    return {r.name for r in op.reads()} if isinstance(op, AnyOp) else {r.name for o in op.body for r in o.reads()}


def synchronize_kernel(kernel: Kernel) -> Kernel:
    (role,) = kernel.roles
    prologue, tiles, epilogue = role.item.body
    assert isinstance(prologue, Block) and isinstance(tiles, Tiles) and isinstance(epilogue, Block)
    step = runs(tiles.step)
    points = [i for i, run in enumerate(step) if is_copy(run[0])]
    asynchronous = any(isinstance(op, CpAsync | CpVector) for op in (*prologue.ops, *tiles.step))

    # groups in issue order: name, (buffer, tile) it brings
    committed: list[tuple[str, set[tuple[str, int | None]]]] = [
        (group_name(run), {(op.dst.name, tile_of(op, 0)) for op in run if isinstance(op, CpAsync | CpVector)})
        for run in _prologue_runs(prologue)
    ]
    waits: dict[int, list[tuple[str, int]]] = {i: [] for i in points}
    for number in range(STEADY):
        for k, i in enumerate(points):
            after = points[k + 1] if k + 1 < len(points) else len(step)
            wanted = {name for run in step[i:after] for op in run for name in reads(op)}
            if k == len(points) - 1:  # the next issue point is at the head of the next step
                wanted |= {name for run in step[: points[0]] for op in run for name in reads(op)}
            newest = max(
                (
                    g
                    for g, (_, brings) in enumerate(committed)
                    if any(n in wanted and t in (None, number) for n, t in brings)
                ),
                default=None,
            )
            if newest is not None:
                waits[i].append((committed[newest][0], len(committed) - 1 - newest))
            brings = {(op.dst.name, tile_of(op, number)) for op in step[i] if isinstance(op, CpAsync | CpVector)}
            committed.append((group_name(step[i]), brings))

    counter, staged = 0, 0
    open_stores: set[str] = set()  # tiles that registers were stored to since the last barrier
    body: list[Step] = []
    for i, run in enumerate(step):
        if i in waits:
            # the strictest count over the steady state: at the head of the loop fewer groups may be in flight
            group, pending = min(waits[i], key=lambda w: w[1], default=("", 0))
            body += _barrier(f"W{counter}", group, pending)
            body += run
            if asynchronous:
                body.append(CpCommit(id=f"C{counter}", group=group_name(run)))
            counter += 1
            open_stores.clear()
        else:
            if open_stores & {name for op in run for name in reads(op)}:
                body.append(CtaSync(id=f"X{staged}s"))
                staged += 1
                open_stores.clear()
            open_stores |= {op.dst.name for op in run if isinstance(op, StFrag)}
            body += run
    return dataclasses.replace(kernel, roles=(dataclasses.replace(role, item=dataclasses.replace(role.item, body=(
        dataclasses.replace(prologue, ops=_prologue(prologue)),
        dataclasses.replace(tiles, step=tuple(body)),
        dataclasses.replace(epilogue, ops=_epilogue(epilogue, asynchronous)),
    ))),))  # fmt: skip


def _prologue_runs(prologue: Block) -> list[list[Step]]:
    """Copies of the prologue, a group for each tile counter: what the first step waits for closes a group."""
    groups: list[list[Step]] = []
    last: Expr | int | None = -1
    for op in prologue.ops:
        if isinstance(op, CpAsync | CpVector):
            tile = tile_of(op, 0)
            if not groups or (tile is not None and last not in (None, tile)):
                groups.append([])
            groups[-1].append(op)
            last = tile
    return groups


def _prologue(prologue: Block) -> tuple[Step, ...]:
    groups = _prologue_runs(prologue)
    ends = {group[-1].id: k for k, group in enumerate(groups)}
    result: list[Step] = []
    for op in prologue.ops:
        result.append(op)
        if op.id in ends:
            result.append(CpCommit(id=f"PC{ends[op.id]}", group=group_name(groups[ends[op.id]])))
    return tuple(result)


def _barrier(op_id: str, group: str, pending: int) -> list[Step]:
    barrier: list[Step] = [CtaSync(id=f"{op_id}s")]
    return [CpWait(id=op_id, group=group, pending=pending), *barrier] if group else barrier


def _epilogue(epilogue: Block, asynchronous: bool) -> tuple[Step, ...]:
    """Everything in flight has landed (an item without a tile still loaded its queries), and the staging tile is
    written after every warp's last read of the tiles it overlays, and read after it was written by all."""
    result: list[Step] = []
    for op in epilogue.ops:
        after = type(result[-1]) if result else None  # tiles that are staged together share their barriers
        if isinstance(op, StFrag) and after is not StFrag:
            result += _barrier("W9", "all" if asynchronous else "", 0)
        if isinstance(op, StTile) and after is not StTile:
            result.append(CtaSync(id="W10s"))
        result.append(op)
    if asynchronous and not any(isinstance(op, StFrag) for op in epilogue.ops):
        result.append(CpWait(id="W9", group="all", pending=0))
    return tuple(result)


def synchronize(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, kernels=tuple(synchronize_kernel(k) for k in schedule.kernels))
