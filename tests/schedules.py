"""The kernels whose machine code is looked at: every text for Hopper, and the samples of the golden set."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen import golden
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.kernel import Generated
from attngen.target import target

TEXTS = sorted((Path(__file__).parent / "data" / "sm90").glob("*.schedule"))
SAMPLES = {s.name: s for s in golden.SAMPLES}
NAMES = [*(f"text {p.stem}" for p in TEXTS), *(f"sample {name}" for name in SAMPLES)]


@cache
def schedule(name: str) -> Schedule:
    """One of NAMES."""
    kind, _, rest = name.partition(" ")
    if kind == "sample":
        return SAMPLES[rest].kernel().schedule
    return Schedule.parse(next(p for p in TEXTS if p.stem == rest).read_text())


@cache
def module(name: str) -> Generated:
    """One of NAMES, lowered. A text is taken as verified: tests/test_sm90.py does so, at some length."""
    kind, _, rest = name.partition(" ")
    if kind == "sample":
        return SAMPLES[rest].kernel()
    return Generated(VerifiedSchedule(schedule(name)), target(schedule(name).target), rest)
