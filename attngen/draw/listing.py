"""The schedule and the CUDA text, each op of the one leading to the same op of the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from attngen.draw.page import CodeLine
from attngen.ir.ops import OPS

Name = Callable[[str, str], str]
_KERNEL = re.compile(r"  kernel (\w+)")
_OP = re.compile(rf" +(\w+) (?:{'|'.join(OPS)}|guard)\b")
_SYMBOL = re.compile(r'extern "C" .*?(\w+)\(const ')
_COMMENT = re.compile(rf" *// (\w+) (?:{'|'.join(OPS)}|guard)\b")


def op_anchor(kernel: str, op: str) -> str:
    return f"op-{kernel}-{op}"


def source_anchor(kernel: str, op: str) -> str:
    return f"src-{kernel}-{op}"


def listings(schedule: str, source: str) -> tuple[tuple[CodeLine, ...], tuple[CodeLine, ...]]:
    """Both texts with anchors; an op that the source has several times (phases, classes) is found at the first."""
    of_source = list(_places(source, _SYMBOL, _COMMENT))
    of_schedule = list(_places(schedule, _KERNEL, _OP))
    have = {(k, op) for _, k, op in of_source if op}
    known = {(k, op) for _, k, op in of_schedule if op}
    schedule_lines = _linked(of_schedule, op_anchor, source_anchor, have)
    return schedule_lines, _linked(of_source, source_anchor, op_anchor, known)


def _places(text: str, kernel: re.Pattern[str], op: re.Pattern[str]) -> Iterator[tuple[str, str, str]]:
    """(line, kernel, op or nothing)."""
    current = ""
    for line in text.rstrip("\n").split("\n"):
        if found := kernel.match(line):
            current = found[1]
        at = op.match(line)
        yield line, current, at[1] if at else ""


def _linked(
    places: list[tuple[str, str, str]], anchor: Name, other: Name, there: set[tuple[str, str]]
) -> tuple[CodeLine, ...]:
    """Lines whose ops have an `anchor`, and lead to the `other` text where the op is there."""
    seen: set[tuple[str, str]] = set()
    lines = []
    for line, kernel, op in places:
        first = bool(op) and (kernel, op) not in seen
        seen.add((kernel, op))
        leads = (kernel, op) in there
        lines.append(CodeLine(
            line, anchor(kernel, op) if first else "", f"#{other(kernel, op)}" if leads else "", op if leads else "",
        ))  # fmt: skip
    return tuple(lines)
