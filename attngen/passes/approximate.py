"""approximate: Graph -> Graph. Takes the hardware's tanh where the type of the inputs rounds more than it does.

Before   tanh in a score
After    tanh_approx, one instruction, for bf16
Why      tanh.approx.f32 has a relative error of 2^-11; a score rounded to bf16, as attention written in torch
         operations has it, one of 2^-9. Written with ex2 and rcp it is exact to float32 and takes two instructions of
         the unit that the softmax needs as well. fp16 rounds scores to 2^-12 and keeps the exact form"""

from __future__ import annotations

import dataclasses

from attngen.expr import Expr, Op, make, rewrite
from attngen.ir.graph import Graph, Map
from attngen.signature import IoType


def approximate(graph: Graph, dtype: IoType) -> Graph:
    if dtype is not IoType.BF16:
        return graph

    def one(e: Expr) -> Expr | None:
        return make(Op.TANH_APPROX, e.args[0]) if e.op is Op.TANH else None

    return Graph(
        graph.name,
        tuple(dataclasses.replace(n, expr=rewrite(n.expr, one)) if isinstance(n, Map) else n for n in graph.nodes),
    )
