"""work_table: Schedule -> Schedule. Adds the kernels that make the work table on the device.

Before   a module whose last kernel takes its items from a table made by the host
After    two kernels in front of it and the workspace `work`: one CTA a section sorts its items by their number of key
tiles, one CTA deals them
Why      the host would have to know the numbers of key tiles, which may depend on captured tensors, and a table that is
made by the host is frozen in a CUDA graph

Items are dealt section by section (heads whose keys and values fit the L2 cache) and in rounds: the longest item of a
round goes to the CTA with the least work so far. This is nearly as balanced as giving one item after the other to the
CTA with the least work (tests/test_work_table.py has both beside each other), in as many steps as there are rounds, not
items."""

from __future__ import annotations

import dataclasses

from attngen.expr import DType, Expr, const, loads, make, var
from attngen.expr import Op as ExprOp
from attngen.ir.ops import DealItems, Ref, Scope, SortItems, Stmt
from attngen.ir.schedule import (
    WORK_TABLE,
    Access,
    Block,
    Buffer,
    Elem,
    Fact,
    Item,
    Kernel,
    Node,
    Order,
    Role,
    ScalarArg,
    Schedule,
    TensorArg,
    Tiles,
    Work,
    WorkSource,
    Workspace,
)
from attngen.ir.walk import resolved
from attngen.layout import SmemLayout, Swizzle

THREADS = 512
SECTION_ITEMS = 4096  # that a CTA can sort
CTAS = 1024  # that items can be dealt to
ITEM_KEYS = 200  # cost of an item beside its tiles, in keys: queries, first tile, output
ITEMS = "items"


def add_work_table(schedule: Schedule, block_n: int) -> Schedule:
    """`block_n`: keys of a tile, by which the work of an item counts."""
    *before, main = schedule.kernels
    role = main.roles[0]
    loop = next(n for n in role.item.body if isinstance(n, Tiles))
    count = resolved(loop.ranges[-1].end, role.item.lets)
    names = {e.name for e in loads(count)}
    sizes = tuple(ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "group", "seqlen_q", "seqlen_k"))
    items = TensorArg(name=ITEMS, elem=Elem.I32, rank=2, access=Access.WORK)
    work = TensorArg(name=WORK_TABLE, elem=Elem.I32, rank=3, access=Access.WORK)
    section = ScalarArg(name="section", dtype=DType.I32)
    sort = SortItems(
        id="T1", dst=ITEMS, keys=Ref(name="sKeys"), body=(Stmt(scope=Scope.ITEM, target="count", value=count),)
    )
    deal = DealItems(id="T2", dst=WORK_TABLE, src=ITEMS, loads=Ref(name="sLoads"), tile=block_n, extra=ITEM_KEYS)
    block_m = main.work.block_m
    kernels = (
        _kernel("sort_items", WorkSource.SECTIONS, block_m, (*(t for t in main.tensors if t.name in names), items),
                (*sizes, section), _words("sKeys", 1, SECTION_ITEMS), Block(name="sort", ops=(sort,))),
        _kernel("deal_items", WorkSource.SINGLE, block_m, (items, work), (section,), _words("sLoads", 2, CTAS),
                Block(name="deal", ops=(deal,))),
    )  # fmt: skip
    main = dataclasses.replace(main, work=dataclasses.replace(main.work, source=WorkSource.DEVICE_TABLE))
    fact = Fact(subject="work_table", text="made on the device: sections sorted by key tiles, dealt in rounds")
    return dataclasses.replace(
        schedule, kernels=(*before, *kernels, main), facts=(*schedule.facts, fact),
        workspaces=(*schedule.workspaces, *_workspaces(block_m)),
    )  # fmt: skip


def _kernel(
    name: str, source: WorkSource, block_m: int, tensors: tuple[TensorArg, ...], scalars: tuple[ScalarArg, ...],
    buffer: Buffer, node: Node,
) -> Kernel:  # fmt: skip
    role = Role(name="table", first_warp=0, warps=THREADS // 32, regs=128, item=Item(lets=(), body=(node,)))
    return Kernel(
        name=name, threads=THREADS, min_ctas=1, work=Work(source=source, order=Order.ASCENDING, block_m=block_m),
        tensors=tensors, scalars=scalars, buffers=(buffer,), roles=(role,),
    )  # fmt: skip


def _words(name: str, rows: int, columns: int) -> Buffer:
    return Buffer(name=name, elem=Elem.I32, layout=SmemLayout(rows, columns, 4, Swizzle.LINEAR), offset=0)


def _workspaces(block_m: int) -> tuple[Workspace, Workspace]:
    batch, heads, seqlen_q, rounds, ctas = (
        var(n, DType.I32) for n in ("batch", "heads", "seqlen_q", "rounds", "ctas")
    )
    tiles = make(ExprOp.FLOORDIV, make(ExprOp.ADD, seqlen_q, const(block_m - 1)), const(block_m))
    count: Expr = make(ExprOp.MUL, make(ExprOp.MUL, batch, heads), tiles)
    return (
        Workspace(name=ITEMS, elem=Elem.I32, shape=(count, const(4))),
        Workspace(name=WORK_TABLE, elem=Elem.I32, shape=(rounds, ctas, const(4))),
    )
