"""schedule: Program -> Schedule. Puts the ops of the loop in time, for a target with cp.async and mma.sync (one role).

Before   tile ops in the order of their definition
After    copies issued as early as their slot allows, one or two issue points a step; ops have their final order
Why      a copy may overwrite a slot once every warp has read it, which a CTA barrier says. In one stage, the tile
         read first is fetched a step ahead, behind the contraction that reads it; the other is fetched at the head of
         its own step, so that the first contraction hides it (FlashAttention-2's order, two barriers a step). In more,
         all copies of a later tile are issued at the head of the step (one barrier a step). cp.async groups complete in
         order, so a mixture would wait for the younger tile anyway."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from attngen.config import Config
from attngen.errors import PassError
from attngen.expr import DType, Expr, Op, add, const, make, substitute, var
from attngen.fold import fold
from attngen.ir.ops import (
    CopyTile,
    CpAsync,
    Fill,
    Heads,
    Map,
    MmaSync,
    Reduce,
    Ref,
    Scope,
    StFrag,
    Stmt,
    StRows,
    StTile,
)
from attngen.ir.ops import Op as AnyOp
from attngen.ir.program import ContractTile, LoadTile, Program, Space, StoreTile, StoreVector, TileLoop
from attngen.ir.schedule import (
    Block,
    Buffer,
    Classes,
    Fact,
    Item,
    Kernel,
    Order,
    Range,
    Role,
    Schedule,
    Step,
    Tiles,
    Value,
    Work,
    WorkSource,
)  # fmt: skip
from attngen.layout import SmemLayout, Swizzle
from attngen.signature import CP_ASYNC_BYTES, store_bytes
from attngen.target import Target

T = var("t", DType.I32)
STAGING = "sO"


Points = list[tuple[int, list[tuple[LoadTile, int]]]]


def issue_points(loop: TileLoop, stages: int) -> Points:
    """(position among the compute ops, the copies issued there with their distance in tiles)."""
    loads = [op for op in loop.body if isinstance(op, LoadTile)]
    compute = [op for op in loop.body if isinstance(op, AnyOp) and not isinstance(op, LoadTile)]
    if stages > 1 or len(loads) == 1:  # one tile alone has no reader before its own that could hide its copy
        return [(0, [(load, max(1, stages - 1)) for load in loads])]
    reader = {
        load.dst.name: next(i for i, op in enumerate(compute) if any(r.name == load.dst.name for r in op.reads()))
        for load in loads
    }
    first = min(reader.values())
    points: Points = [
        (first + 1, [(load, 1)]) if reader[load.dst.name] == first else (0, [(load, 0)]) for load in loads
    ]
    return sorted(points, key=lambda x: x[0])


def at(e: Expr, tile: Expr, n: Expr) -> Expr:
    """An expression of `n` for another tile counter."""
    return fold(substitute(e, {var("n", DType.I32): substitute(n, {T: tile})}))


class _Builder:
    def __init__(self, program: Program, alignment: int) -> None:
        self.program, self.alignment = program, alignment

    def copy(self, op_id: str, op: LoadTile, tile: Expr | None) -> AnyOp:
        when, row = None, op.row
        if tile is not None:
            row = at(op.row, tile, self.program.loop.tile)
            when = make(Op.LT, tile, self.program.loop.count)
        if self.alignment < CP_ASYNC_BYTES:
            return CopyTile(
                id=op_id, dst=op.dst, src=op.src, heads=op.heads, row=row, limit=op.limit, first=op.first, when=when
            )
        return CpAsync(
            id=op_id, dst=op.dst, src=op.src, heads=op.heads, row=row, limit=op.limit, first=op.first, when=when,
            bytes=self.alignment,
        )  # fmt: skip

    def compute(self, op_id: str, op: Step) -> AnyOp:
        if isinstance(op, ContractTile):
            return MmaSync(id=op_id, d=op.d, a=op.a, b=op.b, zero=op.zero)
        if not isinstance(op, Map | Reduce | Fill):
            raise PassError(f"schedule: {type(op).__name__} has no counterpart on this target")
        return dataclasses.replace(op, id=op_id)

    def prologue(self, points: Points) -> Iterator[AnyOp]:
        """Copies of the item, those that the steady state would have issued before the first step, then the rest."""
        number = 0
        for op in (x for x in self.program.prologue if isinstance(x, LoadTile)):
            number += 1
            yield self.copy(f"P{number}", op, None)
        for tile in range(max(distance for _, loads in points for _, distance in loads)):
            for load in (x for _, loads in points for x, distance in loads if tile < distance):
                number += 1
                yield self.copy(f"P{number}", load, const(tile))
        for rest in (x for x in self.program.prologue if not isinstance(x, LoadTile)):
            number += 1
            yield self.compute(f"P{number}", rest)

    def step(self, points: Points) -> Iterator[AnyOp]:
        compute = [op for op in self.program.loop.body if not isinstance(op, LoadTile)]
        number = 0
        for position, op in enumerate(compute):
            for load, distance in (x for p, loads in points if p == position for x in loads):
                number += 1
                yield self.copy(f"S{number}", load, add(T, const(distance)) if distance else T)
            number += 1
            yield self.compute(f"S{number}", op)

    def epilogue(self) -> Iterator[AnyOp]:
        number = 0
        for op in self.program.epilogue:
            number += 1
            if isinstance(op, StoreTile):
                yield StFrag(id=f"E{number}", dst=Ref(name=STAGING), src=op.src, scaled=op.scaled)
                number += 1
                yield StTile(
                    id=f"E{number}", dst=op.dst, src=Ref(name=STAGING), heads=Heads.Q, row=op.row, limit=op.limit,
                    bytes=store_bytes(self.program.head_dim_v),
                )  # fmt: skip
            elif isinstance(op, StoreVector):
                yield StRows(id=f"E{number}", dst=op.dst, src=op.src, heads=Heads.Q, limit=op.limit)
            else:
                yield self.compute(f"E{number}", op)

    def buffers(self) -> tuple[Buffer, ...]:
        shared = [v for v in self.program.values if v.space is Space.SHARED]
        result = [Buffer(name=v.name, elem=v.elem, layout=v.layout) for v in shared if v.layout]
        stored = next(op for op in self.program.epilogue if isinstance(op, StoreTile))
        source = self.program.value(stored.src.name)
        assert source is not None
        layout = SmemLayout(source.rows, source.cols, 2, Swizzle.XOR)
        return (*result, Buffer(name=STAGING, elem=shared[0].elem, layout=layout))

    def values(self) -> tuple[Value, ...]:
        rows = self.program.config.warp_rows
        return tuple(
            Value(name=v.name, fragment=v.fragment, dtype=v.dtype, rows=rows, cols=v.cols,
                  rows_axis=v.axes[0], cols_axis=v.axes[1] or "N")
            for v in self.program.values if v.fragment is not None
        )  # fmt: skip


def schedule(program: Program, target: Target, alignment: int, facts: tuple[Fact, ...]) -> Schedule:
    config = program.config
    assert isinstance(config, Config)
    b = _Builder(program, alignment)
    points = issue_points(program.loop, config.stages)
    loop = program.loop
    tiles = Tiles(
        var="t", start=0, ranges=tuple(Range(cls=c, end=e) for c, e in zip(loop.classes, loop.ends, strict=True)),
        lets=(Stmt(scope=Scope.ITEM, target="n", value=loop.tile),), step=tuple(b.step(points)), classes=Classes.BRANCH,
    )  # fmt: skip
    item = Item(
        lets=program.lets,
        body=(
            Block(name="prologue", ops=tuple(b.prologue(points))),
            tiles,
            Block(name="epilogue", ops=tuple(b.epilogue())),
        ),
    )
    role = Role(name="math", first_warp=0, warps=config.warps, regs=255, values=b.values(), item=item)
    kernel = Kernel(
        name=program.name, threads=config.threads, min_ctas=config.min_ctas,
        work=Work(source=WorkSource.GRID, order=Order.LONGEST_FIRST, block_m=config.block_m),
        tensors=program.tensors, scalars=program.scalars, buffers=b.buffers(), roles=(role,),
    )  # fmt: skip
    order = (
        "FlashAttention-2's: K of the next tile behind QK, V at the head of its step, two barriers a step"
        if config.stages == 1
        else f"copies run {config.stages - 1} tiles ahead, issued at the head of the step, one barrier a step"
    )  # fmt: skip
    return Schedule(
        name=program.name, target=target.name, kernels=(kernel,), workspaces=program.workspaces,
        head_dim_qk=program.head_dim_qk, head_dim_v=program.head_dim_v,
        facts=(*facts, *program.facts, Fact(subject="order", text=order)),
    )  # fmt: skip
