"""Jinja: macros by op name, no decisions. Templates may hold holes and `for` over prepared lists, nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from attngen.resources import templates_dir

Argument = str | int | Sequence[str] | Sequence[Mapping[str, str]]


@cache
def environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=False,
    )  # fmt: skip


@cache
def macros(target: str) -> Mapping[str, jinja2.runtime.Macro]:
    """All macros of a target by name: common ones and its own."""
    found: dict[str, jinja2.runtime.Macro] = {}
    for file in ("common", target):
        module = environment().get_template(f"ops/{file}.jinja").module
        found.update({n: m for n, m in vars(module).items() if isinstance(m, jinja2.runtime.Macro)})
    return found


def call(target: str, macro: str, arguments: Mapping[str, Argument]) -> list[str]:
    """The lines of one macro."""
    text = str(macros(target)[macro](**arguments))
    return text.strip("\n").split("\n")


@dataclass(frozen=True)
class Prelude:
    head: str
    functions: tuple[tuple[str, str], ...]  # name, text


@cache
def prelude_of(target: str) -> Prelude:
    """The prelude files of a target, cut into the head that is always there and one entry a function."""
    head, functions = "", []
    for file in ("common", target):
        text = (templates_dir() / "prelude" / f"{file}.cuh").read_text()
        start, _, rest = text.partition("// ---- primitives\n")
        if file == "common":
            head = start.strip()
        for block in re.split(r"\n\s*\n", rest.strip()):
            name = re.search(r"DI [\w ]+?[ *&]+(\w+)\(", block)
            assert name, f"no function in a block of {file}.cuh: {block!r}"
            functions.append((name[1], block.strip()))
    return Prelude(head, tuple(functions))


def select_prelude(target: str, body: str) -> str:
    """The head and the functions that `body` calls, in the order of the files."""
    prelude = prelude_of(target)
    words = set(re.findall(r"\w+", body))
    used = [text for name, text in prelude.functions if name in words]
    return "\n\n".join([prelude.head, *used]) + "\n"
