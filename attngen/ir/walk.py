"""Walking a kernel as its warps do: the sequence of events of one role for given numbers of tiles.

The rules of the verifier look at such walks. They are concrete (slot and copy indices are numbers), so a rule needs no
fixpoints: it is a walk over a list. What is not known before run time (the user's tensors, sequence lengths) stays
unknown, and a predicate over it is taken both ways."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from attngen.expr import DType, Expr, substitute, var, variables
from attngen.expr import Op as ExprOp
from attngen.ir.ops import Map, MmaSync, Op, Pointwise, Ref, ScanTiles, SortItems, StFrag, Stmt, SumRows, Wgmma
from attngen.ir.schedule import Block, Classes, Guard, Kernel, Role, Step, Tiles, ops_of

Env = Mapping[Expr, int]

_MEANING: dict[ExprOp, Callable[..., int]] = {
    ExprOp.NEG: operator.neg, ExprOp.ADD: operator.add, ExprOp.SUB: operator.sub, ExprOp.MUL: operator.mul,
    ExprOp.MIN: min, ExprOp.MAX: max, ExprOp.EQ: operator.eq, ExprOp.NE: operator.ne, ExprOp.LT: operator.lt,
    ExprOp.LE: operator.le, ExprOp.GT: operator.gt, ExprOp.GE: operator.ge, ExprOp.NOT: operator.not_,
    ExprOp.ABS: abs, ExprOp.I32: int, ExprOp.WHERE: lambda c, a, b: a if c else b,
    ExprOp.FLOORDIV: operator.floordiv, ExprOp.MOD: operator.mod,
}  # fmt: skip


def integer(name: str) -> Expr:
    return var(name, DType.I32)


def value(e: Expr, env: Env) -> int | None:
    """The number an integer or boolean expression has under `env`, None where that is not known."""
    if e in env:
        return env[e]
    if e.op is ExprOp.CONST:
        return int(e.value) if e.dtype is not DType.F32 and e.value is not None else None
    if e.op in (ExprOp.VAR, ExprOp.LOAD):
        return None
    known = [value(a, env) for a in e.args]
    if e.op in (ExprOp.AND, ExprOp.OR):
        decisive = int(e.op is ExprOp.OR)
        if decisive in known:
            return decisive
        return None if None in known else 1 - decisive
    if None in known or e.op not in _MEANING or (e.op in (ExprOp.FLOORDIV, ExprOp.MOD) and not known[1]):
        return None
    return int(_MEANING[e.op](*known))


class Edge(Enum):
    """Control flow between ops."""

    ITEM = "item"  # the head of an item
    NODE = "node"  # from one node of the body to the next
    STEP = "step"  # the head of a step of `tiles`
    DRAIN = "drain"
    ENTER = "enter"  # into a guard, or into the branch of the ops of one class
    LEAVE = "leave"
    EXIT = "exit"  # after the last item


@dataclass(frozen=True, eq=False)
class Event:
    """An op that is executed, or an edge that is crossed. `known`: what the indices and predicates of its piece are."""

    op: Op | None
    known: Mapping[Expr, int | None]
    edge: Edge | None = None
    guard: Guard | None = None  # what the edge leads into, or what the op is in

    def index(self, ref: Ref) -> tuple[int | None, ...]:
        return tuple(self.known[i] for i in ref.index)


E = TypeVar("E")


@dataclass(frozen=True, eq=False)
class Stretch(Generic[E]):
    """A piece of a walk without a backward edge: where in the walk it is (`step` -1: outside of a loop), and what
    happens. Pieces in which the same happens have one tuple of events, however often they are walked."""

    item: int
    step: int
    events: tuple[E, ...]


@dataclass(frozen=True)
class Scenario:
    """What one walk assumes: the tiles of each item, how the ranges share them, and whether what cannot be decided
    (guards, predicates over run-time values) happens."""

    tiles: tuple[int, ...]
    share: Share
    rare: bool

    def __str__(self) -> str:
        counts = " and ".join(str(n) for n in self.tiles)
        return f"with {counts} tiles ({self.share.value} range, rare paths {'taken' if self.rare else 'not taken'})"


class Share(Enum):
    """Which range of a loop the tiles fall into."""

    FIRST = "first"
    LAST = "last"
    EACH = "each"
    ONE = "one tile in the first, the rest in the last"

    def ends(self, tiles: int, ranges: int) -> tuple[int, ...]:
        inner = {
            Share.FIRST: [tiles] * (ranges - 1),
            Share.LAST: [0] * (ranges - 1),
            Share.EACH: [-(-tiles * (k + 1) // ranges) for k in range(ranges - 1)],
            Share.ONE: [min(1, tiles)] * (ranges - 1),
        }[self]
        return (*inner, tiles)


def tiles_of(role: Role) -> Iterator[Tiles]:
    return (n for n in role.item.body if isinstance(n, Tiles))


def scenarios(kernel: Kernel, items: int) -> tuple[Scenario, ...]:
    """All lengths up to two rounds of the longest loop and two tiles more, in each range of the loops. `items`: items
    in a row, the second with another number of tiles."""
    loops = [t for role in kernel.roles for t in tiles_of(role)]
    if not loops:
        return tuple(Scenario((1,) * items, Share.LAST, rare) for rare in (False, True))
    least = max(t.start for t in loops)
    shares = tuple(Share) if any(len(t.ranges) > 1 for t in loops) else (Share.LAST,)
    result: dict[tuple[object, ...], Scenario] = {}
    for n in range(least, least + 3 + 2 * max(t.unroll for t in loops)):
        for share in shares:
            for rare in (False, True):
                seen = (n, rare, *(share.ends(n, len(t.ranges)) for t in loops))
                result.setdefault(seen, Scenario((n, least + 1 + n % 2, n)[:items], share, rare))
    return tuple(result.values())


class Walker:
    """Walks a role. What it has worked out for one scenario it keeps for the others: they differ in few places."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.lets = _bound(role.item.lets)
        self.heads = {id(n): _bound((*n.lets, *n.phase)) for n in tiles_of(role)}
        self.items: dict[tuple[object, ...], _Item] = {}
        self.depends: dict[int, tuple[Expr, ...]] = {}
        self.pieces: dict[tuple[object, ...], tuple[Event, ...]] = {}
        self.branches: dict[int, Guard] = {}

    def walk(self, warpgroup: int, scenario: Scenario) -> Iterator[Stretch[Event]]:
        """What one of the `split` parts of the role does, over the items of the scenario and until the CTA ends."""
        for number, tiles in enumerate(scenario.tiles):
            item = self.item(warpgroup, tiles, scenario.share)
            yield Stretch(number, -1, self.piece(Edge.ITEM, (), item.env, scenario.rare))
            for node in self.role.item.body:
                ops = node.ops if isinstance(node, Block) else ()
                yield Stretch(number, -1, self.piece(Edge.NODE, ops, item.env, scenario.rare))
                if isinstance(node, Tiles):
                    yield from self.loop(node, number, item, scenario)
        env = self.item(warpgroup, scenario.tiles[-1], scenario.share).env
        yield Stretch(len(scenario.tiles), -1, self.piece(Edge.EXIT, self.role.exit, env, scenario.rare))

    def item(self, warpgroup: int, tiles: int, share: Share) -> _Item:
        key = (warpgroup, tiles, share)
        if key not in self.items:
            env: dict[Expr, int] = {_PART: warpgroup}
            for loop in tiles_of(self.role):
                for r, end in zip(loop.ranges, share.ends(tiles, len(loop.ranges)), strict=True):
                    env[r.end] = end
            self.items[key] = _Item(tiles, evaluated(self.lets, env, fixed=env))
        return self.items[key]

    def loop(self, node: Tiles, number: int, item: _Item, scenario: Scenario) -> Iterator[Stretch[Event]]:
        """Ranges are entered at phase 0 and left after whole rounds; the last tile ends the loop at any phase."""
        last, t, head = item.tiles, node.start, self.heads[id(node)]
        branches = node.classes is Classes.BRANCH
        for r, end in zip(node.ranges, scenario.share.ends(last, len(node.ranges)), strict=True):
            while t < end:
                for _ in range(node.unroll):
                    if t >= last:
                        break
                    env = item.at(node, head, t)
                    yield Stretch(number, t, self.piece(Edge.STEP, node.step, env, scenario.rare, r.cls, branches))
                    t += 1
        if node.drain:
            env = item.at(node, head, t)
            yield Stretch(number, t, self.piece(Edge.DRAIN, node.drain, env, scenario.rare))

    # ---- straight lines ------------------------------------------------------------------------------------------

    def piece(
        self, edge: Edge, ops: tuple[Step, ...], env: Env, rare: bool, cls: str = "", branches: bool = False
    ) -> tuple[Event, ...]:
        """The edge and the ops behind it. They depend on the walk through their predicates and indices alone."""
        if id(ops) not in self.depends:
            self.depends[id(ops)] = tuple(dict.fromkeys(_depends(ops)))
        known = {e: value(e, env) for e in self.depends[id(ops)]}
        key = (edge, id(ops), cls, branches, rare, *known.values())
        if key not in self.pieces:
            line = self.line(ops, known, rare, cls, branches)
            self.pieces[key] = (Event(None, known, edge), *line)
        return self.pieces[key]

    def line(
        self, ops: tuple[Step, ...], known: Mapping[Expr, int | None], rare: bool, cls: str, branches: bool
    ) -> Iterator[Event]:
        def executed(op: Op) -> bool:
            decided = None if op.when is None else known[op.when]
            return op.when is None or (rare if decided is None else bool(decided))

        def inside(guard: Guard) -> Iterator[Event]:
            yield Event(None, known, Edge.ENTER, guard)
            yield from (Event(op, known, guard=guard) for op in guard.body if executed(op))
            yield Event(None, known, Edge.LEAVE, guard)

        for op in ops:
            if op.only and op.only != cls:
                continue
            if isinstance(op, Guard):
                if rare:
                    yield from inside(op)
            elif executed(op):
                if branches and op.only:
                    yield from inside(self.branch(op))
                else:
                    yield Event(op, known)

    def branch(self, op: Op) -> Guard:
        """A branch around one op is judged as a guard around it."""
        if id(op) not in self.branches:
            touches = (*op.reads(), *op.writes())
            self.branches[id(op)] = Guard(id=op.id, pred=_TRUE, body=(op,), touches=touches)
        return self.branches[id(op)]


_TRUE = var("true", DType.BOOL)
_PART = integer("w")
_Bound = tuple[tuple[Expr, Expr], ...]  # a name and its value


@dataclass
class _Item:
    """The integers known in an item of so many tiles, and in the steps of its loops."""

    tiles: int
    env: Env
    steps: dict[tuple[int, int], Env] = field(default_factory=dict)

    def at(self, node: Tiles, head: _Bound, t: int) -> Env:
        key = (id(node), t)
        if key not in self.steps:
            self.steps[key] = evaluated(head, {**self.env, integer(node.var): t})
        return self.steps[key]


def _bound(lets: tuple[Stmt, ...]) -> _Bound:
    return tuple((var(let.target, let.value.dtype), let.value) for let in lets)


def _depends(ops: tuple[Step, ...]) -> Iterator[Expr]:
    """Predicates of the ops and indices of what they and their guards name."""
    for step in ops:
        inner, refs = (step.body, step.touches) if isinstance(step, Guard) else ((step,), ())
        for op in inner:
            refs = (*refs, *references(op))
            if op.when is not None:
                yield op.when
        for ref in refs:
            yield from ref.index


def evaluated(lets: _Bound, env: Env, fixed: Env | None = None) -> dict[Expr, int]:
    """`env` after the statements, as far as their values are known. What a scenario fixes is not computed again."""
    result = dict(env)
    for name, wanted in lets:
        if fixed is not None and name in fixed:
            continue
        known = value(wanted, result)
        result.pop(name, None)
        if known is not None:
            result[name] = known
    return result


def resolved(e: Expr, lets: tuple[Stmt, ...]) -> Expr:
    """`e` with the names of item scalars replaced by what they stand for."""
    for let in reversed(lets):
        e = substitute(e, {var(let.target, let.value.dtype): let.value})
    return e


# ---- what ops read and write -----------------------------------------------------------------------------------


def writes(op: Op) -> tuple[Ref, ...]:
    return op.writes()


def reads(op: Op) -> tuple[Ref, ...]:
    """As Op.reads, but exact: an accumulator that is overwritten is not read, nor is what a map itself made before."""
    if isinstance(op, MmaSync | Wgmma):
        return (op.a, op.b) if op.zero else (op.d, op.a, op.b)
    if isinstance(op, Map):
        made: set[str] = set()
        found: dict[str, None] = {}
        for s in op.body:
            wanted = variables(*s.exprs) | ({s.target} if s.accumulate and not s.index else set())
            found.update(dict.fromkeys(sorted(wanted - made)))
            made.add(s.target)
        at = {r.name: r for r in (op.over, *op.copies)}
        return tuple(at.get(name, Ref(name=name)) for name in found)
    refs = op.reads()
    if isinstance(op, StFrag) and op.scaled:
        refs = (*refs, Ref(name=op.scaled))
    return refs


def statements(op: Op) -> tuple[Stmt, ...]:
    return op.body if isinstance(op, Map | Pointwise | ScanTiles | SortItems | SumRows) else ()


def expressions(op: Op) -> Iterator[Expr]:
    """The expressions of an op outside of its statements: rows, limits, predicates, values, indices."""
    for item in vars(op).values():
        if isinstance(item, Expr):
            yield item
    for ref in references(op):
        yield from ref.index
        if ref.cols is not None:
            yield ref.cols


def operands(op: Op) -> frozenset[str]:
    """The variables in the expressions of an op outside of its statements."""
    return variables(*expressions(op))


def references(op: Op) -> tuple[Ref, ...]:
    found: list[Ref] = []
    for item in vars(op).values():
        found += [r for r in (item if isinstance(item, tuple) else (item,)) if isinstance(r, Ref)]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Facts:
    """What an op names, worked out once: walks execute it often."""

    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    references: tuple[Ref, ...]
    operands: frozenset[str]


def facts_of(kernel: Kernel) -> Mapping[int, Facts]:
    """Of each op, by its identity."""
    return {id(op): Facts(reads(op), writes(op), references(op), operands(op)) for _, op in ops_of(kernel)}
