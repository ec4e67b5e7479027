"""stage: Program -> Schedule. Puts the ops of a tile into steps, and copies into a role of their own.

Before   tile ops in the order of their definition, for the first tile and for later ones
After    two roles, one of which copies, by the copy engine or by its threads (attngen.passes.hopper.copies). In a step,
         products whose inputs an earlier step (or a copy) made are issued together at its head; the rest follows in
         program order. Products of stage 1 belong to the tile of the step before, so the first tile's stage 0 is a
         block of its own (peel) and the last tile's stage 1 a drain. What exists once a tile is indexed by the tile's
         counter: `sK[t]`, `rP[t - 1]`
Why      a warpgroup's products run beside its own softmax only if they belong to another tile (software pipelining,
         Rau 1981); which stages and order are best is searched before (attngen.passes.hopper.choose)"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property

from attngen.config import HopperConfig
from attngen.errors import PassError
from attngen.expr import DType, Expr, Op, add, const, loads, make, mul, sub, substitute, var, variables
from attngen.fold import fold
from attngen.ir.ops import (
    BulkCommit,
    BulkRetire,
    Completion,
    CopyTile,
    CpAsync,
    Fill,
    Heads,
    Map,
    Proxy,
    Reduce,
    Ref,
    Scope,
    StFrag,
    Stmt,
    StRows,
    StTile,
    Sync,
    TmaLoad,
    TmaStore,
    Vote,
    Wgmma,
)
from attngen.ir.ops import Op as AnyOp
from attngen.ir.program import ContractTile, LoadTile, Program, Space, StoreTile, StoreVector, numbered
from attngen.ir.schedule import (
    Barrier,
    Block,
    Buffer,
    Guard,
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
)
from attngen.layout import SmemLayout, Swizzle
from attngen.passes.hopper.copies import Copier, copier
from attngen.passes.hopper.flight import reads, writes
from attngen.passes.ranges import TileClass
from attngen.passes.visits import BY_LENGTH, ROWS_A_GROUP
from attngen.signature import VECTOR_BYTES, Signature, store_bytes
from attngen.target import Target

T, W = var("t", DType.I32), var("w", DType.I32)
STAGING, OUTPUT_TURN = "sO", "o"
GROUP_THREADS = 128
COPY_REGISTERS = {Copier.ASYNC: 40, Copier.REGISTERS: 56}  # of a thread that copies: addresses, elements in flight


class Stager:
    """The parts of a schedule, from a program and its configuration."""

    def __init__(self, program: Program, pieces: int, signature: Signature) -> None:
        self.program, self.pieces, self.signature = program, pieces, signature
        assert isinstance(program.config, HopperConfig)
        self.config = program.config
        body = program.loop.body
        self.tile_loads = [op for op in body if isinstance(op, LoadTile)]
        self.item_loads = [op for op in program.prologue if isinstance(op, LoadTile)]
        products = [op for op in body if isinstance(op, ContractTile)]
        if len(products) > len(self.config.stages):
            raise PassError(f"stage: {len(products)} products a tile, stages for {len(self.config.stages)}")
        # a score of positions alone has no product of its own: the last stages are those of the others
        self.product_stage = dict(
            zip((p.d.name for p in products), self.config.stages[-len(products) :], strict=True)
        )
        issue = (c for c in self.config.issue if c >= len(self.config.stages) - len(products))
        self.order = [products[c - len(self.config.stages)].d.name for c in issue]

    # ---- the step ------------------------------------------------------------------------------------------------

    def staged(self, body: Sequence[Step]) -> tuple[list[Step], list[Step]]:
        """(stage 0, stage 1) of a tile, each with its head of products first."""
        stage: dict[str, int] = {}
        made: set[str] = {op.dst.name for op in (*self.tile_loads, *self.item_loads)}
        parts: tuple[list[Step], list[Step]] = ([], [])
        heads: tuple[list[Step], list[Step]] = ([], [])
        for op in body:
            if isinstance(op, LoadTile):
                continue
            inputs = {r.name for r in reads(op)} & set(stage)
            at = max((stage[n] for n in inputs), default=0)
            if isinstance(op, ContractTile):
                own = self.product_stage[op.d.name]
                if own < at:
                    raise PassError(f"stage: {op.d.name} is made in stage {own} from what stage {at} makes")
                ready = all(stage.get(r.name, -1) < own or r.name in made for r in (op.a, op.b))
                at = own
                (heads if ready else parts)[at].append(op)
            else:
                parts[at].append(op)
            stage.update({r.name: at for r in writes(op)})
        for head in heads:
            head.sort(key=lambda op: self.order.index(_d(op)))
        return ([*heads[0], *parts[0]], [*heads[1], *parts[1]])

    def merged(self, now: Sequence[Step], before: Sequence[Step]) -> list[Step]:
        """A step: stage 1 of the tile before among stage 0 of this one; the heads are one window."""
        first = [*_head(now), *_head(before)]
        first.sort(key=lambda op: self.order.index(_d(op)))
        return [*first, *now[len(_head(now)) :], *before[len(_head(before)) :]]

    # ---- tiles as indices ----------------------------------------------------------------------------------------

    @cached_property
    def per_tile(self) -> set[str]:
        """What a tile has of its own: copied tiles, and operands that one stage makes and another reads."""
        zero, one = self.staged(self.program.loop.body)
        crossing = {r.name for op in zero for r in writes(op)} & {
            r.name for op in one if isinstance(op, ContractTile) for r in (op.a, op.b)
        }
        return {op.dst.name for op in self.tile_loads} | crossing

    def at_tile(self, step: Step, tile: Expr) -> Step:
        names = self.per_tile
        items = {op.dst.name for op in self.item_loads}

        def ref(r: Ref) -> Ref:
            if r.name in names:
                return dataclasses.replace(r, index=(tile,))
            return dataclasses.replace(r, index=(W,)) if r.name in items else r

        if isinstance(step, Guard):
            body = tuple(self.at_tile(op, tile) for op in step.body)
            ops = tuple(op for op in body if isinstance(op, AnyOp))
            touched = {r: None for op in ops for r in (*op.reads(), *op.writes()) if self.is_value(r.name)}
            return dataclasses.replace(step, body=ops, touches=tuple(touched))
        if isinstance(step, ContractTile):
            group = f"g{1 + list(self.product_stage).index(step.d.name)}"
            return Wgmma(id=step.id, d=step.d, a=ref(step.a), b=ref(step.b), group=group, zero=step.zero)
        if isinstance(step, Map):
            used = (*step.reads(), *step.writes())
            copies = tuple(dict.fromkeys(ref(r) for r in used if r.name in names and r.name != step.over.name))
            return dataclasses.replace(step, copies=copies)
        if isinstance(step, Reduce | Fill | Vote):
            return step
        raise PassError(f"stage: {type(step).__name__} has no counterpart on this target")

    def is_value(self, name: str) -> bool:
        v = self.program.value(name)
        return v is not None and v.space is Space.REGISTER

    # ---- the math role ---------------------------------------------------------------------------------------------

    def body(self) -> tuple[Block, Tiles, Block]:
        p = self.program
        zero, one = self.staged(p.loop.body)
        peel, _ = self.staged(p.first or p.loop.body)
        start = [op for op in p.prologue if not isinstance(op, LoadTile)]
        peeled = [self.at_tile(op, const(0)) for op in [*_head(peel), *start, *peel[len(_head(peel)) :]]]
        last = [self.at_tile(op, sub(T, const(1))) for op in one]
        step = [self.at_tile(op, T) for op in zero]
        epilogue = [op for op in p.epilogue if not isinstance(op, StoreTile | StoreVector)]
        ranges = tuple(
            Range(cls=c, end=e, whole=c == TileClass.FULL.value)
            for c, e in zip(p.loop.classes, p.loop.ends, strict=True)
        )
        tiles = Tiles(
            var="t", start=1, ranges=ranges, lets=(self.tile_let(),), ahead=self.listed,
            step=steps_of("S", self.merged(step, last)), drain=steps_of("D", [*last, *epilogue] if last else []),
        )  # fmt: skip
        stores = steps_of("E", [*([] if last else epilogue), *self.stores()])
        return Block(name="peel", ops=steps_of("P", peeled)), tiles, Block(name="store", ops=stores)

    @property
    def listed(self) -> bool:
        """A list in memory says which tile is next."""
        return bool(loads(self.program.loop.tile))

    def tile_let(self, tile: Expr = T) -> Stmt:
        value = fold(substitute(self.program.loop.tile, {T: tile}))
        return Stmt(scope=Scope.ITEM, target="n", value=value)

    def stores(self) -> Iterable[Step]:
        """Row vectors from registers; tiles through a staging buffer of each warpgroup, in as many pieces as fit."""
        for op in self.program.epilogue:
            if isinstance(op, StoreVector):
                yield StRows(id="", dst=op.dst, src=op.src, heads=Heads.Q, limit=op.limit)
        for op in self.program.epilogue:
            if not isinstance(op, StoreTile):
                continue
            row = add(op.row, mul(W, const(ROWS_A_GROUP)))
            turn, staging = Ref(name=OUTPUT_TURN, index=(W,)), Ref(name=STAGING, index=(W,))
            for piece in range(self.pieces):
                source = op.src if self.pieces == 1 else dataclasses.replace(op.src, cols=const(piece))
                column = piece * self.piece_cols
                if self.engine_stores:
                    yield BulkRetire(id="", pending=0, until=Completion.READ)
                yield Sync(id="", bar=turn, threads=GROUP_THREADS)
                yield StFrag(id="", dst=staging, src=source, scaled=op.scaled)
                if self.engine_stores:
                    yield Proxy(id="")
                yield Sync(id="", bar=turn, threads=GROUP_THREADS)
                if self.engine_stores:
                    yield TmaStore(id="", dst=op.dst, src=staging, heads=Heads.Q, row=row, column=column)
                    yield BulkCommit(id="")
                else:
                    yield StTile(
                        id="", dst=op.dst, src=staging, heads=Heads.Q, row=row, limit=op.limit, column=column,
                        bytes=store_bytes(self.program.head_dim_v),
                    )  # fmt: skip

    # ---- the load role ---------------------------------------------------------------------------------------------

    def loads(self) -> Tiles:
        """In the order in which a step needs them; those of the item behind the first tile's first."""
        zero, one = self.staged(self.program.loop.body)
        order = [r.name for op in (*zero, *one) if isinstance(op, ContractTile) for r in (op.a, op.b)]
        tiles = sorted(self.tile_loads, key=lambda op: order.index(op.dst.name))
        first = [self.load(op, None) for op in tiles[:1]]
        once = [self.load(op, make(Op.EQ, T, const(0))) for op in self.item_loads]
        rest = [self.load(op, None) for op in tiles[1:]]
        return Tiles(
            var="t", start=0, ranges=(Range(cls="all", end=self.program.loop.count),), lets=(self.tile_let(),),
            ahead=self.listed, step=steps_of("L", [*first, *once, *rest]),
        )  # fmt: skip

    def load(self, op: LoadTile, when: Expr | None) -> TmaLoad | CpAsync | CopyTile:
        dst = op.dst if when is not None else dataclasses.replace(op.dst, index=(T,))
        src, heads, row, limit, first = op.src, op.heads, op.row, op.limit, op.first
        match copier(self.signature):
            case Copier.ENGINE:
                bar = Ref(name=f"{ring_of(op.dst.name)}.full", index=dst.index)
                return TmaLoad(id="", dst=dst, src=src, heads=heads, row=row, bar=bar, when=when)
            case Copier.ASYNC:
                return CpAsync(
                    id="", dst=dst, src=src, heads=heads, row=row, limit=limit, first=first, when=when,
                    bytes=self.signature.alignment,
                )  # fmt: skip
            case Copier.REGISTERS:
                return CopyTile(id="", dst=dst, src=src, heads=heads, row=row, limit=limit, first=first, when=when)

    # ---- declarations ----------------------------------------------------------------------------------------------

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of the output tile."""
        op = next(op for op in self.program.epilogue if isinstance(op, StoreTile))
        v = self.program.value(op.src.name)
        assert v is not None
        return v.rows, v.cols

    @property
    def engine_stores(self) -> bool:
        """Whether the rows of the output, one behind the other, start where the copy engine can write them."""
        return store_bytes(self.program.head_dim_v) == VECTOR_BYTES

    @property
    def piece_cols(self) -> int:
        return self.stored[1] // self.pieces

    def buffers(self) -> tuple[Buffer, ...]:
        shared = [v for v in self.program.values if v.space is Space.SHARED and v.layout is not None]
        made = [Buffer(name=v.name, elem=v.elem, layout=v.layout) for v in shared if v.layout is not None]
        layout = SmemLayout(self.stored[0], self.piece_cols, 2, Swizzle.B128)
        return (*made, Buffer(name=STAGING, elem=shared[0].elem, layout=layout))

    def values(self) -> tuple[Value, ...]:
        rows = self.config.warp_rows
        return tuple(
            Value(name=v.name, fragment=v.fragment, dtype=v.dtype, rows=rows if v.rows else 0, cols=v.cols,
                  rows_axis=v.axes[0] or "M", cols_axis=v.axes[1] or "N")
            for v in self.program.values if v.fragment is not None
        )  # fmt: skip


def ring_of(buffer: str) -> str:
    return buffer.removeprefix("s")


def steps_of(prefix: str, steps: Iterable[Step]) -> tuple[Step, ...]:
    """Numbered from 1, as readers of a schedule count."""
    return numbered(steps, prefix, 1)


def _d(op: Step) -> str:
    assert isinstance(op, ContractTile | Wgmma)
    return op.d.name


def _head(steps: Sequence[Step]) -> list[Step]:
    """The products that a part starts with."""
    count = next((k for k, op in enumerate(steps) if not isinstance(op, ContractTile | Wgmma)), len(steps))
    return list(steps[:count])


def registers(config: HopperConfig, regs_per_sm: int, by: Copier) -> tuple[int, int]:
    """Registers a thread of the load role and of the math role: what the launch allots, moved to where it is needed."""
    load = COPY_REGISTERS.get(by) or (24 if config.warpgroups <= 2 else 32)
    threads = GROUP_THREADS * (config.warpgroups + 1)
    launch = min(regs_per_sm // threads, 255) // 8 * 8
    return load, min(240, (launch * threads - load * GROUP_THREADS) // (GROUP_THREADS * config.warpgroups) // 8 * 8)


def order_of(program: Program) -> Order:
    """By length, where it follows from the row tile or the device ranks them; what else depends on data, or on the
    head, comes in turn."""
    if any(w.name == BY_LENGTH for w in program.workspaces):
        return Order.RANKED
    count = program.loop.count
    for let in reversed(program.lets):
        count = substitute(count, {var(let.target, let.value.dtype): let.value})
    known = not loads(count) and not {"b", "h"} & variables(count)
    return Order.LONGEST_FIRST if known else Order.ASCENDING


def stage(program: Program, signature: Signature, target: Target, pieces: int) -> Schedule:
    """`pieces`: the output leaves in as many blocks of columns, each through the same staging buffer."""
    s = Stager(program, pieces, signature)
    config, body, by = s.config, s.body(), copier(signature)
    load_regs, math_regs = registers(config, target.regs_per_sm, by)
    lets = program.lets
    load = Role(
        name="load", first_warp=0, warps=4, regs=load_regs, single=not by.by_threads,
        item=Item(lets=lets, body=(s.loads(),)),
    )  # fmt: skip
    math = Role(
        name="math", first_warp=4, warps=config.warps, regs=math_regs, split=config.warpgroups, values=s.values(),
        item=Item(lets=(*lets, s.tile_let(const(0))), body=body),
        exit=(BulkRetire(id="X1", pending=0, until=Completion.READ),) if s.engine_stores else (),
    )  # fmt: skip
    turn = Barrier(name=OUTPUT_TURN, first=1, threads=GROUP_THREADS, count=config.warpgroups)
    kernel = Kernel(
        name=program.name, threads=GROUP_THREADS * (config.warpgroups + 1), min_ctas=1,
        work=Work(source=WorkSource.TABLE, order=order_of(program), block_m=config.block_m),
        tensors=program.tensors, scalars=program.scalars, buffers=s.buffers(), barriers=(turn,), roles=(load, math),
    )  # fmt: skip
    return Schedule(
        name=program.name, target=target.name, kernels=(kernel,), workspaces=program.workspaces,
        head_dim_qk=program.head_dim_qk, head_dim_v=program.head_dim_v, facts=program.facts,
    )  # fmt: skip
