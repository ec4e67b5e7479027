"""Exponents: equal in value to `score - reference`, and grouped so that an element costs least; addresses by row and
column of the tile; strides that do not fit 32 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attngen.arguments import rounds_of, values_of
from attngen.config import FoldPolicy, HopperConfig
from attngen.errors import LaunchError
from attngen.evaluate import evaluate
from attngen.execute import run
from attngen.expr import DType, Expr, I, J, Op, add, const, load, make, mul, sub, substitute, var, walk
from attngen.exprtext import show
from attngen.ir.columns import narrow_strides, tile_steps
from attngen.ir.graph import Fold, Graph, Map, Mask
from attngen.ir.ops import Scope, Stmt
from attngen.ir.schedule import Kernel, Schedule
from attngen.kernel import kernel_for
from attngen.passes.exponent import exponent, tile_addresses, with_score
from attngen.passes.scopes import Scopes, Target
from attngen.pipelines import graph_levels, hopper_stages
from attngen.reference import reference as float64
from attngen.scores import ScoreLike
from attngen.signature import IoType, Signature, strided
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import alibi, bias, causal, softcap

ROWS, BLOCK = 64, 16
R, LOGIT = var("r", DType.F32), var("rS", DType.F32)
SLOPES, ROW = torch.tensor([0.5, -2.0]), torch.arange(190).float() / 7
TABLE, SQUARE = torch.arange(480).float().view(2, 240).sin(), torch.arange(150 * 240).float().view(150, 240).cos()

ACROSS = SQUARE.T  # its last dimension is not contiguous

SCORES: dict[str, tuple[ScoreLike | None, bool]] = {  # and whether the mask is causal
    "alibi causal": (alibi(SLOPES), True),
    "alibi full": (alibi(SLOPES), False),
    "capped alibi": ([softcap(3.0), alibi(SLOPES)], True),
    "softcap": (softcap(3.0), False),
    "sum of all": (
        lambda s, b, h, i, j: s * 2.0 + 3 * (i - 2 * j) + SLOPES[h] * (i - j) + i * 0.5 - ROW[j] + ROW[i],
        False,
    ),
    "negated": (lambda s, b, h, i, j: -(s - (j - i) * 0.25) + 1.5, False),
    "nested factors": (lambda s, b, h, i, j: SLOPES[h] * (s + SLOPES[h] * ((i - j) * 2.0 + s)), False),
    "distances": (lambda s, b, h, i, j: s + TABLE[h, i - j + 40], False),
    "steps of two": (lambda s, b, h, i, j: s + TABLE[h, 2 * j + 3 - i], False),
    "square": (bias(SQUARE), False),
    "positions alone": (lambda s, b, h, i, j: (i - j) * 0.5, False),
}


def scopes() -> Scopes:
    base = {"rS": Scope.ELEM, "r": Scope.ROW, "n": Scope.ROW}
    return Scopes(base, {}, {"b", "h", "i", "j", "n", "jt", "rS", "r", "p"})


def score_of(name: str) -> tuple[Attention, Expr]:
    """The score that a tile sees, on logits."""
    score, is_causal = SCORES[name]
    spec = Attention(mask=causal() if is_causal else None, score=score)
    graph = list(graph_levels(spec.variant))[-1].level
    assert isinstance(graph, Graph)
    (fold,) = graph.of(Fold)
    assert isinstance(fold, Fold)
    mask = graph[fold.x]
    assert isinstance(mask, Mask)
    y = graph[mask.x]
    assert isinstance(y, Map)
    return spec, substitute(y.expr, {var(i, DType.F32): LOGIT for i in y.inputs})


def environment(tile: int, seed: int = 0) -> dict[str, Tensor | float]:
    g = torch.Generator().manual_seed(seed)
    within = torch.arange(17, 40)[:, None]
    rows = ROWS + within
    return {
        "b": 0, "h": 1, "m": 1, "i": rows, "it": within, "j": torch.arange(tile * BLOCK, (tile + 1) * BLOCK)[None],
        "jt": torch.arange(BLOCK)[None], "n": tile, "scale": 0.37, "seqlen_q": 105, "seqlen_k": 50,
        "r": torch.randn(rows.shape, generator=g, dtype=torch.float64) * 5,
        "rS": torch.randn(len(rows), BLOCK, generator=g, dtype=torch.float64) * 5,
    }  # fmt: skip


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", SCORES)
def test_exponents_have_the_value_of_the_difference(name: str) -> None:
    """In float64, for tiles at the start and further on, with a reference and without."""
    spec, score = score_of(name)
    for tile in (0, 2):
        env = environment(tile, tile)
        for reference in (R, None):
            e = exponent(tile_addresses(score, ROWS, BLOCK), reference, LOGIT, scopes(), BLOCK)
            want = evaluate(score, env, spec.tensors) - (env["r"] if reference is R else 0.0)
            close(evaluate(e, env, spec.tensors), want)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("unit", [None, 1.4426950408889634])
def test_weights_of_logits(name: str, unit: float | None) -> None:
    """exp2(z - r), or exp2((z - r) * unit), made of the logits: the same weight in either form."""
    spec, score = score_of(name)
    z, env = var("z", DType.F32), environment(1)
    difference = sub(z, R) if unit is None else mul(sub(z, R), const(unit))
    weight = with_score(make(Op.EXP2, difference), z, score, LOGIT, scopes(), BLOCK)
    value = evaluate(score, env, spec.tensors)
    close(evaluate(weight, env, spec.tensors), torch.exp2((value - env["r"]) * (unit or 1.0)))


def statements(name: str) -> tuple[Stmt, ...]:
    _, score = score_of(name)
    s = scopes()
    e = exponent(tile_addresses(score, ROWS, BLOCK), R, LOGIT, s, BLOCK)
    return s.split(Target("p", make(Op.EXP2, e)))


def element(name: str) -> tuple[str, dict[Op, int]]:
    """The statement of an element, and how often it has each operation."""
    (own,) = (s for s in statements(name) if s.scope is Scope.ELEM)
    counts: dict[Op, int] = {}
    for x in walk(own.value):
        counts[x.op] = counts.get(x.op, 0) + 1
    return show(own.value), counts


def test_causal_alibi_costs_an_element_one_addition() -> None:
    """Beside the FMA and the exponential that any score has: the row's part and the column's are sums of their own."""
    text, counts = element("alibi causal")
    assert text == "exp2(fma(rS, u0, u2 + u3))"
    assert (counts[Op.ADD], counts[Op.FMA], counts[Op.EXP2]) == (1, 1, 1)
    assert [(s.scope, show(s.value)) for s in statements("alibi causal")[:-1]] == [
        (Scope.COL, "f32(jt) * u1"),
        (Scope.ROW, "fma(f32(seqlen_q + n * 16 - i - seqlen_k), u1, -r)"),
    ]


def test_alibi_with_a_sign_that_is_not_known() -> None:
    """The absolute value is of the element: a subtraction, and an FMA more."""
    text, counts = element("alibi full")
    assert text == "exp2(fma(rS, u0, fma(abs(u2 - u3), u4, -r)))"
    assert Op.ADD not in counts


def test_a_sum_of_everything_is_grouped() -> None:
    """Four terms of rows, two of columns: an element adds the row's sum and the column's, and its own."""
    _, counts = element("sum of all")
    assert counts[Op.ADD] + counts.get(Op.SUB, 0) <= 3 + 1  # and the address of what it reads
    assert counts[Op.FMA] == 1
    assert not {Op.MUL, Op.F32} & set(counts)


@pytest.mark.parametrize("name", SCORES)
def test_no_element_converts_an_index(name: str) -> None:
    """Conversions share the exponentials' unit: they are of rows and columns."""
    _, counts = element(name)
    assert Op.F32 not in counts


BIG = torch.tensor([1000000.5, 3000000.0])
IDS = torch.arange(40, dtype=torch.int32) * 40_000_000
NEAR = BIG - torch.tensor([0.25, 0.5])
TOGETHER: dict[str, ScoreLike] = {
    "scalars": lambda s, b, h, i, j: s + (BIG[h] - NEAR[h]),
    "a factor": lambda s, b, h, i, j: s - SLOPES[h] * ((i * 1.0 + BIG[h]) - (j * 1.0 + BIG[h])),
    "integers of a table": lambda s, b, h, i, j: s + (IDS[i] * 1e-9 + IDS[j] * 1e-9),
    "integers": lambda s, b, h, i, j: s + ((i * 20_000_000) * 1e-9 + (j * 20_000_000) * 1e-9),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_the_user_adds_up_stays_together(name: str) -> None:
    """Parts that cancel are not added to the reference one by one, nor is a factor given to each; integers are not
    merged where their sum may leave 32 bits."""
    spec = Attention(score=TOGETHER[name], return_lse=True)
    q, k, v = (torch.randn(1, 2, 40, 16).bfloat16() for _ in range(3))
    kernel = kernel_for(
        spec.variant, Signature(IoType.BF16, 16, 16), target("sm90"), HopperConfig(1, 32, 2, turns=False)
    )
    _, lse = run(kernel, q, k, v, spec.tensors, 0.25)
    _, want = float64(Attention(score=TOGETHER[name], scale=0.25, return_lse=True), q, k, v)
    assert want is not None
    assert torch.allclose(lse.double(), want, atol=1e-3)


# ---- addresses -------------------------------------------------------------------------------------------------------

INDICES = {
    "j": J,
    "i - j": sub(I, J),
    "2j + 3 - i": sub(add(mul(J, const(2)), const(3)), I),
    "i - 5j": sub(I, mul(J, const(5))),
    "j - j + i": add(sub(J, J), I),
    "j // 3": make(Op.FLOORDIV, J, const(3)),
    "i": I,
}
STEPS = {"i - j": (1, -1), "2j + 3 - i": (-1, 2), "i - 5j": (1, -5)}  # of the row and of the column


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("name", INDICES)
def test_steps_have_the_value_of_the_index(name: str, is_contiguous: bool) -> None:
    """An index is that of its tile, or of its row, and numbers of steps of row and column; what is not linear in the
    key stays, and what the key alone decides, which is read once a column."""
    index = INDICES[name]
    rewritten = tile_addresses(
        load("t", (index,), DType.F32), ROWS, BLOCK, frozenset("t") if is_contiguous else frozenset()
    )
    (got,) = rewritten.args
    steps, want_steps = tile_steps(got), STEPS.get(name)
    if want_steps is None:
        assert steps is None and got is index
        return
    assert steps is not None
    assert (steps.rows, steps.columns) == (want_steps[0] if is_contiguous else 0, want_steps[1])
    moved = {"it", "jt", "i", "j"} if is_contiguous else {"it", "jt", "j"}
    assert moved.isdisjoint(x.name for x in walk(steps.base))
    for tile in (0, 3, 7):
        env = environment(tile)
        want = evaluate(index, env)
        assert torch.equal(*torch.broadcast_tensors(evaluate(got, env), want))
        base = evaluate(steps.base, env) + steps.rows * env["it"] + steps.columns * env["jt"]
        assert torch.equal(*torch.broadcast_tensors(base, want))


def test_only_the_last_dimension_is_contiguous() -> None:
    index = (sub(I, J), add(I, J))
    first, last = tile_addresses(load("t", index, DType.F32), ROWS, BLOCK, frozenset("t")).args
    assert [(s.rows, s.columns) for s in map(tile_steps, (first, last)) if s] == [(0, -1), (1, 1)]


def test_other_sums_are_no_steps() -> None:
    row, column = var("it", DType.I32), var("jt", DType.I32)
    for e in (row, add(row, I), add(mul(column, I), I), add(add(I, column), mul(column, const(2)))):
        steps = tile_steps(e)
        assert steps is None or "jt" in {x.name for x in walk(steps.base)}


def kernel_of(spec: Attention) -> Kernel:
    config = HopperConfig(2, 64, 2, FoldPolicy.CONDITIONAL)
    signature = Signature(IoType.BF16, 64, 64, strided=strided(spec.tensors))
    last = list(hopper_stages(spec.variant, signature, target("sm90"), config, explained=False))[-1].level
    assert isinstance(last, Schedule)
    return last.kernels[-1]


def arguments(kernel: Kernel, stride: int, dim: int) -> dict[str, int | float | bytes]:
    shapes = {t.name: ((1,) * t.rank, (1,) * t.rank) for t in kernel.tensors}
    (captured,) = (t for t in kernel.tensors if t.access.value == "capture")
    strides = [1] * captured.rank
    strides[dim] = stride
    shapes[captured.name] = ((1,) * captured.rank, tuple(strides))
    scalars = dict.fromkeys(("batch", "heads", "group", "seqlen_q", "seqlen_k", rounds_of(kernel)), 1) | {"scale": 1.0}
    return values_of(kernel, shapes, scalars)  # type: ignore[arg-type]


def test_strides_of_steps_are_narrow() -> None:
    """A stride that a column step multiplies has 32 bits; one beyond is an error that names tensor and dimension, not
    a wrong address. Other strides may be of any size."""
    kernel = kernel_of(Attention(score=lambda s, b, h, i, j: s + ACROSS[i, i - j + 30]))
    (name,) = (t.name for t in kernel.tensors if t.access.value == "capture")
    assert narrow_strides(kernel) == {f"{name}_s1"}
    assert narrow_strides(kernel_of(Attention(score=lambda s, b, h, i, j: s + SQUARE[i, i - j + 30]))) == frozenset()
    for stride in (2**31 - 1, -(2**31), 0, 1):
        assert arguments(kernel, stride, 1)[f"{name}_s1"] == stride
    for stride in (2**31, -(2**31) - 1, 2**40):
        with pytest.raises(LaunchError, match=f"{name} has a stride of {stride} elements in dimension 1"):
            arguments(kernel, stride, 1)
        assert arguments(kernel, stride, 0)[f"{name}_s0"] == stride


def test_indices_of_the_head_need_no_narrow_stride() -> None:
    assert narrow_strides(kernel_of(Attention(mask=causal(), score=alibi(SLOPES)))) == frozenset()
