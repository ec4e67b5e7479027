"""What a tuner may vary. A Config is chosen by rules (attngen.passes.choose) or given by the caller; the schedule
says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from attngen.errors import SignatureError


class FoldPolicy(Enum):
    """How the reference of a streamed maximum moves. Any reference gives the exact result, as the fold's merge shows;
    the policies differ in what a tile costs.

    RUNNING      the maximum so far: each tile is reduced, and all that was summed is corrected
    CONDITIONAL  moved only where a tile's maximum is more than 2^8 above it: no corrections otherwise
    REFERENCE    that of the first tile: no maximum either; the sums, needed anyway, show when it is too small, and the
                 tile is then done again with its maximum
    ANTICIPATED  as REFERENCE, but after a tile that moved the reference far the next one takes its maximum first, which
                 costs less than doing it twice; a branch more a tile"""

    RUNNING = "running"
    CONDITIONAL = "conditional"
    REFERENCE = "reference"
    ANTICIPATED = "anticipated"


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


@dataclass(frozen=True)
class HopperConfig:
    """The same for targets with warpgroup products: `warpgroups` of 64 query rows each and a load role.

    slots: tiles of keys, and of values, in shared memory. stages: for each contraction of a tile, in program order, how
    many steps after the tile's first it is issued. issue: their order in a step. turns: warpgroups take turns on the
    tensor cores; left out: where there are several."""

    warpgroups: int
    block_n: int
    slots: int = 2
    policy: FoldPolicy = FoldPolicy.REFERENCE
    stages: tuple[int, ...] = (0, 1)
    issue: tuple[int, ...] = (0, 1)
    turns: bool = None  # type: ignore[assignment]  # None: where there are several warpgroups

    def __post_init__(self) -> None:
        if self.turns is None:
            object.__setattr__(self, "turns", self.warpgroups != 1)
        for name in ("stages", "issue"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        numbers = (self.warpgroups, self.block_n, self.slots, *self.stages, *self.issue)
        if not all(type(n) is int for n in numbers):
            raise SignatureError(f"{numbers}: warpgroups, block_n, slots, stages and issue are made of ints")
        if not isinstance(self.policy, FoldPolicy):
            allowed = ", ".join(str(p) for p in FoldPolicy)
            raise SignatureError(f"policy={self.policy!r}: allowed are {allowed} (attngen.FoldPolicy)")
        if not isinstance(self.turns, bool):
            raise SignatureError(f"turns={self.turns!r}: allowed are True and False")
        if not 1 <= self.warpgroups <= 4:
            raise SignatureError(f"warpgroups={self.warpgroups}: allowed are 1 to 4")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise SignatureError(f"block_n={self.block_n}: allowed are multiples of 16 from 16 to 256")
        if not 1 <= self.slots <= 8:
            raise SignatureError(f"slots={self.slots}: allowed are 1 to 8")
        if len(self.stages) != len(self.issue) or set(self.issue) != set(range(len(self.issue))):
            raise SignatureError(f"issue={self.issue}: not an order of the {len(self.stages)} contractions")
        if not set(self.stages) <= {0, 1}:
            raise SignatureError(f"stages={self.stages}: allowed are 0 and 1")
        if self.turns and self.warpgroups == 1:
            raise SignatureError("turns=True with warpgroups=1: one takes no turns; give turns=False, or more of them")

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_rows(self) -> int:
        return 16

    def __str__(self) -> str:
        order = "".join(f"{c}{'+' * self.stages[c]}" for c in self.issue)
        tiles = f"m{self.block_m}n{self.block_n}g{self.warpgroups} s{self.slots}"
        return f"{tiles} {self.policy.value} order {order}{' turns' if self.turns else ''}"


SUMS_FLAGS = ("turns", "unroll", "merged", "short")  # of a HopperSumsConfig, as its text has them


@dataclass(frozen=True)
class HopperSumsConfig:
    """Of a kernel of plain sums (gradients) for targets with warpgroup products: `warpgroups` of 64 owned rows each,
    streamed tiles of block_n rows in `slots` slots.

    split: the weights are made in two maps, each behind the product that it needs, and what the first knows is kept in
    16 bits; else both tiles of scores are held until one map makes all. turns: as in HopperConfig. unroll: the loop is
    written out for two slots, whose addresses are then numbers. merged: the role that adds parts up in memory issues
    the copies, too; there is no loading role, and the others have its registers. short: streamed tiles that no product
    of the next step reads have one slot less."""

    warpgroups: int
    block_n: int
    slots: int = 2
    split: bool = True
    turns: bool = False
    unroll: bool = False
    merged: bool = False
    short: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 4:
            raise SignatureError(f"warpgroups={self.warpgroups}: allowed are 1 to 4")
        if self.block_n % 16 or not 16 <= self.block_n <= 256:
            raise SignatureError(f"block_n={self.block_n}: allowed are multiples of 16 from 16 to 256")
        if not 2 <= self.slots <= 8:
            raise SignatureError(f"slots={self.slots}: allowed are 2 to 8; a step reads a tile while the next arrives")
        if self.turns and self.warpgroups == 1:
            raise SignatureError("turns=True with warpgroups=1: one takes no turns; give turns=False, or more of them")
        if self.unroll and self.slots != 2:
            raise SignatureError(f"unroll=True with slots={self.slots}: a loop is unrolled for slots=2")
        if self.unroll and self.merged:
            raise SignatureError("unroll=True with merged=True: copies of a later tile need a slot of their own")

    @property
    def block_m(self) -> int:
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def warp_rows(self) -> int:
        return 16

    def __str__(self) -> str:
        tiles = f"m{self.block_m}n{self.block_n}g{self.warpgroups} s{self.slots}"
        flags = "".join(f" {name}" for name in SUMS_FLAGS if getattr(self, name))
        return f"{tiles} {'split' if self.split else 'joint'}{flags}"


AnyConfig = Config | HopperConfig  # of a forward pass
SumsConfig = Config | HopperSumsConfig  # of a kernel of gradients
TileConfig = AnyConfig | SumsConfig


def written(config: TileConfig) -> dict[str, Any]:
    """The fields for JSON."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in asdict(config).items()}


def read(fields: Mapping[str, Any]) -> AnyConfig:
    """What `written` gave, also after JSON has made lists of tuples."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if "warpgroups" not in given:
        return Config(**given)
    given["policy"] = FoldPolicy(given["policy"])
    return HopperConfig(**given)
