"""One phase of an unrolled loop: the index variables of slots and copies become numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attngen.expr import DType, Expr, const, substitute, var
from attngen.fold import fold
from attngen.ir.ops import Ref
from attngen.ir.schedule import Step, Tiles

Values = Mapping[Expr, Expr]


def phase_values(node: Tiles, phase: int) -> dict[Expr, Expr]:
    """Slot and copy indices in the phase that counter start + phase + k * unroll belongs to."""
    t = var(node.var, DType.I32)
    values: dict[Expr, Expr] = {}
    for s in node.phase:
        values[var(s.target, DType.I32)] = fold(substitute(s.value, {t: const(node.start + phase), **values}))
    return values


def at_phase(step: Step, values: Values) -> Step:
    """The op with its indices as numbers; the text of its comment stays that of the schedule."""
    return dataclasses.replace(step, **{f.name: _at(getattr(step, f.name), values) for f in dataclasses.fields(step)})


def _at(value: Any, values: Values) -> Any:
    if isinstance(value, Expr):
        return fold(substitute(value, dict(values)))
    if isinstance(value, Ref):
        return dataclasses.replace(value, index=_at(value.index, values), cols=_at(value.cols, values))
    if isinstance(value, tuple):
        return tuple(_at(v, values) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _at(getattr(value, f.name), values) for f in dataclasses.fields(value)}
        )
    return value
