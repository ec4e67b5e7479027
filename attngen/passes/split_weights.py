"""How the weights of a step of plain sums are made in two maps, and what of them depends on the query alone.

The gradient of a score is a product: `p * (dp - delta) * f'(s)`. Its factors without dp are known once s is, so s and
dp need not be held at the same time: a first map keeps `p * f'(s)` in 16 bits, where the first sum's operand may be the
same value, and a second one multiplies when dp is there. An accumulator may start at what is added to it.

Whatever depends on nothing but values of the query's row is worked out once a row, by the module's kernel of rows, and
not once a row for each tile of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from attngen.expr import SCALE, Expr, Op, mul, rebuild, var, variables, walk
from attngen.passes.scopes import Target


def lift_rows(e: Expr, rows: frozenset[str], name: Callable[[Expr], Expr]) -> Expr:
    """e with its largest parts that are made of row values alone (loads of `rows`) replaced by what `name` gives."""
    if _of_rows(e, rows):
        return name(e)
    if e.op is Op.LOAD or not e.args:
        return e
    args = tuple(lift_rows(a, rows, name) for a in e.args)
    return e if all(a is b for a, b in zip(args, e.args, strict=True)) else rebuild(e, args)


def _of_rows(e: Expr, rows: frozenset[str]) -> bool:
    if e.op is Op.LOAD:
        return e.name in rows
    if not e.args:
        return False
    own = [_of_rows(a, rows) for a in e.args]
    return any(own) and all(y or a.op is Op.CONST or a is SCALE for a, y in zip(e.args, own, strict=True))


@dataclass(frozen=True)
class Halves:
    """`early` and `late`: what the two maps make. `place`: the value in which an operand lies, where it takes the place
    of what was kept for it. `start`: what accumulators of the late products begin with."""

    early: tuple[Target, ...]
    late: tuple[Target, ...]
    place: Mapping[str, str]
    start: Mapping[str, Expr]


def halves(targets: Sequence[Target], first: str, second: frozenset[str]) -> Halves | None:
    """`first`, `second`: the fragments of the product behind which the early map runs, and of the others. None where a
    value is no product of what the early map knows with what it does not, or a sum over many elements, which would show
    that its factors were kept in 16 bits."""
    early = [t for t in targets if not _names(t) & second]
    kept: dict[Expr, str] = {t.value: t.name for t in early if not t.accumulate}
    late: list[Target] = []
    place: dict[str, str] = {}
    for t in (t for t in targets if _names(t) & second):
        known, rest = _factors(t.value, second)
        if t.accumulate or any(first in variables(x) for x in rest):
            return None
        if known and first in variables(*known):
            g = reduce(mul, known)
            if g not in kept:
                kept[g] = t.name
                early.append(Target(t.name, g))
            place[t.name] = kept[g]
            rest, known = [*rest, var(kept[g], g.dtype)], []
        late.append(replace(t, name=place.get(t.name, t.name), value=reduce(mul, [*rest, *known])))
    start = _starts(late, second)
    return Halves(tuple(early), tuple(replace(t, value=_started(t.value, start)) for t in late), place, start)


def _names(t: Target) -> frozenset[str]:
    return variables(t.value, *t.index)


def _factors(e: Expr, second: frozenset[str]) -> tuple[list[Expr], list[Expr]]:
    """The factors of a product without and with a fragment of `second`."""
    if e.op is Op.MUL:
        left, right = (_factors(a, second) for a in e.args)
        return left[0] + right[0], left[1] + right[1]
    return ([], [e]) if variables(e) & second else ([e], [])


def _starts(late: Sequence[Target], second: frozenset[str]) -> dict[str, Expr]:
    """A fragment that is only read less one other value: its accumulator starts at minus this."""
    found: dict[str, Expr] = {}
    for name in sorted(second):
        users = {x for t in late for x in walk(t.value) if any(a.op is Op.VAR and a.name == name for a in x.args)}
        if len(users) == 1:
            (x,) = users
            plain = x.op is Op.SUB and x.args[0].name == name and x.args[1].op is Op.VAR
            if plain and x.args[1].name not in second:
                found[name] = x.args[1]
    return found


def _started(e: Expr, start: Mapping[str, Expr]) -> Expr:
    if e.op is Op.SUB and e.args[0].op is Op.VAR and start.get(e.args[0].name) is e.args[1]:
        return e.args[0]
    if e.op is Op.LOAD or not e.args:
        return e
    return rebuild(e, tuple(_started(a, start) for a in e.args))
