"""Walking a kernel as its warps do: the sequence of events of one role for given numbers of tiles.

The rules of the verifier look at such walks. They are concrete (slot and copy indices are numbers), so a rule needs no
fixpoints: it is a walk over a list. What is not known before run time (the user's tensors, sequence lengths) stays
unknown, and a predicate over it is taken both ways."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from attngen.expr import DType, Expr, substitute, var, variables
from attngen.expr import Op as ExprOp
from attngen.ir.ops import Map, MmaSync, Op, Pointwise, Ref, ScanTiles, StFrag, Stmt, SumRows, Wgmma
from attngen.ir.schedule import Block, Classes, Guard, Kernel, Role, Step, Tiles

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


@dataclass(frozen=True)
class Event:
    """An op that is executed (or an edge that is crossed): `item` and `step` say when, `env` the integers known."""

    op: Op | None
    env: Env
    item: int
    step: int
    edge: Edge | None = None
    guard: Guard | None = None
    branch: bool = False  # executed under a run-time branch: a guard, or the ops of a class in a shared body

    def index(self, ref: Ref) -> tuple[int | None, ...]:
        return tuple(value(i, self.env) for i in ref.index)


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


def walk_role(role: Role, warpgroup: int, scenario: Scenario) -> Iterator[Event]:
    """The events of one of the `split` parts of a role, over the items of the scenario."""
    for item, tiles in enumerate(scenario.tiles):
        yield from _Walk(role, warpgroup, scenario, item, tiles).body()
    walk = _Walk(role, warpgroup, scenario, len(scenario.tiles), scenario.tiles[-1])
    yield walk.edge(Edge.EXIT, walk.env, -1)
    yield from walk.steps(role.exit, walk.env, -1, "")


@dataclass
class _Walk:
    role: Role
    warpgroup: int
    scenario: Scenario
    item: int
    tiles: int

    def __post_init__(self) -> None:
        env: dict[Expr, int] = {integer("w"): self.warpgroup}
        for loop in tiles_of(self.role):
            for r, end in zip(loop.ranges, self.scenario.share.ends(self.tiles, len(loop.ranges)), strict=True):
                env[r.end] = end
        self.env = evaluated(self.role.item.lets, env, fixed=env)

    def edge(self, edge: Edge, env: Env, step: int, guard: Guard | None = None) -> Event:
        return Event(None, env, self.item, step, edge, guard)

    def body(self) -> Iterator[Event]:
        yield self.edge(Edge.ITEM, self.env, -1)
        for node in self.role.item.body:
            yield self.edge(Edge.NODE, self.env, -1)
            if isinstance(node, Block):
                yield from self.steps(node.ops, self.env, -1, "")
            else:
                yield from self.loop(node)

    def loop(self, node: Tiles) -> Iterator[Event]:
        """Ranges are entered at phase 0 and left after whole rounds; the last tile ends the loop at any phase."""
        last, t = self.tiles, node.start
        for r, end in zip(node.ranges, self.scenario.share.ends(self.tiles, len(node.ranges)), strict=True):
            while t < end:
                for _ in range(node.unroll):
                    if t >= last:
                        break
                    env = self.at(node, t)
                    yield self.edge(Edge.STEP, env, t)
                    yield from self.steps(node.step, env, t, r.cls, node.classes is Classes.BRANCH)
                    t += 1
        if node.drain:
            env = self.at(node, t)
            yield self.edge(Edge.DRAIN, env, t)
            yield from self.steps(node.drain, env, t, "")

    def at(self, node: Tiles, t: int) -> Env:
        return evaluated((*node.lets, *node.phase), {**self.env, integer(node.var): t})

    def steps(self, ops: tuple[Step, ...], env: Env, step: int, cls: str, branches: bool = False) -> Iterator[Event]:
        for op in ops:
            if op.only and op.only != cls:
                continue
            branch = branches and bool(op.only)
            if isinstance(op, Guard):
                if self.scenario.rare:
                    yield self.edge(Edge.ENTER, env, step, op)
                    for inner in op.body:
                        if self.executed(inner, env):
                            yield Event(inner, env, self.item, step, guard=op, branch=True)
                    yield self.edge(Edge.LEAVE, env, step, op)
            elif self.executed(op, env):
                if branch:
                    # a branch around one op is judged as a guard around it
                    around = Guard(id=op.id, pred=_TRUE, body=(op,), touches=(*op.reads(), *op.writes()))
                    yield self.edge(Edge.ENTER, env, step, around)
                    yield Event(op, env, self.item, step, guard=around, branch=True)
                    yield self.edge(Edge.LEAVE, env, step, around)
                else:
                    yield Event(op, env, self.item, step)

    def executed(self, op: Op, env: Env) -> bool:
        decided = None if op.when is None else value(op.when, env)
        return op.when is None or (self.scenario.rare if decided is None else bool(decided))


_TRUE = var("true", DType.BOOL)


def evaluated(lets: tuple[Stmt, ...], env: Env, fixed: Env | None = None) -> dict[Expr, int]:
    """`env` after the statements, as far as their values are known. What a scenario fixes is not computed again."""
    result = dict(env)
    for let in lets:
        name = var(let.target, let.value.dtype)
        if fixed is not None and name in fixed:
            continue
        known = value(let.value, result)
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


@lru_cache(maxsize=4096)
def writes(op: Op) -> tuple[Ref, ...]:
    return op.writes()


@lru_cache(maxsize=4096)
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
    return op.body if isinstance(op, Map | Pointwise | ScanTiles | SumRows) else ()


def expressions(op: Op) -> Iterator[Expr]:
    """The expressions of an op outside of its statements: rows, limits, predicates, values, indices."""
    for item in vars(op).values():
        if isinstance(item, Expr):
            yield item
    for ref in references(op):
        yield from ref.index
        if ref.cols is not None:
            yield ref.cols


@lru_cache(maxsize=4096)
def operands(op: Op) -> frozenset[str]:
    """The variables in the expressions of an op outside of its statements."""
    return variables(*expressions(op))


@lru_cache(maxsize=4096)
def references(op: Op) -> tuple[Ref, ...]:
    found: list[Ref] = []
    for item in vars(op).values():
        found += [r for r in (item if isinstance(item, tuple) else (item,)) if isinstance(r, Ref)]
    return tuple(found)
