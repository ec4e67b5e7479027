"""A picture: rectangles, lines and texts at numbers of pixels. A `kind` is a class of `templates/pages/style.css`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rect:
    """`title`: said where the pointer rests; `href`: where a click goes, such as `#op-S4`."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str = ""
    href: str = ""


@dataclass(frozen=True)
class Line:
    """`bends`: the corners; smooth lines leave and arrive vertically."""

    points: tuple[tuple[float, float], ...]
    kind: str
    smooth: bool = False


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    kind: str = "note"
    anchor: str = "start"


@dataclass(frozen=True)
class Picture:
    title: str
    width: float
    height: float
    rects: tuple[Rect, ...] = ()
    lines: tuple[Line, ...] = ()
    texts: tuple[Text, ...] = ()

    def moved(self, dx: float, dy: float) -> Picture:
        return replace(
            self,
            rects=tuple(replace(r, x=r.x + dx, y=r.y + dy) for r in self.rects),
            lines=tuple(replace(n, points=tuple((x + dx, y + dy) for x, y in n.points)) for n in self.lines),
            texts=tuple(replace(t, x=t.x + dx, y=t.y + dy) for t in self.texts),
        )


def stack(title: str, pictures: Sequence[Picture], space: float = 44) -> Picture:
    """Pictures under each other, each below its title."""
    rects: list[Rect] = []
    lines: list[Line] = []
    texts: list[Text] = []
    at = 0.0
    for p in pictures:
        texts.append(Text(0, at + 20, p.title, "heading"))
        moved = p.moved(0, at + space)
        rects += moved.rects
        lines += moved.lines
        texts += moved.texts
        at += space + p.height + 16
    return Picture(title, max((p.width for p in pictures), default=0), at, tuple(rects), tuple(lines), tuple(texts))


def beside(title: str, pictures: Sequence[Picture], space: float = 28) -> Picture:
    """Pictures next to each other."""
    moved, at = [], 0.0
    for p in pictures:
        moved.append(p.moved(at, 0))
        at += p.width + space
    return merged(title, moved, max(at - space, 0), max((p.height for p in pictures), default=0))


def merged(title: str, pictures: Iterable[Picture], width: float, height: float) -> Picture:
    every = tuple(pictures)
    return Picture(
        title, width, height, tuple(r for p in every for r in p.rects), tuple(n for p in every for n in p.lines),
        tuple(t for p in every for t in p.texts),
    )  # fmt: skip


def ticks(most: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to `most`."""
    step = 1.0
    while most / step > wanted:
        step *= 2.5 if str(step)[0] == "2" else 2
    return [n * step for n in range(int(most / step) + 1)]
