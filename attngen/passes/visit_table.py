"""visit_table: Schedule -> Schedule. Adds the kernel that makes the list of visited tiles, where a mask has no closed
form.

Before   a module whose main kernel reads `visit`, and workspaces for it
After    a kernel in front of it: one CTA a row tile evaluates the mask on every element inside the hull that the
         interval analysis gives, and writes the tiles that have a visible pair, masked ones first; another ranks row
         tiles by the length of their lists, where the main kernel takes its items by rank
Why      exact, in O(S) memory a row tile, and the work is a small fraction of the attention itself"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attngen.expr import DType, Expr, loads, var, variables
from attngen.ir.ops import CompactTiles, CtaSync, RankTile, ScanTiles, Scope, Stmt
from attngen.ir.program import Program
from attngen.ir.schedule import (
    Access,
    Block,
    Elem,
    Fact,
    Item,
    Kernel,
    Order,
    Role,
    ScalarArg,
    Schedule,
    TensorArg,
    Work,
    WorkSource,
)
from attngen.naming import RESERVED
from attngen.passes.bounded import bounded
from attngen.passes.key_visits import key_lets, transposed_ranges
from attngen.passes.ranges import ranges
from attngen.passes.scopes import Scopes, Target
from attngen.passes.visits import BY_LENGTH, CLASSES, VISIT, row_lets

WARPS = 32  # the kernel waits for loads: all the warps an SM can hold


def add_visit_table(schedule: Schedule, program: Program) -> Schedule:
    if program.visit_mask is None:
        return schedule
    mask, block_n = bounded(program.visit_mask), program.config.block_n
    hull = ranges(program.visit_mask, block_n)
    scopes = Scopes({}, {}, set(RESERVED))
    visible = scopes.split(Target("visible", mask))
    lets = (
        *row_lets(program.config),
        _let("n_lo", bounded(hull.lo)),
        _let("n_hi", bounded(hull.hi)),
        *scopes.lets.values(),
    )
    names = {e.name for e in loads(mask)}
    tensors = tuple(t for t in program.tensors if t.access is Access.CAPTURE and t.name in names)
    spaces = {
        w.name: TensorArg(name=w.name, elem=w.elem, rank=len(w.shape), access=Access.WORK) for w in schedule.workspaces
    }
    place = Work(
        source=WorkSource.GRID, order=Order.ASCENDING, block_m=program.config.block_m,
        per_batch="b" in variables(mask), per_head="h" in variables(mask),
    )  # fmt: skip
    scalars = tuple(s for s in program.scalars if s.dtype is DType.I32)
    lo, hi = var("n_lo", DType.I32), var("n_hi", DType.I32)
    block = Block(
        name="scan",
        ops=(
            ScanTiles(id="V1", dst=CLASSES, body=(*scopes.rows.values(), *visible), block_n=block_n, lo=lo, hi=hi),
            CtaSync(id="V2"),
            CompactTiles(id="V3", dst=VISIT, src=CLASSES, lo=lo, hi=hi),
        ),
    )
    item = Item(lets=lets, body=(block,))
    kernel = Kernel(
        name="visit_table", threads=32 * WARPS, min_ctas=1, work=place,
        tensors=(*tensors, spaces[VISIT], spaces[CLASSES]), scalars=scalars, buffers=(),
        roles=(Role(name="scan", first_warp=0, warps=WARPS, regs=255, values=(), item=item),),
    )  # fmt: skip
    fact = Fact(subject="visit_table", text=f"{32 * WARPS} threads a row tile; one list {_shared(mask)}")
    return dataclasses.replace(
        schedule, kernels=(kernel, *_ranked(schedule, place, spaces, scalars), *schedule.kernels),
        facts=(*schedule.facts, fact),
    )  # fmt: skip


def _ranked(
    schedule: Schedule, place: Work, spaces: Mapping[str, TensorArg], scalars: tuple[ScalarArg, ...]
) -> tuple[Kernel, ...]:
    """The kernel that ranks row tiles by the length of their lists, where the items of the main one are ranks: one warp
    a row tile."""
    if schedule.kernels[-1].work.order is not Order.RANKED:
        return ()
    block = Block(name="rank", ops=(RankTile(id="R1", dst=BY_LENGTH, src=VISIT),))
    role = Role(name="rank", first_warp=0, warps=1, regs=255, values=(), item=Item(lets=(), body=(block,)))
    return (Kernel(
        name="rank_tiles", threads=32, min_ctas=1, work=place, tensors=(spaces[VISIT], spaces[BY_LENGTH]),
        scalars=scalars, buffers=(), roles=(role,),
    ),)  # fmt: skip


def _shared(mask: Expr) -> str:
    used = variables(mask) & {"b", "h"}
    return {0: "for all batches and heads", 1: f"a {'batch' if 'b' in used else 'head'}", 2: "a batch and head"}[
        len(used)
    ]


def _let(name: str, value: Expr) -> Stmt:
    return Stmt(scope=Scope.ITEM, target=name, value=value)


# ---- the same for tiles of keys ------------------------------------------------------------------------------------


def add_key_table(schedule: Schedule, program: Program) -> Schedule:
    """The list of query tiles of each tile of keys, one for all heads; where `program` owns keys and reads one."""
    if program.visit_mask is None:
        return schedule
    mask, config = bounded(program.visit_mask), program.config
    hull = transposed_ranges(program.visit_mask, config.block_n)
    scopes = Scopes({}, {}, set(RESERVED), axes={"i": Scope.COL, "j": Scope.ROW})
    visible = scopes.split(Target("visible", mask))
    lets = (
        *key_lets(config), _let("m_lo", bounded(hull.lo)), _let("m_hi", bounded(hull.hi)), *scopes.lets.values(),
    )  # fmt: skip
    read = {e.name for e in loads(mask)}
    tensors = [t for t in program.tensors if t.access is Access.CAPTURE and t.name in read]
    tensors += [
        TensorArg(name=w.name, elem=w.elem, rank=len(w.shape), access=Access.WORK)
        for w in program.workspaces if w.elem is not Elem.F32
    ]  # fmt: skip
    visits, classes = (w.name for w in program.workspaces if w.elem is not Elem.F32)  # beside vectors of row values
    lo, hi = var("m_lo", DType.I32), var("m_hi", DType.I32)
    block = Block(
        name="scan",
        ops=(
            ScanTiles(id="V1", dst=classes, body=(*scopes.rows.values(), *visible), block_n=config.block_n, lo=lo,
                      hi=hi, keys=True),
            CtaSync(id="V2"),
            CompactTiles(id="V3", dst=visits, src=classes, lo=lo, hi=hi, keys=True),
        ),
    )  # fmt: skip
    kernel = Kernel(
        name=f"visit_table_{program.name}", threads=32 * WARPS, min_ctas=1,
        work=Work(source=WorkSource.GRID_KEYS, order=Order.ASCENDING, block_m=config.block_m,
                  per_batch="b" in variables(mask), per_head=False),
        tensors=tuple(tensors), scalars=tuple(s for s in program.scalars if s.dtype is DType.I32), buffers=(),
        roles=(Role(name="scan", first_warp=0, warps=WARPS, regs=255, values=(), item=Item(lets=lets, body=(block,))),),
    )  # fmt: skip
    text = f"{32 * WARPS} threads a tile of keys; one list {_shared(mask)}"
    fact = Fact(subject=f"visit_table_{program.name}", text=text)
    return dataclasses.replace(schedule, kernels=(kernel, *schedule.kernels), facts=(*schedule.facts, fact))
