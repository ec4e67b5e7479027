"""Every level of a variant for Hopper, and parts of its kernel, for the tests of the passes."""

from __future__ import annotations

from functools import cache
from typing import Any

from attngen.config import FoldPolicy, HopperConfig
from attngen.ir.schedule import Block, Kernel, Role, Schedule, Tiles
from attngen.pipelines import Stage, hopper_stages
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal

SM90 = target("sm90")
CAUSAL, FULL = Attention(mask=causal()), Attention()
CONFIG = HopperConfig(2, 128, 2, FoldPolicy.REFERENCE)


@cache
def stages(
    spec: Attention, config: HopperConfig = CONFIG, d: int = 128, dv: int = 0, alignment: int = 16
) -> tuple[Stage, ...]:
    signature = Signature(IoType.BF16, d, dv or d, alignment)
    return tuple(hopper_stages(spec.variant, signature, SM90, config, explained=False))


def level(name: str, spec: Attention = CAUSAL, config: HopperConfig = CONFIG, d: int = 128) -> Any:
    """What the named pass gives."""
    return next(s.level for s in stages(spec, config, d) if s.name == name)


def derived(
    spec: Attention, config: HopperConfig = CONFIG, d: int = 128, dv: int = 0, alignment: int = 16
) -> Kernel:
    last = stages(spec, config, d, dv, alignment)[-1].level
    assert isinstance(last, Schedule)
    return last.kernels[-1]


def role(kernel: Kernel, name: str) -> Role:
    return next(r for r in kernel.roles if r.name == name)


def loop(kernel: Kernel, name: str = "math") -> Tiles:
    (tiles,) = (n for n in role(kernel, name).item.body if isinstance(n, Tiles))
    return tiles


def block(kernel: Kernel, name: str) -> Block:
    return next(n for n in role(kernel, "math").item.body if isinstance(n, Block) and n.name == name)


# ---- orders of products ---------------------------------------------------------------------------------------------

OVERLAPPED, BEHIND, OWN = ((0, 1), (0, 1)), ((0, 1), (1, 0)), ((0, 0), (0, 1))


def ordered(order: tuple[tuple[int, ...], tuple[int, ...]], policy: FoldPolicy = FoldPolicy.RUNNING) -> HopperConfig:
    return HopperConfig(2, 64, 2, policy, *order)
