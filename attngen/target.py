"""What a chip can do: the limits the verifier holds a schedule to, and the units it may use."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from attngen.errors import SignatureError

INSTRUCTION_BYTES = 16  # of machine code, on every target

class Feature(Enum):
    CP_ASYNC = "cp_async"
    LDMATRIX = "ldmatrix"
    STMATRIX = "stmatrix"
    MBARRIER = "mbarrier"
    TMA = "tma"
    WGMMA = "wgmma"
    SETMAXNREG = "setmaxnreg"


@dataclass(frozen=True)
class Target:
    """`archs`: what its kernels are compiled for, the usual one first. `mma`: (m, n, k) of the 16-bit tensor
    instructions; n is the largest, a multiple of 8. `reserved_smem`: bytes of each CTA that the system takes."""

    name: str
    archs: tuple[str, ...]
    smem_per_cta: int
    smem_per_sm: int
    regs_per_sm: int
    max_regs: int
    max_threads: int
    features: frozenset[Feature]
    mma: tuple[tuple[int, int, int], ...]
    instruction_cache: int = 128 * 1024
    reserved_smem: int = 1024

    def has(self, feature: Feature) -> bool:
        return feature in self.features


_AMPERE = frozenset({Feature.CP_ASYNC, Feature.LDMATRIX})
_HOPPER = frozenset({Feature.STMATRIX, Feature.MBARRIER, Feature.TMA, Feature.WGMMA, Feature.SETMAXNREG})

SM80 = Target(
    name="sm80", archs=("sm_80", "sm_90"), smem_per_cta=163 * 1024, smem_per_sm=164 * 1024, regs_per_sm=65536,
    max_regs=255, max_threads=1024, features=_AMPERE, mma=((16, 8, 16),),
)  # fmt: skip
SM90 = Target(
    name="sm90", archs=("sm_90a",), smem_per_cta=227 * 1024, smem_per_sm=228 * 1024, regs_per_sm=65536,
    max_regs=255, max_threads=1024, features=_AMPERE | _HOPPER, mma=((64, 256, 16), (16, 8, 16)),
)  # fmt: skip
TARGETS = {t.name: t for t in (SM80, SM90)}


def target(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise SignatureError(f"target={name!r}: allowed are {', '.join(TARGETS)}")
    return TARGETS[name]
