"""How long a kernel takes, simulated: cycles of a step in the steady state, and what an item costs besides."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from attngen.ir.schedule import Kernel, WorkSource
from attngen.model.actions import Does, Stream, loops, streams
from attngen.model.rates import Rates, rates
from attngen.model.simulate import Run, Simulation, Span
from attngen.model.units import UNITS
from attngen.target import Target

TILES, SETTLE, AFTER = 12, 4, 4  # tiles of the watched item; of them before the steady state; of the next item
BUSY = 0.9  # a unit that is used more than this binds; below it, the order inside the streams does


@dataclass(frozen=True)
class Estimate:
    """`step`: cycles in which each part of the mathematical role does one tile (of one CTA: where several share an SM,
    their steps overlap). `tensor`: share of the tensor cores' cycles that such a step uses. `busy`: share of each unit.
    `stream`: share of the time in which the first part does not wait for others. `binding`: the unit that is busiest,
    or `stream`. `item`: cycles of an item beside its steps (first tile, drain, epilogue). `strip`: what happened in the
    last two steps."""

    kernel: str
    step: float
    tensor: float
    busy: tuple[tuple[str, float], ...]
    stream: float
    binding: str
    item: float
    strip: tuple[Span, ...]

    def cycles(self, tiles: int) -> float:
        """Of an item of so many key tiles."""
        return self.item + tiles * self.step

    def share(self, tiles: int) -> float:
        """Share of the tensor cores over an item of so many key tiles."""
        return self.tensor * self.step * tiles / self.cycles(tiles)


def estimate(kernel: Kernel, target: Target, *, table: Rates | None = None, masked: bool = False) -> Estimate:
    """Simulates `kernel` on `target`, in the tiles of its last class (full), or with `masked` of its first. `table`:
    other rates than the shipped ones."""
    table = table or rates(target)
    start = max(loop.start for loop in loops(kernel))
    unroll = max(loop.unroll for loop in loops(kernel))
    found = streams(kernel, table, (TILES, AFTER), masked)
    last = TILES - start  # steps of the watched item, on a stream that peels the first tile
    run = Simulation(kernel, found, table, _offset(kernel, found), range(last - 2, last)).run()
    window = (last - SETTLE) // unroll * unroll
    at = last - window - 1, last - 1
    mathematical = [k for k, s in enumerate(found) if s.mathematical]
    step = statistics.fmean((run.steps[k][at[1]] - run.steps[k][at[0]]) / window for k in mathematical)
    watched = run.steps[mathematical[0]]
    time = watched[at[1]] - watched[at[0]]
    busy = {u: (run.busy[u][at[1]] - run.busy[u][at[0]]) / time for u in UNITS}
    stream = 1 - (run.blocked[at[1]] - run.blocked[at[0]]) / time
    binding = max(busy, key=lambda u: busy[u])
    return Estimate(
        kernel=kernel.name,
        step=step / kernel.min_ctas,
        tensor=busy["tensor"],
        busy=tuple(busy.items()),
        stream=stream,
        binding=binding if busy[binding] > BUSY else "stream",
        item=_item(kernel, run, mathematical, step, table),
        strip=tuple(s for s in run.spans if s.end - s.start > 1),
    )


def _offset(kernel: Kernel, found: tuple[Stream, ...]) -> float:
    """CTAs that share an SM do not run in step: each starts later by its share of a step."""
    first = next(s for s in found if s.mathematical)
    marks = [k for k, a in enumerate(first.actions) if a.does is Does.STEP]
    alone = sum(a.burst.alone for a in first.actions[marks[0] : marks[1]] if a.burst)
    return alone / kernel.min_ctas


def _item(kernel: Kernel, run: Run, mathematical: list[int], step: float, table: Rates) -> float:
    """Persistent CTAs load the next item while this one is finished; others start anew for each item."""
    if kernel.work.source is WorkSource.GRID:
        end = statistics.fmean(run.ends[k][0] - run.starts[k] for k in mathematical)
        return (table.launch + end - TILES * step) / kernel.min_ctas
    between = statistics.fmean(run.ends[k][1] - run.ends[k][0] for k in mathematical)
    return between - AFTER * step
