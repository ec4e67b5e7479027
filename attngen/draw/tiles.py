"""Which tiles of keys a tile of queries visits, and which of them need no mask: the closed forms beside the truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from attngen.draw.picture import Picture, Rect, Text
from attngen.evaluate import evaluate
from attngen.expr import Expr
from attngen.passes.ranges import VisitSource, ranges

SIDE, LEFT, TOP = 520, 46, 34


class Tile(Enum):
    """What the kernel does with a tile of keys."""

    EMPTY = "empty"  # not visited
    FULL = "full"  # visited, no mask
    PARTIAL = "partial"  # visited, masked element by element
    LATE = "late"  # visited, though no query of it sees a key


LEGEND = (
    ("full", "visited without a mask"), ("partial", "visited, masked element by element"), ("empty", "not visited"),
    ("late", "visited in vain: the bounds are no tighter"),
)  # fmt: skip


@dataclass(frozen=True)
class TileMap:
    rows: tuple[tuple[Tile, ...], ...]  # by tile of queries, then of keys
    source: VisitSource
    reason: str  # of a table

    def count(self, tile: Tile) -> int:
        return sum(row.count(tile) for row in self.rows)


def tile_map(
    mask: Expr, tensors: Mapping[str, Tensor], block_m: int, block_n: int, seqlen_q: int, seqlen_k: int
) -> TileMap:
    """Of the first head of the first batch entry."""
    visit = ranges(mask, block_n)
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "b": 0, "h": 0}
    keys = -(-seqlen_k // block_n)
    made = []
    for first in range(0, seqlen_q, block_m):
        last = min(first + block_m, seqlen_q)
        i, j = torch.arange(first, last)[:, None], torch.arange(seqlen_k)
        seen = torch.zeros(last - first, keys * block_n, dtype=torch.bool)
        seen[:, :seqlen_k] = evaluate(mask, {**lengths, "i": i, "j": j}, tensors)
        tiles = seen.view(last - first, keys, block_n)
        some, all_ = tiles.any(2).any(0).tolist(), tiles.all(2).all(0).tolist()
        if visit.source is VisitSource.TABLE:
            visited, full = some, all_
        else:
            env = {**lengths, "i_lo": first, "i_hi": last - 1}
            lo, hi, full_lo, full_hi = (
                int(evaluate(e, env, tensors)) for e in (visit.lo, visit.hi, visit.full_lo, visit.full_hi)
            )
            visited = [lo <= n < hi for n in range(keys)]
            full = [full_lo <= n < full_hi for n in range(keys)]
        made.append(tuple(_tile(*of) for of in zip(visited, full, some, strict=True)))
    return TileMap(tuple(made), visit.source, visit.reason)


def _tile(visited: bool, full: bool, some: bool) -> Tile:
    if not visited:
        return Tile.EMPTY
    if full:
        return Tile.FULL
    return Tile.PARTIAL if some else Tile.LATE


def tiles_picture(found: TileMap, block_m: int, block_n: int, seqlen_q: int, seqlen_k: int) -> Picture:
    """Queries downwards, keys to the right, both at one scale."""
    scale = SIDE / max(seqlen_q, seqlen_k)
    rects = []
    for m, row in enumerate(found.rows):
        for n, tile in enumerate(row):
            x, y = LEFT + n * block_n * scale, TOP + m * block_m * scale
            width = min(block_n, seqlen_k - n * block_n) * scale
            height = min(block_m, seqlen_q - m * block_m) * scale
            rects.append(Rect(x, y, width, height, tile.value, f"queries from {m * block_m}, keys from {n * block_n}"))
    texts = [
        Text(LEFT, 12, f"keys, {block_n} a tile"), Text(LEFT, TOP - 6, "0", "small"),
        Text(LEFT + seqlen_k * scale, TOP - 6, str(seqlen_k), "small", "end"),
        Text(LEFT - 6, TOP + 10, "0", "small", "end"),
        Text(LEFT - 6, TOP + seqlen_q * scale, str(seqlen_q), "small", "end"),
    ]  # fmt: skip
    visited = sum(found.count(t) for t in (Tile.FULL, Tile.PARTIAL, Tile.LATE))
    total = sum(len(row) for row in found.rows)
    by = "closed forms" if found.source is VisitSource.CLOSED else "a table made on the device"
    said = (
        ("queries", f"downwards, {block_m} a tile"), ("visited", f"{visited} of {total} tiles, by {by}"),
        ("without a mask", f"{found.count(Tile.FULL)}"), ("masked", f"{found.count(Tile.PARTIAL)}"),
        ("in vain", f"{found.count(Tile.LATE)}"), ("why a table", found.reason),
    )  # fmt: skip
    right = LEFT + seqlen_k * scale + 28
    at = TOP + 12.0
    for name, value in said:
        if value:
            texts += [Text(right, at, name), Text(right, at + 17, value, "label")]
            at += 42
    height = max(TOP + seqlen_q * scale, at)
    return Picture("tiles of the first head", right + 330, height, tuple(rects), (), tuple(texts))
