"""key_visits: which tiles of queries a tile of keys is seen from, and the loop over them, for each head of a group.

Before   a mask, and the tile shape of a kernel that owns keys
After    a loop whose counter runs over the masked tiles of all heads, then over the full ones; closed forms, or a list
         that a kernel makes on the device
Why      the analysis of a mask solves it for the keys that rows see; with queries and keys exchanged it gives the
         queries that keys are seen from. Each class is one range of the counter, so that a loop has two ranges whatever
         the number of heads is"""

from __future__ import annotations

from dataclasses import replace

from attngen.config import TileConfig
from attngen.expr import (
    SEQLEN_K,
    SEQLEN_Q,
    B,
    DType,
    Expr,
    I,
    J,
    Op,
    add,
    const,
    load,
    make,
    maximum,
    minimum,
    mul,
    sub,
    substitute,
    var,
    variables,
    where,
)
from attngen.ir.ops import Op as TileOp
from attngen.ir.ops import Stmt
from attngen.ir.program import TileLoop
from attngen.ir.schedule import Elem, Workspace
from attngen.passes.bounded import bounded
from attngen.passes.ranges import TileClass, Visit, VisitSource, ranges
from attngen.passes.visits import LISTED_FROM, _let, _tile_count, i32

T, END = var("t", DType.I32), i32("end0")
I_LO, I_HI = i32("i_lo"), i32("i_hi")
TRANSPOSED: dict[Expr, Expr] = {I: J, J: I, SEQLEN_Q: SEQLEN_K, SEQLEN_K: SEQLEN_Q}
BACK: dict[Expr, Expr] = {**TRANSPOSED, I_LO: i32("j_lo"), I_HI: i32("j_hi")}
VISITS, CLASSES = "visit_keys", "classes_keys"



def query_tiles(mask: Expr, config: TileConfig) -> Visit:
    """The query tiles of a tile of keys."""
    found = transposed_ranges(mask, config.block_n)
    if "h" not in variables(mask):
        return found
    # tiles differ between the heads of a group: all of them, and all of them masked
    last = _tile_count(SEQLEN_Q, config.block_n)
    return Visit(VisitSource.CLOSED, const(0), last, last, last, (TileClass.MASKED,), found.reason)


def transposed_ranges(mask: Expr, block: int) -> Visit:
    """The tiles of `block` queries that the keys j_lo..j_hi are seen from; each class is one range."""
    found = ranges(substitute(mask, TRANSPOSED), block)
    lo, hi, full_lo, full_hi = (substitute(e, BACK) for e in (found.lo, found.hi, found.full_lo, found.full_hi))
    classes = tuple(dict.fromkeys(found.ranges))
    return replace(found, ranges=classes, lo=lo, hi=hi, full_lo=full_lo, full_hi=full_hi)


def key_lets(config: TileConfig) -> tuple[Stmt, ...]:
    """First and last key of the item's tile."""
    first = mul(i32("n"), const(config.block_m))
    last = sub(make(Op.MIN, add(first, const(config.block_m)), SEQLEN_K), const(1))
    return _let("j_lo", first), _let("j_hi", last)


def key_workspaces(mask: Expr, config: TileConfig, number: str) -> tuple[Workspace, Workspace]:
    """The lists and the classes they are made from. number: of the kernel, where a module has several that own keys."""
    lead = (i32("batch") if "b" in variables(mask) else const(1), const(1))
    keys, queries = _tile_count(SEQLEN_K, config.block_m), _tile_count(SEQLEN_Q, config.block_n)
    return (
        Workspace(name=VISITS + number, elem=Elem.I32, shape=(*lead, keys, add(queries, const(LISTED_FROM + 1)))),
        Workspace(name=CLASSES + number, elem=Elem.U8, shape=(*lead, keys, queries)),
    )


def _listed(mask: Expr, number: str, at: Expr) -> Expr:
    """An entry of the list of a tile of keys: the number of masked tiles, of all, masked tiles, full ones."""
    b = B if "b" in variables(mask) else const(0)
    return load(VISITS + number, (b, const(0), i32("n"), at), DType.I32)


def group_loop(
    visit: Visit, mask: Expr, config: TileConfig, body: tuple[TileOp, ...], shed: bool, number: str, least: bool
) -> tuple[tuple[Stmt, ...], TileLoop]:
    """Masked query tiles of all heads of the group, then the full ones: so each class is one range of the counter.
    least: keys that no query sees visit one tile, in which nothing is visible."""
    lets = [*key_lets(config)]
    group, before, c = i32("group"), i32("before"), i32("c")
    in_masked, u = make(Op.LT, T, END), i32("u")
    if visit.source is VisitSource.TABLE:
        lets += [
            _let("masked", _listed(mask, number, const(0))),
            _let("full", sub(_listed(mask, number, const(1)), i32("masked"))),
        ]
        at = add(where(in_masked, c, add(c, i32("masked"))), const(LISTED_FROM))
        tile = _listed(mask, number, at)  # one read: that of the other class may lie beyond the list
    else:
        bound = {n: bounded(getattr(visit, n)) for n in ("lo", "hi", "full_lo", "full_hi")}
        if shed:  # the last tile of keys has rows beyond the last key: none of its query tiles is full
            whole = make(Op.LE, mul(add(i32("n"), const(1)), const(config.block_m)), SEQLEN_K)
            bound |= {n: where(whole, bound[n], i32("m_hi")) for n in ("full_lo", "full_hi")}
        lets += [_let(f"m_{n}" if n in ("lo", "hi") else n, e) for n, e in bound.items()]
        lets += [
            _let("before", sub(i32("full_lo"), i32("m_lo"))),
            _let("masked", add(before, sub(i32("m_hi"), i32("full_hi")))),
            _let("full", sub(i32("full_hi"), i32("full_lo"))),
        ]
        masked_tile = add(i32("m_lo"), where(make(Op.LT, c, before), c, add(c, i32("full"))))
        tile = where(in_masked, masked_tile, add(i32("full_lo"), c))
    lets += [
        _let("end0", mul(group, i32("masked"))),
        _let("end1", add(END, mul(group, i32("full")))),
    ]
    ends = (END, i32("end1"))[: len(visit.ranges)]
    count = where(in_masked, i32("masked"), i32("full"))
    if least:
        lets.append(_let("count", maximum(ends[-1], const(1))))
        count = maximum(count, const(1))
        if visit.source is VisitSource.TABLE:
            tile = where(make(Op.EQ, ends[-1], const(0)), const(0), tile)
        else:
            tile = minimum(tile, sub(_tile_count(SEQLEN_Q, config.block_n), const(1)))
        ends = (*ends[:-1], i32("count"))
    # the head of a step, by an approximate reciprocal: exact below 2^20 steps, a division of integers takes longer
    per_count = make(Op.RCP, make(Op.F32, count))
    place = (
        _let("u", where(in_masked, T, sub(T, END))),
        _let("g", make(Op.I32, mul(add(make(Op.F32, u), const(0.5)), per_count))),
        _let("c", sub(u, mul(i32("g"), count))),
        _let("m", tile),
        _let("h", add(mul(i32("hkv"), group), i32("g"))),
    )
    classes = tuple(c.value for c in visit.ranges)
    return tuple(lets), TileLoop(classes=classes, ends=ends, tile=i32("m"), place=place, body=body,
                                  visited=add(i32("masked"), i32("full")) if least else None)  # fmt: skip
