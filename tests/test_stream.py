"""The algebra of the derived fold: states of parts of the keys merge to the state of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attngen.errors import PassError
from attngen.evaluate import evaluate
from attngen.expr import SCALE, DType, Op, add, const, make, mul, sub, var
from attngen.ir.graph import Axis, Contract, Fold, Graph, Input, Map, Output, RowReduce
from attngen.ir.ops import ReduceKind
from attngen.passes.simplify import simplify
from attngen.passes.stream import lift_extra, merge, neutral, reference, slope, stream
from attngen.passes.textbook import ROWS, SCORES, textbook
from attngen.passes.units import units
from attngen.spec import Attention
from attngen.variants import causal

ROW_COUNT, KEYS, WIDTH, LN2 = 7, 24, 5, 0.6931471805599453
State = dict[str, Tensor]


def fold_of(spec: Attention, in_units: bool) -> Fold:
    graph = stream(simplify(textbook(spec.variant)))
    graph = units(graph, True) if in_units else graph
    (fold,) = graph.of(Fold)
    assert isinstance(fold, Fold)
    return fold


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Scores with rows that see nothing at all (0), nothing in the first half (1), or one key (2); and values."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROW_COUNT, KEYS, generator=g, dtype=torch.float64) * 10
    scores[0], scores[1, : KEYS // 2], scores[2, 1:] = -torch.inf, -torch.inf, -torch.inf
    return scores, torch.randn(KEYS, WIDTH, generator=g, dtype=torch.float64)


SCALE_VALUE = 0.37


def lift(fold: Fold, scores: Tensor, values: Tensor) -> State:
    """The state of some keys, from the elements that the pass derived."""
    state: State = {}
    env: dict[str, Tensor | float] = {fold.x: scores, "scale": SCALE_VALUE}
    for s in fold.states:
        element = evaluate(s.element, env).expand(scores.shape)
        if s.operand:
            state[s.name] = element @ values
        elif s.kind is ReduceKind.SUM:
            state[s.name] = element.sum(1, keepdim=True)
        else:
            factor = 1.0 if s.units is None else evaluate(s.units, env)
            state[s.name] = element.amax(1, keepdim=True) * factor
            env[s.name] = evaluate(reference(var(s.name, DType.F32)), state)
    return state


def merged(fold: Fold, first: State, second: State) -> State:
    env = {f"{n}_1": t for n, t in first.items()} | {f"{n}_2": t for n, t in second.items()}
    for name, e in merge(fold):
        env[name] = evaluate(e, env)
    return {s.name: env[s.name] for s in fold.states}


def empty(fold: Fold) -> State:
    shape = {s.name: (ROW_COUNT, WIDTH if s.operand else 1) for s in fold.states}
    return {s.name: evaluate(neutral(s), {}).expand(shape[s.name]) for s in fold.states}


def close(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-13, atol=1e-13)


FOLDS = [
    pytest.param(fold_of(Attention(mask=causal()), False), id="natural"),
    pytest.param(fold_of(Attention(mask=causal()), True), id="units"),
    pytest.param(fold_of(Attention(score=lambda s, b, h, i, j: s, normalizer="none"), False), id="no maximum"),
]
SINKS = [
    pytest.param(fold_of(Attention(sink=torch.zeros(1)), False), id="natural"),
    pytest.param(fold_of(Attention(sink=torch.zeros(1)), True), id="units"),
]


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("cut", [0, 1, KEYS // 2, KEYS - 1])
def test_two_halves_are_the_whole(fold: Fold, cut: int) -> None:
    scores, values = data()
    if not any(s.kind is ReduceKind.MAX for s in fold.states):
        scores = scores.where(scores > -torch.inf, 0)  # what the mask leaves there without a softmax
    first = lift(fold, scores[:, :cut], values[:cut]) if cut else empty(fold)
    close(merged(fold, first, lift(fold, scores[:, cut:], values[cut:])), lift(fold, scores, values))


@pytest.mark.parametrize("fold", FOLDS)
def test_the_neutral_state(fold: Fold) -> None:
    """merge(empty, empty) is empty, without NaN, and the empty state changes nothing."""
    nothing = empty(fold)
    both = merged(fold, nothing, nothing)
    for s in fold.states:
        want = -torch.inf if s.kind is ReduceKind.MAX else 0.0
        assert (both[s.name] == want).all()
    scores, values = data()
    state = lift(fold, scores.where(scores > -torch.inf, -50.0), values)
    for left, right in ((nothing, state), (state, nothing)):
        for name, t in merged(fold, left, right).items():
            assert torch.equal(t, state[name])


@pytest.mark.parametrize("fold", FOLDS[:2])
def test_a_row_without_keys_is_the_neutral_state(fold: Fold) -> None:
    scores, values = data()
    state = lift(fold, scores, values)
    for name, t in empty(fold).items():
        assert torch.equal(state[name][0], t[0])


@pytest.mark.parametrize("fold", FOLDS)
def test_merge_is_associative_and_commutative(fold: Fold) -> None:
    scores, values = data()
    if not any(s.kind is ReduceKind.MAX for s in fold.states):
        scores = scores.where(scores > -torch.inf, 0)
    parts = [lift(fold, scores[:, n : n + 8], values[n : n + 8]) for n in range(0, KEYS, 8)]
    want = lift(fold, scores, values)
    for a, b, c in itertools.permutations(parts):
        close(merged(fold, merged(fold, a, b), c), want)
        close(merged(fold, a, merged(fold, b, c)), want)


@pytest.mark.parametrize("fold", FOLDS[:2])
def test_the_state_is_the_softmax(fold: Fold) -> None:
    """out = sum / l and lse, from states of eight keys at a time."""
    scores, values = data()
    state = empty(fold)
    for n in range(0, KEYS, 8):
        state = merged(fold, state, lift(fold, scores[:, n : n + 8], values[n : n + 8]))
    in_units = fold.states[0].units is not None
    logits = scores * SCALE_VALUE if in_units else scores
    seen = slice(1, None)  # row 0 sees nothing
    (r, total, out) = (state[s.name][seen] for s in fold.states)
    lse = (r * LN2 if in_units else r) + total.log()
    torch.testing.assert_close(lse[:, 0], logits[seen].logsumexp(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(out / total, logits[seen].softmax(1) @ values, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("fold", SINKS)
@pytest.mark.parametrize("sink", [0.5, 100.0, -torch.inf])
def test_a_sink_is_one_more_element(fold: Fold, sink: float) -> None:
    """The sink lifts to the state of one key with a value of zero."""
    scores, values = data()
    env: State = {"h": torch.zeros((), dtype=torch.int64)}
    for name, e in lift_extra(fold):
        env[name] = evaluate(e, env, {"sink": torch.tensor([sink], dtype=torch.float64)})
    lifted = {s.name: env[s.name].expand(ROW_COUNT, WIDTH if s.operand else 1) for s in fold.states}
    factor = SCALE_VALUE if fold.states[0].units is not None else 1.0
    key = torch.full((ROW_COUNT, 1), sink / factor, dtype=torch.float64)
    close(lifted, lift(fold, key, torch.zeros(1, WIDTH, dtype=torch.float64)))
    want = lift(fold, torch.cat([scores, key], 1), torch.cat([values, torch.zeros(1, WIDTH, dtype=torch.float64)]))
    close(merged(fold, lift(fold, scores, values), lifted), want)


# ---- what cannot be streamed ---------------------------------------------------------------------------------------


def graph_with(weight: object) -> Graph:
    """The sum of `weight`, an expression of the score z and the maximum r, over the keys."""
    z, r = var("z", DType.F32), var("r", DType.F32)
    expr = weight(z, r)  # type: ignore[operator]
    nodes = (
        Input(id="q", axes=(Axis.B, Axis.H, Axis.M, Axis.D)),
        Input(id="k", axes=(Axis.B, Axis.H, Axis.N, Axis.D)),
        Contract(id="s", axes=SCORES, a="q", b="k", over=Axis.D),
        Map(id="z", axes=SCORES, expr=mul(SCALE, var("s", DType.F32)), inputs=("s",)),
        RowReduce(id="r", axes=ROWS, kind=ReduceKind.MAX, x="z", over=Axis.N),
        Map(id="e", axes=SCORES, expr=expr, inputs=("z", "r")),
        RowReduce(id="l", axes=ROWS, kind=ReduceKind.SUM, x="e", over=Axis.N),
        Output(id="l!", axes=ROWS, x="l"),
    )
    return Graph("sum", nodes)


@pytest.mark.parametrize(
    ("weight", "culprit"),
    [
        (lambda z, r: make(Op.TANH, sub(z, r)), "tanh"),  # not a factor
        (lambda z, r: make(Op.EXP2, mul(z, r)), "exp2"),  # not linear in r
        (lambda z, r: add(make(Op.EXP2, sub(z, r)), const(1.0)), "exp2"),  # a sum does not scale
        (lambda z, r: make(Op.DIV, z, make(Op.EXP2, sub(z, r))), "exp2"),
    ],
)
def test_a_weight_that_no_factor_corrects_is_an_error(weight: object, culprit: str) -> None:
    with pytest.raises(PassError, match=f"running maximum r through .*{culprit}"):
        stream(graph_with(weight))


def test_weights_that_a_factor_corrects() -> None:
    graph = stream(graph_with(lambda z, r: mul(make(Op.EXP2, mul(sub(z, r), const(3.0))), z)))
    (fold,) = graph.of(Fold)
    assert isinstance(fold, Fold)
    assert str(fold.states[1].correction) == "exp2((r_old - r) * 3.0)"


def test_slope() -> None:
    x, y = var("x", DType.F32), var("y", DType.F32)
    assert slope(sub(mul(sub(y, x), const(2.0)), y), "x") == -2.0
    assert slope(y, "x") == 0.0
    assert slope(mul(x, y), "x") is None
