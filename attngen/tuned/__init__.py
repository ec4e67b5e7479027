"""Configurations that were measured fastest among the first in rank, and how a table of them is written.

What decides is the form of the score, the head dims, and whether tiles come from a list; constants, names of tensors
and other masks change what is computed and how many tiles there are, not what a tile costs. The model's ranking follows
behind, for a compiler that refuses the first. The tables here come with the package; one of a machine's own
measurements has the same form (attngen.measured)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attngen.config import AnyConfig, read, written
from attngen.expr import SCORE, Expr, Op, load, rebuild, var, walk
from attngen.exprtext import show
from attngen.passes.ranges import VisitSource, ranges
from attngen.signature import VECTOR_BYTES, Signature
from attngen.spec import Normalizer, Variant
from attngen.target import Target

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """A configuration and what was measured. `what`: said of it alone; "": as of its table. `results`: numbers by what
    they are of, in `unit`."""

    config: AnyConfig
    unit: str
    results: tuple[tuple[str, float], ...]
    what: str = ""


@dataclass(frozen=True)
class Table:
    """Entries by key, and what all of them were measured on. `date`: of the last."""

    device: str
    compiler: str
    date: str
    what: str
    entries: Mapping[str, Entry]

    def say(self, entry: Entry) -> str:
        """What was measured, where and when."""
        numbers = ", ".join(f"{name} {value:g}" for name, value in entry.results)
        where = f"{self.device}, {self.compiler}, {self.date}"
        return f"{where}: {entry.what or self.what}: {numbers} {UNITS[entry.unit]}"

    def with_entry(self, key: str, entry: Entry) -> Table:
        return replace(self, entries={**self.entries, key: entry})


LISTED = "listed"
UNITS = {"tflops": "TFLOP/s", "ms": "ms"}  # by their name in a file


def keys_of(variant: Variant, signature: Signature) -> tuple[str, ...]:
    """The word for the form of a score, and the head dims; before it the same of listed tiles, where they are."""
    plain = variant.score is SCORE and variant.scale_positive and variant.normalizer is Normalizer.SOFTMAX
    text = f"{show(form(variant.score))} {variant.scale_positive} {variant.normalizer.value}"
    word = "plain" if plain else hashlib.sha256(text.encode()).hexdigest()[:16]
    dims = f"{signature.head_dim_qk} {signature.head_dim_v}"
    listed = ranges(variant.mask, 64).source is VisitSource.TABLE  # of tiles of any size
    return (*((f"{word} {LISTED} {dims}",) if listed else ()), f"{word} {dims}")


def form(score: Expr) -> Expr:
    """The same with one constant for all, and tensors by their place."""
    forms: dict[Expr, Expr] = {}
    names: dict[str, str] = {}
    for e in walk(score):
        args = tuple(forms[a] for a in e.args)
        if e.op is Op.CONST:
            forms[e] = var("constant", e.dtype)
        elif e.op is Op.LOAD:
            forms[e] = load(names.setdefault(e.name, f"tensor{len(names)}"), args, e.dtype)
        else:
            forms[e] = rebuild(e, args)
    return forms[score]


# ---- as JSON -----------------------------------------------------------------------------------------------------


def table_text(table: Table) -> str:
    head = {"device": table.device, "compiler": table.compiler, "date": table.date, "what": table.what}
    return json.dumps({**head, "entries": {k: _written(e) for k, e in table.entries.items()}}, indent=1) + "\n"


def table_of(text: str) -> Table:
    """Raises ValueError, KeyError, TypeError or SignatureError where the text is no table."""
    found = json.loads(text)
    entries = {key: _read(entry) for key, entry in found["entries"].items()}
    return Table(found["device"], found["compiler"], found["date"], found["what"], entries)


def _written(entry: Entry) -> dict[str, Any]:
    said = {"what": entry.what} if entry.what else {}
    return {"config": written(entry.config), **said, entry.unit: dict(entry.results)}


def _read(entry: Mapping[str, Any]) -> Entry:
    (unit,) = set(entry) & set(UNITS)
    return Entry(read(entry["config"]), unit, tuple(entry[unit].items()), entry.get("what", ""))


# ---- what comes with the package ---------------------------------------------------------------------------------


@cache
def shipped(target: Target) -> Table | None:
    """None for a target without a table."""
    path = FOLDER / f"{target.name}.json"
    return table_of(path.read_text(encoding="utf-8")) if path.exists() else None


def found(variant: Variant, signature: Signature, target: Target) -> tuple[Table, Entry] | None:
    """What was measured holds for rows that the copy engine reads: threads that copy need registers, and time."""
    table = shipped(target) if signature.alignment == VECTOR_BYTES else None
    keys = keys_of(variant, signature) if table else ()
    return next(((table, table.entries[key]) for key in keys if table and key in table.entries), None)


def lookup(variant: Variant, signature: Signature, target: Target) -> AnyConfig | None:
    known = found(variant, signature, target)
    return known[1].config if known else None
