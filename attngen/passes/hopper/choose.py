"""choose: configurations for targets with warpgroup products, best first.

Enumerated: warpgroups, keys a tile, slots, the stages and issue order of a tile's products, and turns on the tensor
cores. What exceeds registers or shared memory is left out; the rest is ranked by the machine model (attngen.model): the
simulated cycles of an item over its rows and keys. Shapes are ranked first, each with one order of its products, then
the orders of the best shapes.

The model sees one item; how many there are, and how long, depends on the call, which is not known here: `LENGTH`
queries and keys stand for it, in whole tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from attngen.config import FoldPolicy, HopperConfig
from attngen.errors import PassError
from attngen.expr import Expr
from attngen.ir.schedule import Kernel
from attngen.layout import SmemLayout, Swizzle
from attngen.model import Estimate, estimate
from attngen.passes.choose import padded
from attngen.passes.hopper.copies import copier
from attngen.passes.hopper.stage import registers
from attngen.passes.tile import by_position
from attngen.signature import Signature
from attngen.target import Target

BASE = 1024  # the swizzle atom that the first buffer is aligned to
BARRIERS = 512  # room for the mbarriers of all rings
ADDRESSES = 24  # registers beside accumulators and A fragments that no kernel does without
READS = 16  # and those of neighbours that a score reads at its query or key: with fewer ptxas spills (CUDA 13)
LENGTH = 4096
BLOCK_N = (48, 64, 80, 96, 112, 128, 144, 160, 176)
# (stages, issue): a tile's second product beside the next tile's first, behind it or before it; or in its own step
SLOTS = (4, 2)
ORDERS = (((0, 1), (0, 1)), ((0, 1), (1, 0)), ((0, 0), (0, 1)))
TOLD_APART = 0.005  # relative cost
REORDERED = 4  # shapes whose other orders are tried
# share of the tensor cores from which a branch a tile is hidden: 0.3 to 0.6 % slower there, 2 to 3 % where issue slots
# bind (H200, head dims 64, 128 and 256)
TENSOR_BOUND = 0.9

Build = Callable[[HopperConfig], Kernel]


def tile_bytes(rows: int, cols: int) -> int:
    return SmemLayout(rows, cols, 2, Swizzle.B128).bytes


def loaded_bytes(config: HopperConfig, signature: Signature) -> int:
    d, dv = padded(signature.head_dim_qk), padded(signature.head_dim_v)
    return tile_bytes(config.block_m, d) + config.slots * (
        tile_bytes(config.block_n, d) + tile_bytes(config.block_n, dv)
    )


def staging_room(config: HopperConfig, signature: Signature, target: Target) -> int:
    """Bytes that copied tiles and barriers leave for the output."""
    return target.smem_per_cta - BASE - BARRIERS - loaded_bytes(config, signature)


def staging(config: HopperConfig, signature: Signature) -> list[tuple[int, int]]:
    """(pieces, bytes): in how many blocks of columns the output may go through a staging buffer."""
    dv = padded(signature.head_dim_v)
    legal = [pieces for pieces in (1, 2, 3, 4) if pieces == 1 or dv % (64 * pieces) == 0]
    return [(pieces, tile_bytes(config.block_m, dv // pieces)) for pieces in legal]


def needed_bytes(config: HopperConfig, signature: Signature) -> int:
    """Shared memory of a CTA, with the smallest staging buffer."""
    return BASE + BARRIERS + loaded_bytes(config, signature) + min(size for _, size in staging(config, signature))


def output_pieces(config: HopperConfig, signature: Signature, target: Target) -> int:
    """In how many blocks of columns the output goes through its staging buffer: as few as shared memory allows."""
    room = staging_room(config, signature, target)
    for pieces, size in staging(config, signature):
        if size <= room:
            return pieces
    raise PassError(f"choose: {config} for {signature}: {_too_large(config, signature, target)}")


def _too_large(config: HopperConfig, signature: Signature, target: Target) -> str:
    return f"{needed_bytes(config, signature)} bytes of shared memory, more than {target.smem_per_cta}"


def fragments(config: HopperConfig, signature: Signature) -> int:
    """Registers a thread of accumulators and A fragments."""
    overlapped = config.stages == (0, 1) and config.issue == (0, 1)
    copies = 2 if overlapped else 1
    return config.block_n // 2 + padded(signature.head_dim_v) // 2 + copies * config.block_n // 4


def beside(score: Expr) -> int:
    """Registers a thread beside accumulators and A fragments."""
    return ADDRESSES + (READS if by_position(score) else 0)


def excess(config: HopperConfig, signature: Signature, target: Target, spare: int = ADDRESSES) -> str | None:
    """The limit that a configuration exceeds; None: it fits. `spare`: registers `beside` what it holds."""
    used, limit = fragments(config, signature), registers(config, target.regs_per_sm, copier(signature))[1]
    if spare + used >= limit:
        return f"accumulators, A fragments, addresses take {used} + {spare} registers a thread, not below {limit}"
    if needed_bytes(config, signature) > target.smem_per_cta:
        return _too_large(config, signature, target)
    return None


def fits(config: HopperConfig, signature: Signature, target: Target, spare: int = ADDRESSES) -> bool:
    return excess(config, signature, target, spare) is None


def every_shape(policy: FoldPolicy) -> list[list[HopperConfig]]:
    """For each shape its configurations in the order of preference. Slots: four where they fit, else two: the loop
    needs no more phases than that."""
    return [
        [
            HopperConfig(groups, block_n, slots, policy, stages, issue, groups > 1)
            for (stages, issue), slots in product(ORDERS, SLOTS)
        ]
        for groups, block_n in product((1, 2, 3, 4), BLOCK_N)
    ]


def shapes(
    signature: Signature, target: Target, policy: FoldPolicy, spare: int = ADDRESSES
) -> list[HopperConfig]:
    """Legal configurations, one order of products each."""
    found = (next((c for c in legal if fits(c, signature, target, spare)), None) for legal in every_shape(policy))
    return [config for config in found if config is not None]


def excluded(signature: Signature, target: Target, spare: int = ADDRESSES) -> list[tuple[str, str]]:
    """Shapes that do not fit in any order, and the limit that the smallest of their configurations exceeds."""
    result = []
    for legal in every_shape(FoldPolicy.RUNNING):
        over = [excess(c, signature, target, spare) for c in legal]
        if None not in over:
            smallest = legal[-1]
            result.append((f"m{smallest.block_m}n{smallest.block_n}g{smallest.warpgroups}", str(over[-1])))
    return result


def reordered(config: HopperConfig, signature: Signature, target: Target, spare: int) -> list[HopperConfig]:
    """The other orders of a shape's products."""
    others = (replace(config, stages=stages, issue=issue) for stages, issue in ORDERS)
    return [c for c in others if c != config and fits(c, signature, target, spare)]


@dataclass(frozen=True)
class Candidate:
    """A configuration and what the model says of it. `cost`: cycles of a row and key."""

    config: HopperConfig
    estimate: Estimate

    @property
    def cost(self) -> float:
        c = self.config
        rows, tiles = -(-LENGTH // c.block_m) * c.block_m, -(-LENGTH // c.block_n)
        return self.estimate.cycles(tiles) / (c.block_m * LENGTH) * rows / LENGTH


def ranked(
    signature: Signature, target: Target, policies: tuple[FoldPolicy, ...], build: Build, spare: int = ADDRESSES
) -> tuple[Candidate, ...]:
    """`policies`: those that the fold allows; the cheapest is taken. `build`: the kernel of a configuration. `spare`:
    registers `beside` accumulators and fragments."""

    def simulated(configs: Iterable[HopperConfig]) -> list[Candidate]:
        return [Candidate(c, estimate(build(c), target)) for c in configs]

    cheapest = [p for p in policies if p is not FoldPolicy.ANTICIPATED]
    found = by_slack(simulated(shapes(signature, target, cheapest[0], spare)))
    if not found:
        raise PassError(f"choose: no tile shape fits {signature} on {target.name}")
    best = found[0].config
    alternatives = by_slack(simulated(replace(best, policy=p) for p in cheapest))
    policy = alternatives[0].config.policy
    if policy is not best.policy:
        found = simulated(replace(c.config, policy=policy) for c in found)
    for candidate in by_slack(found)[:REORDERED]:
        found += simulated(reordered(candidate.config, signature, target, spare))
    return tuple(anticipating(c, policies) for c in by_slack(found))


def shorter(configs: Sequence[HopperConfig]) -> list[HopperConfig]:
    """The same shapes with the least code, for scores whose text is long: both products of a tile in its own step, two
    slots, and a maximum at each tile instead of tiles that are done again."""
    least = {"slots": 2, "policy": FoldPolicy.RUNNING, "stages": ORDERS[-1][0], "issue": ORDERS[-1][1]}
    made = dict.fromkeys(replace(c, **least) for c in configs)  # type: ignore[arg-type]
    return [c for c in made if c not in configs]


def by_slack(found: list[Candidate]) -> list[Candidate]:
    """By cost, in steps of what the model can tell apart; then those whose streams wait most: they have most to give
    when something is later than modelled."""
    best = min((c.cost for c in found), default=1.0)
    return sorted(found, key=lambda c: (round((c.cost / best - 1) / TOLD_APART), c.estimate.stream, c.cost))


def anticipating(candidate: Candidate, policies: tuple[FoldPolicy, ...]) -> Candidate:
    """With one branch more a tile where the tensor cores bind and it costs nothing."""
    config = candidate.config
    free = candidate.estimate.tensor >= TENSOR_BOUND and config.policy is FoldPolicy.REFERENCE
    if free and FoldPolicy.ANTICIPATED in policies:
        return replace(candidate, config=replace(config, policy=FoldPolicy.ANTICIPATED))
    return candidate
