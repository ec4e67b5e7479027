"""What a tuner may vary. A Config is chosen by rules (attngen.passes.choose) or given by the caller; the schedule
says it."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.errors import SignatureError


@dataclass(frozen=True)
class Config:
    """block_m: rows of the CTA tile, queries (keys, where a kernel owns keys). block_n: keys (queries) of a streamed
    tile. warps: each owns block_m / warps rows.
    stages: how far copies run ahead; 1: at most one tile, behind its reader; s > 1: s - 1 tiles, in s slots.
    min_ctas: CTAs an SM that registers must allow."""

    block_m: int
    block_n: int
    warps: int
    stages: int = 1
    min_ctas: int = 1

    def __post_init__(self) -> None:
        if self.block_m % (16 * self.warps):
            raise SignatureError(
                f"block_m={self.block_m} is not a multiple of 16 rows for each of {self.warps} warps; "
                f"choose a multiple of {16 * self.warps}"
            )
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise SignatureError(f"block_n={self.block_n}: allowed are multiples of 16 from 16 to 256")
        if self.stages not in (1, 2, 3, 4):
            raise SignatureError(f"stages={self.stages}: allowed are 1 to 4")

    @property
    def warp_rows(self) -> int:
        return self.block_m // self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def __str__(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps} s{self.stages} ctas{self.min_ctas}"
