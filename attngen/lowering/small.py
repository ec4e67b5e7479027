"""Ops of the small kernels of a module: the visit table and pointwise kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from attngen.cprint import C_DTYPE, Printer
from attngen.errors import PassError
from attngen.expr import B, H, I, J, Op, rewrite, var, walk
from attngen.exprtext import show
from attngen.ir import ops as o
from attngen.ir.ops import Scope
from attngen.ir.schedule import Elem, TensorArg
from attngen.layout import blocks
from attngen.lowering.context import RoleContext
from attngen.render import Argument, call


def scan_call(context: RoleContext, op: o.ScanTiles) -> dict[str, Argument]:
    cols = -(-op.block_n // 32)
    kept = {s.target for s in op.body if s.scope is Scope.COL}
    lines: dict[Scope, list[str]] = {}
    for scope in (Scope.COL, Scope.ROW, Scope.ELEM):
        printer = Printer(
            lambda v: f"{v.name}[ci]" if v.name in kept else context.spell(v), context.elems, context.dense
        )
        lines[scope] = []
        for s in (s for s in op.body if s.scope is scope):
            lines[scope] += printer.temporaries(s.value)
            head = f"{s.target}[ci]" if scope is Scope.COL else f"const {C_DTYPE[s.value.dtype]} {s.target}"
            lines[scope].append(f"{head} = {printer(s.value)};")
        # indices as floats, where a comparison needs them
        text = "\n".join(lines[scope])
        used = [index for index in ("i", "j") if re.search(rf"\b{index}_f\b", text)]
        lines[scope] = [f"const float {index}_f = f32_of_s32({index});" for index in used] + lines[scope]
    row, column, tile = ("j", "i", "m") if op.keys else ("i", "j", "n")
    block = context.kernel.work.block_m
    return {
        "i": row, "j": column, "n": tile, "length": "p.seqlen_q" if op.keys else "p.seqlen_k",
        "whole": f"n * {block} + {block} <= p.seqlen_k" if op.keys else "true",
        "dst": op.dst, "at": context.row_of(op.dst, op.keys), "lo": context.expr(op.lo), "hi": context.expr(op.hi),
        "block_n": op.block_n,
        "warps": context.role.warps, "cols": cols, "col": lines[Scope.COL], "row": lines[Scope.ROW],
        "elem": lines[Scope.ELEM],
        "locals": [f"{C_DTYPE[s.value.dtype]} {s.target}[{cols}];" for s in op.body if s.scope is Scope.COL],
    }  # fmt: skip


def cast_frag_call(context: RoleContext, op: o.CastFrag) -> dict[str, Argument]:
    """Blocks in groups of 32 columns, of which a lane stores eight."""
    tensor = next(t for t in context.kernel.tensors if t.name == op.dst)
    width = context.schedule.head_dim(op.dst)
    found = [(first, w) for first, w in blocks(op.cols) if first < width]
    return {
        "dst": op.dst, "src": op.src, "rows": context.kernel.work.block_m, "step": 8 * context.kernel.work.block_m,
        "block": context.kernel.work.block_m * op.cols,
        "factor": context.expr(op.factor), "pack": f"pack_{tensor.elem.value}x2",
        "parts": [
            {"at": str(first * context.kernel.work.block_m), "tiles": str(w // 8), "groups": str(-(-w // 32)),
             "rows": call(context.target, "store_eights", {
                 "dst": op.dst, "groups": -(-w // 32), "first": first, "width": min(w, width - first),
             })}
            for first, w in found
        ],
    }  # fmt: skip


def index_bits(keys: int) -> int:
    """Low bits of a word of 32 that number the items of a section; the upper ones hold the key tiles of an item."""
    if keys & (keys - 1) or not 2 <= keys <= 1 << 16:
        raise PassError(f"lower: a section of {keys} items cannot be sorted. Allowed: powers of 2 up to {1 << 16}")
    return keys.bit_length() - 1


def count_lines(context: RoleContext, op: o.SortItems) -> list[str]:
    """Statements on one item; the last is `count`."""
    lines: list[str] = []
    for s in op.body:
        printer = Printer(context.spell, context.elems, context.dense)
        lines += printer.temporaries(s.value)
        lines.append(f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};")
    return lines


def pointwise_lines(context: RoleContext, op: o.Pointwise) -> Iterator[str]:
    """Statements on one element; a target that is an output tensor is stored (a row's by its first element)."""
    tensors = {t.name: t for t in context.kernel.tensors}
    for s in op.body:
        printer = Printer(context.spell, context.elems, context.dense)
        yield f"// {s.target} = {show(s.value)}"
        if s.target not in tensors:
            yield f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};"
            continue
        t = tensors[s.target]
        text = _stored(context, t, printer(s.value))
        yield from (
            text if t.rank == 4 else call(context.target, "when", {"predicate": "j == 0", "body": text})
        )


def _stored(context: RoleContext, t: TensorArg, value: str) -> list[str]:
    """A value stored at the element (b, h, i, j) of a result, or at its row."""
    index = ["b", "h", "i", "j"][: t.rank]
    at = " + ".join(f"(i64){x} * p.{t.name}_s{k}" if k < t.rank - 1 else x for k, x in enumerate(index))
    arguments: dict[str, Argument] = {"dst": t.name, "at": at, "value": value}
    if t.elem is Elem.F32:
        return call(context.target, "store_f32", arguments)
    return call(context.target, "store_packed", {**arguments, "pack": f"pack_{t.elem.value}x2"})


ELEMENT = (B, H, I, J)


def sum_eights_call(context: RoleContext, op: o.SumRows) -> dict[str, Argument]:
    """Sums of a row whose lanes have eight elements each, then statements of the row."""
    tensors = {t.name: t for t in context.kernel.tensors}
    each, row = list[str](), list[str]()
    elements = [s for s in op.body if s.scope is Scope.ELEM]
    read = dict.fromkeys(e.name for e in walk(*(s.value for s in elements)) if e.op is Op.LOAD and e.args == ELEMENT)
    words = {f"{name}_at": name for name in read} if op.at_once else {}
    counter = 0
    for s in op.body:
        value = s.value
        if words:
            value = rewrite(value, lambda e: var(f"{e.name}_at", e.dtype) if e.args == ELEMENT else None)
        printer = Printer(
            lambda v: f"unpack_{tensors[words[v.name]].elem.value}x2({v.name}[ei / 2], ei % 2)"
            if v.name in words else context.spell(v), context.elems, context.dense,
        )  # fmt: skip
        printer.counter = counter
        lines = each if s.scope is Scope.ELEM else row
        lines += [f"// {s.target} {'+=' if s.accumulate else '='} {show(s.value)}", *printer.temporaries(value)]
        counter = printer.counter
        if s.target in tensors:
            lines += _stored(context, tensors[s.target], printer(value))
        elif s.accumulate:
            lines.append(f"{s.target} += {printer(value)};")
        else:
            lines.append(f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(value)};")
    return {
        "cols": op.cols, "lanes": op.lanes, "sums": [s.target for s in op.body if s.accumulate],
        "vectors": [{"name": at, "src": name} for at, name in words.items()],
        "inside": "true" if words else f"j < {op.cols}", "each": each, "row": row,
    }  # fmt: skip


def sum_rows_call(context: RoleContext, op: o.SumRows) -> dict[str, Argument]:
    """Sums of a row over its elements, then statements of the row; a target that is a tensor is stored."""
    tensors = {t.name: t for t in context.kernel.tensors}
    lines: dict[Scope, list[str]] = {Scope.ELEM: [], Scope.ROW: []}
    sums = [s.target for s in op.body if s.accumulate]
    before, after = list[str](), list[str]()
    if op.at_once:
        for e in walk(*(s.value for s in op.body if s.scope is Scope.ELEM)):
            if e.op is Op.LOAD and e.args == ELEMENT:
                x = f"{e.name}_at"
                before += call(context.target, "load_pair", {"x": x, "src": e.name, "elem": tensors[e.name].elem.value})
    for s in op.body:
        if op.at_once and s.scope is Scope.ELEM:
            paired = rewrite(s.value, lambda e: var(f"{e.name}_at", e.dtype) if e.args == ELEMENT else None)
            printer = Printer(lambda v: f"{v.name}[ei]" if v.name.endswith("_at") else context.spell(v), context.elems)
            text = printer.temporaries(paired)
            if s.target in tensors:
                before.append(f"float {s.target}_of[2];")
                text.append(f"{s.target}_of[ei] = {printer(paired)};")
                pack = f"pack_{tensors[s.target].elem.value}x2"
                after += call(context.target, "store_pair", {"dst": s.target, "pack": pack})
            else:
                text.append(f"{s.target} += {printer(paired)};")
            lines[s.scope] += [f"// {s.target} {'+=' if s.accumulate else '='} {show(s.value)}", *text]
            continue
        printer = Printer(context.spell, context.elems, context.dense)
        text = [f"// {s.target} {'+=' if s.accumulate else '='} {show(s.value)}", *printer.temporaries(s.value)]
        if s.target in tensors:
            text += _stored(context, tensors[s.target], printer(s.value))
        elif s.accumulate:
            text.append(f"{s.target} += {printer(s.value)};")
        else:
            text.append(f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};")
        lines[s.scope] += text
    row = [line for x in sums for line in call(context.target, "sum_lanes", {"x": x})]
    if lines[Scope.ROW]:
        row += call(context.target, "when", {"predicate": "lane == 0", "body": lines[Scope.ROW]})
    return {"cols": op.cols, "sums": sums, "before": before, "each": lines[Scope.ELEM], "after": after, "row": row}
