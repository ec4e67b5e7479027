"""choose: the tile shape, by rules: (signature, target) -> ranked configurations with reasons; the first that compiles
cleanly is used. What was measured (attngen.tuned) goes before it.

Rules, in this order (each is printed by `explain`):
 1. A warp owns 32 rows where registers allow, else 16: each ldmatrix of K and V then feeds two MMAs, and shared-memory
    bandwidth (128 bytes a cycle) stays above what mma.sync consumes.
 2. Registers: accumulators O and S of a warp take rows/16 * (head_dim_v + block_n) / 2 a thread; 160 leave room for
    fragments and addresses below 255; a user's score takes 8 of them, reading captured tensors in the loop 32.
 3. Two CTAs an SM where shared memory allows it: one's softmax runs beside the other's MMAs.
 4. The widest block_n under 1 to 3, at most 128: fewer barriers a key."""

from __future__ import annotations

from attngen.config import Config
from attngen.errors import PassError
from attngen.expr import SCORE, loads, variables
from attngen.ir.schedule import Fact
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Target

RESERVED = 56  # registers a thread that a kernel cannot do without beside its accumulators
# registers a thread for O and S; with more, ptxas spills loop invariants (measured, CUDA 12.8 to 13.5)
ACCUMULATORS = 160


def padded(head_dim: int) -> int:
    """Head dims are computed in steps of 16 (the k of an MMA); columns beyond the true one are zeros."""
    return -(-head_dim // 16) * 16


def smem(config: Config, signature: Signature) -> int:
    d, dv = padded(signature.head_dim_qk), padded(signature.head_dim_v)
    tiles = config.block_m * d + config.block_n * config.stages * (d + dv)
    return 2 * max(tiles, config.block_m * dv)


def budget(variant: Variant) -> int:
    """Registers a thread for the accumulators, less what this variant needs beside them."""
    indexed = [e for e in loads(variant.score, variant.mask) if variables(e) & {"i", "j"}]
    score = 32 if indexed else 8 if variant.score is not SCORE else 0
    return ACCUMULATORS - score


def candidates(variant: Variant, signature: Signature, target: Target) -> tuple[Config, ...]:
    """Legal configurations, best first."""
    dv, registers = padded(signature.head_dim_v), budget(variant)
    ranked: list[tuple[tuple[int, ...], Config]] = []
    for warp_rows in (32, 16):
        for block_n in (128, 112, 96, 80, 64, 48, 32):
            used = warp_rows // 16 * (dv + block_n) // 2
            if used > target.max_regs - RESERVED:
                continue
            for warps in (4, 8):
                for ctas in (2, 1):
                    config = Config(warp_rows * warps, block_n, warps, min_ctas=ctas)
                    fits = smem(config, signature) <= min(target.smem_per_cta, target.smem_per_sm // ctas - 1024)
                    if fits and ctas * config.threads * 255 <= target.regs_per_sm:
                        busy = ctas * warps  # warps that can hide each other's latencies
                        # shapes beyond the budget come last: the build gate decides about them
                        over = max(0, used - registers)
                        ranked.append(((over, -warp_rows, -busy, -ctas, -block_n), config))
    if not ranked:
        raise PassError(f"choose: no tile shape fits {signature} on {target.name}")
    return tuple(c for _, c in sorted(ranked, key=lambda x: x[0]))


def facts(config: Config, variant: Variant, signature: Signature, target: Target) -> tuple[Fact, ...]:
    dv = padded(signature.head_dim_v)
    registers = config.warp_rows // 16 * (dv + config.block_n) // 2
    used, limit = smem(config, signature), budget(variant)
    first = config == candidates(variant, signature, target)[0]
    why = f"widest with O and S in {registers} <= {limit}" if first else f"O and S in {registers}"
    return (
        Fact(subject="block_m", text=f"{config.block_m} = {config.warps} warps x {config.warp_rows} rows: "
             + ("each ldmatrix of K and V feeds two MMAs" if config.warp_rows == 32
                else "32 rows would need too many registers")),
        Fact(subject="block_n", text=f"{config.block_n}: {why} registers and {used} bytes of shared memory"),
        Fact(subject="occupancy", text=f"{config.min_ctas} CTAs an SM: {used} of {target.smem_per_sm} bytes, "
             f"{config.threads} threads x 255 registers of {target.regs_per_sm}"),
    )  # fmt: skip
