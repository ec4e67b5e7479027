"""Configurations that were measured fastest among the first in rank, and how a table of them is written.

What decides is the score, the head dims and the type; masks change how many tiles there are, not what a tile costs. The
model's ranking follows behind, for a compiler that refuses the first. The tables here come with the package; one of a
machine's own measurements has the same form (attngen.measured)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from attngen.config import AnyConfig, read, written
from attngen.expr import SCORE
from attngen.exprtext import show
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


UNITS = {"tflops": "TFLOP/s", "ms": "ms"}  # by their name in a file


def key_of(variant: Variant, signature: Signature) -> str:
    """The word for a score, and the head dims."""
    plain = variant.score is SCORE and variant.scale_positive and variant.normalizer is Normalizer.SOFTMAX
    text = f"{show(variant.score)} {variant.scale_positive} {variant.normalizer.value}"
    word = "plain" if plain else hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{word} {signature.head_dim_qk} {signature.head_dim_v}"


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


def lookup(variant: Variant, signature: Signature, target: Target) -> AnyConfig | None:
    """What was measured holds for rows that the copy engine reads: threads that copy need registers, and time."""
    table = shipped(target) if signature.alignment == VECTOR_BYTES else None
    entry = table.entries.get(key_of(variant, signature)) if table else None
    return entry.config if entry else None
