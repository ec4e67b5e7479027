"""Registers of a role over one item: which values are alive at each op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.draw.picture import Line, Picture, Rect, Text, ticks
from attngen.ir import ops as o
from attngen.ir.rules.uses import Cell, Uses, cells
from attngen.ir.schedule import Kernel, Role, Value
from attngen.ir.walk import Edge, Event, Scenario, Share, Stretch, Walker, facts_of, tiles_of

LEFT, WIDE, HIGH, CURVE, TOP = 150, 900, 17, 110, 40
COLOURS = {"acc": "c0", "opA": "c2", "row": "c4", "col": "c5", "uni": "c6"}
LEGEND = (
    ("c0", "accumulator"), ("c2", "operand of a product"), ("c4", "one a row"), ("c5", "one a column"),
    ("c6", "one a warp"),
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """An op of the walk, the part of the item it belongs to, and the values alive behind it: an operand that it reads
    last is not among them, as its registers may take the result."""

    op: str
    part: str
    alive: frozenset[Cell]


def moments(kernel: Kernel, role: Role) -> tuple[Moment, ...]:
    """One item with a tile of each class and the rare blocks entered. What an asynchronous product reads or writes is
    alive until it is waited for."""
    values = {v.name: v for v in role.values}
    start = max((t.start for t in tiles_of(role)), default=0)
    classes = max((len(t.ranges) for t in tiles_of(role)), default=1)
    scenario = Scenario((start + max(2, classes),), Share.EACH, rare=True)
    stretches = [s for s in Walker(role).walk(0, scenario) if s.item == 0]
    names = [name for name, s in zip(_parts(role, stretches), stretches, strict=True) for _ in s.events]
    see = Uses((role,), facts_of(kernel))
    uses = [see(role, event)[1] for s in stretches for event in s.events]
    held: dict[int, set[Cell]] = {}
    issued: dict[str, set[Cell]] = {}
    for k, use in enumerate(uses):
        if isinstance(use.op, o.Wgmma):
            issued.setdefault(use.op.group, set()).update(cells(use.event, (use.op.d, use.op.a), values))
        elif isinstance(use.op, o.Retire):
            held[k] = issued.pop(use.op.group, set())
    alive: set[Cell] = set()
    found: list[Moment] = []
    for k in range(len(uses) - 1, -1, -1):
        use = uses[k]
        if use.op is not None:
            found.append(Moment(use.op.id, names[k], frozenset(alive | set(use.writes))))
        alive -= set(use.writes)
        alive |= {*use.reads, *use.operands} | held.get(k, set())
    return tuple(reversed(found))


def _parts(role: Role, stretches: list[Stretch[Event]]) -> Iterator[str]:
    """The part of each piece: a block by its name, a step by its number."""
    nodes = iter(role.item.body)
    part = ""
    for stretch in stretches:
        edge = stretch.events[0].edge
        if edge is Edge.NODE:
            part = getattr(next(nodes), "name", "tiles")
        elif edge is Edge.STEP:
            part = f"tile {stretch.step}"
        elif edge in (Edge.DRAIN, Edge.EXIT) and edge is not None:
            part = edge.value
        yield part


def registers_picture(kernel: Kernel, role: Role, allowed: int) -> Picture:
    """The sum over the values as a curve, below it a bar for each value while it is alive. `allowed`: of a thread."""
    walked = moments(kernel, role)
    values = {v.name: v for v in role.values}
    step = WIDE / max(len(walked), 1)
    order = sorted({c for m in walked for c in m.alive}, key=lambda c: (list(values).index(c[0]), c[1]))
    totals = [sum(_size(values[name]) for name, _ in m.alive) for m in walked]
    scale = CURVE / max(allowed, *totals)
    base = TOP + CURVE
    rects: list[Rect] = []
    texts: list[Text] = []
    lines: list[Line] = []
    for n, (moment, total) in enumerate(zip(walked, totals, strict=True)):
        said = f"{moment.op} in {moment.part}: {total} registers of values"
        rects.append(Rect(LEFT + n * step, base - total * scale, step + 0.4, total * scale, "c3", said))
    for t in ticks(allowed, 4):
        y = base - t * scale
        lines.append(Line(((LEFT, y), (LEFT + WIDE, y)), "tick"))
        texts.append(Text(LEFT - 8, y + 4, f"{t:.0f}", "small", "end"))
    at = base - allowed * scale
    lines.append(Line(((LEFT, at), (LEFT + WIDE, at)), "roof"))
    texts.append(Text(LEFT + WIDE + 8, at + 4, f"{allowed} allowed"))
    for row, cell in enumerate(order):
        y = base + 14 + row * HIGH
        value = values[cell[0]]
        name = f"{cell[0]}[{cell[1]}]" if value.copies > 1 else cell[0]
        texts.append(Text(LEFT - 8, y + 12, f"{name}, {_size(value)}", "label", "end"))
        rects.append(Rect(LEFT, y, WIDE, HIGH - 3, "band"))
        for first, last in _runs([cell in m.alive for m in walked]):
            said = f"{name}: {_size(value)} registers, from {walked[first].op} to {walked[last].op}"
            rects.append(Rect(LEFT + first * step, y, (last - first + 1) * step, HIGH - 3,
                              COLOURS[value.fragment.value], said))  # fmt: skip
    bottom = base + 14 + len(order) * HIGH
    for first, last in _stretches([m.part for m in walked]):
        x = LEFT + first * step
        lines.append(Line(((x, TOP - 4), (x, bottom)), "axis"))
        texts.append(Text(x + 3, TOP - 8, walked[first].part, "small"))
        assert last >= first
    most = max(totals, default=0)
    where = walked[totals.index(most)].op if walked else ""
    texts.append(Text(LEFT, 12, f"at most {most} registers of values, at {where}", "note"))
    return Picture(f"role {role.name}", LEFT + WIDE + 90, bottom, tuple(rects), tuple(lines), tuple(texts))


def _size(value: Value) -> int:
    return value.registers // value.copies


def _runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """First and last of each run of true."""
    start: int | None = None
    for n, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = n
        elif not flag and start is not None:
            yield start, n - 1
            start = None


def _stretches(names: list[str]) -> Iterator[tuple[int, int]]:
    start = 0
    for n in range(1, len(names) + 1):
        if n == len(names) or names[n] != names[start]:
            yield start, n - 1
            start = n
