"""The text of a schedule, and its parser; the two are inverse (tests/test_schedule_text.py).

One line a node: keyword, name, then `field=value` for every field that differs from its default; children are
indented. Both directions walk the dataclass fields, so a new op or field needs no code here. Expressions are written
in braces (as values of fields) or after `=` (statements)."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any

from attngen.errors import ScheduleError
from attngen.expr import DType, Expr
from attngen.exprtext import parse, show
from attngen.ir import ops as _ops
from attngen.ir import schedule as _schedule
from attngen.ir.ops import OPS, Op, Ref, Scope, Stmt, kind_of
from attngen.ir.schedule import (
    Barrier,
    Block,
    Buffer,
    Elem,
    Fact,
    Guard,
    Item,
    Kernel,
    OrderRing,
    Range,
    Ring,
    Role,
    ScalarArg,
    Schedule,
    TensorArg,
    Tiles,
    Value,
    Work,
    Workspace,
)  # fmt: skip
from attngen.layout import SmemLayout, Swizzle

KEYWORDS: dict[str, type] = {
    "schedule": Schedule, "kernel": Kernel, "work": Work, "tensor": TensorArg, "scalar": ScalarArg, "smem": Buffer,
    "ring": Ring, "order": OrderRing, "barrier": Barrier, "role": Role, "value": Value, "item": Item, "block": Block,
    "tiles": Tiles,
    "range": Range, "guard": Guard, "workspace": Workspace, **OPS,
}  # fmt: skip
_WORD = {c: k for k, c in KEYWORDS.items()}
_GROUPS = {"step": "step", "drain": "drain", "exit": "exit"}  # tuples of ops under a word of their own
_LISTS = {"lets": "let", "phase": "phase"}  # tuples of statements, one line each under this word
INDEX_NAMES = ("b", "h", "hkv", "i", "j", "it", "jt", "m", "n", "rank", "t", "w", "batch", "heads", "group",
               "seqlen_q", "seqlen_k", "rounds", "ctas")  # fmt: skip
ELEM_DTYPE = {Elem.BF16: DType.F32, Elem.F16: DType.F32, Elem.F32: DType.F32, Elem.I32: DType.I32}
ELEM_DTYPE |= {Elem.I64: DType.I32, Elem.U8: DType.BOOL}


@cache
def _types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, vars(_ops) | vars(_schedule))


# ---- printing ----------------------------------------------------------------------------------------------------


def print_schedule(schedule: Schedule) -> str:
    return "\n".join(_lines(schedule, 0)) + "\n"


def describe(op: Op | Guard) -> str:
    """The line of one op, as it stands in the schedule: the comment above its code."""
    return next(iter(_lines(op, 0)))


def op_lines(op: Op | Guard, depth: int) -> list[str]:
    """An op and its statements, indented; the ops of other levels print the same way."""
    return list(_lines(op, depth))


def _lines(node: Any, depth: int) -> Iterator[str]:
    cls: type = type(node)
    word, pad = _WORD.get(cls) or kind_of(cls), "  " * depth
    head = (
        f"{node.id} {word}"
        if isinstance(node, Op | Guard)
        else f"{word} {node.name}"
        if hasattr(node, "name")
        else word
    )
    children: list[tuple[str, Any]] = []
    for f in fields(cls):
        value = getattr(node, f.name)
        if f.name in ("id", "name", "note") or _is_default(f, value):
            continue
        if _is_children(cls, f.name) or isinstance(value, Work | Item):
            children.append((f.name, value))
        else:
            head += f" {f.name}" if value is True and f.default is False else f" {f.name}={_scalar(value)}"
    note = f"  # {node.note}" if getattr(node, "note", "") else ""
    yield pad + head + note
    for name, value in children:
        yield from _children(name, value, depth + 1)


def _children(name: str, value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if name in _GROUPS:
        yield pad + name
        for op in value:
            yield from _lines(op, depth + 1)
        return
    for child in value if isinstance(value, tuple) else (value,):
        if isinstance(child, Stmt):
            word = _LISTS.get(name, child.scope.value)
            index = f"[{', '.join(map(show, child.index))}]" if child.index else ""
            yield f"{pad}{word} {child.target}{index} {'+=' if child.accumulate else '='} {show(child.value)}"
        elif isinstance(child, Fact):
            yield f"{pad}fact {child.subject}: {child.text}"
        else:
            yield from _lines(child, depth)


def _is_default(f: Field[Any], value: Any) -> bool:
    return f.default is not MISSING and value == f.default


@cache
def _is_children(cls: type, name: str) -> bool:
    hint = _types(cls)[name]
    if typing.get_origin(hint) is not tuple:
        return False
    inner = typing.get_args(hint)[0]
    members = typing.get_args(inner) if isinstance(inner, types.UnionType) else (inner,)
    return all(m in _WORD or m in (Stmt, Fact, Op) for m in members)


def _scalar(value: Any) -> str:
    if isinstance(value, Expr):
        return f"{{{show(value)}}}"
    if isinstance(value, Ref):
        inside = ", ".join(show(i) for i in value.index) + (f":{show(value.cols)}" if value.cols is not None else "")
        index = f"[{inside}]" if inside else ""
        return f"{value.name}{index}{'.T' if value.transposed else ''}".replace(" ", "")
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, SmemLayout):
        return f"[{value.rows},{value.cols}]x{value.itemsize}:{value.swizzle.value}"
    if isinstance(value, tuple):
        return "(" + ";".join(_scalar(v) for v in value) + ")"
    return str(value)


# ---- parsing -----------------------------------------------------------------------------------------------------


@dataclass
class _Line:
    number: int
    depth: int
    text: str
    children: list[_Line]


class _Names:
    """Types of the names that are visible at a point of the text."""

    def __init__(self) -> None:
        self.scalars: dict[str, DType] = dict.fromkeys(INDEX_NAMES, DType.I32)
        self.tensors: dict[str, DType] = {}

    def expr(self, text: str) -> Expr:
        return parse(text, self.scalars, self.tensors)


def parse_schedule(text: str) -> Schedule:
    """Reads a schedule text. ScheduleError names the line, what was found and what is allowed."""
    roots = _tree(text)
    if len(roots) != 1 or not roots[0].text.startswith("schedule "):
        raise ScheduleError("a schedule text has one root line that starts with `schedule NAME`")
    node = _parse(roots[0], _Names())
    assert isinstance(node, Schedule)
    return node


def _tree(text: str) -> list[_Line]:
    roots: list[_Line] = []
    stack: list[_Line] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        indent = len(raw) - len(raw.lstrip())
        if indent % 2:
            raise ScheduleError(f"line {number}: indentation is two spaces a level, found {indent}")
        line = _Line(number, indent // 2, raw.strip(), [])
        while stack and stack[-1].depth >= line.depth:
            stack.pop()
        if line.depth != (stack[-1].depth + 1 if stack else 0):
            raise ScheduleError(f"line {number}: indented by more than one level")
        (stack[-1].children if stack else roots).append(line)
        stack.append(line)
    return roots


_FIELD = re.compile(
    r"(?P<key>[a-z_]+)(?:=(?P<value>\{[^}]*\}|\((?:\{[^}]*\}|[^){])*\)|\[[^\]]*\]\S*|[^\s\[]+(?:\[[^\]]*\])?\S*))?(?:\s+|$)"
)


def _parse(line: _Line, names: _Names) -> Any:
    text, _, note = line.text.partition("  # ")
    words = text.split()
    if words[0] in KEYWORDS and not issubclass(KEYWORDS[words[0]], Op | Guard):
        cls = KEYWORDS[words[0]]
        values: dict[str, Any] = {}
        rest = text[len(words[0]) :].strip()
        if "name" in _types(cls):
            values["name"], _, rest = rest.partition(" ")
    elif len(words) > 1 and words[1] in KEYWORDS and issubclass(KEYWORDS[words[1]], Op | Guard):
        cls, values = KEYWORDS[words[1]], {"id": words[0]}
        rest = text.split(None, 2)[2] if len(words) > 2 else ""
        if note:
            values["note"] = note
    else:
        raise ScheduleError(f"line {line.number}: unknown node {line.text!r}; ops are written `ID kind field=value`")
    hints = _types(cls)
    at = 0
    rest = rest.strip()
    while at < len(rest):
        m = _FIELD.match(rest, at)
        if not m or m["key"] not in hints:
            raise ScheduleError(
                f"line {line.number}: {_WORD[cls]} has no field at {rest[at:]!r}; fields: {', '.join(hints)}"
            )
        try:
            values[m["key"]] = True if m["value"] is None else _read(m["value"], hints[m["key"]], names)
        except (ValueError, ScheduleError) as error:
            raise ScheduleError(f"line {line.number}, field {m['key']}: {error}") from None
        at = m.end()
    _read_children(line, cls, values, names)
    try:
        node = cls(**values)
    except TypeError as error:
        raise ScheduleError(f"line {line.number}: {_WORD[cls]}: {error}") from None
    _declare(node, names)
    return node


def _read_children(line: _Line, cls: type, values: dict[str, Any], names: _Names) -> None:
    lists: dict[str, list[Any]] = {f.name: [] for f in fields(cls) if _is_children(cls, f.name)}
    for child in line.children:
        word = child.text.split()[0]
        if word in _GROUPS and word in lists:
            lists[word] = [_parse(c, names) for c in child.children]
        elif word == "fact":
            subject, _, text = child.text[5:].partition(": ")
            lists["facts"].append(Fact(subject=subject, text=text))
        elif word in _LISTS.values() or (word in Scope._value2member_map_ and issubclass(cls, Op)):
            key = next((k for k, w in _LISTS.items() if w == word), "body")
            if key not in lists:
                raise ScheduleError(f"line {child.number}: {word!r} does not belong under {_WORD[cls]!r}")
            lists[key].append(_statement(child, word, names))
        else:
            # lets and locals of one kernel are not visible in the next, where a name may have another type
            node = _parse(child, _Names() if word == _WORD[Kernel] else names)
            key = _slot(cls, type(node), child)
            if key in lists:
                lists[key].append(node)
            else:
                values[key] = node
    values.update({k: tuple(v) for k, v in lists.items() if v or k not in _defaulted(cls)})


@cache
def _defaulted(cls: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(cls) if f.default is not MISSING)


def _slot(cls: type, child: type, line: _Line) -> str:
    for name, hint in _types(cls).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        members = typing.get_args(inner) if isinstance(inner, types.UnionType) else (inner,)
        if any(isinstance(m, type) and issubclass(child, m) for m in members) and name not in _GROUPS:
            return name
    raise ScheduleError(f"line {line.number}: {line.text.split()[0]!r} does not belong under {_WORD[cls]!r}")


def _statement(line: _Line, word: str, names: _Names) -> Stmt:
    m = re.fullmatch(r"(\w+) (\w+)(\[.*?\])? (\+?=) (.*)", line.text)
    if not m or (m[3] and m[4] == "="):
        raise ScheduleError(f"line {line.number}: a statement is `{word} name = expression`, found {line.text!r}")
    try:
        value = names.expr(m[5])
        # the parser of expressions splits an index at its commas: as that of an element of a tensor of this name
        index = parse(f"{m[2]}{m[3]}", names.scalars, {**names.tensors, m[2]: DType.F32}).args if m[3] else ()
    except ScheduleError as error:
        raise ScheduleError(f"line {line.number}: {error}") from None
    if not index:
        names.scalars.setdefault(m[2], value.dtype)
    scope = Scope(word) if word in Scope._value2member_map_ else Scope.ITEM
    return Stmt(scope=scope, target=m[2], value=value, accumulate=m[4] == "+=", index=index)


def _declare(node: Any, names: _Names) -> None:
    if isinstance(node, TensorArg):
        names.tensors[node.name] = ELEM_DTYPE[node.elem]
        names.scalars.update({f"{node.name}_n{k}": DType.I32 for k in range(node.rank)})
    elif isinstance(node, ScalarArg):
        names.scalars[node.name] = node.dtype
    elif isinstance(node, Buffer) and node.elem is Elem.F32:  # an element of a vector
        names.scalars[node.name] = DType.F32
    elif isinstance(node, Value):
        names.scalars[node.name] = {"i32": DType.I32, "bool": DType.BOOL}.get(node.dtype, DType.F32)


def _read(text: str, hint: Any, names: _Names) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_read(t, inner, names) for t in text[1:-1].split(";") if t)
    if hint is Expr:
        return names.expr(text[1:-1] if text.startswith("{") else text)
    if hint is Ref:
        m = re.fullmatch(
            r"(\w+(?:\.\w+)?)(?:\[(.*)\])?(\.T)?", text.removesuffix(".T") + (".T" if text.endswith(".T") else "")
        )
        if not m:
            raise ScheduleError(f"a reference is NAME[index:columns].T, found {text!r}")
        name = m[1].removesuffix(".T")
        before, colon, after = (m[2] or "").partition(":")
        index = tuple(names.expr(t) for t in before.split(",")) if before else ()
        return Ref(name=name, index=index, transposed=text.endswith(".T"), cols=names.expr(after) if colon else None)
    if hint is SmemLayout:
        m = re.fullmatch(r"\[(\d+),(\d+)\]x(\d+):(\w+)", text)
        if not m:
            raise ScheduleError(f"a layout is [rows,cols]xBYTES:swizzle, found {text!r}")
        return SmemLayout(int(m[1]), int(m[2]), int(m[3]), Swizzle(m[4]))
    if isinstance(hint, type) and issubclass(hint, Enum):
        if text not in hint._value2member_map_:
            raise ScheduleError(f"{text!r} is not one of {', '.join(str(e.value) for e in hint)}")
        return hint(text)
    if hint is bool:
        return text == "True"
    return hint(text)


