"""Schedules that come with the package, as texts: for which variant, head dims and type each is.

A text is parsed, verified and lowered like any other schedule; nothing else knows about it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen.config import Config
from attngen.ir.schedule import Schedule
from attngen.ir.verify import verify
from attngen.pipelines import Levels, Stage, tile_levels
from attngen.signature import IoType, Signature
from attngen.spec import Attention, Variant
from attngen.target import Target
from attngen.variants import causal

FOLDER = Path(__file__).parent / "schedules"
HEAD_DIMS = (64, 128, 256)
ALLOWED = "no mask or causal(), no score, no sink, a positive scale, equal head dims 64, 128 or 256, aligned rows"


@cache
def variants() -> dict[str, str]:
    """Variant key -> the word for it in the names of the files."""
    return {Attention().variant.variant_key(): "full", Attention(mask=causal()).variant.variant_key(): "causal"}


def file_for(variant: Variant, signature: Signature, target: Target) -> Path | None:
    """The text that fits; None: no text does."""
    word = variants().get(variant.variant_key())
    equal = signature.head_dim_qk == signature.head_dim_v and signature.head_dim_qk in HEAD_DIMS
    if word is None or not equal or signature.alignment != 16:
        return None
    dtype = "bf16" if signature.dtype is IoType.BF16 else "fp16"
    path = FOLDER / f"{target.name}_{word}_d{signature.head_dim_qk}_{dtype}.schedule"
    return path if path.exists() else None


@cache
def schedule_of(path: Path) -> Schedule:
    return Schedule.parse(path.read_text())


def levels(variant: Variant, signature: Signature, path: Path) -> Levels:
    """The levels of a kernel whose schedule is a text: graph and program are derived as ever, with its tile shape."""
    schedule = schedule_of(path)
    (kernel,) = schedule.kernels
    block_n = next(b for b in kernel.buffers if b.name == "sK").layout.rows
    warps = kernel.work.block_m // 16
    config = Config(kernel.work.block_m, block_n, warps, min_ctas=kernel.min_ctas)
    stages = (*tile_levels(variant, signature, config), Stage("text", schedule))
    return Levels(stages, config, verify(schedule))
