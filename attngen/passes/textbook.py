"""textbook: Variant -> Graph. Attention as its formula: scores, mask, softmax over all keys, weighted values.

Before   a traced variant
After    a graph in which the softmax is two row reductions and a division; nothing is streamed yet
Why      every later pass derives from this graph; it is also the reference meaning (attngen.ir.interpret)"""

from __future__ import annotations

from attngen.expr import NEG_INF, SCALE, SCORE, ZERO, DType, Expr, H, Op, load, make, mul, sub, substitute, var
from attngen.ir.graph import Axis, Contract, Graph, Input, Map, Mask, Node, Output, RowReduce
from attngen.ir.ops import ReduceKind
from attngen.spec import Normalizer, Variant

SCORES = (Axis.B, Axis.H, Axis.M, Axis.N)
ROWS = (Axis.B, Axis.H, Axis.M)
SINK = "sink"


def f32(name: str) -> Expr:
    return var(name, DType.F32)


def textbook(variant: Variant) -> Graph:
    """The graph of one attention call; variables of its maps are node ids, indices, `scale` and captured tensors."""
    softmax = variant.normalizer is Normalizer.SOFTMAX
    score = substitute(variant.score, {SCORE: mul(SCALE, f32("s"))})
    nodes: list[Node] = [
        Input(id="q", axes=(Axis.B, Axis.H, Axis.M, Axis.D)),
        Input(id="k", axes=(Axis.B, Axis.H, Axis.N, Axis.D)),
        Input(id="v", axes=(Axis.B, Axis.H, Axis.N, Axis.DV)),
        Contract(id="s", axes=SCORES, a="q", b="k", over=Axis.D),
        Map(id="y", axes=SCORES, expr=score, inputs=("s",)),
        Mask(id="z", axes=SCORES, x="y", visible=variant.mask, hidden=NEG_INF if softmax else ZERO),
    ]
    out = (Axis.B, Axis.H, Axis.M, Axis.DV)
    if softmax:
        sink = load(SINK, (H,), DType.F32) if variant.sink else None
        rest = None if sink is None else make(Op.EXP, sub(sink, f32("r")))
        z_minus_r = sub(f32("z"), f32("r"))
        nodes += [
            RowReduce(id="r", axes=ROWS, kind=ReduceKind.MAX, x="z", over=Axis.N, extra=sink),
            Map(id="e", axes=SCORES, expr=make(Op.EXP, z_minus_r), inputs=("z", "r")),
            RowReduce(id="l", axes=ROWS, kind=ReduceKind.SUM, x="e", over=Axis.N, extra=rest,
                      extra_inputs=("r",) if rest is not None else ()),
            Map(id="p", axes=SCORES, expr=make(Op.DIV, f32("e"), f32("l")), inputs=("e", "l")),
            Contract(id="out", axes=out, a="p", b="v", over=Axis.N),
            Map(id="lse", axes=ROWS, expr=make(Op.ADD, f32("r"), make(Op.LOG, f32("l"))), inputs=("r", "l")),
            Output(id="out!", axes=out, x="out"),
            Output(id="lse!", axes=ROWS, x="lse"),
        ]  # fmt: skip
    else:
        nodes += [Contract(id="out", axes=out, a="z", b="v", over=Axis.N), Output(id="out!", axes=out, x="out")]
    return Graph("attention", tuple(nodes))
