"""How many tensor, special-function, conversion and maximum instructions the machine code of a kernel must have.

Counted from the schedule alone, op by op, as often as lowering writes an op: once a class and phase of a loop, once a
drain of each. The text is no part of it, so a macro, a prelude or a compiler that drops or doubles work shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from attngen.expr import DType, Expr, make, rewrite, var, variables, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Heads, Op, ReduceKind, Ref, Scope, Stmt
from attngen.ir.schedule import (
    PERSISTENT,
    Block,
    Classes,
    Guard,
    Kernel,
    Role,
    Schedule,
    Step,
    Tiles,
    Value,
    WorkSource,
)
from attngen.layout import Fragment
from attngen.lowering.sm80 import KSTEP_UNROLL

WGMMA, MMA, SPECIAL, PACK, MAXIMUM = "HGMMA", "HMMA", "MUFU", "F2FP", "FMNMX"
MNEMONICS = (WGMMA, MMA, SPECIAL, PACK, MAXIMUM)

_SPECIAL = frozenset({ExprOp.EXP2, ExprOp.LOG2, ExprOp.RCP, ExprOp.TANH_APPROX})
_SLOW = frozenset({ExprOp.DIV, ExprOp.SQRT})  # correctly rounded: an estimate, and a slow path with another
_COMMUTATIVE = frozenset({ExprOp.ADD, ExprOp.MUL, ExprOp.MIN, ExprOp.MAX, ExprOp.AND, ExprOp.OR})
# of kernels that run beside the attention
_LISTED = (o.Pointwise, o.SumRows, o.CastFrag, o.ScanTiles, o.CompactTiles, o.RankTile, o.SortItems, o.DealItems)


@dataclass(frozen=True)
class Bounds:
    """How often an instruction may occur; almost always one number."""

    least: int = 0
    most: int = 0

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.least + other.least, self.most + other.most)

    def __mul__(self, times: int) -> Bounds:
        return Bounds(self.least * times, self.most * times)

    def __contains__(self, count: int) -> bool:
        return self.least <= count <= self.most

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


def exactly(count: int) -> Bounds:
    return Bounds(count, count)


def at_most(count: int) -> Bounds:
    return Bounds(0, count)


Counts = Mapping[str, Bounds]


def predicted(schedule: Schedule) -> dict[str, Counts]:
    """By symbol, for the kernels of a module that compute attention."""
    found = ((k.name, predict(k)) for k in schedule.kernels)
    return {symbol: counts for symbol, counts in found if counts is not None}


def predict(kernel: Kernel) -> Counts | None:
    """Bounds of each of MNEMONICS; None for a small kernel of a module, which has neither products nor a softmax."""
    if any(isinstance(op, _LISTED) for role in kernel.roles for op, *_ in written(role)):
        return None
    total = _Tally()
    for role in kernel.roles:
        _count_role(total, kernel, role)
    if _of_positions(kernel):
        return {name: b if name in (WGMMA, MMA) else at_most(b.most) for name, b in total.counts.items()}
    return total.counts


def _of_positions(kernel: Kernel) -> bool:
    """Scores that no product makes: they may be the same in all rows, and what is made of them is shared."""
    steps = [op for role in kernel.roles for op, *_ in written(role)]
    products = {op.d.name for op in steps if isinstance(op, o.Wgmma | o.MmaSync)}
    return any(isinstance(op, o.Map) and op.over.name not in products for op in steps)


@dataclass
class _Tally:
    counts: dict[str, Bounds] = field(default_factory=lambda: dict.fromkeys(MNEMONICS, Bounds()))

    def add(self, mnemonic: str, bounds: Bounds) -> None:
        self.counts[mnemonic] += bounds


# ---- how often an op is written ------------------------------------------------------------------------------------


def written(role: Role) -> Iterator[tuple[Op, int, bool]]:
    """Every op of a role, the number of times that it stands in the text, and whether a guard holds it."""
    for node in role.item.body:
        if isinstance(node, Block):
            yield from _once(node.ops, "", 1)
        elif node.classes is Classes.BRANCH:
            yield from ((op, 1, isinstance(step, Guard)) for step in (*node.step, *node.drain) for op in _ops(step))
        else:
            for cls in classes_of(node):
                yield from _once(node.step, cls, node.unroll)
                yield from _once(node.drain, cls, node.unroll)
    yield from _once(role.exit, "", 1)


def classes_of(node: Tiles) -> tuple[str, ...]:
    """Ranges of one class share one body."""
    return tuple(dict.fromkeys(r.cls for r in node.ranges))


def _once(steps: tuple[Step, ...], cls: str, times: int) -> Iterator[tuple[Op, int, bool]]:
    for step in steps:
        if not step.only or step.only == cls:
            kept = (op for op in _ops(step) if not op.only or op.only == cls)
            yield from ((op, times, isinstance(step, Guard)) for op in kept)


def _ops(step: Step) -> tuple[Op, ...]:
    return step.body if isinstance(step, Guard) else (step,)


def _bodies(node: Tiles) -> int:
    """How often the scalars of a step stand in the text."""
    return 1 if node.classes is Classes.BRANCH else len(classes_of(node)) * node.unroll


# ---- ops -----------------------------------------------------------------------------------------------------------


def _count_role(total: _Tally, kernel: Kernel, role: Role) -> None:
    values = {v.name: v for v in role.values}
    # what a guard computes once more, the compiler may still have from the step before it, but for what guards assign
    loops = [node for node in role.item.body if isinstance(node, Tiles)]
    guarded = [op for loop in loops for s in loop.step if isinstance(s, Guard) for op in s.body]
    assigned = {s.target for op in guarded if isinstance(op, o.Map) for s in op.body if s.scope is Scope.ROW}
    before = frozenset(
        node for loop in loops for op in loop.step if isinstance(op, o.Map)
        for s in op.body for node in walk(*s.exprs) if not variables(node) & assigned
    )  # fmt: skip
    for op, times, rare in written(role):
        match op:
            case o.Wgmma():
                total.add(WGMMA, exactly(_ksteps(kernel, op.b) * times))
            case o.MmaSync():
                d = values[op.d.name]
                products = d.rows // 16 * (d.cols // 8)
                total.add(MMA, _rolled(_ksteps(kernel, op.b), op.a.name in values) * (products * times))
            case o.Reduce() if op.kind is ReduceKind.MAX:
                src = values[op.src.name]
                total.add(MAXIMUM, exactly(src.rows // 8 * (src.cols // 4 - 1 + _QUAD) * times))
            case o.StFrag() if values[op.src.name].fragment is not Fragment.OPA:  # else packed already
                total.add(PACK, exactly(_stored(kernel, values[op.src.name], op) * times))
            case o.Map():
                _count_map(total, values, op, times, before if rare else frozenset())
            case _:
                pass
    scalars = [(role.item.lets, 1)]
    scalars += [(node.lets, _bodies(node)) for node in role.item.body if isinstance(node, Tiles)]
    for lets, times in scalars:
        # uniform: shared between clones, dropped where unused
        for node in walk(*(s.value for s in lets)):
            for mnemonic, bounds in _cost(node).items():
                total.add(mnemonic, at_most(bounds.most * times))
    total.add(SPECIAL, _divisions(kernel, role))


_QUAD = 2  # steps of a reduction over the four lanes of a row


def _ksteps(kernel: Kernel, b: Ref) -> int:
    buffer = kernel.buffer(b.name)
    assert buffer is not None
    return (buffer.layout.cols if b.transposed else buffer.layout.rows) // 16


def _rolled(ksteps: int, unrolled: bool) -> Bounds:
    """k-steps in the text of a loop over them; the compiler unrolls what is left of a part as it likes."""
    if unrolled or ksteps <= KSTEP_UNROLL:
        return exactly(ksteps)
    return Bounds(KSTEP_UNROLL, ksteps)


def _stored(kernel: Kernel, value: Value, op: o.StFrag) -> int:
    """Packed pairs of a fragment, or of the block of its columns that a tile takes."""
    buffer = kernel.buffer(op.dst.name)
    assert buffer is not None
    cols = value.cols if op.src.cols is None else min(value.cols, buffer.layout.cols)
    return value.rows // 8 * cols // 4 // 2


def _divisions(kernel: Kernel, role: Role) -> Bounds:
    """Reciprocals of the integer divisions that find batch and head of an item."""
    reads_kv = any(getattr(op, "heads", None) is Heads.KV for op, *_ in written(role))
    if kernel.work.source is WorkSource.TABLE_KEYS:
        return exactly(0)
    if kernel.work.source in PERSISTENT:
        return exactly(int(reads_kv))
    return Bounds(int(reads_kv), 3)


# ---- scalar statements ---------------------------------------------------------------------------------------------


def _cost(e: Expr) -> dict[str, Bounds]:
    """Instructions of one evaluation of a node, its arguments left out."""
    if e.op in _SPECIAL:
        return {SPECIAL: exactly(1)}
    if e.op in _SLOW:
        return {SPECIAL: Bounds(1, 2)}
    if e.op in (ExprOp.MIN, ExprOp.MAX) and e.dtype is DType.F32:
        return {MAXIMUM: exactly(1)}
    if e.op in (ExprOp.FLOORDIV, ExprOp.MOD) and e.args[1].op is not ExprOp.CONST:
        return {SPECIAL: Bounds(0, 2)}
    return {}


@dataclass(frozen=True)
class _Needs:
    """What the value of an expression depends on: the row, the column, a value of the role (which changes)."""

    row: bool = False
    col: bool = False
    changes: bool = False

    def __or__(self, other: _Needs) -> _Needs:
        return _Needs(self.row or other.row, self.col or other.col, self.changes or other.changes)


_OF_FRAGMENT = {
    Fragment.ACC: _Needs(row=True, col=True, changes=True),
    Fragment.OPA: _Needs(row=True, col=True, changes=True),
    Fragment.ROW: _Needs(row=True, changes=True),
    Fragment.COL: _Needs(col=True, changes=True),
    Fragment.UNI: _Needs(changes=True),
}


def _count_map(
    total: _Tally, values: Mapping[str, Value], op: o.Map, times: int, before: frozenset[Expr]
) -> None:
    over = values[op.over.name]
    rows, cols = over.rows // 8, over.cols // 4
    row, col = ("i", "j") if over.rows_axis == "M" else ("j", "i")
    needs = {row: _Needs(row=True), col: _Needs(col=True), "n": _Needs(), "m": _Needs()}
    needs |= {name: _OF_FRAGMENT[v.fragment] for name, v in values.items()}
    for scope in (Scope.ROW, Scope.COL, Scope.ELEM):
        known: set[Expr] = set()  # computed in this scope, and not stale
        for s in (s for s in op.body if s.scope is scope):
            for node in walk(*s.exprs):
                if node not in known:
                    # a compiler may share them
                    twin = node in before or any(_ordered(node) is _ordered(e) for e in known)
                    known.add(node)
                    need = _Needs() if twin else _needs(node, needs)
                    _count_node(total, node, scope, need, rows, cols, times)
            needs[s.target] = _assigned(values.get(s.target), needs, s)
            known = {e for e in known if s.target not in variables(e)}
            written_to = values.get(s.target)
            if written_to is not None and written_to.fragment is Fragment.OPA:
                packed = rows * cols // 2 * times
                # a value that is kept or not: the compiler may choose between packed ones
                total.add(PACK, at_most(packed) if _chosen(s) else exactly(packed))


def _chosen(s: Stmt) -> bool:
    return s.value.op is ExprOp.WHERE and s.value.args[1] is var(s.target, s.value.dtype)


@lru_cache(maxsize=4096)
def _ordered(e: Expr) -> Expr:
    """The expression with the operands of sums, products and extrema in one order."""
    return rewrite(e, lambda x: make(x.op, *sorted(x.args, key=id)) if x.op in _COMMUTATIVE else None)


def _assigned(value: Value | None, needs: Mapping[str, _Needs], s: Stmt) -> _Needs:
    return _needs(s.value, needs) if value is None else _OF_FRAGMENT[value.fragment]


def _needs(e: Expr, needs: Mapping[str, _Needs]) -> _Needs:
    found = _Needs()
    for name in variables(e):
        found |= needs.get(name, _Needs())
    return found


def _count_node(
    total: _Tally, node: Expr, scope: Scope, needs: _Needs, rows: int, cols: int, times: int
) -> None:
    """At most as often as the scope says; at least where the operands differ, which no compiler can share. Extrema of
    elements are the user's: two that clamp may become a modifier of the instruction before."""
    most = {Scope.ROW: rows, Scope.COL: cols, Scope.ELEM: rows * cols}[scope]
    least = min(most, (rows if needs.row else 1) * (cols if needs.col else 1)) if needs.changes else 0
    if scope is Scope.ELEM and node.op in (ExprOp.MIN, ExprOp.MAX):
        least = 0
    for mnemonic, bounds in _cost(node).items():
        total.add(mnemonic, Bounds(bounds.least * least * times, bounds.most * most * times))
