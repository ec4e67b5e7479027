"""Op -> macro calls: the ops that every target has."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.errors import PassError
from attngen.ir import ops as o
from attngen.ir.ops import Heads, Op, kind_of
from attngen.lowering.context import RoleContext
from attngen.lowering.maps import map_call, reduce_call
from attngen.lowering.small import pointwise_lines, scan_call, sum_rows_call
from attngen.render import Argument


def calls(context: RoleContext, op: Op) -> Iterator[tuple[str, dict[str, Argument]]]:
    kind = kind_of(type(op))
    match op:
        case o.CtaSync():
            yield kind, {}
        case o.Map():
            yield map_call(context, op)
        case o.Reduce():
            yield reduce_call(context, op)
        case o.Fill():
            value = context.values[op.dst.name]
            yield kind, {"dst": op.dst.name, "value": context.expr(op.value), "count": value.registers}
        case o.StTile():
            yield kind, {"dst": op.dst, "src": context.address(op.src), "row": context.expr(op.row),
                         "limit": context.expr(op.limit), "head": "hkv" if op.heads is Heads.KV else "h",
                         **context.chunks(context.buffer(op.src).layout, op.dst)}  # fmt: skip
        case o.StRows():
            yield kind, {"rows": context.values[op.src.name].rows // 8, "dst": op.dst, "src": op.src.name,
                         "i0": context.row0, "limit": context.expr(op.limit)}  # fmt: skip
        case o.Pointwise():
            yield kind, {"lines": list(pointwise_lines(context, op))}
        case o.SumRows():
            yield kind, sum_rows_call(context, op)
        case o.ScanTiles():
            yield kind, scan_call(context, op)
        case o.CompactTiles():
            yield kind, {"dst": op.dst, "dst_at": context.row_of(op.dst, op.keys), "src": op.src,
                         "src_at": context.row_of(op.src, op.keys),
                         "lo": context.expr(op.lo), "hi": context.expr(op.hi)}  # fmt: skip
        case _:
            raise PassError(f"lower: {context.schedule.target} has no macro for op {op.id} {kind}")
