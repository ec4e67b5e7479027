"""choose: configurations for targets with warpgroup products that fit registers and shared memory, best first."""

from __future__ import annotations

from attngen.config import AnyConfig, FoldPolicy, HopperConfig
from attngen.errors import PassError
from attngen.layout import SmemLayout, Swizzle
from attngen.passes.choose import padded
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Target

BASE = 1024  # the swizzle atom that the first buffer is aligned to
BARRIERS = 512  # room for the mbarriers of all rings


def tile_bytes(rows: int, cols: int) -> int:
    return SmemLayout(rows, cols, 2, Swizzle.B128).bytes


def output_pieces(config: HopperConfig, signature: Signature, target: Target) -> int:
    """In how many blocks of columns the output goes through its staging buffer: as few as shared memory allows."""
    d, dv = padded(signature.head_dim_qk), padded(signature.head_dim_v)
    loaded = tile_bytes(config.block_m, d)
    loaded += config.slots * (tile_bytes(config.block_n, d) + tile_bytes(config.block_n, dv))
    for pieces in (1, 2, 3, 4):
        if dv % (64 * pieces) and pieces > 1:
            continue
        if BASE + loaded + tile_bytes(config.block_m, dv // pieces) + BARRIERS <= target.smem_per_cta:
            return pieces
    raise PassError(f"choose: {config} needs more than {target.smem_per_cta} bytes of shared memory for {signature}")


def candidates(variant: Variant, signature: Signature, target: Target) -> tuple[AnyConfig, ...]:
    widest = max(padded(signature.head_dim_qk), padded(signature.head_dim_v))
    if widest <= 64:
        return (HopperConfig(4, 64, 4, FoldPolicy.REFERENCE, (0, 1), (1, 0)),)
    if widest <= 128:
        return (HopperConfig(2, 128, 2, FoldPolicy.REFERENCE, (0, 1), (0, 1)),)
    if widest <= 192:
        return (HopperConfig(2, 96, 2, FoldPolicy.REFERENCE, (0, 1), (0, 1)),)
    return (HopperConfig(2, 64, 2, FoldPolicy.REFERENCE, (0, 1), (0, 1)),)
