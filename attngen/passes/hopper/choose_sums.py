"""Ranked configurations of kernels of plain sums for targets with warpgroup products, by rules, best first. The first
that verifies and compiles cleanly is used.

Rules, in this order:
 1. Weights in two maps, where they split: the tiles of both products of scores are not held at the same time.
 2. Two warpgroups of owned rows: half of the additions into memory of one, and one computes while the other's products
    run.
 3. The widest streamed tile that registers allow, in multiples of 64 where its weights cross the warps: fewer waits a
    row.
 4. As many slots of streamed tiles as shared memory has, up to three. Turns on the tensor cores cost registers, and
    gain little: the warpgroups are out of step by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.config import HopperSumsConfig
from attngen.errors import PassError
from attngen.ir.graph import Axis, Contract, Input
from attngen.layout import Fragment, Swizzle, blocks
from attngen.passes.choose import padded
from attngen.passes.choose_sums import products
from attngen.passes.hopper.stage_sums import ADDRESSES, BARRIERS, STAGED, role_registers
from attngen.passes.partition import Owned
from attngen.passes.place import place
from attngen.passes.sum_names import KEY_KERNEL
from attngen.passes.tile_sums import tile_sums
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Target

WIDTHS = (128, 112, 96, 80, 64, 48, 32, 16)
SLOTS = (3, 2)
VECTORS = 3  # row values of 4 bytes a streamed row: lse, delta, and one of the user's
ITEMSIZE = 2
SLAB = 64  # columns that lie side by side in shared memory


def slabbed(cols: int) -> int:
    return -(-cols // SLAB) * SLAB


def operands(owned: Owned, variant: Variant, signature: Signature, split: bool) -> int | None:
    """Values of 16 bits that a step holds; None where the weights do not split."""
    try:
        program = place(tile_sums(owned, KEY_KERNEL, variant, signature, HopperSumsConfig(1, 64, 2, split, False)),
                        Swizzle.B128)  # fmt: skip
    except PassError:
        return None
    return sum(v.fragment is Fragment.OPA for v in program.values)


def candidates_sums(
    owned: Owned, variant: Variant, signature: Signature, target: Target
) -> tuple[HopperSumsConfig, ...]:
    """Legal configurations, best first; none where no shape fits registers and shared memory."""
    found: list[HopperSumsConfig] = []
    for split in (True, False):
        held = operands(owned, variant, signature, split)
        if held is not None and (not split or products(owned) > 1):
            found += (c for c in shapes(owned, split) if fits(owned, signature, target, c, held))
    return tuple(found)


def shapes(owned: Owned, split: bool) -> Iterator[HopperSumsConfig]:
    step = 64 if owned.shed() else 16
    for groups in (2, 1):
        for block_n in (w for w in WIDTHS if w % step == 0):
            for slots in SLOTS:
                for turns in (False, True)[:groups]:
                    for unroll in (False, True)[: 4 - slots]:
                        yield HopperSumsConfig(groups, block_n, slots, split, turns, unroll)


def fits(owned: Owned, signature: Signature, target: Target, config: HopperSumsConfig, held: int) -> bool:
    size = {Axis.D: padded(signature.head_dim_qk), Axis.DV: padded(signature.head_dim_v)}
    read = {name for node in owned.graph.of(Contract) for name in node.operands()}
    inputs = [node for node in owned.graph.of(Input) if node.id in read]
    own, stream = (
        sum(slabbed(size[x.axes[3]]) for x in inputs if axis in x.axes) for axis in (owned.own, owned.stream)
    )
    sums = [size[node.axes[3]] for _, node in owned.sums()]
    n, rows = config.block_n, config.block_m
    shed = [w for _, node in owned.shed() for w in {w for _, w in blocks(size[node.axes[3]])}]
    math = role_registers(config.warpgroups, sum(shed) // 2 if shed else None, target)[2]
    scores = n // 2 * (1 if config.split else products(owned))
    if ADDRESSES + sum(sums) // 2 + scores + held * n // 4 >= math:
        return False
    # the least that an output leaves through: a slab of 64 columns
    tiles = rows * own + n * config.slots * stream + rows * SLAB
    tiles += STAGED * rows * slabbed(n) if shed else 0
    return ITEMSIZE * tiles + 4 * VECTORS * n * config.slots + BARRIERS <= target.smem_per_cta
