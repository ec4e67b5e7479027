"""What the tiles, vectors and outputs of kernels of plain sums are called, and which outputs are sums of which kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attngen.errors import PassError
from attngen.evaluate import evaluate
from attngen.expr import (
    SEQLEN_K,
    SEQLEN_Q,
    DType,
    Expr,
    Op,
    add,
    const,
    load,
    make,
    mul,
    rewrite,
    var,
    variables,
    walk,
)
from attngen.ir.graph import Axis, Graph, Output
from attngen.ir.ops import Assign, Stmt
from attngen.ir.schedule import Elem, Workspace
from attngen.passes.bounded import bounded

KEY_HEADS = {"k", "v"}
KEY_KERNEL = "attn_bwd_keys"  # kernels that own keys: this name, and a number where there are several
GIVEN_ROWS = {"lse", "dlse"}  # row values that a caller gives; others are made by a kernel of the module
WIDEST_TILE = 256  # rows
PLAIN = "rX"  # scores that no contraction makes
LENGTH = {Axis.M: SEQLEN_Q, Axis.N: SEQLEN_K}
TILE = {Axis.M: "m", Axis.N: "n"}
WIDTH = {Axis.D: "head_dim_qk", Axis.DV: "head_dim_v"}


def tile_name(prefix: str, node: str) -> str:
    """sQ of q, rS of s, rdP of dp."""
    d = "d" if len(node) > 1 and node.startswith("d") else ""
    return f"{prefix}{d}{node[len(d):].capitalize()}"


def vector_name(rows: str) -> str:
    """sLse_rows of lse_rows."""
    return f"s{rows.capitalize()}"


def own_name(node: str) -> str:
    """The value that is named like a left operand."""
    return tile_name("r", node)


def added(graph: Graph) -> Iterator[Output]:
    """What a graph adds to captured tensors."""
    for out in graph.of(Output):
        assert isinstance(out, Output)
        if out.mode is Assign.REDUCE_ADD:
            yield out


def row_sums(graph: Graph) -> Iterator[Output]:
    """At an index that all keys of a row share: summed in the row, whose sum is stored."""
    return (out for out in added(graph) if "j" not in variables(*out.index))


def element_sums(graph: Graph) -> Iterator[Output]:
    """At an index of the element: each element is added where it belongs."""
    return (out for out in added(graph) if "j" in variables(*out.index))


def clamped(out: Output) -> tuple[Expr, ...]:
    """The index inside the tensor, as where it was read."""
    return bounded(load(out.into, out.index, DType.F32)).args


def tiled(length: Expr, block: int) -> Expr:
    """Whole tiles of a length, in rows."""
    return mul(make(Op.FLOORDIV, add(length, const(block - 1)), const(block)), const(block))


def check_hidden(name: str, e: Expr) -> None:
    """A masked element has the weight 0 exactly, so that it may be selected instead of computed."""
    env = {x.name: 0.5 if x.dtype is DType.F32 else 1 for x in walk(e) if x.op is Op.VAR}
    known = rewrite(e, lambda x: const(0.5) if x.op is Op.LOAD and x.dtype is DType.F32 else None)
    if float(evaluate(known, env)) != 0.0:
        raise PassError(f"tile_sums: {name} is not 0 where it is masked")


def row_space(name: str) -> Workspace:
    """Row values for the copy engine, as far as a tile of any kernel may reach beyond the last row."""
    lead = tuple(var(n, DType.I32) for n in ("batch", "heads"))
    length = tiled(add(SEQLEN_Q, const(WIDEST_TILE)), WIDEST_TILE)
    return Workspace(name=name, elem=Elem.F32, shape=(*lead, length))


def by_step(lets: Iterable[Stmt]) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Scalars that change with the head of a step, and those of the item."""
    stepped, steps, items = {"h"}, list[Stmt](), list[Stmt]()
    for s in lets:
        if variables(s.value) & stepped:
            stepped.add(s.target)
            steps.append(s)
        else:
            items.append(s)
    return tuple(steps), tuple(items)
