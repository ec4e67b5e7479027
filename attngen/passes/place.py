"""place: Program -> Program. Gives every value a space and a layout.

Before   tiles without a place
After    loaded and staged tiles in shared memory (swizzled), loaded vectors too (linear); results of contractions as
         accumulator fragments, the left operand of the second contraction as an A fragment in registers, row vectors as
         row values
Why      an accumulator is an A operand without movement exactly when both have the same rows axis and the same split of
         it over the warps (the fragments coincide, see attngen.layout.Fragment); else it would go through shared
         memory"""

from __future__ import annotations

import dataclasses

from attngen.errors import PassError
from attngen.ir.ops import Map, Scope
from attngen.ir.program import ContractTile, LoadTile, LoadVector, Program, Space, StageTile, TileValue
from attngen.ir.schedule import Elem
from attngen.layout import Fragment, SmemLayout, Swizzle

PACKED = {Elem.BF16: "bf16x2", Elem.F16: "f16x2"}


def place(program: Program, swizzle: Swizzle) -> Program:
    """`swizzle`: of the tiles in shared memory, what the target's copies write and its products read."""
    loaded = {op.dst.name for op in program.ops() if isinstance(op, LoadTile | StageTile)}
    vectors = {op.dst.name for op in program.ops() if isinstance(op, LoadVector)}
    fragments = {op.d.name for op in program.ops() if isinstance(op, ContractTile)}
    fragments |= {op.over.name for op in program.ops() if isinstance(op, Map)}  # scores made of positions alone
    left = {op.a.name for op in program.ops() if isinstance(op, ContractTile)} - loaded
    rows_axis = {v.name: v.axes[0] for v in program.values}
    sources = {
        s.target: op.over.name
        for op in program.ops() if isinstance(op, Map) for s in op.body if s.scope is Scope.ELEM
    }  # fmt: skip

    def one(v: TileValue) -> TileValue:
        if v.fragment is not None:
            return dataclasses.replace(v, space=Space.REGISTER)
        if v.name in loaded:
            layout = SmemLayout(v.rows, v.cols, v.elem.bytes, swizzle)
            return dataclasses.replace(v, space=Space.SHARED, layout=layout)
        if v.name in vectors:
            layout = SmemLayout(1, v.rows, v.elem.bytes, Swizzle.LINEAR)
            return dataclasses.replace(v, space=Space.SHARED, layout=layout)
        if v.name in fragments:
            return dataclasses.replace(v, space=Space.REGISTER, fragment=Fragment.ACC)
        if v.name in left:
            source = sources.get(v.name, "")
            if rows_axis.get(source) != v.axes[0]:
                raise PassError(
                    f"place: {v.name} has rows {v.axes[0]} but is made from {source or 'nothing'} with other rows"
                )
            return dataclasses.replace(v, space=Space.REGISTER, fragment=Fragment.OPA, dtype=PACKED[v.elem])
        return dataclasses.replace(v, space=Space.REGISTER, fragment=Fragment.ROW)

    return dataclasses.replace(program, values=tuple(one(v) for v in program.values))
