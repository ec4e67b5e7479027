"""Pictures and pages as text: every number is spelled here, templates have holes and loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from attngen.draw.picture import Line, Picture, Rect, Text
from attngen.resources import templates_dir

MARGIN = 8
UNDER = ("tick", "edge")  # kinds of lines that lie below the rectangles


@cache
def environment() -> jinja2.Environment:
    """Everything in a hole is escaped, unless it is Markup."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir() / "pages"), undefined=jinja2.StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def render(template: str, values: Mapping[str, Any]) -> Markup:
    return Markup(environment().get_template(template).render(values))


@cache
def style() -> Markup:
    return Markup((templates_dir() / "pages" / "style.css").read_text(encoding="utf-8"))


def svg(picture: Picture) -> Markup:
    """A picture inside a page, which has the style."""
    return render("picture.svg.jinja", {**_spelled(picture), "style": ""})


def svg_file(picture: Picture) -> str:
    """A picture as a file of its own."""
    return str(render("picture.svg.jinja", {**_spelled(picture), "style": style()})) + "\n"


def number(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def _spelled(picture: Picture) -> dict[str, Any]:
    width, height = picture.width + 2 * MARGIN, picture.height + 2 * MARGIN
    return {
        "title": picture.title, "width": number(width), "height": number(height),
        "box": " ".join(number(x) for x in (-MARGIN, -MARGIN, width, height)),
        "rects": [_rect(r) for r in picture.rects if not r.href],
        "links": [_rect(r) for r in picture.rects if r.href],
        "under": [_line(n) for n in picture.lines if n.kind in UNDER],
        "lines": [_line(n) for n in picture.lines if n.kind not in UNDER],
        "texts": [_text(t) for t in picture.texts],
    }  # fmt: skip


def _rect(r: Rect) -> dict[str, str]:
    return {
        "x": number(r.x), "y": number(r.y), "width": number(r.width), "height": number(r.height), "kind": r.kind,
        "title": r.title, "href": r.href,
    }  # fmt: skip


def _line(n: Line) -> dict[str, str]:
    return {"kind": n.kind, "path": _path(n)}


def _text(t: Text) -> dict[str, str]:
    return {"x": number(t.x), "y": number(t.y), "text": t.text, "kind": t.kind, "anchor": t.anchor}


def _path(line: Line) -> str:
    (x, y), *rest = line.points
    words = [f"M{number(x)} {number(y)}"]
    for x2, y2 in rest:
        if line.smooth:
            half = (y + y2) / 2
            words.append(f"C{number(x)} {number(half)} {number(x2)} {number(half)} {number(x2)} {number(y2)}")
        else:
            words.append(f"L{number(x2)} {number(y2)}")
        x, y = x2, y2
    return "".join(words)


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kind: str = "numbers"  # or words


@dataclass(frozen=True)
class Section:
    """A part of a page: words, pictures, a table, text with anchors; what is not there is empty."""

    anchor: str
    title: str
    words: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()  # kind, meaning
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    code: tuple[CodeLine, ...] = ()


@dataclass(frozen=True)
class CodeLine:
    """`anchor`: its id; `href`: where its first word leads."""

    text: str
    anchor: str = ""
    href: str = ""
    link: str = ""


def html(title: str, lead: Sequence[str], facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """A page of sections."""
    return str(render("page.html.jinja", {
        "title": title, "style": style(), "lead": lead, "facts": [{"name": n, "value": v} for n, v in facts],
        "sections": [_section(s) for s in sections],
    })) + "\n"  # fmt: skip


def _section(s: Section) -> dict[str, Any]:
    return {
        "anchor": s.anchor, "title": s.title, "words": s.words,
        "legend": [{"kind": kind, "meaning": meaning} for kind, meaning in s.legend],
        "pictures": [{"title": p.title, "svg": svg(p)} for p in s.pictures],
        "tables": [{"kind": t.kind, "head": t.head, "rows": t.rows} for t in (s.table,) if t is not None],
        "blocks": [{"lines": [_code(n) for n in s.code]}] if s.code else [],
    }  # fmt: skip


def _code(line: CodeLine) -> dict[str, Any]:
    """A line in three parts: the text before the link, the linked word, the text behind it."""
    before, word, behind = line.text.partition(line.link) if line.link and line.href else (line.text, "", "")
    return {
        "ids": [line.anchor] if line.anchor else [], "before": before,
        "links": [{"href": line.href, "word": word}] if word else [], "behind": behind,
    }  # fmt: skip
