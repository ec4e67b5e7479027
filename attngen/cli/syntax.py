"""Masks and scores as text on the command line: names, calls with numbers, and `&`, `|`, `~` between masks.

The text is read as a syntax tree and never executed. A name alone is a call without arguments, and `softcap=30` is
another way to write `softcap(30)`."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from attngen.errors import SpecError
from attngen.masks import Mask
from attngen.scores import Score

Argument = int | float | str
MaskMaker = Callable[..., Mask]
ScoreMaker = Callable[..., Score]
_Made = TypeVar("_Made", Mask, Score)
_NESTED = "{option}: a text of {length} characters nests too deeply. Allowed: about 100 operators and parentheses"
_SHORT = re.compile(r"\s*(\w+)\s*=\s*([-+.\w]+)\s*")


def parse_mask(text: str, makers: Mapping[str, MaskMaker]) -> Mask:
    """The mask that `text` describes; `makers` are the names it may use."""
    try:
        return _mask(_tree("--mask", text), text, makers)
    except RecursionError:
        raise SpecError(_NESTED.format(option="--mask", length=len(text))) from None


def parse_scores(text: str, makers: Mapping[str, ScoreMaker]) -> tuple[Score, ...]:
    """The score modifications of a comma-separated list, in its order."""
    return tuple(_made("--score", _tree("--score", part), part, makers) for part in _parts(text))


def names_in(text: str) -> frozenset[str]:
    """The names that a text mentions."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))


def _parts(text: str) -> list[str]:
    """The pieces between the commas outside of parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += {"(": 1, ")": -1}.get(c, 0)
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _tree(option: str, text: str) -> ast.expr:
    short = _SHORT.fullmatch(text)
    try:
        return ast.parse(f"{short[1]}({short[2]})" if short else text.strip(), mode="eval").body
    except (RecursionError, MemoryError):  # the parser's own limit of nesting
        raise SpecError(_NESTED.format(option=option, length=len(text))) from None
    except SyntaxError as error:
        raise SpecError(f"{option}: {text!r} does not parse: {error.msg}") from None


def _mask(node: ast.expr, text: str, makers: Mapping[str, MaskMaker]) -> Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text, makers) & _mask(right, text, makers)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text, makers) | _mask(right, text, makers)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, text, makers)
    return _made("--mask", node, text, makers)


def _made(option: str, node: ast.expr, text: str, makers: Mapping[str, Callable[..., _Made]]) -> _Made:
    match node:
        case ast.Name(id=name):
            args: list[ast.expr] = []
            keywords: list[ast.keyword] = []
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            pass
        case _:
            operators = ", combined with &, | and ~" if option == "--mask" else ", separated by commas"
            found = f"{ast.unparse(node)!r} in {text!r}"
            raise SpecError(f"{option}: {found} is not understood. Allowed: {_list(makers)}{operators}")
    if name not in makers:
        raise SpecError(f"{option}: {name!r} is not known{meant(name, makers)}. Allowed: {_list(makers)}")
    values = [_argument(option, a) for a in args]
    named = {k.arg: _argument(option, k.value) for k in keywords if k.arg is not None}
    try:
        return makers[name](*values, **named)
    except TypeError as error:
        raise SpecError(f"{option}: {ast.unparse(node)}: {str(error).split('() ')[-1]}") from None


def _argument(option: str, node: ast.expr) -> Argument:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        value = None
    if not isinstance(value, int | float | str):
        found = ast.unparse(node)
        raise SpecError(
            f"{option}: the argument {found!r} is not a number. Allowed: numbers, True, False, and strings in quotes"
        )
    return value


def meant(name: str, allowed: Iterable[str]) -> str:
    """What may have been meant by a name that is not known."""
    near = difflib.get_close_matches(name, list(allowed), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _list(makers: Mapping[str, object]) -> str:
    return ", ".join(makers)
