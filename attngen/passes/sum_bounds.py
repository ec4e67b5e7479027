"""Which rows of its tiles a kernel of plain sums can see at all: the rest is loaded as zeros, where copies can."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.expr import SEQLEN_Q, Expr, Op, const, make, sub, substitute, variables
from attngen.interval import Span, analyse
from attngen.ir.graph import Axis
from attngen.ir.ops import Stmt
from attngen.passes.bounded import bounded
from attngen.passes.key_visits import BACK, I_HI, I_LO, TRANSPOSED
from attngen.passes.partition import Owned
from attngen.passes.ranges import TileClass, Visit, VisitSource
from attngen.passes.sum_names import LENGTH
from attngen.passes.visits import _let, i32
from attngen.sums import tidy

Bounds = tuple[Expr | None, Expr]


@dataclass(frozen=True)
class Seen:
    """First row (None: 0) and limit of streamed and of owned tiles, and the scalars of the item that they are."""

    streamed: Bounds
    own: Bounds
    lets: tuple[Stmt, ...]


def seen_rows(owned: Owned, mask: Expr) -> Seen:
    """Of streamed tiles the rows that some owned row sees. Where an owned tile is an operand of a part of another sum,
    those of its rows that no streamed row sees at all are left out too."""
    keys = owned.own is Axis.N
    along = substitute(mask, TRANSPOSED) if keys else mask
    lets, streamed = _bounds("seen", analyse(along).any, LENGTH[owned.stream], BACK if keys else {}, keys)
    own: Bounds = (None, LENGTH[owned.own])
    if owned.shed():
        whole = {I_LO: const(0), I_HI: sub(SEQLEN_Q, const(1))}
        more, own = _bounds("own", analyse(mask).any, LENGTH[owned.own], whole, keys)
        lets += more
    return Seen(streamed, own, tuple(lets))


def _bounds(
    name: str, span: Span, length: Expr, values: dict[Expr, Expr], keys: bool
) -> tuple[list[Stmt], Bounds]:
    """The ends of a span as scalars; they are left out where they depend on the head of a group."""
    lets: list[Stmt] = []
    first, limit = None, length
    if span.hi is not None and not (keys and "h" in variables(span.hi)):
        lets.append(_let(f"{name}_hi", tidy(make(Op.MIN, bounded(substitute(span.hi, values)), length))))
        limit = i32(f"{name}_hi")
    if span.lo is not None and not (keys and "h" in variables(span.lo)):
        lets.append(_let(f"{name}_lo", bounded(substitute(span.lo, values))))
        first = i32(f"{name}_lo")
    return lets, (first, limit)


def visit_fact(visit: Visit, keys: bool) -> str:
    what = "query" if keys else "key"
    if visit.source is VisitSource.TABLE:
        return f"{what} tiles from a list made on the device, since the mask has no closed form: {visit.reason}"
    if visit.ranges == (TileClass.MASKED,):
        return f"every {what} tile is visited and masked, since the mask depends on the head of a group"
    return f"closed forms of the mask, {what} tiles {' and '.join(dict.fromkeys(c.value for c in visit.ranges))}"
