"""Op -> macro calls of targets with ldmatrix and mma.sync."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.errors import PassError
from attngen.expr import const
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref, kind_of
from attngen.ir.schedule import ops_of
from attngen.layout import Fragment
from attngen.lowering import ops as common
from attngen.lowering.context import RoleContext, swizzle
from attngen.render import Argument

KSTEP_UNROLL = 4  # k-steps of a contraction of shared tiles that the compiler may interleave: more only costs registers


def calls(context: RoleContext, op: Op) -> Iterator[tuple[str, dict[str, Argument]]]:
    kind = kind_of(type(op))
    match op:
        case o.CopyTile():
            tensor = next(t for t in context.kernel.tensors if t.name == op.src)
            whole, head_dim = common.copy_arguments(context, op), context.schedule.head_dim(op.src)
            if head_dim % 8:  # the last chunk has elements beyond the row
                whole["in_head"] = f"(group * {whole['block']} + (int)ch) * 8 + x < {head_dim}"
            yield kind, {**whole, "column": f" * p.{op.src}_s3" if tensor.strided else ""}
        case o.MmaSync():
            if op.zero:
                yield from common.calls(context, o.Fill(id=op.id, dst=op.d, value=const(0.0)))
            yield mma(context, op)
        case o.StFrag():
            value, buffer = context.values[op.src.name], context.buffer(op.dst)
            if value.fragment is Fragment.OPA:
                yield "st_packed", {"dst": context.address(op.dst), "src": op.src.name, "rows": value.rows // 8,
                                    "tiles": value.cols // 8, "warp_rows": value.rows,
                                    **swizzle(buffer.layout)}  # fmt: skip
                return
            yield kind, {
                "dst": context.address(op.dst), "src": op.src.name, "pack": f"pack_{buffer.elem.value}x2",
                "scale": f"{op.scaled}[ri]" if op.scaled else "1.0f", "rows": value.rows // 8,
                "tiles": value.cols // 8,
                "warp_rows": value.rows, **swizzle(buffer.layout),
            }  # fmt: skip
        case o.RedAdd():
            value = context.values[op.src.name]
            head = "h" if op.head is None else context.expr(op.head)
            yield kind, {"dst": op.dst, "src": op.src.name, "head": head, "row": context.expr(op.row),
                         "rows": value.rows // 8, "tiles": value.cols // 8,
                         "columns": value.cols, **warp_grid(context, op.src)}  # fmt: skip
        case _:
            yield from common.calls(context, op)


def warp_grid(context: RoleContext, d: Ref) -> dict[str, Argument]:
    """Row and column block of a warp in a product with a shared tile `a.T`."""
    product = next((op for _, op in ops_of(context.kernel) if isinstance(op, o.MmaSync) and op.d == d), None)
    if product is None:
        raise PassError(f"lower: no product gives {d.name}, so its place in the tile is not known")
    across = context.buffer(product.a).layout.cols // context.values[d.name].rows
    return {"warp_row": f"warp % {across} * {context.values[d.name].rows}", "warp_column": f"warp / {across}"}


def mma(context: RoleContext, op: o.MmaSync) -> tuple[str, dict[str, Argument]]:
    d, b = context.values[op.d.name], context.buffer(op.b)
    arguments: dict[str, Argument] = {
        "mma": f"mma_m16n8k16_{b.elem.value}", "d": op.d.name, "b": context.address(op.b), "blocks": d.rows // 16,
        "pairs": d.cols // 16, **{f"b_{k}": v for k, v in swizzle(b.layout).items()},
    }  # fmt: skip
    if (
        op.b.transposed
    ):  # rows of b are columns of d: eight columns by eight k a matrix, k chunks in lanes 8..15, 24..31
        arguments |= {"ldmatrix_b": "ldmatrix_x4", "b_row": "at_lane % 8 + at_lane / 16 * 8",
                      "b_chunk": "at_lane / 8 % 2",
                      "b_row_step": 16, "b_row_kstep": 0, "b_chunk_step": 0, "b_chunk_kstep": 2}  # fmt: skip
        ksteps = b.layout.cols // 16
    else:  # rows of b are k: matrices transposed on the way
        arguments |= {"ldmatrix_b": "ldmatrix_x4_trans", "b_row": "at_lane % 16", "b_chunk": "at_lane / 16",
                      "b_row_step": 0, "b_row_kstep": 16, "b_chunk_step": 2, "b_chunk_kstep": 0}  # fmt: skip
        ksteps = b.layout.rows // 16
    arguments["ksteps"] = ksteps
    if op.a.name in context.values:
        return "mma_sync_rs", {**arguments, "a": op.a.name}
    a = context.buffer(op.a)
    if op.a.transposed:
        return "mma_sync_ts", {
            **arguments, "a": context.address(op.a), "unroll": KSTEP_UNROLL, "ksteps": a.layout.rows // 16,
            "columns": d.cols // 8, **warp_grid(context, op.d), **{f"a_{k}": v for k, v in swizzle(a.layout).items()}
        }  # fmt: skip
    return "mma_sync_ss", {
        **arguments, "a": context.address(op.a), "warp_rows": d.rows, "unroll": KSTEP_UNROLL,
        **{f"a_{k}": v for k, v in swizzle(a.layout).items()}
    }  # fmt: skip
