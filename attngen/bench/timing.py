"""How long calls take: blocks of launches, in turn, in random order.

The clock of a GPU follows its power: what ran just before decides the speed. So contenders take turns in a random
order, and are compared inside one run. With gaps, the GPU rests before each block, and a block is too short to reach
the power limit: this is for decisions. Back to back it does reach it: this is what a long job sees."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

Launch = Callable[[], Any]
Timer = Callable[[Launch, int], Sequence[float]]  # milliseconds of each of so many launches


class Mode(Enum):
    GAPS = "gaps"
    STEADY = "back to back"


@dataclass(frozen=True)
class Settings:
    rounds: int = 5
    gap_seconds: float = 0.15
    block_ms: float = 30.0
    fewest: int = 3  # launches of a block
    most: int = 200


@dataclass(frozen=True)
class Time:
    """Milliseconds of a launch: the median over rounds of the median of a block; `low` and `high`: of those medians."""

    ms: float
    low: float
    high: float


def by_events(launch: Launch, count: int) -> Sequence[float]:
    """By CUDA events between the launches of the current stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        launch()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def measure(
    launches: Mapping[str, Launch], mode: Mode, settings: Settings, timer: Timer = by_events,
    sleep: Callable[[float], None] = time.sleep, seed: int = 0,
) -> dict[str, Time]:  # fmt: skip
    """The time of each, by name. Each has to have run before: nothing is compiled here."""
    order = random.Random(seed)
    counts = {}
    for name, launch in launches.items():
        alone = statistics.median(timer(launch, settings.fewest))
        counts[name] = max(settings.fewest, min(settings.most, int(settings.block_ms / max(alone, 1e-6))))
    blocks: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(settings.rounds):
        for name in order.sample(list(launches), len(launches)):
            if mode is Mode.GAPS:
                sleep(settings.gap_seconds)
            blocks[name].append(statistics.median(timer(launches[name], counts[name])))
    return {name: Time(statistics.median(ms), min(ms), max(ms)) for name, ms in blocks.items()}
