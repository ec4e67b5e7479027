"""Walks as a family of rules sees them.

Scenarios differ in few places, and most rules see only a part of what happens. A `Look` says which part; walks that are
equal in it are judged once, so that the number of scenarios costs little. The first of them stands for the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Generic

from attngen.ir.schedule import Role
from attngen.ir.walk import E, Event, Scenario, Stretch


@dataclass(frozen=True, eq=False)
class Walk(Generic[E]):
    """One role part in one scenario."""

    role: Role
    warpgroup: int
    scenario: Scenario
    stretches: tuple[Stretch[E], ...]

    @property
    def events(self) -> Iterator[E]:
        return chain.from_iterable(s.events for s in self.stretches)


@dataclass(frozen=True)
class View(Generic[E]):
    """`walks`: of each part of each role, equal ones once. `scenarios`: of all parts together, equal ones once."""

    walks: tuple[Walk[E], ...]
    scenarios: Mapping[Scenario, tuple[Walk[E], ...]]


# What is told apart of an event, and the event as the rules see it; None: they do not see it.
Look = Callable[[Role, Event], tuple[Hashable, E] | None]


def view(scenarios: Mapping[Scenario, tuple[Walk[Event], ...]], look: Look[E], timed: bool) -> View[E]:
    """`timed`: the numbers of items and steps are told apart, too."""
    pieces = _Pieces(look)
    apart: dict[Hashable, Walk[E]] = {}
    together: dict[Hashable, tuple[Scenario, tuple[Walk[E], ...]]] = {}
    for scenario, walks in scenarios.items():
        seen = tuple(pieces.walk(w) for w in walks)
        keys = tuple(_key(w, timed) for w in seen)
        for key, walk in zip(keys, seen, strict=True):
            apart.setdefault(key, walk)
        together.setdefault(keys, (scenario, seen))
    return View(tuple(apart.values()), dict(together.values()))


def _key(walk: Walk[E], timed: bool) -> Hashable:
    """Equal pieces are one object here."""
    pieces = tuple(id(s.events) for s in walk.stretches)
    return id(walk.role), pieces, tuple((s.item, s.step) for s in walk.stretches) if timed else ()


class _Pieces(Generic[E]):
    """Pieces of walks as `look` shows them: equal events and equal pieces become one object."""

    def __init__(self, look: Look[E]) -> None:
        self.look = look
        self.events: dict[tuple[int, Hashable], E] = {}
        self.pieces: dict[tuple[int, ...], tuple[E, ...]] = {}
        self.done: dict[tuple[int, int], tuple[E, ...]] = {}

    def walk(self, walk: Walk[Event]) -> Walk[E]:
        parts = (Stretch(s.item, s.step, self.piece(walk.role, s.events)) for s in walk.stretches)
        return Walk(walk.role, walk.warpgroup, walk.scenario, tuple(s for s in parts if s.events))

    def piece(self, role: Role, events: tuple[Event, ...]) -> tuple[E, ...]:
        at = (id(role), id(events))
        if at not in self.done:
            shown = (found for e in events if (found := self.look(role, e)) is not None)
            piece = tuple(self.events.setdefault((id(role), key), event) for key, event in shown)
            self.done[at] = self.pieces.setdefault(tuple(map(id, piece)), piece)
        return self.done[at]
