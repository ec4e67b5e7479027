"""The ops of the small kernels of a module: lists of tiles, tables of items, sums of rows, casts. One of them is almost
all that such a kernel does."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.expr import Expr
from attngen.ir.terms import Op, Ref, Stmt, Unit, updated


@dataclass(frozen=True, kw_only=True)
class ScanTiles(Op):
    """Classifies the key tiles [lo, hi) of one row tile by evaluating `visible`, the last statement, on every element
    (warps take tiles in turn, lanes columns), and writes the class of tile n to `dst[.., n]`: 0 empty, 1 masked, 2 full
    (every key < seqlen_k, every row sees it). keys: the rows are keys and the tiles are of queries; a tile of keys that
    reaches beyond the last one has no full tile."""

    dst: str
    body: tuple[Stmt, ...]
    lo: Expr
    hi: Expr
    block_n: int
    keys: bool = False
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class CompactTiles(Op):
    """From the classes of a row tile to its visit list: dst = [count masked, count, masked tiles.., full tiles..], both
    from the last down; entry 0 of an empty list is tile 0."""

    dst: str
    src: str
    lo: Expr
    hi: Expr
    keys: bool = False
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class RankTile(Op):
    """The CTA's row tile at its rank in a list of them, those with most key tiles first: dst[.., rank] = m. `src`:
    visit lists. Equal ones keep their order."""

    dst: str
    src: str
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class SumRows(Op):
    """Elements j < `cols` of a row (b, h, i): ELEM statements, of which `x += value` are sums over the row, then ROW
    statements of the sums; a target named like an output tensor is stored. lanes: that share a row, each with eight
    neighbours, so that a warp has 32 / lanes rows; 0: a warp has a row, and a lane two neighbours at a time. at_once:
    the neighbours at [b, h, i, j] are read, and stored, as one word of 16 (of two: 4 or 8) bytes, on which dense rows
    start. The order of the sums does not depend on it."""

    body: tuple[Stmt, ...]
    cols: int
    lanes: int = 0
    at_once: bool = False
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class CastFrag(Op):
    """The rows of a work item, 64 at most, from what `red_frag` added up, by a thread for two: elements of `src` times
    `factor`. cols: of the workspace, in blocks (attngen.layout.blocks); columns beyond the tensor's are padding."""

    dst: str
    src: str
    factor: Expr
    cols: int
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class SortItems(Op):
    """The items of a section, most key tiles first, as rows [row tile, head, batch, key tiles] of `dst`. The last
    statement is the number of key tiles of item (m, h, b). `keys`: a word for each item that a section can have. Equal
    items keep their order, so that equal sizes give equal tables."""

    dst: str
    keys: Ref = updated()
    body: tuple[Stmt, ...]
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class DealItems(Op):
    """Sorted items to CTAs, section by section and a round at a time: the longest item of a round to the CTA with the
    least work so far. An item costs `tile` for each of its key tiles, and `extra`. `loads`: two vectors of a word for
    each CTA."""

    dst: str
    src: str
    loads: Ref = updated()
    tile: int
    extra: int
    unit = Unit.GLOBAL


@dataclass(frozen=True, kw_only=True)
class Pointwise(Op):
    """Scalar statements on one element a thread; a target named like an output tensor is stored."""

    body: tuple[Stmt, ...]
    unit = Unit.GLOBAL
