"""choose_sums: the tile shapes of kernels of plain sums, by rules, best first. The first that compiles cleanly is used.

Rules, in this order:
 1. Registers: a warp keeps the accumulators of its rows for the whole loop, and the products of a step. What the user's
    score needs beside them is reserved as in the forward pass.
 2. A warp owns 32 rows where registers allow, else 16: each ldmatrix of a streamed tile then feeds two MMAs.
 3. A CTA that adds parts of a sum in memory owns 128 rows where it can: half of the additions of 64.
 4. The widest streamed tile up to 64: fewer barriers; the more CTAs or warps on an SM, the better latencies hide.
Streamed tiles have two slots, so that copies run a step ahead."""

from __future__ import annotations

from attngen.config import Config
from attngen.ir.graph import Axis, Contract, Input
from attngen.passes.choose import ACCUMULATORS, RESERVED, budget, padded
from attngen.passes.partition import Owned
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Target

ROW_BLOCK, PAIR = 16, 16  # rows of an MMA, columns of the two that one ldmatrix feeds
# Products die where the weights are made: more registers than the forward pass may be used, most where row values are
# read from shared memory.
STEADY = {Axis.M: ACCUMULATORS + 24, Axis.N: ACCUMULATORS + 32}
NARROW = 96  # head dims up to here have their parts shared by four warps, with 16 rows each


def width(owned: Owned, head_dim: int) -> int:
    """Columns of a tile with a head dimension: that of an MMA divides them, and where eight warps share a part, twice
    that."""
    return padded(head_dim) if not owned.shed() or head_dim <= NARROW else -(-head_dim // 32) * 32


def _sizes(owned: Owned, signature: Signature) -> dict[Axis, int]:
    return {Axis.D: width(owned, signature.head_dim_qk), Axis.DV: width(owned, signature.head_dim_v)}


def widths(owned: Owned, signature: Signature) -> tuple[int, int, tuple[int, ...]]:
    """(elements a row of the owned inputs, of the streamed ones, of each sum)."""
    size = _sizes(owned, signature)
    read = {name for node in owned.graph.of(Contract) for name in node.operands()}
    inputs = [node for node in owned.graph.of(Input) if node.id in read]
    own = sum(size[n.axes[3]] for n in inputs if owned.own in n.axes)
    stream = sum(size[n.axes[3]] for n in inputs if owned.stream in n.axes)
    return own, stream, tuple(size[node.axes[3]] for _, node in owned.sums())


def products(owned: Owned) -> int:
    """Tiles of scores in registers: one for each contraction over a head dimension."""
    return max(1, sum(isinstance(n, Contract) and n.over in (Axis.D, Axis.DV) for n in owned.graph.nodes))


def smem(config: Config, owned: Owned, signature: Signature) -> int:
    own, stream, sums = widths(owned, signature)
    tiles = config.block_m * own + config.block_n * config.stages * stream
    tiles += config.block_m * config.block_n * len(owned.shed())
    return 2 * max(tiles, config.block_m * sum(sums))


def registers(config: Config, owned: Owned, signature: Signature) -> int:
    """Of the accumulators and products of a thread."""
    return config.warp_rows // 16 * (sum(widths(owned, signature)[2]) + products(owned) * config.block_n) // 2


def part_shapes(rows: int, cols: int, warps: int) -> list[tuple[int, int]]:
    """Rows and columns of each warp where all share a tile: whole MMAs, the nearest to a square first, since what a
    warp reads of its operands is proportional to their sum."""
    shapes = [
        (r, rows * cols // (warps * r)) for r in range(ROW_BLOCK, rows + 1, ROW_BLOCK)
        if rows % r == 0 and warps % (rows // r) == 0 and rows * cols % (warps * r * PAIR) == 0
    ]  # fmt: skip
    return sorted(shapes, key=lambda s: (sum(s), s[0]))


def divides(config: Config, owned: Owned, signature: Signature) -> bool:
    """Whether the warps can share the tile of each part."""
    size = _sizes(owned, signature)
    return all(part_shapes(config.block_n, size[node.axes[3]], config.warps) for _, node in owned.shed())


def candidates_sums(owned: Owned, variant: Variant, signature: Signature, target: Target) -> tuple[Config, ...]:
    """Legal configurations, best first; none where the accumulators alone are too many."""
    score = ACCUMULATORS - budget(variant)
    ranked: list[tuple[tuple[int, ...], Config]] = []
    for warp_rows in (32, 16):
        for block_n in (64, 48, 32, 16):
            for warps in (4, 8):
                for ctas in (2, 1):
                    config = Config(warp_rows * warps, block_n, warps, stages=2, min_ctas=ctas)
                    used = registers(config, owned, signature)
                    room = min(target.smem_per_cta, target.smem_per_sm // ctas - target.reserved_smem)
                    fits = smem(config, owned, signature) <= room
                    if not fits or used > target.max_regs - RESERVED + 8 or not divides(config, owned, signature):
                        continue
                    if ctas * config.threads * target.max_regs > target.regs_per_sm:
                        continue
                    over, busy = max(0, used - STEADY[owned.own] + score), ctas * warps
                    # what a CTA sheds is the less the more rows it owns
                    rows = -min(config.block_m, 128) if owned.shed() else 0
                    ranked.append(((over, rows, -min(warp_rows * block_n, 1024), -busy, -warp_rows), config))
    return tuple(c for _, c in sorted(ranked, key=lambda x: x[0]))
