"""What an event does to the register values of its role."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from attngen.expr import variables
from attngen.ir.ops import Op, Ref, Vote
from attngen.ir.schedule import Role, Value
from attngen.ir.walk import Edge, Event, Facts

Cell = tuple[str, int]  # a value and its copy


def cells(event: Event, refs: tuple[Ref, ...], values: Mapping[str, Value]) -> Iterator[Cell]:
    for ref in refs:
        value = values.get(ref.name)
        if value is not None:
            index = event.index(ref) if value.copies > 1 else ()
            yield ref.name, (index[0] or 0) if index else 0


@dataclass(frozen=True, eq=False)
class Use:
    """An event with the cells of its refs. `operands`: cells read by expressions outside of statements, predicates of
    guards among them."""

    event: Event
    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()
    operands: tuple[Cell, ...] = ()

    @property
    def op(self) -> Op | None:
        return self.event.op


class Uses:
    """Shows events as uses: two of them are told apart by what is executed and by the cells that it names, whatever
    barriers and shared memory it is about."""

    def __init__(self, roles: tuple[Role, ...], facts: Mapping[int, Facts]) -> None:
        self.facts = facts
        self.values = {id(r): {v.name: v for v in r.values} for r in roles}

    def __call__(self, role: Role, event: Event) -> tuple[Hashable, Use]:
        values, op, guard = self.values[id(role)], event.op, event.guard
        use, named = Use(event), tuple[Ref, ...]()
        if op is not None:
            facts = self.facts[id(op)]
            named = facts.references
            others = frozenset[str]() if isinstance(op, Vote) else facts.operands  # a vote's are among its reads
            found = (cells(event, refs, values) for refs in (facts.reads, facts.writes, _whole(others)))
            use = Use(event, *map(tuple, found))
        elif event.edge is Edge.ENTER and guard is not None:
            named = (*guard.touches, *(r for inner in guard.body for r in self.facts[id(inner)].references))
            use = Use(event, operands=tuple(cells(event, _whole(variables(guard.pred)), values)))
        return (id(op), id(guard), event.edge, *cells(event, named, values)), use


def _whole(names: frozenset[str]) -> tuple[Ref, ...]:
    return tuple(Ref(name=n) for n in sorted(names))
