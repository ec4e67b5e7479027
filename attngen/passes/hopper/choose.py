"""choose: configurations for targets with warpgroup products, best first.

Enumerated: warpgroups, keys a tile, slots, the stages and issue order of a tile's products, and turns on the tensor
cores. What exceeds registers or shared memory is left out; the rest is ranked by the machine model (attngen.model): the
simulated cycles of an item over its rows and keys. Shapes are ranked first, each with one order of its products, then
the orders of the best shapes.

The model sees one item; how long it is depends on the call, which is not known here: `ITEM_KEYS` keys stand for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

from attngen.config import FoldPolicy, HopperConfig
from attngen.errors import PassError
from attngen.ir.schedule import Kernel
from attngen.layout import SmemLayout, Swizzle
from attngen.model import Estimate, estimate
from attngen.passes.choose import padded
from attngen.passes.hopper.stage import registers
from attngen.signature import Signature
from attngen.target import Target

BASE = 1024  # the swizzle atom that the first buffer is aligned to
BARRIERS = 512  # room for the mbarriers of all rings
ADDRESSES = 24  # registers beside accumulators and A fragments that no kernel does without
ITEM_KEYS = 4096
BLOCK_N = (48, 64, 80, 96, 112, 128, 144, 160, 176)
# (stages, issue): a tile's second product beside the next tile's first, behind it or before it; or in its own step
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


def output_pieces(config: HopperConfig, signature: Signature, target: Target) -> int:
    """In how many blocks of columns the output goes through its staging buffer: as few as shared memory allows."""
    dv = padded(signature.head_dim_v)
    free = target.smem_per_cta - BASE - BARRIERS - loaded_bytes(config, signature)
    for pieces in (1, 2, 3, 4):
        if (pieces == 1 or dv % (64 * pieces) == 0) and tile_bytes(config.block_m, dv // pieces) <= free:
            return pieces
    raise PassError(f"choose: {config} needs more than {target.smem_per_cta} bytes of shared memory for {signature}")


def fits(config: HopperConfig, signature: Signature, target: Target) -> bool:
    """Registers of accumulators and A fragments below those of a thread; shared memory."""
    overlapped = config.stages == (0, 1) and config.issue == (0, 1)
    copies = 2 if overlapped else 1
    fragments = config.block_n // 2 + padded(signature.head_dim_v) // 2 + copies * config.block_n // 4
    if ADDRESSES + fragments >= registers(config, target.regs_per_sm)[1]:
        return False
    try:
        output_pieces(config, signature, target)
    except PassError:
        return False
    return True


def shapes(signature: Signature, target: Target, policy: FoldPolicy) -> list[HopperConfig]:
    """Legal configurations, one order of products each. Slots: four where they fit, else two: the loop needs no more
    phases than that."""
    found = []
    for groups, block_n in product((1, 2, 3, 4), BLOCK_N):
        legal = (
            HopperConfig(groups, block_n, slots, policy, stages, issue, groups > 1)
            for (stages, issue), slots in product(ORDERS, (4, 2))
        )
        config = next((c for c in legal if fits(c, signature, target)), None)
        if config is not None:
            found.append(config)
    return found


def reordered(config: HopperConfig, signature: Signature, target: Target) -> list[HopperConfig]:
    """The other orders of a shape's products."""
    others = (replace(config, stages=stages, issue=issue) for stages, issue in ORDERS)
    return [c for c in others if c != config and fits(c, signature, target)]


@dataclass(frozen=True)
class Candidate:
    """A configuration and what the model says of it. `cost`: cycles of a row and key."""

    config: HopperConfig
    estimate: Estimate

    @property
    def cost(self) -> float:
        keys = ITEM_KEYS // self.config.block_n
        return self.estimate.cycles(keys) / (self.config.block_m * ITEM_KEYS)


def ranked(
    signature: Signature, target: Target, policies: tuple[FoldPolicy, ...], build: Build
) -> tuple[Candidate, ...]:
    """`policies`: those that the fold allows; the cheapest is taken. `build`: the kernel of a configuration."""

    def simulated(configs: Iterable[HopperConfig]) -> list[Candidate]:
        return [Candidate(c, estimate(build(c), target)) for c in configs]

    cheapest = [p for p in policies if p is not FoldPolicy.ANTICIPATED]
    found = by_slack(simulated(shapes(signature, target, cheapest[0])))
    if not found:
        raise PassError(f"choose: no tile shape fits {signature} on {target.name}")
    best = found[0].config
    alternatives = by_slack(simulated(replace(best, policy=p) for p in cheapest))
    policy = alternatives[0].config.policy
    if policy is not best.policy:
        found = simulated(replace(c.config, policy=policy) for c in found)
    for candidate in by_slack(found)[:REORDERED]:
        found += simulated(reordered(candidate.config, signature, target))
    return tuple(anticipating(c, policies) for c in by_slack(found))


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
