"""Addresses that move by numbers within the tile.

A row and a column within the tile are the thread's first ones plus numbers that unrolling knows. So an element's
address is that of the tile, moved to the thread's first row and column, plus a number times a stride: nothing to
compute where the stride is 1, as in a contiguous dimension, else one instruction, if the stride has 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.expr import Expr, Op, loads
from attngen.ir.ops import Map
from attngen.ir.schedule import Kernel, ops_of

ROW, COLUMN = "it", "jt"


@dataclass(frozen=True)
class Steps:
    """An index: `base` plus so many times the row and the column within the tile."""

    base: Expr
    rows: int
    columns: int


def tile_steps(index: Expr) -> Steps | None:
    """The parts of `base + it * rows + jt * columns`, each added or subtracted, in any order behind the base; None: the
    index has another form."""
    factors: dict[str, int] = {}
    while index.op in (Op.ADD, Op.SUB):
        step, factor = index.args[1], -1 if index.op is Op.SUB else 1
        known = step.args[1].value if step.op is Op.MUL else None
        if isinstance(known, int):
            step, factor = step.args[0], factor * known
        if step.op is not Op.VAR or step.name not in (ROW, COLUMN) or step.name in factors:
            break
        factors[step.name] = factor
        index = index.args[0]
    return Steps(index, factors.get(ROW, 0), factors.get(COLUMN, 0)) if factors else None


def narrow_strides(kernel: Kernel) -> frozenset[str]:
    """Names of the strides that are multiplied as 32-bit numbers."""
    strided = {t.name: t.rank if t.strided else t.rank - 1 for t in kernel.tensors}
    return frozenset(
        f"{x.name}_s{k}"
        for _, op in ops_of(kernel) if isinstance(op, Map)
        for s in op.body for x in loads(*s.exprs) for k, index in enumerate(x.args)
        if tile_steps(index) is not None and k < strided[x.name]
    )  # fmt: skip
