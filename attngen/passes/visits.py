"""Which key tiles an item visits, as scalars of the item: closed forms of the mask, or a list made on the device."""

from __future__ import annotations

from attngen.config import Config, HopperConfig, TileConfig
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
    maximum,
    minimum,
    mul,
    sub,
    substitute,
    var,
    variables,
    where,
)
from attngen.interval import analyse
from attngen.ir.ops import Scope, Stmt
from attngen.ir.program import TileLoop, numbered
from attngen.ir.schedule import Elem, Fact, Step, Workspace
from attngen.passes.bounded import bounded
from attngen.passes.ranges import Visit, VisitSource
from attngen.sums import tidy

M_TILE, T, W = var("m", DType.I32), var("t", DType.I32), var("w", DType.I32)
I_LO, I_HI = var("i_lo", DType.I32), var("i_hi", DType.I32)
VISIT, CLASSES = "visit", "classes"
BY_LENGTH = "by_length"  # row tiles of a list, those with most key tiles first
ROWS_A_GROUP = 64
LISTED_FROM = 2  # a list starts with its number of masked tiles, and of all; one entry more is read at its end


def i32(name: str) -> Expr:
    return var(name, DType.I32)


def row_lets(config: TileConfig) -> tuple[Stmt, ...]:
    """First and last query row of the item's tile."""
    first = mul(M_TILE, const(config.block_m))
    last = sub(minimum(add(first, const(config.block_m)), SEQLEN_Q), const(1))
    return (_let("i_lo", first), _let("i_hi", last))


def group_lets(config: TileConfig) -> tuple[Stmt, ...]:
    """First and last query row of a warpgroup; the last row of all, where it has none."""
    first = add(mul(M_TILE, const(config.block_m)), mul(W, const(ROWS_A_GROUP)))
    last = sub(minimum(add(i32("w_lo"), const(ROWS_A_GROUP)), SEQLEN_Q), const(1))
    return (_let("w_lo", minimum(first, sub(SEQLEN_Q, const(1)))), _let("w_hi", last))


def seen_keys(mask: Expr) -> tuple[tuple[Stmt, ...], tuple[Expr | None, Expr]]:
    """Bounds of the keys that some row of a tile sees, as item scalars."""
    span = analyse(mask).any
    lets: list[Stmt] = []
    first, limit = None, SEQLEN_K
    if span.hi is not None:
        lets.append(_let("seen_hi", tidy(minimum(bounded(span.hi), SEQLEN_K))))
        limit = i32("seen_hi")
    if span.lo is not None:
        lets.append(_let("seen_lo", bounded(span.lo)))
        first = i32("seen_lo")
    return tuple(lets), (first, limit)


Visits = tuple[tuple[Stmt, ...], TileLoop, tuple[Workspace, ...]]


def visits(visit: Visit, config: TileConfig, mask: Expr, body: tuple[Step, ...], whole: bool = False) -> Visits:
    """Scalars of the item, the loop over its tiles, and the workspaces that a list of tiles needs. `whole`: no tile
    with rows of padding is full."""
    if visit.source is VisitSource.TABLE:
        return _listed(config, mask, body)
    closed = {k: bounded(getattr(visit, k)) for k in ("lo", "hi", "full_lo", "full_hi")}
    if isinstance(config, Config):
        lets, ends = _cta_ends(closed, len(visit.ranges))
    else:
        lets, ends = _group_ends(config, closed, len(visit.ranges), whole)
    tile = sub(sub(i32("n_hi"), const(1)), T)
    return (*row_lets(config), *lets), TileLoop(
        classes=tuple(c.value for c in visit.ranges), ends=ends, tile=tile, body=numbered(body)
    ), ()  # fmt: skip


Ends = tuple[tuple[Stmt, ...], tuple[Expr, ...]]


def _cta_ends(closed: dict[str, Expr], ranges: int) -> Ends:
    """The classes of a tile are those of all rows of the CTA."""
    lo, hi = i32("n_lo"), i32("n_hi")
    lets = [_let(f"n_{k}" if k in ("lo", "hi") else k, v) for k, v in closed.items()]
    ends = (sub(hi, i32("full_hi")), sub(hi, i32("full_lo")), sub(hi, lo))[:ranges]
    if ranges == 2:
        ends = (ends[0], sub(hi, lo))
    lets += [_let(f"end{k}", e) for k, e in enumerate(ends)]
    return tuple(lets), tuple(i32(f"end{k}") for k in range(len(ends)))


def _group_ends(config: TileConfig, closed: dict[str, Expr], ranges: int, whole: bool) -> Ends:
    """All warpgroups visit the tiles of the CTA, at least one (its state then is that of no key); the classes of a tile
    are those of a warpgroup's own rows."""
    lo, hi = i32("n_lo"), i32("n_hi")
    rows = {I_LO: i32("w_lo"), I_HI: i32("w_hi")}
    full = {k: substitute(closed[k], rows) for k in ("full_lo", "full_hi")}
    if whole:
        last = add(i32("w_lo"), const(ROWS_A_GROUP - 1))
        full = {k: where(make(Op.EQ, i32("w_hi"), last), e, lo) for k, e in full.items()}
    lets = [
        _let("n_lo", closed["lo"]),
        _let("n_hi", maximum(closed["hi"], const(1))),
        _let("count", maximum(sub(hi, lo), const(1))),
        *group_lets(config),
        *(_let(k, e) for k, e in full.items()),
    ]
    ends = [sub(hi, i32("full_hi")), sub(hi, i32("full_lo"))][: ranges - 1]
    lets += [_let(f"end{k}", e) for k, e in enumerate(ends)]
    return tuple(lets), (*(i32(f"end{k}") for k in range(len(ends))), i32("count"))


def _listed(config: TileConfig, mask: Expr, body: tuple[Step, ...]) -> Visits:
    lead = [i32(s) if s[0] in variables(mask) else None for s in ("batch", "heads")]
    at = [const(0) if x is None else i32(x.name[0]) for x in lead]

    def entry(k: Expr) -> Expr:
        return load(VISIT, (*at, M_TILE, k), DType.I32)

    sizes = tuple(const(1) if x is None else x for x in lead)
    rows, keys = _tile_count(SEQLEN_Q, config.block_m), _tile_count(SEQLEN_K, config.block_n)
    spaces = [
        Workspace(name=VISIT, elem=Elem.I32, shape=(*sizes, rows, add(keys, const(LISTED_FROM + 1)))),
        Workspace(name=CLASSES, elem=Elem.U8, shape=(*sizes, rows, keys)),
    ]
    lets = [*row_lets(config), _let("masked", entry(const(0))), _let("count", entry(const(1)))]
    if not isinstance(config, Config):  # at least one tile is visited; all of its keys are masked
        lets[-1] = _let("count", maximum(lets[-1].value, const(1)))
    if isinstance(config, HopperConfig):
        lets.insert(0, _let("m", load(BY_LENGTH, (*at, i32("rank")), DType.I32)))
        spaces.append(Workspace(name=BY_LENGTH, elem=Elem.I32, shape=(*sizes, rows)))
    loop = TileLoop(
        classes=("masked", "full"), ends=(i32("masked"), i32("count")), tile=entry(add(T, const(LISTED_FROM))),
        body=numbered(body),
    )  # fmt: skip
    return tuple(lets), loop, tuple(spaces)


def _let(name: str, value: Expr) -> Stmt:
    return Stmt(scope=Scope.ITEM, target=name, value=value)


def _tile_count(length: Expr, block: int) -> Expr:
    return make(Op.FLOORDIV, add(length, const(block - 1)), const(block))


def ranges_fact(visit: Visit) -> Fact:
    if visit.source is VisitSource.TABLE:
        text = f"a list of tiles made on the device, since the mask has no closed form: {visit.reason}"
    else:
        text = f"closed forms of the mask, tiles from the last key down: {', '.join(c.value for c in visit.ranges)}"
    return Fact(subject="ranges", text=text)
