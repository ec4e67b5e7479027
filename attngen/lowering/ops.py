"""Op -> macro calls: the ops that every target has."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.errors import PassError
from attngen.ir import ops as o
from attngen.ir.ops import Heads, Op, kind_of
from attngen.layout import CHUNK
from attngen.lowering.context import RoleContext
from attngen.lowering.maps import map_call, reduce_call
from attngen.lowering.small import (
    cast_frag_call,
    count_lines,
    index_bits,
    pointwise_lines,
    scan_call,
    sum_eights_call,
    sum_rows_call,
)
from attngen.render import Argument


def copy_arguments(context: RoleContext, op: o.CpAsync | o.CopyTile, unit: int = CHUNK) -> dict[str, Argument]:
    """Of a copy whose threads share the chunks of the tile, or `unit` bytes of them."""
    return {
        "dst": context.address(op.dst), "src": op.src, "base": context.head(op.src, op.heads, op.head),
        "row": context.expr(op.row), "inside": context.inside(op), **context.chunks(op.dst, op.src, unit),
    }  # fmt: skip


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
        case o.CpAsync():
            if op.bytes == CHUNK:
                yield kind, copy_arguments(context, op)
                return
            shared = copy_arguments(context, op, op.bytes)
            units = 1 << context.buffer(op.dst).layout.xor_bits
            yield "cp_async_narrow", {**shared, "units": units * CHUNK // op.bytes, "bytes": op.bytes}
        case o.CpVector():
            yield kind, {"dst": context.address(op.dst), "base": context.head(op.src, Heads.Q, op.head),
                         "row": context.expr(op.row), "limit": context.expr(op.limit),
                         "count": context.buffer(op.dst).layout.cols}  # fmt: skip
        case o.CpWait():
            yield kind, {"pending": op.pending}
        case o.CpCommit():
            yield kind, {}
        case o.StTile():
            stored: dict[str, Argument] = {
                "dst": op.dst, "src": context.address(op.src), "row": context.expr(op.row),
                "limit": context.expr(op.limit), "head": "hkv" if op.heads is Heads.KV else "h",
                **context.chunks(op.src, op.dst, op.bytes, op.column),
            }  # fmt: skip
            if op.bytes == CHUNK:
                yield kind, stored
            else:
                units = (1 << context.buffer(op.src).layout.xor_bits) * CHUNK // op.bytes
                yield "st_tile_narrow", {**stored, "column": op.column, "units": units, "bytes": op.bytes}
        case o.StRows():
            yield kind, {"rows": context.values[op.src.name].rows // 8, "dst": op.dst, "src": op.src.name,
                         "i0": context.row0(), "limit": context.expr(op.limit)}  # fmt: skip
        case o.Pointwise():
            yield kind, {"lines": list(pointwise_lines(context, op))}
        case o.SumRows() if op.lanes:
            yield "sum_eights", sum_eights_call(context, op)
        case o.SumRows():
            yield kind, sum_rows_call(context, op)
        case o.CastFrag():
            yield kind, cast_frag_call(context, op)
        case o.ScanTiles():
            yield kind, scan_call(context, op)
        case o.CompactTiles():
            yield kind, {"dst": op.dst, "dst_at": context.row_of(op.dst, op.keys), "src": op.src,
                         "src_at": context.row_of(op.src, op.keys),
                         "lo": context.expr(op.lo), "hi": context.expr(op.hi)}  # fmt: skip
        case o.RankTile():
            yield kind, {"dst": op.dst, "dst_at": context.list_of(op.dst), "src": op.src,
                         "src_at": context.list_of(op.src)}  # fmt: skip
        case o.SortItems():
            keys = context.buffer(op.keys).layout.cols
            words: dict[str, Argument] = {"keys": context.address(op.keys), "threads": context.threads,
                                          "index_bits": index_bits(keys), "last": keys - 1}  # fmt: skip
            yield "item_keys", {**words, "lines": count_lines(context, op)}
            yield kind, {**words, "dst": op.dst}
        case o.DealItems():
            layout = context.buffer(op.loads).layout
            yield kind, {"dst": op.dst, "src": op.src, "loads": context.address(op.loads), "threads": context.threads,
                         "ctas": layout.cols, "pitch": layout.pitch, "tile": op.tile, "extra": op.extra}  # fmt: skip
        case _:
            raise PassError(f"lower: {context.schedule.target} has no macro for op {op.id} {kind}")
