"""The steady state of a kernel as the machine model sees it: what each part of a role has on which unit, in cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from attngen.draw.picture import Line, Picture, Rect, Text, ticks

LEFT, WIDE, HIGH, GAP, TOP = 150, 960, 22, 8, 30
ORDER = ("tensor", "compute", "copy", "wait")
KINDS = {"tensor": "c0", "compute": "c2", "copy": "c4", "wait": "c3"}
LEGEND = (("c0", "tensor cores"), ("c2", "computes"), ("c4", "copy engine"), ("c3", "waits"))
LETTER = 6.2  # pixels


class Span(Protocol):
    """As `attngen.model.Span`."""

    @property
    def lane(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def strip_picture(title: str, spans: Sequence[Span], href: str) -> Picture:
    """A row for each lane and unit; what overlaps there, such as copies in flight, has rows of its own. `href`: of an
    op, with `{op}` in its place."""
    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    scale = WIDE / (end - begin)
    rects: list[Rect] = []
    texts: list[Text] = []
    lines: list[Line] = []
    y = float(TOP)
    for lane in sorted({s.lane for s in spans}):
        texts.append(Text(0, y + 15, lane, "strong"))
        units = {s.unit for s in spans if s.lane == lane}
        for unit in sorted(units, key=lambda u: (ORDER.index(u) if u in ORDER else len(ORDER), u)):
            texts.append(Text(LEFT - 10, y + 15, unit, "note", "end"))
            for row in _rows([s for s in spans if (s.lane, s.unit) == (lane, unit)]):
                rects.append(Rect(LEFT, y, WIDE, HIGH, "band"))
                for s in row:
                    x, width = LEFT + (s.start - begin) * scale, (s.end - s.start) * scale
                    said = f"{s.op} on {lane}, {unit}: {s.end - s.start:.0f} cycles"
                    kind, to = KINDS.get(unit, "c5"), href.format(op=s.op)
                    rects.append(Rect(x, y, max(width - 0.6, 0.6), HIGH, kind, said, to))
                    if width > LETTER * len(s.op) + 4:
                        texts.append(Text(x + width / 2, y + 15, s.op, "inside", "middle"))
                y += HIGH + 2
        y += GAP
    for t in ticks(end - begin, 10):
        lines.append(Line(((LEFT + t * scale, TOP - 6), (LEFT + t * scale, y - GAP)), "tick"))
        texts.append(Text(LEFT + t * scale, TOP - 12, f"{t:.0f}", "small", "middle"))
    texts.append(Text(LEFT - 10, TOP - 12, "cycles", "small", "end"))
    return Picture(title, LEFT + WIDE + 20, y, tuple(rects), tuple(lines), tuple(texts))


def _rows(spans: list[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: (s.start, s.end)):
        row = next((r for r in rows if r[-1].end <= s.start), None)
        if row is None:
            rows.append([s])
        else:
            row.append(s)
    return rows
