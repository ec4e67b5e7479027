"""schedule_sums: Program -> Kernel. Puts a loop of plain sums in time, for a target with cp.async and mma.sync.

Before   tile ops in the order of their definition
After    one issue point at the head of a step, from which the streamed tiles of a later step are fetched; parts of
         sums over the owned axis last, when the tiles of scores are dead
Needs    two stages or more
Why      a streamed tile is read first by a product of scores and last by a sum, so its slot is free at the end of a
         step: what is fetched ahead needs another slot"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from attngen.config import Config
from attngen.errors import PassError
from attngen.expr import DType, Expr, Op, add, const, make, substitute, var
from attngen.fold import fold
from attngen.ir.ops import (
    Assign,
    CopyTile,
    CpAsync,
    CpVector,
    Fill,
    Heads,
    Map,
    MmaSync,
    RedAdd,
    Reduce,
    Ref,
    StFrag,
    Stmt,
    StRows,
    StTile,
)  # fmt: skip
from attngen.ir.ops import Op as AnyOp
from attngen.ir.program import (
    AddTile,
    ContractTile,
    LoadTile,
    LoadVector,
    Program,
    Space,
    StageTile,
    StoreTile,
    StoreVector,
)
from attngen.ir.schedule import (
    Block,
    Buffer,
    Classes,
    Item,
    Kernel,
    Order,
    Range,
    Role,
    Step,
    Tiles,
    Value,
    Work,
    WorkSource,
)  # fmt: skip
from attngen.layout import SmemLayout, Swizzle
from attngen.passes.choose_sums import part_shapes

T = var("t", DType.I32)


def moved(place: tuple[Stmt, ...], tile: Expr, suffix: str) -> tuple[tuple[Stmt, ...], dict[Expr, Expr]]:
    """Where the step of another counter is: statements with names of their own, and these names."""
    names = {var(s.target, s.value.dtype): var(s.target + suffix, s.value.dtype) for s in place}
    values = {T: tile, **names}
    return tuple(dataclasses.replace(s, target=s.target + suffix, value=fold(substitute(s.value, values)))
                 for s in place), names  # fmt: skip


class _Builder:
    def __init__(self, program: Program, aligned: bool) -> None:
        self.program, self.aligned = program, aligned
        self.loads = [op for op in program.loop.body if isinstance(op, LoadTile | LoadVector)]
        assert isinstance(program.config, Config)
        self.config = program.config
        self.distance = self.config.stages - 1
        if self.distance < 1:
            raise PassError(f"schedule_sums: {program.name} has stages={self.config.stages}. Allowed: 2 to 4")

    def copy(self, op_id: str, op: LoadTile | LoadVector, tile: Expr | None, names: dict[Expr, Expr]) -> AnyOp:
        when = None if tile is None else make(Op.LT, tile, self.program.loop.count)
        head = None if op.head is None else substitute(op.head, names)
        if isinstance(op, LoadVector):
            return CpVector(id=op_id, dst=op.dst, src=op.src, row=substitute(op.row, names), limit=op.limit, head=head,
                            when=when)  # fmt: skip
        kind = CpAsync if self.aligned else CopyTile
        return kind(id=op_id, dst=op.dst, src=op.src, heads=op.heads, row=substitute(op.row, names), limit=op.limit,
                    first=op.first, head=head, when=when)  # fmt: skip

    def compute(self, op_id: str, op: Step) -> AnyOp:
        if isinstance(op, ContractTile):
            return MmaSync(id=op_id, d=op.d, a=op.a, b=op.b, zero=op.zero)
        if isinstance(op, StageTile):
            return StFrag(id=op_id, dst=op.dst, src=op.src)
        if isinstance(op, AddTile):
            return RedAdd(id=op_id, dst=op.dst, src=op.src, heads=op.heads, row=op.row,
                          mode=Assign.REDUCE_ADD)  # fmt: skip
        if not isinstance(op, Map | Reduce | Fill):
            raise PassError(f"schedule_sums: {type(op).__name__} has no counterpart on this target")
        return dataclasses.replace(op, id=op_id)

    def ahead(self) -> tuple[tuple[Stmt, ...], ...]:
        """Places of the tiles that are fetched before the loop."""
        return tuple(moved(self.program.loop.place, const(tile), f"_{tile}")[0] for tile in range(self.distance))

    def prologue(self) -> Iterator[AnyOp]:
        ops: list[AnyOp] = [self.copy("", op, None, {}) for op in self.program.prologue if isinstance(op, LoadTile)]
        for tile in range(self.distance):
            names = moved(self.program.loop.place, const(tile), f"_{tile}")[1]
            ops += [self.copy("", load, const(tile), names) for load in self.loads]
        ops += [self.compute("", op) for op in self.program.prologue if not isinstance(op, LoadTile)]
        return (dataclasses.replace(op, id=f"P{n + 1}") for n, op in enumerate(ops))

    def step(self) -> tuple[tuple[Stmt, ...], tuple[AnyOp, ...]]:
        """Scalars and ops of a step."""
        loop, lets = self.program.loop, self.program.loop.place
        tile = add(T, const(self.distance))
        more, names = moved(loop.place, tile, "_next")
        lets = (*lets, *more)
        ops = [self.copy("", load, tile, names) for load in self.loads]
        ops += [self.compute("", op) for op in loop.body if not isinstance(op, LoadTile | LoadVector)]
        return (*lets, *loop.lets), tuple(dataclasses.replace(op, id=f"S{n + 1}") for n, op in enumerate(ops))

    def epilogue(self) -> Iterator[AnyOp]:
        """All tiles are staged between the same two barriers: each has a staging buffer of its own."""
        stores = [op for op in self.program.epilogue if isinstance(op, StoreTile)]
        ops: list[AnyOp] = [
            self.compute("", op) for op in self.program.epilogue if not isinstance(op, StoreTile | StoreVector)
        ]
        ops += [
            StRows(id="", dst=op.dst, src=op.src, heads=Heads.Q, limit=op.limit)
            for op in self.program.epilogue if isinstance(op, StoreVector)
        ]  # fmt: skip
        ops += [StFrag(id="", dst=Ref(name=staging(op)), src=op.src, scaled=op.scaled) for op in stores]
        ops += [
            StTile(id="", dst=op.dst, src=Ref(name=staging(op)), heads=op.heads, row=op.row, limit=op.limit)
            for op in stores
        ]
        return (dataclasses.replace(op, id=f"E{n + 1}") for n, op in enumerate(ops))

    def buffers(self) -> tuple[Buffer, ...]:
        shared = [v for v in self.program.values if v.space is Space.SHARED]
        result = [Buffer(name=v.name, elem=v.elem, layout=v.layout) for v in shared if v.layout]
        elem = next(v.elem for v in shared if v.cols)  # of tiles; vectors are float32
        for op in self.program.epilogue:
            if isinstance(op, StoreTile):
                source = self.program.value(op.src.name)
                assert source is not None
                layout = SmemLayout(source.rows, source.cols, 2, Swizzle.XOR)
                result.append(Buffer(name=staging(op), elem=elem, layout=layout))
        return tuple(result)

    def values(self) -> tuple[Value, ...]:
        rows, warps = self.config.warp_rows, self.config.warps
        parts = {op.src.name for op in self.program.loop.body if isinstance(op, AddTile)}
        result = []
        for v in self.program.values:
            if v.fragment is not None:
                mine, cols = rows, v.cols
                if v.name in parts:
                    mine, cols = part_shapes(v.rows, v.cols, warps)[0]
                result.append(Value(name=v.name, fragment=v.fragment, dtype=v.dtype, rows=mine, cols=cols,
                                    rows_axis=v.axes[0], cols_axis=v.axes[1] or "N"))  # fmt: skip
        return tuple(result)


def staging(op: StoreTile) -> str:
    return f"s{op.dst[0].lower()}{op.dst[1:].capitalize()}"


def schedule_sums(program: Program, aligned: bool) -> Kernel:
    b = _Builder(program, aligned)
    loop, config = program.loop, b.config
    lets, step = b.step()
    tiles = Tiles(
        var="t", start=0, ranges=tuple(Range(cls=c, end=e) for c, e in zip(loop.classes, loop.ends, strict=True)),
        lets=lets, step=step, classes=Classes.BRANCH,
    )  # fmt: skip
    body = (Block(name="prologue", ops=tuple(b.prologue())), tiles, Block(name="epilogue", ops=tuple(b.epilogue())))
    item = Item(lets=(*program.lets, *(s for place in b.ahead() for s in place)), body=body)
    keys = next(v for v in program.values if v.fragment is not None).axes[0] == "N"
    return Kernel(
        name=program.name, threads=config.threads, min_ctas=config.min_ctas,
        work=Work(source=WorkSource.GRID_KEYS if keys else WorkSource.GRID,
                  order=Order.ASCENDING if keys else Order.LONGEST_FIRST, block_m=config.block_m),
        tensors=program.tensors, scalars=program.scalars, buffers=b.buffers(),
        roles=(Role(name="math", first_warp=0, warps=config.warps, regs=255, values=b.values(), item=item),),
    )  # fmt: skip
