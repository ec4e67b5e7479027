"""Absolute values whose sign the mask decides, and those whose sign it does not."""

from __future__ import annotations

import pytest
import torch
from support import qkv

from attngen.ir.graph import Map
from attngen.ir.interpret import run_graph
from attngen.passes.signs import signs
from attngen.passes.textbook import textbook
from attngen.spec import Attention
from attngen.variants import MaskLike, alibi, causal, sliding_window, window

SLOPES = torch.tensor([0.5, 2.0])
AFTER, BEFORE, EITHER = "f32({})", "f32(-({}))", "f32(abs({}))"  # the key is not after the query's diagonal, not before
DISTANCE = "i + (seqlen_k - seqlen_q) - j"
MASKS: dict[str, tuple[MaskLike | None, str]] = {
    "none": (None, EITHER),
    "causal": (causal(), AFTER),
    "sliding": (sliding_window(9), AFTER),
    "left": (window(-1, 0), AFTER),
    "narrower": (causal() & (lambda b, h, i, j: j > 3), AFTER),
    "right": (window(0, 5), BEFORE),
    "not causal": (~causal(), BEFORE),
    "both sides": (window(5, 3), EITHER),
    "one past": (window(-1, 1), EITHER),
    "top left": (causal(align="top_left"), EITHER),  # another diagonal than that of the score
    "either": (causal() | (lambda b, h, i, j: j < 4), EITHER),
}


def score_of(spec: Attention, rewritten: bool) -> str:
    graph = textbook(spec.variant)
    (y,) = (n for n in (signs(graph) if rewritten else graph).nodes if n.id == "y")
    assert isinstance(y, Map)
    return y.text()


@pytest.mark.parametrize("name", MASKS)
def test_alibi(name: str) -> None:
    """|i + shift - j| under each mask; and the same numbers out as before, for more queries than keys and for fewer."""
    mask, form = MASKS[name]
    spec = Attention(mask=mask, score=alibi(SLOPES))
    assert score_of(spec, False) == f"map scale * s - slopes[h] * {EITHER.format(DISTANCE)}"
    assert score_of(spec, True) == f"map scale * s - slopes[h] * {form.format(DISTANCE)}"
    for sq, sk in ((9, 30), (30, 9), (17, 17)):
        tensors = qkv(sq=sq, sk=sk, d=8, std=2.0)
        before, after = (run_graph(g, *tensors, spec.tensors, 0.35) for g in _both(spec))
        torch.testing.assert_close(after["lse"], before["lse"], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(after["out"], before["out"], rtol=0, atol=0, equal_nan=True)


def _both(spec: Attention):  # type: ignore[no-untyped-def]
    graph = textbook(spec.variant)
    return graph, signs(graph)


@pytest.mark.parametrize(
    ("distance", "kept"),
    [
        (lambda i, j: i - j, False),
        (lambda i, j: i - j + 3, False),  # at least 3
        (lambda i, j: i - j - 1, True),  # -1 at the diagonal
        (lambda i, j: 2 * i - 2 * j, False),
        (lambda i, j: j - i, False),
        (lambda i, j: 2 * i - j, False),  # i >= 0
        (lambda i, j: i - 2 * j, True),
    ],
)
def test_ends_are_exact(distance, kept: bool) -> None:  # type: ignore[no-untyped-def]
    """At the last visible key the distance is 0 or above, to the last unit."""
    spec = Attention(
        mask=lambda b, h, i, j: j <= i, score=lambda s, b, h, i, j: s - 0.5 * abs(distance(i, j))
    )
    assert ("abs(" in score_of(spec, True)) == kept


def test_only_integers_and_only_scores() -> None:
    """The sign of a float, of a captured number, and inside of a mask are not known."""
    ids = torch.zeros(40, dtype=torch.int32)
    spec = Attention(
        mask=causal() & (lambda b, h, i, j: abs(i - j) < 7), score=lambda s, b, h, i, j: abs(s) - abs(ids[j] - i)
    )
    graph, after = _both(spec)
    assert [n.text() for n in after.nodes] == [n.text() for n in graph.nodes]
