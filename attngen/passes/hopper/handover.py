"""What the load role does around its copies: it claims a free slot, fills it, and hands it over.

The copy engine hands over by itself: the barrier counts its bytes. Threads wait for their own copies, make them visible
to the products by a proxy fence, and arrive, each for itself. Copies that a product needs together are handed over
together: those of the item with the tile that comes before them. With cp.async the last ones of a step are in flight
until those of the next step have been waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from attngen.errors import PassError
from attngen.expr import DType, Expr, Op, add, const, make, sub, var
from attngen.ir.ops import (
    CopyTile,
    CpAsync,
    CpCommit,
    CpWait,
    MbarArrive,
    MbarExpect,
    MbarWait,
    Proxy,
    Ref,
    Scope,
    Stmt,
    TmaLoad,
)
from attngen.ir.ops import Op as AnyOp
from attngen.ir.schedule import Block, Kernel, Role, Step, Tiles
from attngen.passes.hopper.stage import T, ring_of, steps_of

Copy = TmaLoad | CpAsync | CopyTile
PREVIOUS, LAST = var("prev", DType.I32), var("last", DType.I32)  # slots of the tile before, and of the item's last


def copies(role: Role) -> list[Copy]:
    """Those of a load role, in order."""
    (loop,) = role.item.body
    assert isinstance(loop, Tiles)
    found = [op for op in loop.step if isinstance(op, TmaLoad | CpAsync | CopyTile)]
    if len(found) != len(loop.step):
        raise PassError(f"synchronize: the loop of role {role.name} has ops that are no copies")
    return found


def hand_over(role: Role, kernel: Kernel) -> Role:
    """The load role with its waits and arrivals."""
    (loop,) = role.item.body
    assert isinstance(loop, Tiles)
    batches: list[list[Copy]] = []
    for op in copies(role):
        if op.when is None:
            batches.append([op])
        else:
            batches[-1].append(op)
    if all(isinstance(op, TmaLoad) for batch in batches for op in batch):
        step = steps_of("L", (x for batch in batches for op in batch for x in _engine(op, kernel)))
        return _with(role, loop, step)
    if any(isinstance(op, CpAsync) for batch in batches for op in batch):
        if len(batches) > 1:
            return _overlapped(role, loop, batches, kernel)
        return _with(role, loop, steps_of("L", (*_issued(batches[0]), *_arrived(batches[0]))))
    step = steps_of("L", (x for batch in batches for x in (*_claimed(batch), Proxy(id=""), *_full(batch))))
    return _with(role, loop, step)


def _with(role: Role, loop: Tiles, step: tuple[Step, ...]) -> Role:
    return dataclasses.replace(
        role, item=dataclasses.replace(role.item, body=(dataclasses.replace(loop, step=step),))
    )


def _bar(op: Copy, side: str) -> Ref:
    return Ref(name=f"{ring_of(op.dst.name)}.{side}", index=op.dst.index)


def _engine(op: Copy, kernel: Kernel) -> Iterator[AnyOp]:
    assert isinstance(op, TmaLoad)
    buffer = kernel.buffer(op.dst.name)
    assert buffer is not None
    yield MbarWait(id="", bar=_bar(op, "free"), when=op.when)
    yield MbarExpect(id="", bar=op.bar, bytes=buffer.layout.bytes, when=op.when)
    yield op


# ---- by threads ------------------------------------------------------------------------------------------------------


def _claimed(batch: Sequence[Copy]) -> Iterator[AnyOp]:
    for op in batch:
        yield MbarWait(id="", bar=_bar(op, "free"), when=op.when)
        yield op


def _full(batch: Sequence[Copy]) -> Iterator[AnyOp]:
    for op in batch:
        yield MbarArrive(id="", bar=_bar(op, "full"), each_thread=True, when=op.when)


def _group(batch: Sequence[Copy]) -> str:
    return ring_of(batch[0].dst.name)


def _issued(batch: Sequence[Copy]) -> Iterator[AnyOp]:
    yield from _claimed(batch)
    yield CpCommit(id="", group=_group(batch))


def _arrived(batch: Sequence[Copy]) -> Iterator[AnyOp]:
    yield CpWait(id="", group=_group(batch), pending=0)
    yield Proxy(id="")
    yield from _full(batch)


def _overlapped(role: Role, loop: Tiles, batches: Sequence[Sequence[Copy]], kernel: Kernel) -> Role:
    """The last batch of a step arrives with the first of the next one."""
    *firsts, late = batches
    (last,) = late  # of the item are only copies of the first batch
    buffer = kernel.buffer(last.dst.name)
    assert buffer is not None
    slots = buffer.slots

    def full(slot: Expr, when: Expr | None) -> MbarArrive:
        bar = dataclasses.replace(_bar(last, "full"), index=(slot,) if slots > 1 else ())
        return MbarArrive(id="", bar=bar, each_thread=True, when=when)

    step: list[AnyOp] = []
    for number, batch in enumerate(firsts):
        step += [*_issued(batch), *_arrived(batch)]
        if number == 0:
            step.append(full(PREVIOUS, make(Op.GT, T, const(0))))
    step += _issued(late)
    rest = [CpWait(id="", group=_group(late), pending=0), Proxy(id=""), full(LAST, None)]
    every = steps_of("L", [*step, *rest])
    lets, item_lets = loop.lets, role.item.lets
    if slots > 1:
        lets = (*lets, _let(PREVIOUS, make(Op.MOD, add(T, const(slots - 1)), const(slots))))
        item_lets = (*item_lets, _let(LAST, make(Op.MOD, sub(loop.ranges[-1].end, const(1)), const(slots))))
    body = (
        dataclasses.replace(loop, lets=lets, step=every[: len(step)]),
        Block(name="last", ops=every[len(step) :]),
    )
    return dataclasses.replace(role, item=dataclasses.replace(role.item, lets=item_lets, body=body))


def _let(name: Expr, value: Expr) -> Stmt:
    return Stmt(scope=Scope.ITEM, target=name.name, value=value)
