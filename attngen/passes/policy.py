"""The ops of a fold over tiles, under each policy of its reference (attngen.config.FoldPolicy).

The algebra is that of `attngen.passes.stream`: a tile's elements are expressions of the score and of the references;
moving a reference multiplies what was summed by its correction. Nothing here knows softmax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from attngen.config import FoldPolicy
from attngen.expr import ONE, ZERO, DType, Expr, Op, add, const, make, maximum, mul, substitute, var, walk
from attngen.ir.graph import Fold, State
from attngen.ir.ops import Map, Reduce, ReduceKind, Ref, Scope, Stmt, Vote
from attngen.ir.ops import Op as TileOp
from attngen.ir.schedule import Guard
from attngen.passes.exponent import exponent, with_score
from attngen.passes.ranges import TileClass
from attngen.passes.scopes import Scopes, Target
from attngen.passes.stream import before, reference

Step = TileOp | Guard
SCORE, WEIGHTS, ACCUMULATOR = "rS", "rP", "rO"
LOWEST = -3.4028234663852886e38  # of float32: any score that is larger moves it, and it is a number
TOO_LARGE = 1024.0  # a thread's part of a row sum beyond it: weights leave the range where bf16 and fp16 hold them well
FAR = 2.0**-8  # CONDITIONAL moves the reference when the correction would be smaller
GROWING = 2.0**-4  # a correction below it: the next tile is expected to move the reference too
X = var("x", DType.F32)
PART = "_t"  # ends the names of sums of one tile
MASKED, FULL = TileClass.MASKED.value, TileClass.FULL.value
NEED, HOT = var("need", DType.BOOL), var("hot", DType.BOOL)


def policies(fold: Fold, plain: bool) -> tuple[FoldPolicy, ...]:
    """Those that a fold allows. REFERENCE needs a plain sum of the weights of each contraction, to see their size in;
    without a maximum there is nothing to choose. `plain`: scores are a multiple of the logits, so that taking a maximum
    needs no more than them."""
    maxima = [s for s in fold.states if s.kind is ReduceKind.MAX]
    sums = {s.element for s in fold.states if s.kind is ReduceKind.SUM and not s.operand}
    weights = [s.element for s in fold.states if s.operand]
    if len(maxima) != 1:
        return (FoldPolicy.RUNNING,)
    if weights and all(w in sums and w.op is Op.EXP2 for w in weights):
        by_reference = (FoldPolicy.REFERENCE, FoldPolicy.ANTICIPATED) if plain else (FoldPolicy.REFERENCE,)
        return (*by_reference, FoldPolicy.CONDITIONAL, FoldPolicy.RUNNING)
    return (FoldPolicy.CONDITIONAL, FoldPolicy.RUNNING)


@dataclass
class FoldOps:
    """Makes the ops; collects the row values (name -> dtype) and uniform values that they need."""

    fold: Fold
    scopes: Scopes
    block_n: int
    full_score: Expr | None = None  # of a full tile, an expression of the logit; None: the logit itself
    rows: dict[str, str] = field(default_factory=dict)
    uniform: list[str] = field(default_factory=list)
    factor: dict[str, str] = field(default_factory=dict)  # accumulator -> row value that corrects it

    # ---- statements ----------------------------------------------------------------------------------------------

    @property
    def maxima(self) -> list[State]:
        return [s for s in self.fold.states if s.kind is ReduceKind.MAX]

    @property
    def plain(self) -> list[State]:
        """Sums that are row values."""
        return [s for s in self.fold.states if s.kind is ReduceKind.SUM and not s.operand]

    def row(self, name: str) -> Expr:
        self.rows.setdefault(name, "f32")
        return var(name, DType.F32)

    def measured(self, s: State) -> Expr:
        """The maximum over a tile in the unit of the reference."""
        return X if s.units is None else mul(X, self.scopes.hoist_item(s.units))

    def move(
        self, s: State, x: Expr, used: dict[Expr, Expr], pending: bool = False, number: bool = False
    ) -> list[Stmt]:
        """reference := max(reference, x), factors of what was summed so far, plain sums corrected. `used` learns what
        later statements take for the reference; `pending`: factors not applied yet are multiplied; `number`: the
        reference is one, also where nothing was visible yet."""
        old, r = f"{s.name}_old", self.row(s.name)
        body = [
            Stmt(scope=Scope.ROW, target=old, value=r),
            Stmt(scope=Scope.ROW, target=s.name, value=maximum(var(old, DType.F32), x)),
        ]
        if not number:
            used[r] = self.row(f"{s.name}_ref")
            body.append(Stmt(scope=Scope.ROW, target=f"{s.name}_ref", value=reference(r)))
        factors: dict[Expr, str] = {}
        for other in self.fold.states:
            if other.correction is None or before(s.name) not in set(walk(other.correction)):
                continue
            correction = substitute(other.correction, used)
            if correction not in factors:
                name = factors[correction] = "a" if not factors else f"a{len(factors)}"
                a, f = self.row(name), var(f"{name}_f", DType.F32)
                if pending:
                    body.append(Stmt(scope=Scope.ROW, target=f.name, value=correction))
                    body.append(Stmt(scope=Scope.ROW, target=name, value=mul(a, f)))
                else:
                    body.append(Stmt(scope=Scope.ROW, target=name, value=correction))
            if not other.operand:
                by = var(f"{factors[correction]}_f" if pending else factors[correction], DType.F32)
                body.append(Stmt(scope=Scope.ROW, target=other.name, value=mul(self.row(other.name), by)))
            else:
                self.factor[other.name] = factors[correction]
        return body

    def elements(
        self, used: dict[Expr, Expr], suffix: str = "", fresh: bool = False, score: Expr | None = None
    ) -> tuple[Stmt, ...]:
        """What a tile's scores add to the sums. `suffix`: of plain sums kept apart; `fresh`: they start at 0; `score`:
        as an expression of what the fragment holds, where a tile that overflows is done again."""
        z, held = var(self.fold.x, DType.F32), var(SCORE, DType.F32)
        start = [Stmt(scope=Scope.ROW, target=s.name + suffix, value=ZERO) for s in self.plain] if fresh else []
        for s in self.plain:
            self.row(s.name + suffix)
        targets = [
            Target(WEIGHTS, value) if s.operand else Target(s.name + suffix, value, accumulate=True)
            for s in self.fold.states if s.kind is not ReduceKind.MAX
            for value in (self._element(substitute(s.element, used), z, held, score),)
        ]  # fmt: skip
        return (*start, *self.scopes.split(*targets))

    def _element(self, e: Expr, z: Expr, held: Expr, score: Expr | None) -> Expr:
        if score is None:
            return substitute(e, {z: held})
        return with_score(e, z, score, held, self.scopes, self.block_n)

    # ---- ops -----------------------------------------------------------------------------------------------------

    def reduced(self) -> Reduce:
        self.row("x")
        return Reduce(id="", kind=ReduceKind.MAX, dst=Ref(name="x"), src=Ref(name=SCORE))

    def moved(self, used: dict[Expr, Expr], pending: bool = False, number: bool = False) -> list[TileOp]:
        """The maxima over the tile, and the references moved to them."""
        return [
            op
            for s in self.maxima
            for op in (self.reduced(), _map(SCORE, self.move(s, self.measured(s), used, pending, number)))
        ]

    def corrected(self) -> list[TileOp]:
        """The accumulators multiplied by their factors."""
        return [
            _map(ACCUMULATOR, [Stmt(scope=Scope.ELEM, target=ACCUMULATOR,
                                    value=mul(var(ACCUMULATOR, DType.F32), var(a, DType.F32)))])
            for a in self.factor.values()
        ]  # fmt: skip

    def lift(self, policy: FoldPolicy) -> list[Step]:
        """The state of the first tile alone. Policies that look at sums alone start rows that see nothing at the lowest
        number: hidden scores then weigh 0, however many tiles of them follow, and the first score that is seen weighs
        more than any sum may. With -inf both would be no number, and every tile would be done again."""
        ops: list[Step] = []
        used: dict[Expr, Expr] = {}
        number = policy in (FoldPolicy.REFERENCE, FoldPolicy.ANTICIPATED)
        for s in self.maxima:
            r, name = self.row(s.name), f"{s.name}_ref"
            first = maximum(self.measured(s), const(LOWEST)) if number else self.measured(s)
            body = [Stmt(scope=Scope.ROW, target=s.name, value=first)]
            if not number:
                used[r] = self.row(name)
                body.append(Stmt(scope=Scope.ROW, target=name, value=reference(r)))
            ops += [self.reduced(), _map(SCORE, body)]
        ops.append(_map(SCORE, self.elements(used, fresh=True)))
        if policy is FoldPolicy.ANTICIPATED:  # factors that no accumulator waits for
            ops.append(_map(SCORE, [Stmt(scope=Scope.ROW, target=a, value=ONE) for a in self.factors]))
            ops.append(self._vote(HOT, self._growing()))
        return ops

    def update(self, policy: FoldPolicy) -> list[Step]:
        """A tile added to the state, up to the weights of the contraction; accumulators are corrected."""
        match policy:
            case FoldPolicy.RUNNING:
                return self._running()
            case FoldPolicy.CONDITIONAL:
                return self._conditional()
            case FoldPolicy.REFERENCE:
                return self._reference()
            case FoldPolicy.ANTICIPATED:
                return self._anticipated()

    def _running(self) -> list[Step]:
        used: dict[Expr, Expr] = {}
        moved = self.moved(used)
        # accumulators before the elements: the factors are then dead while scores and weights are both alive
        return [*moved, *self.corrected(), _map(SCORE, self.elements(used))]

    def _conditional(self) -> list[Step]:
        """The correction itself is compared: what makes it small, or no number, moves the reference."""
        (s,) = self.maxima
        r, following, a = var(s.name, DType.F32), self.row(f"{s.name}_next"), self.row("a")
        used: dict[Expr, Expr] = {r: self.row(f"{s.name}_ref")}
        (correction,) = {o.correction for o in self.fold.states if o.correction is not None}
        self.factor.update((o.name, "a") for o in self.fold.states if o.operand)
        measured = [
            Stmt(scope=Scope.ROW, target=f"{s.name}_next", value=maximum(r, self.measured(s))),
            Stmt(scope=Scope.ROW, target="a",
                 value=substitute(correction, {before(s.name): r, r: reference(following)})),
        ]  # fmt: skip
        moved = [
            Stmt(scope=Scope.ROW, target=s.name, value=following),
            Stmt(scope=Scope.ROW, target=f"{s.name}_ref", value=reference(r)),
            *(Stmt(scope=Scope.ROW, target=o.name, value=mul(self.row(o.name), a)) for o in self.plain),
        ]
        return [
            self.reduced(),
            _map(SCORE, measured),
            self._vote(NEED, make(Op.NOT, make(Op.GE, a, const(FAR)))),
            _guard(NEED, [_map(SCORE, moved)]),
            _map(SCORE, self.elements(used)),
            _guard(NEED, self.corrected()),
        ]

    def _reference(self) -> list[Step]:
        """The elements of a full tile come from the logits themselves where the score is more than a multiple of them:
        only a tile that is done again, or masked, has its scores in registers."""
        used: dict[Expr, Expr] = {}
        redone = self.moved(used, number=True)
        fused, held = self.full_score is not None, var(SCORE, DType.F32)
        return [
            *self._only(MASKED if fused else "", self.elements({}, PART, fresh=True, score=held)),
            *self._only(FULL, self.elements({}, PART, fresh=True, score=self.full_score) if fused else ()),
            self._vote(NEED, self._large()),
            _guard(NEED, [*self._only(FULL, self.scored()), *redone,
                          _map(SCORE, self.elements(used, PART, fresh=True))]),
            _map(SCORE, self._summed()),
            _guard(NEED, self.corrected()),
        ]  # fmt: skip

    def _anticipated(self) -> list[Step]:
        used: dict[Expr, Expr] = {}
        expected = self.moved({}, pending=True, number=True)
        redone = self.moved(used, pending=True, number=True)
        ones = [Stmt(scope=Scope.ROW, target=a, value=ONE) for a in self.factors]
        done = [self._vote(HOT, self._growing()), *self.corrected(), _map(SCORE, ones)]
        return [
            _guard(HOT, expected),
            _map(SCORE, self.elements({}, PART, fresh=True, score=var(SCORE, DType.F32))),
            self._vote(NEED, self._large()),
            _guard(NEED, [*redone, _map(SCORE, self.elements(used, PART, fresh=True))]),
            _map(SCORE, self._summed()),
            _guard(make(Op.OR, NEED, HOT), done),
        ]

    def _large(self) -> Expr:
        """A sum of the tile is too large, or no number."""
        return _any([make(Op.NOT, make(Op.LE, var(s.name + PART, DType.F32), const(TOO_LARGE))) for s in self.plain])

    def _growing(self) -> Expr:
        return _any([make(Op.LT, var(a, DType.F32), const(GROWING)) for a in self.factors])

    def _summed(self) -> list[Stmt]:
        return [
            Stmt(scope=Scope.ROW, target=s.name, value=add(var(s.name, DType.F32), var(s.name + PART, DType.F32)))
            for s in self.plain
        ]

    def scored(self) -> tuple[Stmt, ...]:
        """The scores of a full tile put in place of its logits."""
        if self.full_score is None:
            return ()
        value = exponent(self.full_score, None, var(SCORE, DType.F32), self.scopes, self.block_n)
        return self.scopes.split(Target(SCORE, value))

    def _only(self, cls: str, body: tuple[Stmt, ...]) -> list[Map]:
        return [Map(id="", only=cls, over=Ref(name=SCORE), body=body)] if body else []

    @property
    def factors(self) -> list[str]:
        return sorted(set(self.factor.values()))

    def _vote(self, dst: Expr, pred: Expr) -> Vote:
        if dst.name not in self.uniform:
            self.uniform.append(dst.name)
        return Vote(id="", dst=Ref(name=dst.name), pred=pred)


def _any(conditions: list[Expr]) -> Expr:
    result = conditions[0]
    for c in conditions[1:]:
        result = make(Op.OR, result, c)
    return result


def _guard(pred: Expr, body: list[TileOp]) -> Guard:
    return Guard(id="", pred=pred, body=tuple(body), touches=())


def _map(over: str, body: Iterable[Stmt]) -> Map:
    return Map(id="", over=Ref(name=over), body=tuple(body))
