"""The order of work of a persistent kernel: which CTA takes which row tile of which head, in which round.

Items of one head, or of a section of heads whose keys and values fit the L2 cache, run at about the same time. Where
row tiles differ in length (causal masks), the longest of a section come first and each goes to the CTA with the least
work so far (longest processing time first, Graham 1969); the section size is the one with the least imbalance in that
simulation. Where only the device knows how long row tiles are (order=ranked), an item has the rank of its row tile, and
lengths that fall evenly with the rank stand for the true ones: what is dealt evenly for these is nearly so for others
that fall. Where all are of one length, or where another data dependence decides it (order=ascending), items are dealt
in turn, each round a CTA further: a tile that takes longer, as the ragged last one of each head, comes to every CTA.

A table can also be made on the device, by two small kernels of the module (attngen.passes.work_table). Then only its
size is worked out here."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attngen.errors import LaunchError, PassError
from attngen.expr import Expr, substitute
from attngen.ir.ops import DealItems, SortItems
from attngen.ir.schedule import Kernel, Order, Schedule, Tiles, WorkSource, ops_of
from attngen.ir.walk import integer, value
from attngen.passes.work_table import ITEM_KEYS

MEGABYTE = 10**6
SECTION_MEGABYTES = (6, 10, 16, 22, 28, 36)  # of keys and values in the L2 cache at once
# where only the device knows lengths: large sections, since what a small one leaves unbalanced is not seen, and as many
# keys as rows of one rank visit are few
RANKED_MEGABYTES = (72,)
BETTER = 0.002  # a larger section has to gain this much balance

Item = tuple[int, int, int]  # row tile, head, batch


@dataclass(frozen=True)
class WorkTable:
    """`entries`: [rounds * ctas][4] of row tile, head, batch, 0; a negative row tile is no item."""

    rounds: int
    entries: tuple[int, ...]


def owned(kernel: Kernel, sizes: Mapping[str, int]) -> tuple[str, int, int]:
    """The index of a tile that an item is of, how many of them a head has, and the number of heads."""
    keys = kernel.work.source is WorkSource.TABLE_KEYS
    length, heads = ("seqlen_k", sizes["heads"] // sizes["group"]) if keys else ("seqlen_q", sizes["heads"])
    return "n" if keys else "m", -(-sizes[length] // kernel.work.block_m), heads


def tile_counts(kernel: Kernel, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Streamed tiles of each owned tile, from the same expressions that the kernel evaluates."""
    role = kernel.roles[0]
    loop = next(n for n in role.item.body if isinstance(n, Tiles))
    end: Expr = loop.ranges[-1].end
    for let in reversed(role.item.lets):
        end = substitute(end, {integer(let.target): let.value})
    env = {integer(name): n for name, n in sizes.items()}
    index, tiles, _ = owned(kernel, sizes)
    counts = [value(end, {**env, integer(index): tile}) for tile in range(tiles)]
    if None in counts:
        raise PassError(
            f"{kernel.name}: the number of tiles of an item depends on more than {index}; use a device table, or "
            "order=ascending"
        )
    return tuple(n for n in counts if n is not None)


def work_table(kernel: Kernel, sizes: Mapping[str, int], head_bytes: int, ctas: int) -> WorkTable:
    """`head_bytes`: keys and values of one key head. `ctas`: CTAs of the grid."""
    _, rows, count = owned(kernel, sizes)
    heads = [(h, b) for b in range(sizes["batch"]) for h in range(count)]
    block_n = next(b for b in kernel.buffers if b.slots > 1 or b.name == "sK").layout.rows
    group = sizes["group"] if count == sizes["heads"] else 1
    counts: tuple[int, ...] = ()
    sections: tuple[int, ...] = SECTION_MEGABYTES
    if kernel.work.order is Order.LONGEST_FIRST:
        counts = tile_counts(kernel, sizes)
    elif kernel.work.order is Order.RANKED:
        counts, sections = tuple(range(rows, 0, -1)), RANKED_MEGABYTES
    if len(set(counts)) <= 1:
        items = [(m, h, b) for h, b in heads for m in range(rows)]
        bins = _in_turn(items, ctas)
    else:
        bins = _balanced(counts, heads, group, head_bytes, block_n, ctas, sections)
    rounds = max(map(len, bins))
    entries: list[int] = []
    for k in range(rounds):
        for work in bins:
            entries += (*work[k], 0) if k < len(work) else (-1, 0, 0, 0)
    return WorkTable(rounds, tuple(entries))


def _in_turn(items: Sequence[Item], ctas: int) -> list[list[Item]]:
    bins: list[list[Item]] = [[] for _ in range(ctas)]
    for k, item in enumerate(items):
        turn, c = divmod(k, ctas)
        bins[(c + turn) % ctas].append(item)
    return bins


@dataclass(frozen=True)
class DeviceTable:
    """Sizes of a table that the device makes: items a section, and rounds."""

    section: int
    rounds: int


def item_count(block_m: int, sizes: Mapping[str, int]) -> int:
    return -(-sizes["seqlen_q"] // block_m) * sizes["heads"] * sizes["batch"]


def device_table(schedule: Schedule, sizes: Mapping[str, int], head_bytes: int) -> DeviceTable:
    """Sections of equal numbers of heads, whose keys and values fit the L2 cache, or of as many items as the kernel can
    sort. LaunchError for more CTAs than the kernel deals to."""
    found = [(k, op) for k in schedule.kernels for _, op in ops_of(k)]
    sort, keys = next((k, op.keys) for k, op in found if isinstance(op, SortItems))
    deal, loads = next((k, op.loads) for k, op in found if isinstance(op, DealItems))
    ctas, most = sizes["ctas"], _columns(deal, loads.name)
    if ctas > most:
        raise LaunchError(f"{deal.name}: {ctas} CTAs. Allowed: {most}, the width of {loads.name}")
    heads = sizes["heads"] * sizes["batch"]
    sections = max(1, -(-heads * head_bytes // sizes["group"] // (SECTION_MEGABYTES[-1] * MEGABYTE)))
    items = item_count(sort.work.block_m, sizes)
    section = min(-(-heads // sections) * (items // heads), _columns(sort, keys.name))
    whole, rest = divmod(items, section)
    return DeviceTable(section, whole * -(-section // ctas) + -(-rest // ctas))


def _columns(kernel: Kernel, name: str) -> int:
    return next(b for b in kernel.buffers if b.name == name).layout.cols


def _balanced(
    counts: Sequence[int], heads: Sequence[tuple[int, int]], group: int, head_bytes: int, block_n: int, ctas: int,
    sections: Sequence[int],
) -> list[list[Item]]:  # fmt: skip
    best: tuple[float, list[list[Item]]] | None = None
    seen: set[int] = set()
    for megabytes in sections:
        section = max(1, megabytes * MEGABYTE // max(1, head_bytes)) * group
        while len(heads) % section:
            section -= 1
        if section in seen:
            continue
        seen.add(section)
        bins, imbalance = _dealt(counts, heads, section, block_n, ctas)
        if best is None or imbalance < best[0] - BETTER:
            best = (imbalance, bins)
    assert best is not None
    return best[1]


def _dealt(
    counts: Sequence[int], heads: Sequence[tuple[int, int]], section: int, block_n: int, ctas: int
) -> tuple[list[list[Item]], float]:
    """Items in order, each to the CTA with the least work; the greatest load over the mean."""
    longest = sorted(range(len(counts)), key=lambda m: (-counts[m], -m))
    queue = [(0, c) for c in range(ctas)]
    bins: list[list[Item]] = [[] for _ in range(ctas)]
    for start in range(0, len(heads), section):
        for m in longest:
            for h, b in heads[start : start + section]:
                load, c = heapq.heappop(queue)
                bins[c].append((m, h, b))
                heapq.heappush(queue, (load + counts[m] * block_n + ITEM_KEYS, c))
    loads = [load for load, _ in queue]
    return bins, max(loads) * ctas / sum(loads)
