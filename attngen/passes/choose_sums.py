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

STEADY = ACCUMULATORS + 24  # products die where the weights are made: more registers than the forward pass may be used


def widths(owned: Owned, signature: Signature) -> tuple[int, int, tuple[int, ...]]:
    """(elements a row of the owned inputs, of the streamed ones, of each sum)."""
    size = {Axis.D: padded(signature.head_dim_qk), Axis.DV: padded(signature.head_dim_v)}
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


def divides(config: Config, owned: Owned, signature: Signature) -> bool:
    """Whether the warps share the tile of each part: 16 rows each, then whole pairs of MMAs of its columns."""
    size = {Axis.D: padded(signature.head_dim_qk), Axis.DV: padded(signature.head_dim_v)}
    across = config.block_n // 16
    return all(
        config.warps % across == 0 and size[node.axes[3]] % (16 * (config.warps // across)) == 0
        for _, node in owned.shed()
    )


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
                    # 32 rows halve what is read from shared memory: worth a compile that may be refused
                    limit = STEADY + (8 if owned.shed() and warp_rows == 32 else 0) - score
                    over, busy = max(0, used - limit), ctas * warps
                    # what a CTA sheds is the less the more rows it owns
                    rows = -min(config.block_m, 128) if owned.shed() else 0
                    ranked.append(((over, rows, -min(warp_rows * block_n, 1024), -busy, -warp_rows), config))
    return tuple(c for _, c in sorted(ranked, key=lambda x: x[0]))
