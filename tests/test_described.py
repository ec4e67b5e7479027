"""Descriptions of calls: made once where nothing of the user's is in them, and checked at every call where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen import described as module
from attngen import shared as shared_module
from attngen.described import described
from attngen.errors import SpecError
from attngen.masks import Mask
from attngen.spec import Attention
from attngen.variants import alibi, bias, causal, document, full, prefix_lm, sliding_window, softcap, window

DEFAULTS: dict[str, Any] = {
    "mask": None, "score": None, "scale": None, "sink": None, "return_lse": False, "normalizer": "softmax",
}  # fmt: skip


def of(**arguments: Any) -> Attention:
    return described(**{**DEFAULTS, **arguments})


@pytest.mark.parametrize(
    "make",
    [
        lambda: {},
        lambda: {"mask": causal()},
        lambda: {"mask": causal("top_left"), "return_lse": True},
        lambda: {"mask": full() | window(3, 0) & ~prefix_lm(5)},
        lambda: {"mask": causal() & sliding_window(7), "score": softcap(30), "scale": 0.25},
        lambda: {"score": [softcap(30), softcap(2.5)]},
    ],
)
def test_equal_plain_descriptions_are_one(make: Any) -> None:
    spec, plain = of(**make()), Attention(**make())
    assert of(**make()) is spec
    assert spec.variant == plain.variant and spec.scale == plain.scale and spec.return_lse == plain.return_lse


def test_different_ones_are_not() -> None:
    specs = [
        of(), of(mask=causal()), of(mask=causal("top_left")), of(mask=window(7, 0)), of(mask=sliding_window(8)),
        of(mask=causal() & sliding_window(7)), of(mask=sliding_window(7) & causal()), of(mask=~causal()),
        of(mask=causal() | sliding_window(7)), of(score=softcap(7)), of(score=[softcap(7), softcap(7)]),
        of(mask=prefix_lm(7)), of(scale=0.5), of(scale=0.25), of(return_lse=True), of(normalizer="none"),
    ]  # fmt: skip
    assert len({id(s) for s in specs}) == len(specs)
    assert len({(str(s.mask), s.scores, s.scale, s.return_lse, s.normalizer) for s in specs}) == len(specs)


TABLE = torch.zeros(4, 9)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mask": document(torch.zeros(8, dtype=torch.int32))},
        {"mask": prefix_lm(torch.tensor(3))},
        {"mask": lambda b, h, i, j: j <= i},
        {"mask": causal() & (lambda b, h, i, j: j <= i)},
        {"mask": ~document(torch.zeros(8, dtype=torch.int32)) | causal()},
        {"score": alibi(torch.ones(4))},
        {"score": [softcap(3), bias(torch.zeros(8, 8))]},
        {"score": lambda s, b, h, i, j: s + TABLE[h, j]},
        {"sink": torch.zeros(4)},
    ],
)
def test_nothing_of_the_users_is_kept(arguments: dict[str, Any]) -> None:
    held = len(module._made)
    assert of(**arguments) is not of(**arguments)
    assert len(module._made) == held


def test_a_mask_of_tensors_or_functions_is_not_shared() -> None:
    ids, seen = torch.zeros(8, dtype=torch.int32), lambda b, h, i, j: j <= i
    makers = (
        lambda: document(ids), lambda: causal() & document(ids), lambda: ~(causal() & seen), lambda: causal() | seen,
    )  # fmt: skip
    for make in makers:
        assert make() is not make() and not make().plain


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"return_lse": True}, {"return_lse": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"mask": causal()}, {"mask": causal}),
        ({"normalizer": "none"}, {"normalizer": "none", "return_lse": True}),
        ({"score": softcap(3)}, {"score": causal()}),
        ({}, {"mask": [causal()]}),
        ({}, {"scale": float("inf")}),
        ({}, {"scale": float("nan")}),
    ],
)
def test_no_check_is_lost(good: dict[str, Any], bad: dict[str, Any]) -> None:
    of(**good)
    for _ in range(2):
        with pytest.raises(SpecError):
            of(**bad)


def test_equal_numbers_of_other_meaning() -> None:
    assert str(of(scale=-0.0).scale) == "-0.0" and str(of(scale=0.0).scale) == "0.0"
    assert of(scale=2).scale == 2.0 and of(scale=2.0).scale == 2.0


def test_a_users_own_mask_is_asked_nothing_but_whether_it_is_plain() -> None:
    class Own(Mask):
        __hash__ = None  # type: ignore[assignment]

        def trace(self, tracer: Any) -> Any:
            return causal().trace(tracer)

        def __str__(self) -> str:
            return "own"

    assert of(mask=Own()) is not of(mask=Own())


def test_what_is_kept_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 8)
    monkeypatch.setattr(shared_module, "KEPT", 8)
    for n in range(1, 40):
        assert of(mask=sliding_window(n), score=softcap(n)).description == f"softcap({n}), sliding_window({n})"
    assert len(module._made) <= 8 and len(shared_module._made) <= 8
