"""The unit in which a fold keeps scores: log2 units where no value leaves float32's range, else natural ones."""

from __future__ import annotations

import math

import pytest
import torch
from support import qkv

from attngen.functions import where
from attngen.ir.graph import Fold, Graph, Map, Mask
from attngen.ir.interpret import run_graph
from attngen.passes.signs import signs
from attngen.passes.simplify import simplify
from attngen.passes.stream import stream
from attngen.passes.textbook import textbook
from attngen.passes.units import USUAL, tame, units
from attngen.scores import ScoreLike
from attngen.spec import Attention
from attngen.variants import alibi, bias, causal, softcap

SLOPES, TABLE = torch.tensor([0.25, 1.5]), torch.zeros(64, 64)
LOWEST = torch.finfo(torch.float32).min

SCORES: dict[str, tuple[ScoreLike, bool]] = {  # and whether log2 units hold it
    "softcap": (softcap(30.0), True),
    "alibi": (alibi(SLOPES), True),
    "both": ([softcap(5.0), alibi(SLOPES)], True),
    "constant": (lambda s, b, h, i, j: s + 1e29, True),
    "masked by hand": (lambda s, b, h, i, j: where(j % 3 == 0, -math.inf, s), True),
    "large constant": (lambda s, b, h, i, j: where(j % 3 == 0, 2 * USUAL, s), False),
    "finfo.min": (lambda s, b, h, i, j: where(j % 3 == 0, LOWEST, s), False),
    "table": (bias(TABLE), False),
    "table of distances": (lambda s, b, h, i, j: s + TABLE[h, i - j + 30], False),
    "added by head": (lambda s, b, h, i, j: s + SLOPES[h], False),  # may be finfo.min for all keys of a row
    "times a number of the head": (lambda s, b, h, i, j: s * SLOPES[h], True),
    "product of constants": (lambda s, b, h, i, j: where(i % 3 == 1, s, -1e20) * 1e8 * 3e8, False),
    "small divisor": (lambda s, b, h, i, j: s - 1.0 / (i * 0.0 + 3e-39), False),
}  # type: ignore[dict-item]


def before(spec: Attention) -> Graph:
    return stream(simplify(signs(textbook(spec.variant))))


def after(spec: Attention) -> Graph:
    return units(before(spec), spec.variant.scale_positive)


def fold_of(graph: Graph) -> Fold:
    (fold,) = graph.of(Fold)
    assert isinstance(fold, Fold)
    return fold


@pytest.mark.parametrize("name", SCORES)
def test_tame_scores_are_in_log2_units(name: str) -> None:
    """An element is exp2(z - r) where the score took up log2 e; where it may not, the difference is multiplied."""
    score, in_log2 = SCORES[name]
    graph = after(Attention(mask=causal(), score=score))
    fold = fold_of(graph)
    texts = {s.name: s.text() for s in fold.states}
    mask = graph[fold.x]
    assert isinstance(mask, Mask)
    assert isinstance(graph[mask.x], Map)
    element = "exp2(z - r)" if in_log2 else "exp2((z - r) * 1.4426950408889634)"
    assert texts["l"].startswith(f"l = sum {element}")
    assert texts["out_sum"].startswith(f"out_sum = sum {element} . v")
    assert texts["r"] == "r = max z"


@pytest.mark.parametrize("name", SCORES)
def test_units_change_no_result(name: str) -> None:
    """out and lse (which is natural in any unit) in float64, also with a sink."""
    score, _ = SCORES[name]
    for sink in (None, torch.tensor([0.5, -2.0])):
        spec = Attention(mask=causal(), score=score, sink=sink)
        tensors = qkv(sq=23, sk=31, d=8, std=3.0)
        want, got = (run_graph(g(spec), *tensors, spec.tensors, 0.35) for g in (before, after))
        torch.testing.assert_close(got["lse"], want["lse"], rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(got["out"], want["out"], rtol=0, atol=1e-9)


def test_constants_take_up_the_unit() -> None:
    """log2 e costs an element nothing: it is part of the cap, and of the slope once a head."""
    spec = Attention(mask=causal(), score=[softcap(30.0), alibi(SLOPES)])
    graph = after(spec)
    (y,) = (n for n in graph.nodes if n.id == "y")
    assert isinstance(y, Map)
    assert y.text() == (
        "map (1.0 - rcp(1.0 + exp2(s * (scale * 0.09617966939259756))) * 2.0) * 43.2808512266689"
        " - (f32(i) + f32(seqlen_k - seqlen_q) - f32(j)) * (slopes[h] * 1.4426950408889634)"
    )


def test_plain_scores_stay_raw() -> None:
    """Nothing is multiplied before the exponential's FMA."""
    fold = fold_of(after(Attention(mask=causal())))
    assert fold.states[0].text() == "r = max z, times scale * 1.4426950408889634"
    assert fold.states[1].text().startswith("l = sum exp2(fma(z, scale * 1.4426950408889634, -r))")


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e38])
def test_scales_that_keep_natural_units(scale: float) -> None:
    """A maximum does not commute with a negative factor, and log2 e times a huge scale is infinite."""
    for score in (None, alibi(SLOPES)):
        spec = Attention(mask=causal(), score=score, scale=scale)
        assert str(after(spec)) == str(before(spec))


def test_sums_without_a_maximum_have_no_unit() -> None:
    spec = Attention(mask=causal(), score=lambda s, b, h, i, j: s * 0.5, normalizer="none")
    assert str(after(spec)) == str(before(spec))


def test_tame_is_about_range() -> None:
    """-inf is masked and no number; an index that is no position reads a number of the head."""
    for name, (score, in_log2) in SCORES.items():
        assert tame(Attention(score=score).variant.score) == in_log2, name
