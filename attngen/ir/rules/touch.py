"""Which parts of shared memory and workspaces an op touches, through which unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

from attngen.expr import variables
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref
from attngen.ir.rules.case import Case, ops
from attngen.ir.schedule import Kernel
from attngen.ir.walk import tiles_of

Key = tuple[str, int]  # a buffer and its slot


class Touch(Enum):
    """Which part of a tile an agent touches: its own rows, its own chunks of a cooperative copy, or anything."""

    OWN = "own"
    CHUNKS = "chunks"
    ALL = "all"


PLACE = frozenset({"b", "h", "m"})  # of an item: the same in all of its steps

_Use = tuple[Ref, Touch, bool, str]


def accesses(op: Op, case: Case) -> Iterator[_Use]:
    """(what, which part, written, unit: empty for the warp itself) for the shared memory and workspaces of an op."""
    shared: Callable[[Ref], bool] = lambda r: r.name in case.buffers  # noqa: E731
    match op:
        case o.CpAsync() | o.CpVector():
            yield op.dst, Touch.CHUNKS, True, "cp"
        case o.CopyTile():
            yield op.dst, Touch.CHUNKS, True, ""
        case o.TmaLoad() | o.BulkLoad():
            yield op.dst, Touch.ALL, True, "tma"
        case o.TmaStore() | o.TmaReduce():
            yield op.src, Touch.ALL, False, "bulk"
        case o.Wgmma():
            yield from ((r, Touch.ALL, False, "wgmma") for r in (op.a, op.b) if shared(r))
        case o.MmaSync():
            own = Touch.ALL if op.a.transposed else Touch.OWN
            yield from ((r, t, False, "") for r, t in ((op.a, own), (op.b, Touch.ALL)) if shared(r))
        case o.StFrag():
            yield op.dst, Touch.OWN, True, ""
        case o.Ldmatrix() | o.LdFrag():
            yield op.src, Touch.OWN, False, ""
        case o.LdVec() | o.StTile():
            yield op.src, Touch.ALL, False, ""
        case o.Map():
            yield from ((r, Touch.ALL, False, "") for r in op.copies if shared(r))
        case o.ScanTiles():
            yield Ref(name=op.dst), Touch.OWN, True, ""
        case o.CompactTiles():
            yield Ref(name=op.src), Touch.ALL, False, ""
            yield Ref(name=op.dst), Touch.OWN, True, ""
        case o.RankTile():  # its lists are an earlier kernel's
            yield Ref(name=op.dst), Touch.OWN, True, ""
        case o.SortItems():
            yield op.keys, Touch.OWN, True, ""
        case o.DealItems():
            yield op.loads, Touch.OWN, True, ""


def loaded_bytes(op: Op, case: Case) -> int:
    if isinstance(op, o.BulkLoad):
        return op.bytes
    assert isinstance(op, o.TmaLoad)
    return case.buffers[op.dst.name].layout.bytes


def overlaps(kernel: Kernel) -> dict[Key, tuple[Key, ...]]:
    """Tiles of different buffers that share bytes."""
    spans = {
        (b.name, s): (b.offset + s * b.layout.bytes, b.offset + (s + 1) * b.layout.bytes)
        for b in kernel.buffers if b.offset is not None for s in range(b.slots)
    }  # fmt: skip
    return {
        key: tuple(k for k, (start, end) in spans.items() if k[0] != key[0] and start < mine[1] and mine[0] < end)
        for key, mine in spans.items()
    }


def streamed(kernel: Kernel) -> frozenset[str]:
    """Buffers that hold another tile in each step: their copies depend on the tile counter or on the tiles of the
    item."""
    result: set[str] = set()
    for role in kernel.roles:
        lets = {s.target: s.value for s in role.item.lets}
        names: set[str] = set()
        for loop in tiles_of(role):
            last = variables(loop.ranges[-1].end)
            names |= {loop.var, *(s.target for s in loop.lets), *last}
            names |= {v for n in last & set(lets) for v in variables(lets[n]) & set(lets)} - PLACE
        for op in ops(role):
            if isinstance(op, o.CpAsync | o.CpVector | o.CopyTile | o.TmaLoad) and variables(op.row) & names:
                result.add(op.dst.name)
    return frozenset(result)
