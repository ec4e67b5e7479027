"""Addresses whose last part is a multiple of the column within the tile.

The column is the thread's first one plus a number that unrolling knows. So an element's address is that of its row,
moved to the thread's first column, plus a number times a stride: one instruction, if the stride has 32 bits."""

from __future__ import annotations

from attngen.expr import Expr, Op, loads
from attngen.ir.ops import Map
from attngen.ir.schedule import Kernel, ops_of

COLUMN = "jt"


def column_step(index: Expr) -> tuple[Expr, int] | None:
    """(row part, factor) of an index `row + jt * factor` or `row - jt * factor`; None: it has another form."""
    if index.op not in (Op.ADD, Op.SUB):
        return None
    row, step = index.args
    sign, factor = -1 if index.op is Op.SUB else 1, 1
    known = step.args[1].value if step.op is Op.MUL else None
    if isinstance(known, int):
        step, factor = step.args[0], known
    return (row, sign * factor) if step.op is Op.VAR and step.name == COLUMN else None


def narrow_strides(kernel: Kernel) -> frozenset[str]:
    """Names of the strides that are multiplied as 32-bit numbers."""
    return frozenset(
        f"{x.name}_s{k}"
        for _, op in ops_of(kernel) if isinstance(op, Map)
        for s in op.body for x in loads(*s.exprs) for k, index in enumerate(x.args)
        if column_step(index) is not None
    )  # fmt: skip
