"""Where each part of a user's expression is evaluated: once an item, once a row, once a column, or for each element.

A conversion, a load or a division that depends on one index only costs a row or a column, not a tile: ALiBi written
per element would put an int-to-float conversion, the unit of ex2, beside every ex2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attngen.expr import Expr, Op, rebuild, substitute, var, walk
from attngen.ir.columns import COLUMN, ROW, tile_steps
from attngen.ir.ops import Scope, Stmt

_LEVEL = {Scope.ITEM: 0, Scope.ROW: 1, Scope.COL: 1, Scope.ELEM: 2}
_COSTLY = frozenset({Op.LOAD, Op.EXP2, Op.LOG2, Op.RCP, Op.TANH_APPROX, Op.DIV, Op.SQRT, Op.FLOORDIV, Op.MOD})
_TYPES = frozenset({"u8", "u16", "u32", "u64"})  # of the kernel text: no names for values


def join(scopes: Iterable[Scope]) -> Scope:
    """The scope of a value that depends on values of these scopes."""
    found = set(scopes) - {Scope.ITEM}
    if not found:
        return Scope.ITEM
    return next(iter(found)) if len(found) == 1 else Scope.ELEM


@dataclass(frozen=True)
class Target:
    """What a statement of a map is to produce."""

    name: str
    value: Expr
    scope: Scope = Scope.ELEM
    accumulate: bool = False
    index: tuple[Expr, ...] = ()


@dataclass
class Scopes:
    """Splits expressions by scope; collects what is hoisted out of the loop (`lets` an item, `rows` a row value each).

    `base`: scope of each variable that is no index. `names`: names to give to subexpressions, the user's own first.
    `axes`: whether an index runs along the rows or the columns. `stepped`: scalars that change inside the loop."""

    base: Mapping[str, Scope]
    names: Mapping[Expr, str]
    taken: set[str]
    lets: dict[Expr, Stmt] = field(default_factory=dict)
    rows: dict[Expr, Stmt] = field(default_factory=dict)
    axes: Mapping[str, Scope] = field(
        default_factory=lambda: {"i": Scope.ROW, ROW: Scope.ROW, "j": Scope.COL, COLUMN: Scope.COL}
    )
    stepped: frozenset[str] = frozenset()

    def scope(self, e: Expr) -> Scope:
        return join(self._leaf(x) for x in walk(e) if x.op is Op.VAR)

    def _leaf(self, v: Expr) -> Scope:
        return self.axes.get(v.name) or self.base.get(v.name, Scope.ITEM)

    def _name(self, e: Expr) -> str:
        wanted = self.names.get(e, "")
        number = 0
        name = wanted or "u0"
        while name in self.taken or name in _TYPES:
            number += 1
            name = f"{wanted}_{number}" if wanted else f"u{number}"
        self.taken.add(name)
        return name

    def hoist_item(self, e: Expr) -> Expr:
        """A uniform scalar of the item with the value of e."""
        if e.op in (Op.CONST, Op.VAR):
            return e
        if e not in self.lets:
            self.lets[e] = Stmt(scope=Scope.ITEM, target=self._name(e), value=e)
        return var(self.lets[e].target, e.dtype)

    def split(self, *targets: Target) -> tuple[Stmt, ...]:
        """Statements that give each target its value, with everything cheaper to do in an outer scope hoisted."""
        temporaries: list[Stmt] = []
        done: dict[tuple[Expr, Scope], Expr] = {}
        values = [
            Stmt(
                scope=t.scope,
                target=t.name,
                value=self._place(t.value, t.scope, temporaries, done),
                accumulate=t.accumulate,
                index=tuple(self._place(e, t.scope, temporaries, done) for e in t.index),
            )
            for t in targets
        ]
        return (*temporaries, *values)

    def _place(self, x: Expr, scope: Scope, temporaries: list[Stmt], done: dict[tuple[Expr, Scope], Expr]) -> Expr:
        """x with its maximal subexpressions below `scope` replaced by names."""
        if (x, scope) in done:
            return done[x, scope]
        own = self.scope(x)
        if _leaf(x):
            result = x
        elif own is Scope.ITEM:
            result = self.hoist_item(x)
        elif own is Scope.ROW and scope is not Scope.ROW and self._invariant(x):
            result = self._hoist_row(x)
        elif own is not scope and _LEVEL[own] < _LEVEL[scope]:
            inner = self._place(x, own, temporaries, done)
            name = self._name(x)
            temporaries.append(Stmt(scope=own, target=name, value=inner))
            result = var(name, x.dtype)
        else:
            args = tuple(self._argument(x, a, scope, temporaries, done) for a in x.args)
            result = x if all(a is b for a, b in zip(args, x.args, strict=True)) else rebuild(x, args)
        done[x, scope] = result
        return result

    def _argument(
        self, x: Expr, a: Expr, scope: Scope, temporaries: list[Stmt], done: dict[tuple[Expr, Scope], Expr]
    ) -> Expr:
        """What the row and the column within the tile add to an address stays where it is: a number times a stride."""
        steps = tile_steps(a) if x.op is Op.LOAD else None
        if steps is None:
            return self._place(a, scope, temporaries, done)
        return substitute(a, {steps.base: self._place(steps.base, scope, temporaries, done)})

    def _invariant(self, x: Expr) -> bool:
        """Worth a register for the whole item: costly, and free of row values that the loop changes."""
        return any(y.op in _COSTLY for y in walk(x)) and not any(
            y.op is Op.VAR and (self.base.get(y.name) is Scope.ROW or y.name in self.stepped) for y in walk(x)
        )

    def _hoist_row(self, x: Expr) -> Expr:
        if x not in self.rows:
            (self.rows[x],) = self.split(Target(self._name(x), x, Scope.ROW))
        return var(self.rows[x].target, x.dtype)



def _leaf(x: Expr) -> bool:
    """Free where it is used: a constant, a variable, or a sign, which instructions take as a modifier."""
    return x.op in (Op.CONST, Op.VAR) or (x.op is Op.NEG and x.args[0].op is Op.VAR)
