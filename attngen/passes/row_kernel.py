"""row_kernel: Graph -> Kernel. One number a row, made from the row's results and their gradients.

Before   a graph whose values are row values and sums over a head dimension
After    a kernel whose lanes take eight elements of a row each, at once where rows are aligned; the sums are exchanged,
         one lane stores
Why      every key tile of a row needs delta; computed there it would be computed again for each of them"""

from __future__ import annotations

from attngen.errors import PassError
from attngen.expr import SCALE, B, DType, Expr, H, I, J, const, load, loads, substitute, var, variables
from attngen.fold import fold
from attngen.ir.graph import Axis, Contract, Graph, Input, Map, Output, RowReduce
from attngen.ir.ops import CastFrag, ReduceKind, Scope, Stmt, SumRows
from attngen.ir.schedule import (
    Access,
    Block,
    Elem,
    Item,
    Kernel,
    Order,
    Role,
    ScalarArg,
    TensorArg,
    Work,
    WorkSource,
)  # fmt: skip
from attngen.passes.bounded import bounded

WARPS = 8
EIGHT = 8  # elements of a lane


def row_kernel(
    graph: Graph, name: str, elem: Elem, width: int, captures: tuple[TensorArg, ...], aligned: bool
) -> Kernel:
    """`elem`: of the inputs with a head dimension, whose size is `width`. Outputs are f32 [B, H, Sq]. aligned: rows of
    these inputs are dense and start on 16 bytes."""
    body: list[Stmt] = []
    stored = {n.x for n in graph.of(Output) if isinstance(n, Output)}
    tensors: list[TensorArg] = []
    value: dict[Expr, Expr] = {}
    for node in graph.nodes:
        own = var(node.id, DType.F32)
        match node:
            case Input():
                wide = Axis.DV in node.axes
                tensors.append(TensorArg(name=node.id, elem=elem if wide else Elem.F32, rank=4 if wide else 3,
                                         access=Access.CAPTURE, strided=True))  # fmt: skip
                value[own] = load(node.id, (B, H, I, J) if wide else (B, H, I), DType.F32)
            case Map() if Axis.DV in node.axes:
                value[own] = substitute(node.expr, value)
            case RowReduce() if node.kind is ReduceKind.SUM:
                target = f"{node.id}_sum" if node.id in stored else node.id
                x = value[var(node.x, DType.F32)]
                body.append(Stmt(scope=Scope.ELEM, target=target, value=x, accumulate=True))
                value[own] = var(target, DType.F32)
                if node.id in stored:
                    body.append(Stmt(scope=Scope.ROW, target=node.id, value=value[own]))
            case Map():
                value[own] = bounded(substitute(node.expr, value), frozenset(t.name for t in tensors))
                if node.id in stored:
                    body.append(Stmt(scope=Scope.ROW, target=node.id, value=value[own]))
            case Output():
                tensors.append(TensorArg(name=node.x, elem=Elem.F32, rank=3, access=Access.OUT))
            case _:
                raise PassError(f"row_kernel: {node.id} is no value of a row")
    read = {e.name for e in loads(*(s.value for s in body))}
    tensors += [t for t in captures if t.name in read]
    lanes = max(4, 1 << (-(-width // EIGHT) - 1).bit_length())
    sums = SumRows(id="R1", body=tuple(body), cols=width, lanes=lanes, at_once=aligned)
    item = Item(lets=(), body=(Block(name="rows", ops=(sums,)),))
    return Kernel(
        name=name, threads=32 * WARPS, min_ctas=1,
        work=Work(source=WorkSource.ROWS, order=Order.ASCENDING, block_m=32 // lanes), tensors=tuple(tensors),
        scalars=tuple(ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "seqlen_q")),
        roles=(Role(name="rows", first_warp=0, warps=WARPS, regs=255, item=item),),
    )  # fmt: skip


def cast_blocks(graph: Graph, out: Output, node: Contract, elem: Elem, cols: int, rows: int) -> Kernel:
    """As `cast_kernel`, of a sum that lies in blocks in the order of accumulators of `rows` rows and
    `cols` columns."""
    final, one = graph[out.x], const(1.0)
    factor = fold(substitute(final.expr, {var(node.id, DType.F32): one})) if isinstance(final, Map) else one
    tensors = (
        TensorArg(name=node.id, elem=Elem.F32, rank=3, access=Access.WORK),
        TensorArg(name=out.x, elem=elem, rank=4, access=Access.OUT),
    )
    cast = CastFrag(id="C1", dst=out.x, src=node.id, factor=factor, cols=cols)
    names = sorted(variables(factor) & {SCALE.name})
    scalars = [ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "group", "seqlen_q")]
    return Kernel(
        name=f"attn_bwd_cast_{out.x}", threads=2 * rows, min_ctas=1,
        work=Work(source=WorkSource.GRID, order=Order.ASCENDING, block_m=rows), tensors=tensors,
        scalars=(*scalars, *(ScalarArg(name=n, dtype=DType.F32) for n in names)),
        roles=(Role(name="rows", first_warp=0, warps=2 * rows // 32, regs=255,
                    item=Item(lets=(), body=(Block(name="rows", ops=(cast,)),))),),
    )  # fmt: skip


def cast_kernel(graph: Graph, out: Output, node: Contract, elem: Elem, width: int) -> Kernel:
    """What follows a sum that was added up in memory: its factor, and the type of the output."""
    sums = load(node.id, (B, H, I, J), DType.F32)
    final = graph[out.x]
    value = substitute(final.expr, {var(node.id, DType.F32): sums}) if isinstance(final, Map) else sums
    tensors = (
        TensorArg(name=node.id, elem=Elem.F32, rank=4, access=Access.WORK),
        TensorArg(name=out.x, elem=elem, rank=4, access=Access.OUT),
    )
    cast = SumRows(id="C1", body=(Stmt(scope=Scope.ELEM, target=out.x, value=value),), cols=width, at_once=True)
    names = sorted(variables(value) & {SCALE.name})
    scalars = [ScalarArg(name=n, dtype=DType.I32) for n in ("batch", "heads", "seqlen_q")]
    return Kernel(
        name=f"attn_bwd_cast_{out.x}", threads=32 * WARPS, min_ctas=1,
        work=Work(source=WorkSource.ROWS, order=Order.ASCENDING, block_m=1), tensors=tensors,
        scalars=(*scalars, *(ScalarArg(name=n, dtype=DType.F32) for n in names)),
        roles=(Role(name="rows", first_warp=0, warps=WARPS, regs=255,
                    item=Item(lets=(), body=(Block(name="rows", ops=(cast,)),))),),
    )  # fmt: skip
