"""stage_sums: Program -> Kernel. Puts a loop of plain sums into steps, and what crosses the warps into roles.

Before   tile ops in the order of their definition
After    a loading role, math roles of 64 owned rows each, and where the owned axis is contracted too a role that makes
         the parts of that sum from tiles which the math roles leave in shared memory, and adds them up in memory.
         Products that follow the last map belong to the tile of the step before: they are issued with the first
         product of this tile. What exists once a tile is indexed by the tile's counter: `sQ[t]`, `sQ[t - 1]`
Why      the weights of a tile are ready at the end of its step. Whatever waits for them runs beside the next tile's
         scores, and a product into memory needs registers of its own, which a role of its own has"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby, takewhile

from attngen.config import HopperSumsConfig
from attngen.errors import PassError, SignatureError
from attngen.expr import SEQLEN_K, Expr, H, Op, add, const, make, mul, sub, substitute, var, where
from attngen.fold import fold
from attngen.ir.ops import (
    Assign,
    BulkCommit,
    BulkLoad,
    BulkRetire,
    Completion,
    Fill,
    Heads,
    Map,
    Proxy,
    RedFrag,
    Reduce,
    Ref,
    Scope,
    StFrag,
    Stmt,
    StRows,
    Sync,
    TmaLoad,
    TmaStore,
    Wgmma,
)
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
)  # fmt: skip
from attngen.ir.schedule import (
    Barrier,
    Block,
    Buffer,
    Classes,
    Item,
    Kernel,
    Range,
    Role,
    Step,
    Tiles,
    Value,
    Work,
    WorkSource,
)  # fmt: skip
from attngen.layout import Fragment, Swizzle, blocks
from attngen.passes.hopper.allocate import names
from attngen.passes.hopper.stage import GROUP_THREADS, OUTPUT_TURN, STAGING, T, W, order_of, ring_of, steps_of
from attngen.passes.hopper.sum_room import (
    BARRIERS,
    STAGED,
    least_staging,
    part_rows,
    pieces,
    role_registers,
    shared_accumulators,
    staging,
)  # fmt: skip
from attngen.passes.ranges import TileClass
from attngen.passes.visits import ROWS_A_GROUP, i32
from attngen.target import Target

LAST = sub(T, const(1))
LOAD, SHED, MATH = "load", "shed", "math"
OWN_ROW = "own_row"
FIRST = make(Op.EQ, T, const(0))


@dataclasses.dataclass(frozen=True)
class Part:
    """A block of a tile that is added up in memory: rows `row`.. of the streamed tile, columns `column`.."""

    row: int
    column: int
    width: int


class SumStager:
    def __init__(self, program: Program, target: Target) -> None:
        self.program, self.target = program, target
        assert isinstance(program.config, HopperSumsConfig)
        self.config = program.config
        body = program.loop.body
        self.loads = [op for op in body if isinstance(op, LoadTile | LoadVector)]
        self.item_loads = [op for op in program.prologue if isinstance(op, LoadTile)]
        # what follows a staged tile is work of another role
        self.shed = [op for op in body if isinstance(op, AddTile) or op in _of_staged(body)]
        self.body = [op for op in body if op not in self.shed and not isinstance(op, LoadTile | LoadVector)]

    # ---- tiles as indices ------------------------------------------------------------------------------------------

    @cached_property
    def per_tile(self) -> set[str]:
        return {op.dst.name for op in self.loads} | {op.dst.name for op in self.body if isinstance(op, StageTile)}

    def ref(self, r: Ref, tile: Expr) -> Ref:
        if r.name in self.per_tile:
            return dataclasses.replace(r, index=(tile,))
        item = any(op.dst.name == r.name for op in self.item_loads)
        return dataclasses.replace(r, index=(W,)) if item and not r.transposed else r

    def at_tile(self, op: Step, tile: Expr) -> AnyOp:
        match op:
            case ContractTile():
                # an owned tile is read whole where it is the right operand
                b = op.b if op.b.name not in self.per_tile else self.ref(op.b, tile)
                return Wgmma(id="", d=op.d, a=self.ref(op.a, tile), b=b, group=f"g_{op.d.name}", zero=op.zero)
            case Map():
                return dataclasses.replace(op, copies=tuple(self.ref(r, tile) for r in op.copies))
            case StageTile():
                dst = dataclasses.replace(op.dst, index=(tile, W))
                return StFrag(id="", dst=dst, src=op.src)
            case Reduce() | Fill():
                return op
            case _:
                raise PassError(f"stage_sums: {type(op).__name__} has no counterpart on this target")

    # ---- the math role ---------------------------------------------------------------------------------------------

    @cached_property
    def late(self) -> list[ContractTile]:
        """Products behind the last map."""
        last = max((k for k, op in enumerate(self.body) if isinstance(op, Map)), default=-1)
        return [op for op in self.body[last + 1 :] if isinstance(op, ContractTile)]

    def math_body(self) -> tuple[Block, Tiles, Block]:
        now = [op for op in self.body if op not in self.late]
        heads = next((k for k, op in enumerate(now) if not isinstance(op, ContractTile)), len(now))
        step = [self.at_tile(op, T) for op in now[:heads]]
        step += [self.at_tile(op, LAST) for op in self.late]
        step += [self.at_tile(op, T) for op in now[heads:]]
        weakest = self.program.loop.classes[0]
        start = [op for op in self.program.prologue if not isinstance(op, LoadTile)]
        first = [self.at_tile(op, const(0)) for op in (*start, *now) if not op.only or op.only == weakest]
        first = [dataclasses.replace(op, only="") for op in first]
        loop = self.program.loop
        ranges = tuple(
            Range(cls=c, end=e, whole=c == TileClass.FULL.value) for c, e in zip(loop.classes, loop.ends, strict=True)
        )
        lets = self.place(T)
        if not self.named(op for op in step if op.only != weakest) & {s.target for s in lets}:
            # where a step is matters to masked tiles alone, which are few: no registers for it in the loop
            step, lets = [self.afresh(op, lets) if op.only else op for op in step], ()
        tiles = Tiles(
            var="t", start=1, ranges=ranges, lets=lets, step=steps_of("S", by_class(step)), classes=Classes.BRANCH,
            drain=steps_of("D", [self.at_tile(op, LAST) for op in self.late]),
        )  # fmt: skip
        epilogue = [op for op in self.program.epilogue if not isinstance(op, StoreTile | StoreVector)]
        stores = steps_of("E", [*(self.at_tile(op, T) for op in epilogue), *self.stores()])
        return Block(name="peel", ops=steps_of("P", first)), tiles, Block(name="store", ops=stores)

    def named(self, steps: Iterable[Step]) -> set[str]:
        """Scalars that ops read, by name or by the index of an element."""
        found = {n for op in steps for n in names(op)}
        return found | {tile for index, tile in (("i", "m"), ("j", "n")) if index in found}

    def afresh(self, op: AnyOp, lets: tuple[Stmt, ...]) -> AnyOp:
        """A map that works out itself what it needs to know of its tile."""
        wanted, kept = self.named([op]), list[Stmt]()
        for s in reversed((*self.program.lets, *lets)):
            if s.target in wanted and (s in lets or any(k in lets for k in kept)):
                wanted |= set(names(s.value))
                kept.append(s)
        if not isinstance(op, Map) or not kept:
            return op
        return dataclasses.replace(op, body=(*kept[::-1], *op.body))

    def place(self, tile: Expr) -> tuple[Stmt, ...]:
        """Where a step is, and its scalars."""
        loop = self.program.loop
        place = tuple(dataclasses.replace(s, value=fold(substitute(s.value, {T: tile}))) for s in loop.place)
        return (*place, *loop.lets)

    def stores(self) -> Iterator[AnyOp]:
        for op in self.program.epilogue:
            if isinstance(op, StoreVector):
                yield StRows(id="", dst=op.dst, src=op.src, heads=Heads.Q, limit=op.limit)
        for op in self.program.epilogue:
            if not isinstance(op, StoreTile):
                continue
            value = self.program.value(op.src.name)
            assert value is not None
            row = add(op.row, mul(W, const(ROWS_A_GROUP)))
            turn, staging = Ref(name=OUTPUT_TURN, index=(W,)), Ref(name=STAGING, index=(W,))
            for piece in range(-(-value.cols // self.piece)):
                source = op.src if value.cols <= self.piece else dataclasses.replace(op.src, cols=const(piece))
                yield BulkRetire(id="", pending=0, until=Completion.READ)
                yield Sync(id="", bar=turn, threads=GROUP_THREADS)
                yield StFrag(id="", dst=staging, src=source, scaled=op.scaled)
                yield Proxy(id="")
                yield Sync(id="", bar=turn, threads=GROUP_THREADS)
                yield TmaStore(id="", dst=op.dst, src=staging, heads=op.heads, row=row, column=piece * self.piece)
                yield BulkCommit(id="")

    @cached_property
    def piece(self) -> int:
        """Columns of an output tile that leave at once: the most that memory holds."""
        room = self.room(self.tiles())
        fits = (n for n in pieces(self.widths()) if staging(self.config.block_m, n).bytes <= room)
        piece = next(fits, None)
        if piece is None:
            raise PassError(f"stage_sums: {self.program.name} with {self.config} leaves {room} bytes for its output")
        return piece

    def widths(self) -> list[int]:
        values = (self.program.value(op.src.name) for op in self.program.epilogue if isinstance(op, StoreTile))
        return [v.cols for v in values if v is not None]

    # ---- the role of what is added up in memory --------------------------------------------------------------------

    def parts(self) -> tuple[Part, ...]:
        """Blocks of at most 64 rows, and of powers of two of columns."""
        adds = [op for op in self.shed if isinstance(op, AddTile)]
        values = [v for op in adds for v in [self.program.value(op.src.name)] if v is not None]
        return tuple(
            Part(row, column, width)
            for v in values for row in range(0, v.rows, self.part_rows)
            for column, width in blocks(v.cols)
        )  # fmt: skip

    @property
    def part_rows(self) -> int:
        return part_rows(self.config.block_n)

    def accumulators(self) -> dict[str, int]:
        """Values of the parts, and their columns."""
        (op,) = (op for op in self.shed if isinstance(op, AddTile))
        parts = self.parts()
        names = shared_accumulators([p.width for p in parts])
        return {f"{op.src.name}{name}": part.width for name, part in zip(names, parts, strict=True)}

    def shed_step(self) -> Iterator[AnyOp]:
        """A product and what it adds, block by block."""
        product, adding = self.shed
        assert isinstance(product, ContractTile) and isinstance(adding, AddTile)
        value, parts = self.program.value(product.d.name), self.parts()
        assert value is not None
        rows = len({p.row for p in parts})
        for part, name in zip(parts, shared_accumulators([p.width for p in parts]), strict=True):
            d, a, b = Ref(name=f"{product.d.name}{name}"), self.ref(product.a, T), product.b
            if rows > 1:
                a = dataclasses.replace(a, cols=const(part.row // self.part_rows))
            if part.width != value.cols:
                b = dataclasses.replace(b, cols=const(part.column // part.width))
            yield Wgmma(id="", d=d, a=a, b=b, group=f"g_{d.name}", zero=True)
            at = add(mul(adding.row, const(value.cols)), const(part.row * value.cols + part.column * self.part_rows))
            yield RedFrag(id="", dst=adding.dst, src=d, heads=adding.heads, at=fold(at), mode=Assign.REDUCE_ADD,
                          rows=self.part_rows)  # fmt: skip

    def shed_role(self, regs: int) -> Role:
        values = tuple(
            Value(name=name, fragment=Fragment.ACC, dtype="f32", rows=16, cols=width, rows_axis="M", cols_axis="D")
            for name, width in self.accumulators().items()
        )  # fmt: skip
        loop, lets, ahead = self.program.loop, self.program.lets, list[AnyOp]()
        place, body = self.place(T), list[Block | Tiles]()
        if self.config.merged:
            distance = self.config.slots - 1
            first = [self.copies(const(n), make(Op.LT, const(n), loop.count), f"_{n}") for n in range(distance)]
            lets = (*lets, *self.own_row(), *(s for stated, _ in first for s in stated))
            items = [self.load(op, item=True) for op in self.item_loads]
            copies = [op for _, ops in first for op in ops]
            # what the first products need comes first
            soon = len(first[0][1]) if self.together else 1
            order = [*items[:1], *copies[:soon], *items[1:], *copies[soon:]]
            body.append(Block(name="first", ops=steps_of("L", (dataclasses.replace(op, when=None) if op in items else op
                                                               for op in order))))  # fmt: skip
            tile = add(T, const(distance))
            stated, ahead = self.copies(tile, make(Op.LT, tile, loop.count), "_next")
            place = (*place, *stated)
        step = list(self.shed_step())
        # copies beside the first products; with two slots before them, as the tile is needed a step later
        beside = next(k for k, op in enumerate(step) if not isinstance(op, Wgmma)) if self.config.slots > 2 else 0
        tiles = Tiles(
            var="t", start=0, ranges=(Range(cls="all", end=loop.count),), lets=place,
            step=steps_of("R", [*step[:beside], *ahead, *step[beside:]]), classes=Classes.BRANCH,
        )  # fmt: skip
        return Role(name=SHED, first_warp=0 if self.config.merged else 4, warps=4, regs=regs, values=values,
                    item=Item(lets=lets, body=(*body, tiles)))  # fmt: skip

    def copies(self, tile: Expr, when: Expr, suffix: str) -> tuple[tuple[Stmt, ...], list[AnyOp]]:
        """The copies of a tile, and where it is, under names of its own."""
        stated = self.place(tile)
        own = {var(s.target, s.value.dtype): var(s.target + suffix, s.value.dtype) for s in stated}
        lets = tuple(dataclasses.replace(s, target=s.target + suffix, value=substitute(s.value, own)) for s in stated)
        made: list[AnyOp] = []
        for op in self.load_tiles().step:
            assert isinstance(op, TmaLoad | BulkLoad)
            if op.when is not None:  # of the item
                continue
            head = own.get(H) if op.heads is Heads.Q else None
            dst, bar = (dataclasses.replace(r, index=(tile,)) for r in (op.dst, op.bar))
            moved = dataclasses.replace(op, dst=dst, bar=bar, head=head, when=when)
            if isinstance(moved, TmaLoad):
                made.append(dataclasses.replace(moved, row=substitute(moved.row, own)))
            else:
                made.append(dataclasses.replace(moved, at=substitute(moved.at, own)))
        return lets, made

    def kept(self) -> set[str]:
        """Streamed tiles that products of the next step read."""
        return {op.b.name for op in self.late}

    # ---- the load role ---------------------------------------------------------------------------------------------

    def load_tiles(self) -> Tiles:
        """In the order in which the first tile needs them."""
        reads = [r.name for op in self.body if isinstance(op, ContractTile) for r in (op.a, op.b)]
        tiles = sorted((op for op in self.loads if isinstance(op, LoadTile)), key=lambda op: reads.index(op.dst.name))
        items = sorted(self.item_loads, key=lambda op: reads.index(op.dst.name))
        vectors = [op for op in self.loads if isinstance(op, LoadVector)]
        # vectors travel with a tile that is kept until the next step: a product hands both back
        kept = self.kept()
        carrier = next((op for op in tiles if op.dst.name in kept), None)
        ops: list[AnyOp] = []
        for n in range(max(len(tiles), len(items))):
            ops += [self.load(op, item=True) for op in items[n : n + 1]]
            ops += [self.load(op) for op in tiles[n : n + 1]]
            if carrier is not None and tiles[n : n + 1] == [carrier]:
                bar = Ref(name=f"{ring_of(self.carrier(carrier))}.full", index=(T,))
                ops += [
                    BulkLoad(id="", dst=dataclasses.replace(v.dst, index=(T,)), src=v.src, heads=Heads.Q, at=v.row,
                             bytes=4 * self.config.block_n, bar=bar)
                    for v in vectors
                ]  # fmt: skip
        return Tiles(
            var="t", start=0, ranges=(Range(cls="all", end=self.program.loop.count),), lets=self.place(T),
            step=steps_of("L", ops),
        )  # fmt: skip

    @property
    def together(self) -> bool:
        """Two steps ahead, the copies of a tile have one barrier: they have come long before they are needed, and no
        wait stands between a map and the turn behind it. Without turns two are measured to be better: 0.98."""
        return self.config.merged and self.config.slots > 2 and self.config.turns

    def carrier(self, op: LoadTile) -> str:
        """The streamed tile whose ring another one has."""
        return next(x.dst.name for x in self.loads if isinstance(x, LoadTile)) if self.together else op.dst.name

    def load(self, op: LoadTile, item: bool = False) -> TmaLoad:
        dst = op.dst if item else dataclasses.replace(op.dst, index=(T,))
        bar = Ref(name=f"{ring_of(op.dst.name if item else self.carrier(op))}.full", index=dst.index)
        row = i32(OWN_ROW) if item else op.row
        return TmaLoad(id="", dst=dst, src=op.src, heads=op.heads, row=row, bar=bar, when=FIRST if item else None)

    def own_row(self) -> tuple[Stmt, ...]:
        """Where the owned tiles start; nothing if no product reads one. Keys that nothing sees have a part of 0: they
        are zeros from behind the last row, since 0 times what they hold may not be 0."""
        if not self.item_loads:
            return ()
        row, visited = self.item_loads[0].row, self.program.loop.visited
        if visited is not None:
            row = where(make(Op.LT, const(0), visited), row, SEQLEN_K)
        return (Stmt(scope=Scope.ITEM, target=OWN_ROW, value=row),)

    # ---- declarations ----------------------------------------------------------------------------------------------

    def tiles(self) -> tuple[Buffer, ...]:
        """Tiles and vectors in shared memory, in as many slots as the configuration says."""
        slots = {op.dst.name: self.config.slots for op in self.loads}
        if self.config.short:
            kept = self.kept()
            slots |= {op.dst.name: self.config.slots - 1 for op in self.loads
                      if isinstance(op, LoadTile) and op.dst.name not in kept}  # fmt: skip
        values = [v for v in self.program.values if v.space is Space.SHARED]
        crossing = {op.dst.name for op in self.body if isinstance(op, StageTile)}
        least = least_staging(self.config.block_m, self.widths())
        for staged in (STAGED, 1):
            slots |= dict.fromkeys(crossing, staged)
            found = tuple(Buffer(name=v.name, elem=v.elem, layout=v.layout, slots=slots.get(v.name, 1))
                          for v in values if v.layout is not None)  # fmt: skip
            if self.room(found) >= least:
                break
        return found

    def room(self, tiles: tuple[Buffer, ...]) -> int:
        """Bytes of shared memory that tiles leave for an output."""
        return self.target.smem_per_cta - sum(b.bytes for b in tiles) - BARRIERS

    def buffers(self) -> tuple[Buffer, ...]:
        tiles = self.tiles()
        whole = list(tiles)
        if any(isinstance(op, StoreTile) for op in self.program.epilogue):  # else all is added at elements
            elem = next(b.elem for b in tiles if b.layout.swizzle is Swizzle.B128)
            whole.append(Buffer(name=STAGING, elem=elem, layout=staging(self.config.block_m, self.piece)))
        # swizzled tiles first: they start at multiples of 1024 bytes
        return tuple(sorted(whole, key=lambda b: -b.layout.align))

    def values(self) -> tuple[Value, ...]:
        rows = self.config.warp_rows
        parts = {op.src.name for op in self.shed if isinstance(op, AddTile)}
        return tuple(
            Value(name=v.name, fragment=v.fragment, dtype=v.dtype, rows=rows if v.rows else 0, cols=v.cols,
                  rows_axis=v.axes[0] or "M", cols_axis=v.axes[1] or "N")
            for v in self.program.values if v.fragment is not None and v.name not in parts
        )  # fmt: skip

    def registers(self) -> tuple[int, int, int]:
        held = sum(w // 2 for w in self.accumulators().values()) if self.shed else None
        return role_registers(self.config.warpgroups, held, self.target, self.config.merged)


def by_class(step: Sequence[AnyOp]) -> list[AnyOp]:
    """What stores the result of the maps of the classes, once in each class: behind the branches, the compiler would
    begin it when all of the map is done."""
    ordered: list[AnyOp] = []
    runs = [(own, list(run)) for own, run in groupby(step, key=lambda op: bool(op.only))]
    for (own, run), (_, behind) in zip(runs, [*runs[1:], (False, [])], strict=True):
        if not own:
            ordered += run
            continue
        stores = list(takewhile(lambda op: isinstance(op, StFrag), behind))
        del behind[: len(stores)]
        for cls in dict.fromkeys(op.only for op in run):
            ordered += [op for op in run if op.only == cls]
            ordered += [dataclasses.replace(op, only=cls) for op in stores]
    return ordered


def _of_staged(body: Sequence[Step]) -> list[Step]:
    """Products of tiles that cross the warps."""
    staged = {op.dst.name for op in body if isinstance(op, StageTile)}
    return [op for op in body if isinstance(op, ContractTile) and op.a.name in staged]


def stage_sums(program: Program, target: Target) -> Kernel:
    s = SumStager(program, target)
    config = s.config
    if s.shed and config.block_n % s.part_rows:
        raise SignatureError(
            f"block_n={config.block_n} for {program.name}, which adds parts of {ROWS_A_GROUP} rows up in memory. "
            "Allowed: less, and multiples; gradients that are the same bits in every run have no such parts"
        )
    load_regs, shed_regs, math_regs = s.registers()
    lets = program.lets
    first = 8 if s.shed and not config.merged else 4
    roles: list[Role] = []
    if not config.merged:
        roles.append(Role(name=LOAD, first_warp=0, warps=4, regs=load_regs, single=True,
                          item=Item(lets=(*lets, *s.own_row()), body=(s.load_tiles(),))))  # fmt: skip
    if s.shed:
        roles.append(s.shed_role(shed_regs))
    roles.append(Role(
        name=MATH, first_warp=first, warps=config.warps, regs=math_regs, split=config.warpgroups, values=s.values(),
        item=Item(lets=(*lets, *s.place(const(0))), body=s.math_body()),
        exit=(BulkRetire(id="X1", pending=0, until=Completion.READ),),
    ))  # fmt: skip
    keys = next(v for v in s.values() if v.fragment is Fragment.ACC).rows_axis == "N"
    turn = Barrier(name=OUTPUT_TURN, first=1, threads=GROUP_THREADS, count=config.warpgroups)
    return Kernel(
        name=program.name, threads=32 * (first + config.warps), min_ctas=1,
        work=Work(source=WorkSource.TABLE_KEYS if keys else WorkSource.TABLE, order=order_of(program),
                  block_m=config.block_m),
        tensors=program.tensors, scalars=program.scalars, buffers=s.buffers(), barriers=(turn,), roles=tuple(roles),
    )  # fmt: skip
