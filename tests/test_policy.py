"""Every policy of a fold's reference gives the formula: programs in float64 (and float32, where range is the point)
against attention in plain torch, on random data and on data that moves the reference as no random data does."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from cases import CASES, Case, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Truth, causal_grid, qkv, randn
from torch import Tensor

from attngen.config import FoldPolicy, HopperConfig
from attngen.functions import where
from attngen.ir.graph import Fold, Graph, Map, Mask
from attngen.ir.interpret import ProgramRun, _Item, run_program
from attngen.ir.ops import Map as MapOp
from attngen.ir.ops import Op, Reduce, ReduceKind
from attngen.ir.program import Program
from attngen.ir.schedule import Guard, Step
from attngen.passes.policy import ACCUMULATOR, policies
from attngen.passes.ranges import VisitSource, ranges
from attngen.pipelines import graph_levels, tile_levels
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.variants import alibi, causal, sliding_window, softcap, window

Tensors = tuple[Tensor, Tensor, Tensor]
SOFTMAX = tuple(name for name in CASES if name != "sigmoid")
BLOCK = 16
SIGNATURE = Signature(IoType.BF16, 64, 64)


def last_graph(spec: Attention) -> Graph:
    graph = list(graph_levels(spec.variant))[-1].level
    assert isinstance(graph, Graph)
    return graph


def fold_of(spec: Attention) -> Fold:
    (fold,) = last_graph(spec).of(Fold)
    assert isinstance(fold, Fold)
    return fold


def allowed(spec: Attention) -> tuple[FoldPolicy, ...]:
    """All that are right for a description; which of them pay is another question."""
    return policies(fold_of(spec), plain=True)


def program(
    spec: Attention, policy: FoldPolicy, block_n: int = BLOCK, warpgroups: int = 1, signature: Signature = SIGNATURE
) -> Program:
    config = HopperConfig(warpgroups, block_n, policy=policy, turns=warpgroups > 1)
    placed = list(tile_levels(spec.variant, signature, config))[-1].level
    assert isinstance(placed, Program)
    return placed


def run(
    spec: Attention, policy: FoldPolicy, tensors: Tensors, block_n: int = BLOCK, warpgroups: int = 1,
    dtype: torch.dtype = torch.float64,
) -> ProgramRun:  # fmt: skip
    q, _, v = tensors
    signature = Signature(IoType.BF16, q.size(3), v.size(3))
    made = program(spec, policy, block_n, warpgroups, signature)
    return run_program(made, *tensors, spec.tensors, spec.scale_for(q.size(3)), dtype)


def equal(got: dict[str, Tensor], truth: Truth, tensors: Tensors, atol: float = 1e-10, rtol: float = 0.0) -> None:
    out, lse = truth(*tensors, torch.float64)
    torch.testing.assert_close(got["out"].double(), out, rtol=rtol, atol=atol)
    assert ("lse" in got) == (lse is not None)
    if lse is not None:
        torch.testing.assert_close(got["lse"].double(), lse, rtol=max(rtol, 1e-12), atol=atol)


# ---- the library of variants -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_policies_mean_the_formula(name: str) -> None:
    """Ragged lengths, more queries than keys and fewer, groups of heads; a tile's first rows see nothing of the tiles
    that are visited first, as 64 rows share tiles of 16 keys."""
    for sq, sk, seed in ((70, 41, 0), (41, 100, 1)):
        spec, truth = CASES[name](Sizes(2, 2, sq, sk))
        tensors = qkv(b=2, sq=sq, sk=sk, d=24, dv=16, seed=seed, std=2.0)
        for policy in allowed(spec):
            equal(run(spec, policy, tensors).outputs, truth, tensors)


def test_two_warpgroups_have_classes_of_their_own() -> None:
    """What is full for one warpgroup and masked for the other is right for both."""
    tensors = qkv(b=1, h=1, sq=200, sk=230, d=16)
    spec, truth = Attention(mask=causal()), Truth(causal_grid(200, 230))
    for policy in FoldPolicy:
        equal(run(spec, policy, tensors, 32, warpgroups=2).outputs, truth, tensors)


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
def test_masked_tiles_at_both_ends(policy: FoldPolicy) -> None:
    """A window has masked tiles behind full ones: a tile of rows ends in another class than it was in before."""
    sq = sk = 200
    spec = Attention(mask=window(110, 5))
    truth = Truth(lambda b, h, i, j: (j <= i + 5) & (j >= i - 110))
    tensors = qkv(b=1, h=2, sq=sq, sk=sk, d=16, std=3.0)
    result = run(spec, policy, tensors)
    classes = [v.cls for v in result.visited[0, 0, 2]]
    assert classes[0] == classes[-1] == "masked"
    assert "full" in classes
    equal(result.outputs, truth, tensors)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("score", ["alibi", "softcap", "both"])
def test_scores_of_full_tiles(score: str, mask: str) -> None:
    """In full tiles an element is made of the logit itself; with ALiBi the mask decides the sign of the distance, or
    does not."""
    sq, sk, slopes = 100, 150, torch.tensor([0.25, 3.0])

    def capped(s: Tensor) -> Tensor:
        return 5 * torch.tanh(s / 5)

    def slope(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return slopes[h] * (i + sk - sq - j).abs()

    scores = {
        "alibi": (alibi(slopes), lambda s, b, h, i, j: s - slope(h, i, j)),
        "softcap": (softcap(5.0), lambda s, b, h, i, j: capped(s)),
        "both": ([softcap(5.0), alibi(slopes)], lambda s, b, h, i, j: capped(s) - slope(h, i, j)),
    }
    described, plain = scores[score]
    spec = Attention(mask=causal() if mask == "causal" else None, score=described)
    truth = Truth(causal_grid(sq, sk) if mask == "causal" else None, plain)
    tensors = qkv(b=1, h=2, sq=sq, sk=sk, d=16, std=4.0)
    for policy in allowed(spec):
        equal(run(spec, policy, tensors).outputs, truth, tensors)


def test_lists_of_tiles() -> None:
    """A mask of captured ids goes by the list of tiles; documents that end inside a tile, and rows without a key."""
    spec, truth = CASES["document"](Sizes(1, 2, 130, 90))
    assert ranges(spec.variant.mask, BLOCK).source is VisitSource.TABLE
    tensors = qkv(b=1, sq=130, sk=90, d=16, std=3.0)
    for policy in allowed(spec):
        result = run(spec, policy, tensors)
        equal(result.outputs, truth, tensors)
        assert result.outputs["lse"][0, 0, 95:].isneginf().all()  # documents 4 and 5 have no key below 90


# ---- adversarial data ------------------------------------------------------------------------------------------------


def by_key(levels: Tensor, sq: int, signs: Tensor | None = None, noise: float = 0.1) -> Tensors:
    """Tensors whose scaled scores are about `levels` of a key, times a sign of the row; values random."""
    q = torch.zeros(1, 1, sq, 16, dtype=torch.float64)
    q[..., 0] = 4.0 if signs is None else 4.0 * signs  # the scale is 1/4
    k = randn(1, 1, len(levels), 16, dtype=torch.float64, seed=1) * noise
    k[..., 0] = levels
    q[..., 1:] = randn(1, 1, sq, 15, dtype=torch.float64, seed=2)
    return q, k, randn(1, 1, len(levels), 16, dtype=torch.float64, seed=3)


STEPS = (1e-3, 0.3, 1.0, 5.0, 7.0, 40.0, 800.0, 3e4)  # of the score from tile to tile; weights fit, or overflow


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("step", STEPS)
def test_growing_maxima(step: float, mask: str, policy: FoldPolicy) -> None:
    """Rows of one sign have a new maximum at every tile, by little or by more than a float holds; those of the other
    never do. Tiles come from the last key down."""
    sq, sk = 70, 100
    levels = step * torch.arange(sk, 0, -1, dtype=torch.float64) / BLOCK
    signs = torch.tensor([1.0, -1.0, 1.0]).repeat(sq)[:sq].double()
    tensors = by_key(levels, sq, signs)
    spec = Attention(mask=causal() if mask == "causal" else None)
    truth = Truth(causal_grid(sq, sk) if mask == "causal" else None)
    equal(run(spec, policy, tensors).outputs, truth, tensors, atol=1e-8)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    levels=st.lists(st.sampled_from([0.0, -3.0, 2.0, 9.0, -9.0, 80.0, -80.0, 1e3, -1e3, 4e4, -4e4]), min_size=2,
                    max_size=6),
    hidden=st.lists(st.booleans(), min_size=6, max_size=6),
    holes=st.booleans(),
    sk_cut=st.integers(0, BLOCK - 1),
    block_n=st.sampled_from([16, 32]),
)  # fmt: skip
def test_any_sequence_of_levels(
    levels: list[float], hidden: list[bool], holes: bool, sk_cut: int, block_n: int
) -> None:
    """Tiles of any levels in any order, some of them -inf for every other row, give one result under each policy."""
    each = torch.tensor(levels, dtype=torch.float64).repeat_interleave(BLOCK)
    sk = len(each) - sk_cut
    tensors = by_key(each[:sk], 5)
    table = torch.zeros(5, sk)
    gone = torch.tensor(hidden[: len(levels)]).repeat_interleave(BLOCK)[:sk]
    table[::2, gone] = float("-inf")
    if holes:
        table[:, ::3] = float("-inf")
    plain, biased = Attention(), Attention(score=lambda s, b, h, i, j: s + table[i, j])
    truth = Truth(score=lambda s, b, h, i, j: s + table[i, j])
    for spec, want in ((plain, Truth()), (biased, truth)):
        results = {p: run(spec, p, tensors, block_n).outputs for p in allowed(spec)}
        assert len(results) == 4
        for got in results.values():
            equal(got, want, tensors, atol=1e-7)
            torch.testing.assert_close(got["lse"], results[FoldPolicy.RUNNING]["lse"], rtol=1e-12, atol=1e-10)
            torch.testing.assert_close(got["out"], results[FoldPolicy.RUNNING]["out"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
def test_rows_that_start_masked(policy: FoldPolicy) -> None:
    """A row that sees the oldest keys alone has an empty state for most of its tiles; then scores of any size."""
    sq, sk = 64, 112
    spec, truth = Attention(mask=sliding_window(20)), Truth(lambda b, h, i, j: (j <= i + 48) & (j > i + 28))
    for size in (1.0, -500.0, 3e4):
        tensors = by_key(size * torch.ones(sk, dtype=torch.float64), sq)
        equal(run(spec, policy, tensors).outputs, truth, tensors, atol=1e-8)


@pytest.mark.parametrize("policy", [FoldPolicy.REFERENCE, FoldPolicy.ANTICIPATED], ids=lambda p: p.value)
def test_hidden_tiles_are_not_done_again(policy: FoldPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row sees all keys, the others only the first tile, which comes last: that is the only one done again."""
    entered: list[int] = []
    plain = _Item.steps

    def counted(item: _Item, ops: tuple[Step, ...], cls: str = "") -> None:
        guards = [g for g in item.program.loop.body if isinstance(g, Guard) and g.body is ops]
        entered.extend(1 for g in guards if any(isinstance(op, Reduce) for op in g.body))
        plain(item, ops, cls)

    monkeypatch.setattr(_Item, "steps", counted)
    spec = Attention(mask=lambda b, h, i, j: (i == 0) | (j < BLOCK))
    truth = Truth(lambda b, h, i, j: (i == 0) | (j < BLOCK))
    tensors = by_key(torch.zeros(6 * BLOCK, dtype=torch.float64), 8, noise=0.01)
    equal(run(spec, policy, tensors).outputs, truth, tensors)
    assert len(entered) == 1


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_lowest_finite_biases(dtype: torch.dtype, policy: FoldPolicy) -> None:
    """finfo.min is a number: a row of it gives the mean of the values. In log2 units it is none in float32; the
    policies that look at sums alone have to see that. From a table, and from a constant."""
    lowest = torch.finfo(torch.float32).min
    table = torch.zeros(40, 70)
    table[3:9], table[20:30, 16:], table[31, :50], table[32] = lowest, lowest, lowest, float("-inf")

    cases: tuple[Case, ...] = (
        (Attention(score=lambda s, b, h, i, j: s + table[i, j]), Truth(score=lambda s, b, h, i, j: s + table[i, j])),
        (
            Attention(mask=causal(), score=lambda s, b, h, i, j: where(i % 5 == 0, lowest, s)),
            Truth(causal_grid(40, 70), lambda s, b, h, i, j: torch.where(i % 5 == 0, lowest, s)),
        ),
    )
    tensors = qkv(b=1, h=1, sq=40, sk=70, d=16, std=2.0)
    for spec, truth in cases:
        got = run(spec, policy, tensors, dtype=dtype).outputs
        out, lse = truth(*tensors, torch.float64)
        assert lse is not None
        torch.testing.assert_close(got["out"].double(), out, rtol=0, atol=1e-10 if dtype is torch.float64 else 3e-6)
        torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
def test_sinks_of_any_size(policy: FoldPolicy) -> None:
    """A sink far above all scores, and far below; rows without a key have it alone."""
    sink = torch.tensor([-300.0, 0.5, 300.0, 2e4])
    spec = Attention(mask=causal(), sink=sink)
    truth = Truth(causal_grid(60, 40), sink=sink)
    tensors = qkv(b=1, h=4, hkv=2, sq=60, sk=40, d=16, std=3.0)
    equal(run(spec, policy, tensors).outputs, truth, tensors)


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("at", [1, 40, 69])
def test_scores_that_are_no_numbers_stay_in_their_row(at: int, policy: FoldPolicy) -> None:
    """NaN or +inf in a visible score is NaN in its row, wherever its tile is; the rows beside it have none of it."""
    table = torch.zeros(20, 70)
    table[3, at], table[11, at] = float("nan"), float("inf")
    spec = Attention(score=lambda s, b, h, i, j: s + table[i, j])
    tensors = qkv(b=1, h=1, sq=20, sk=70, d=16, std=2.0)
    got = run(spec, policy, tensors).outputs["out"][0, 0]
    want, _ = Truth()(*tensors, torch.float64)
    others = torch.tensor([n not in (3, 11) for n in range(20)])
    assert got[~others].isnan().all()
    torch.testing.assert_close(got[others], want[0, 0][others], rtol=0, atol=1e-10)


# ---- which policies there are ----------------------------------------------------------------------------------------


def test_policies_of_a_fold() -> None:
    assert policies(fold_of(Attention()), plain=True) == (
        FoldPolicy.REFERENCE, FoldPolicy.ANTICIPATED, FoldPolicy.CONDITIONAL, FoldPolicy.RUNNING
    )  # fmt: skip
    assert FoldPolicy.ANTICIPATED not in policies(fold_of(Attention(score=softcap(30.0))), plain=False)


def test_no_reference_without_a_sum_to_see_it_in() -> None:
    """Without a plain sum of the weights nothing shows that they are too large; a maximum has to be taken."""
    fold = fold_of(Attention(mask=causal()))
    unsummed = dataclasses.replace(
        fold, states=tuple(s for s in fold.states if s.kind is ReduceKind.MAX or s.operand)
    )
    assert policies(unsummed, plain=True) == (FoldPolicy.CONDITIONAL, FoldPolicy.RUNNING)


def test_without_a_maximum_there_is_nothing_to_choose() -> None:
    spec, _ = CASES["sigmoid"](Sizes(1, 2, 8, 8))
    assert allowed(spec) == (FoldPolicy.RUNNING,)
    assert not any(isinstance(op, Guard | Reduce) for op in program(spec, FoldPolicy.RUNNING).loop.body)


# ---- what a tile costs -----------------------------------------------------------------------------------------------


def always(made: Program) -> list[Op]:
    """Ops of a tile that stand under no guard."""
    return [op for op in made.loop.body if not isinstance(op, Guard)]


def corrects(op: Op) -> bool:
    return isinstance(op, MapOp) and any(s.target == ACCUMULATOR for s in op.body)


COSTS = {  # under no guard: reductions of a tile, corrections of the accumulator; guards
    FoldPolicy.RUNNING: (1, 1, 0),
    FoldPolicy.CONDITIONAL: (1, 0, 2),
    FoldPolicy.REFERENCE: (0, 0, 2),
    FoldPolicy.ANTICIPATED: (0, 0, 3),
}


@pytest.mark.parametrize("policy", FoldPolicy, ids=lambda p: p.value)
def test_cost_of_a_tile(policy: FoldPolicy) -> None:
    made = program(Attention(mask=causal()), policy)
    ops = always(made)
    found = (sum(isinstance(op, Reduce) for op in ops), sum(corrects(op) for op in ops))
    assert (*found, sum(isinstance(op, Guard) for op in made.loop.body)) == COSTS[policy]


def test_text_of_a_tile_under_reference() -> None:
    """No reduction before the guard: elements with the reference as it is, and their sum."""
    lines = str(program(Attention(mask=causal()), FoldPolicy.REFERENCE)).split("for t:")[1].splitlines()
    first = next(n for n, x in enumerate(lines) if "map over=rS" in x and "only" not in x)
    guard = next(n for n, x in enumerate(lines) if " guard " in x)
    assert not any("reduce" in x for x in lines[:guard])
    assert [x.strip() for x in lines[first + 1 : guard]] == [
        "row l_t = 0.0",
        "elem l_t += exp2(fma(rS, scale_log2, -r))",
        "elem rP = exp2(fma(rS, scale_log2, -r))",
        "o4 vote dst=need pred={~(l_t <= 1024.0)}",
    ]


@cache
def unguarded(policy: FoldPolicy) -> Program:
    made = program(Attention(), policy, signature=Signature(IoType.BF16, 16, 16))
    loop = dataclasses.replace(made.loop, body=tuple(op for op in made.loop.body if not isinstance(op, Guard)))
    return dataclasses.replace(made, loop=loop)


@pytest.mark.parametrize("policy", [p for p in FoldPolicy if p is not FoldPolicy.RUNNING], ids=lambda p: p.value)
def test_guards_are_for_references_that_move(policy: FoldPolicy) -> None:
    """On level scores a program without its guards gives the same; where they outgrow the range of a float it does
    not."""
    spec = Attention()
    for step, same in ((0.0, True), (800.0, False)):
        tensors = by_key(step * torch.arange(96, 0, -1, dtype=torch.float64) / BLOCK, 8, noise=0.01)
        want, _ = Truth()(*tensors, torch.float64)
        got = run_program(unguarded(policy), *tensors, {}, spec.scale_for(16)).outputs["out"]
        assert torch.allclose(got, want, rtol=0, atol=1e-9) == same


def test_scores_stay_logits_in_full_tiles() -> None:
    """Under REFERENCE a full tile of a softcapped score has no op that writes scores but in the guard; another policy,
    and a score read by position, have one in every tile."""
    capped = Attention(mask=causal(), score=softcap(3.0))
    table = torch.zeros(4, 4)
    biased = Attention(mask=causal(), score=lambda s, b, h, i, j: s + table[i, j])

    def scored(spec: Attention, policy: FoldPolicy) -> bool:
        full = [op for op in always(program(spec, policy)) if op.only != "masked"]
        return any(s.target == "rS" for op in full if isinstance(op, MapOp) for s in op.body)

    assert not scored(capped, FoldPolicy.REFERENCE)
    assert scored(capped, FoldPolicy.CONDITIONAL)
    assert scored(biased, FoldPolicy.REFERENCE)


def test_masks_and_scores_are_plain_or_not() -> None:
    """What ranking takes for plain: the mask reads the logits, no map between."""
    for spec, plain in ((Attention(mask=causal()), True), (Attention(score=softcap(3.0)), False)):
        graph, fold = last_graph(spec), fold_of(spec)
        mask = graph[fold.x]
        assert isinstance(mask, Mask)
        assert isinstance(graph[mask.x], Map) != plain
