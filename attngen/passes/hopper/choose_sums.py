"""Ranked configurations of kernels of plain sums for targets with warpgroup products, by rules, best first. The first
that verifies and compiles cleanly is used.

Rules, in this order:
 1. Weights in two maps, where they split: the tiles of both products of scores are not held at the same time.
 2. As many warpgroups of owned rows as registers allow: with two, half of the additions into memory of one, and one
    computes while the other's products run. Three where no loading role needs registers (head_dim up to 64): a third
    fewer additions again. Measured on an H200 at head_dim 64, in time of two: 0.88 and 0.94 at seqlen 16384, 0.92 and
    0.96 at 4096, 1.03 at 1024, where tiles of 192 rows are not filled.
 3. The role of parts issues the copies, two tiles ahead and beside its products: registers for the others, and one
    barrier a tile. Measured at head_dim 96, in time of a loading role and a loop that is written out: 0.96. With two
    slots the copies come before its products, which then wait: 1.04 to 1.07 of the time of three.
 4. The widest streamed tile that registers allow, in multiples of 64 where its weights cross the warps: fewer waits a
    row.
 5. Turns on the tensor cores for two warpgroups: 0.97 to 0.99 of the time at head_dim 128. None for three: 1.0 to 1.01
    with them. Without parts, as many slots as shared memory has, up to three, without turns; or a loop over two slots
    that is written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from attngen.config import HopperSumsConfig
from attngen.errors import PassError
from attngen.ir.graph import Axis, Contract, Input
from attngen.ir.program import LoadTile, LoadVector
from attngen.layout import Fragment, Swizzle, blocks
from attngen.passes.choose import padded
from attngen.passes.choose_sums import products
from attngen.passes.hopper.stage_sums import SumStager
from attngen.passes.hopper.sum_room import (
    ADDRESSES,
    BARRIERS,
    ITEMSIZE,
    SLAB,
    least_staging,
    part_rows,
    role_registers,
    shared_accumulators,
)  # fmt: skip
from attngen.passes.partition import Owned
from attngen.passes.place import place
from attngen.passes.sum_names import KEY_KERNEL
from attngen.passes.tile_sums import tile_sums
from attngen.passes.visits import ROWS_A_GROUP
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Target

WIDTHS = (128, 112, 96, 80, 64, 48, 32, 16)
SLOTS = (3, 2)
ROW_REGS = 40  # what values of owned queries take beside: with fewer left, the assembler gives up on the products
MAP_REGS = 16  # what a map takes that makes all weights at once
TURN_REGS = 16  # that turns may cost
TRIED = 3  # ways of a shape before narrower ones: what spills in three of them spills in all


def slabbed(cols: int) -> int:
    return -(-cols // SLAB) * SLAB


@dataclass(frozen=True)
class Step:
    """`operands`: values of 16 bits that a step holds. `brief`: columns of streamed tiles that it alone reads.
    `vectors`: row values of 4 bytes a streamed row."""

    operands: int
    brief: int
    vectors: int


def step_of(owned: Owned, variant: Variant, signature: Signature, target: Target, split: bool) -> Step | None:
    """None where the weights do not split."""
    try:
        program = place(tile_sums(owned, KEY_KERNEL, variant, signature, HopperSumsConfig(1, 64, 2, split, False)),
                        Swizzle.B128)  # fmt: skip
    except PassError:
        return None
    kept = SumStager(program, target).kept()
    tiles = (program.value(op.dst.name) for op in program.loop.body if isinstance(op, LoadTile))
    brief = (slabbed(v.cols) for v in tiles if v is not None and v.name not in kept)
    vectors = sum(isinstance(op, LoadVector) for op in program.loop.body)
    return Step(sum(v.fragment is Fragment.OPA for v in program.values), sum(brief), vectors)


def candidates_sums(
    owned: Owned, variant: Variant, signature: Signature, target: Target
) -> tuple[HopperSumsConfig, ...]:
    """Legal configurations, best first; none where no shape fits registers and shared memory."""
    found, others = list[HopperSumsConfig](), list[HopperSumsConfig]()
    for split in (True, False):
        held = step_of(owned, variant, signature, target, split)
        if held is None or (split and products(owned) == 1):
            continue
        for groups in (3, 2) if owned.shed() else (2, 1):
            for block_n in (w for w in WIDTHS if w % part_rows(w) == 0 or not owned.shed()):
                shape = HopperSumsConfig(groups, block_n, 2, split, merged=groups == 3)
                left = spare(owned, signature, target, shape, held.operands)
                if left > (ROW_REGS if owned.own is Axis.M else 0 if split else MAP_REGS):
                    made = ways(shape, bool(owned.shed()), left)
                    fit = [c for c in made if smem(owned, signature, c, held) <= target.smem_per_cta]
                    found += fit[:TRIED]
                    others += fit[TRIED:]
    if owned.shed():  # rows of padding in products of parts cost more than a warpgroup less
        found.sort(key=lambda c: c.block_n < ROWS_A_GROUP)
    return (*found, *others)


def ways(shape: HopperSumsConfig, shed: bool, left: int) -> Iterator[HopperSumsConfig]:
    """Loading role, slots, turns and unrolling of a loop, best first. left: registers a thread."""
    if shed:
        turns = (False, True) if shape.merged else (True, False)
        yield from (replace(shape, merged=True, slots=n, turns=t) for n in SLOTS for t in turns)
        yield from (replace(shape, merged=True, turns=t, short=True) for t in turns)
    if shape.merged:
        return
    turns = (False, True) if left < TURN_REGS else (True, False)
    written: list[dict[str, Any]] = [{"slots": 2, "turns": t, "unroll": True} for t in turns]
    kept: list[dict[str, Any]] = [{"slots": n, "turns": t} for t in (turns if shed else (False, True)) for n in SLOTS]
    kept += [{"slots": 2, "turns": t, "short": True} for t in (False, True)]
    for way in [*written, *kept] if shed else [*kept, *written]:
        if shape.warpgroups > 1 or not way["turns"]:
            yield replace(shape, **way)


def sizes(owned: Owned, signature: Signature) -> tuple[list[int], list[int], list[int], list[int]]:
    """Columns of the owned inputs, of the streamed ones, of the sums, and of the blocks of 64 rows of parts of sums."""
    size = {Axis.D: padded(signature.head_dim_qk), Axis.DV: padded(signature.head_dim_v)}
    read = {name for node in owned.graph.of(Contract) for name in node.operands()}
    inputs = [node for node in owned.graph.of(Input) if node.id in read]
    own, stream = ([size[x.axes[3]] for x in inputs if a in x.axes] for a in (owned.own, owned.stream))
    sums = [size[node.axes[3]] for _, node in owned.sums()]
    parts = [w for _, node in owned.shed() for _, w in blocks(size[node.axes[3]])]
    return own, stream, sums, parts


def spare(owned: Owned, signature: Signature, target: Target, config: HopperSumsConfig, held: int) -> int:
    """Registers a thread of the math role beside addresses, accumulators and operands; below 1: too many."""
    _, _, sums, parts = sizes(owned, signature)
    parts *= -(-config.block_n // ROWS_A_GROUP)
    kept = dict(zip(shared_accumulators(parts), parts, strict=True))
    shed = sum(kept.values()) // 2 if parts else None
    math = role_registers(config.warpgroups, shed, target, config.merged)[2]
    scores = config.block_n // 2 * (1 if config.split else products(owned))
    return math - (ADDRESSES + sum(sums) // 2 + scores + held * config.block_n // 4)


def smem(owned: Owned, signature: Signature, config: HopperSumsConfig, step: Step) -> int:
    """Bytes of tiles, with one slot of what crosses the warps and the least that an output leaves through."""
    own, stream, sums, parts = sizes(owned, signature)
    n, rows = config.block_n, config.block_m
    tiles = rows * sum(map(slabbed, own)) + n * config.slots * sum(map(slabbed, stream))
    tiles += rows * slabbed(n) if parts else 0
    tiles -= n * step.brief if config.short else 0
    return ITEMSIZE * tiles + least_staging(rows, sums) + 4 * step.vectors * n * config.slots + BARRIERS
