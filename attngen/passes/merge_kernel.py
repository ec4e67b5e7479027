"""merge_kernel: Graph -> Schedule. The kernel that merges two finished partial results, derived from the fold.

Before   a graph with a fold (after `stream`, in natural units)
After    one pointwise kernel: a finished pair (out, lse) is the state (r = lse, l = 1, sum = out), an empty one
         (-inf, 0, 0); the fold's merge and the graph's final maps give the merged pair
Why      ring attention and split keys need exactly this, and it has to agree with what the kernels compute"""

from __future__ import annotations

from attngen.expr import NEG_INF, ONE, ZERO, B, DType, Expr, H, I, J, Op, load, make, substitute, var, where
from attngen.ir.graph import Fold, Graph, Map, Output
from attngen.ir.ops import Pointwise, ReduceKind, Scope, Stmt
from attngen.ir.schedule import (
    Access,
    Block,
    Elem,
    Item,
    Kernel,
    Order,
    Role,
    ScalarArg,
    Schedule,
    TensorArg,
    Work,
    WorkSource,
)  # fmt: skip
from attngen.passes.stream import merge

THREADS = 256


def finished(fold: Fold, part: str) -> dict[Expr, Expr]:
    """The fold's state of a finished pair out_{part}, lse_{part}."""
    lse = load(f"lse_{part}", (B, H, I), DType.F32)
    state: dict[Expr, Expr] = {}
    for s in fold.states:
        if s.kind is ReduceKind.MAX:
            value = lse
        elif s.operand:
            # an empty part adds nothing, whatever its memory holds: its weight of 0 would keep a NaN
            value = where(make(Op.EQ, lse, NEG_INF), ZERO, load(f"out_{part}", (B, H, I, J), DType.F32))
        else:
            value = where(make(Op.EQ, lse, NEG_INF), ZERO, ONE)
        state[var(f"{s.name}_{part}", DType.F32)] = value
    return state


def merge_kernel(graph: Graph, elem: Elem, target: str) -> Schedule:
    """`elem`: storage of out_1, out_2 and out; lse_1, lse_2 and lse are f32."""
    fold = next(iter(graph.of(Fold)))
    assert isinstance(fold, Fold)
    parts = {**finished(fold, "1"), **finished(fold, "2")}
    body = [Stmt(scope=Scope.ELEM, target=name, value=substitute(e, parts)) for name, e in merge(fold)]
    for out in graph.of(Output):
        assert isinstance(out, Output)
        final = graph[out.x]
        value = final.expr if isinstance(final, Map) else var(out.x, DType.F32)
        body.append(Stmt(scope=Scope.ELEM, target=out.x, value=value))
    ranks = {"out_1": (elem, 4), "out_2": (elem, 4), "lse_1": (Elem.F32, 3), "lse_2": (Elem.F32, 3)}
    tensors = [TensorArg(name=n, elem=e, rank=r, access=Access.CAPTURE, strided=True) for n, (e, r) in ranks.items()]
    tensors += [
        TensorArg(name="out", elem=elem, rank=4, access=Access.OUT),
        TensorArg(name="lse", elem=Elem.F32, rank=3, access=Access.OUT),
    ]
    item = Item(lets=(), body=(Block(name="elements", ops=(Pointwise(id="M1", body=tuple(body)),)),))
    kernel = Kernel(
        name="merge", threads=THREADS, min_ctas=1,
        work=Work(source=WorkSource.ELEMENTS, order=Order.ASCENDING, block_m=1), tensors=tuple(tensors),
        scalars=tuple(ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "seqlen_q", "head_dim")),
        buffers=(),
        roles=(Role(name="elements", first_warp=0, warps=THREADS // 32, regs=255, values=(), item=item),),
    )  # fmt: skip
    return Schedule(name="merge", target=target, kernels=(kernel,))
