"""A kernel as text: parameters, indices, item scalars, values, body."""

from __future__ import annotations

from attngen.ir import ops as o
from attngen.ir.ops import Heads
from attngen.ir.schedule import Block, Kernel, Role, Schedule, Value, WorkSource, ops_of
from attngen.lowering.context import RoleContext
from attngen.lowering.control import lets, steps, tiles
from attngen.params import C_TYPE, fields
from attngen.render import Argument, call, environment


def kernel_lines(schedule: Schedule, kernel: Kernel) -> list[str]:
    """The text of one kernel of a target whose kernels have one role."""
    (role,) = kernel.roles
    context = RoleContext(schedule, kernel, role)
    body: list[str] = []
    for node in role.item.body:
        body += steps(context, node.ops, "") if isinstance(node, Block) else tiles(context, node)
    work = kernel.work
    name = f"work_{work.source.value}_{work.order.value}"
    place: dict[str, Argument] = {"block_m": work.block_m, "round_up": work.block_m - 1}
    if work.source is WorkSource.GRID:
        place["heads"] = "p.heads" if work.per_head else "1"
    elif work.source is WorkSource.GRID_KEYS:
        heads = "p.heads / p.group" if work.per_head else "1"
        place = {"block": work.block_m, "round_up": work.block_m - 1, "heads": heads}
    elif work.source is WorkSource.ROWS:
        place = {"warps": role.warps, "round_up": role.warps - 1}
        lanes = next((op.lanes for _, op in ops_of(kernel) if isinstance(op, o.SumRows)), 0)
        if lanes:
            name, rows = "work_rows_shared", role.warps * work.block_m
            place = {"rows": rows, "round_up": rows - 1, "lanes": lanes}
    elif work.source is WorkSource.ELEMENTS:
        place = {"threads": kernel.threads}
    found = [] if work.source is WorkSource.SINGLE else call(schedule.target, name, place)
    text = str(environment().get_template("kernel.cu.jinja").module.kernel(  # type: ignore[attr-defined]
        name=kernel.name, threads=kernel.threads, min_ctas=kernel.min_ctas,
        params=[f.declaration for f in fields(kernel)],
        asserts=[
            f'static_assert(sizeof({kernel.name}_params) <= 4096, "parameters exceed what a launch can pass");'
        ],
        indices=[
            "const int tid = thread_id(), warp = uniform(tid / 32), lane = tid % 32, quad = lane % 4;",
            "const u32 smem = smem_base();",
        ],
        work=found,
        bases=bases(kernel, role), lets=lets(context, role.item.lets),
        values=[declaration(v) for v in role.values], body=body,
    ))  # fmt: skip
    return text.strip("\n").split("\n")


def bases(kernel: Kernel, role: Role) -> list[str]:
    """Where the item's batch and head start in each tensor that the threads of a role load tiles from."""
    loads = (op for of, op in ops_of(kernel) if of is role and isinstance(op, o.CpAsync | o.CopyTile))
    heads = {op.src: op.heads for op in loads if op.head is None}
    lines = []
    for t in kernel.tensors:
        if t.name in heads:
            h = "h" if heads[t.name] is Heads.Q else "hkv"
            place = f"p.{t.name} + (i64)b * p.{t.name}_s0 + (i64){h} * p.{t.name}_s1"
            lines.append(f"const {C_TYPE[t.elem]}* const {t.name}_bh = {place};")
    return lines


def declaration(v: Value) -> str:
    kind = {"f32": "float", "i32": "int", "bool": "bool"}.get(v.dtype, "u32")
    return f"{kind} {v.name}[{v.registers}];"
