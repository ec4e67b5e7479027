"""The spec object and the variant it is traced to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attngen.errors import SpecError
from attngen.expr import SCORE, TRUE
from attngen.spec import Attention, Normalizer
from attngen.variants import alibi, bias, causal, document, sliding_window, softcap


def test_plain() -> None:
    spec = Attention()
    assert spec.variant.score is SCORE
    assert spec.variant.mask is TRUE
    assert spec.variant.normalizer is Normalizer.SOFTMAX
    assert spec.variant.description == "full"
    assert dict(spec.tensors) == {}
    assert spec.scale_for(64) == 0.125
    assert spec.variant is spec.variant


def test_scale() -> None:
    assert Attention(scale=0.3).scale_for(64) == 0.3
    assert Attention().variant.scale_positive
    assert Attention(scale=2).variant.scale_positive
    assert not Attention(scale=0).variant.scale_positive
    assert not Attention(scale=1e8).variant.scale_positive
    assert not Attention(scale=1e-46).variant.scale_positive
    assert not Attention(scale=-1.0).variant.scale_positive


def test_printed() -> None:
    spec = Attention(
        causal() & sliding_window(256), [softcap(30), alibi(torch.ones(4))], sink=torch.zeros(4), scale=0.5
    )
    assert repr(spec) == "Attention(softcap(30), alibi, causal & sliding_window(256), sink, scale=0.5)"
    assert list(spec.tensors) == ["slopes", "sink"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scale": float("inf")}, "finite"),
        ({"scale": True}, "scale=True"),
        ({"scale": torch.tensor(1.0)}, "0-dim tensor t"),
        ({"sink": torch.zeros(2, 2)}, r"\[Hq\]"),
        ({"sink": torch.zeros(2, dtype=torch.float64)}, "float32"),
        ({"sink": 0.5}, "sink is 0.5"),
        ({"return_lse": 1}, "return_lse=1"),
        ({"normalizer": "sigmoid"}, "'softmax', 'none'"),
        ({"normalizer": "none", "return_lse": True}, "return_lse needs"),
        ({"normalizer": "none", "sink": torch.zeros(2)}, "sink needs"),
        ({"mask": causal}, r"mask=causal\(\.\.\.\)"),
        ({"mask": softcap(3)}, "Give it as `score=`"),
        ({"mask": [causal()]}, "combine with `&`"),
        ({"mask": torch.ones(3, 3).bool()}, r"score=bias\(tensor\)"),
        ({"score": causal()}, "Give it as `mask=`"),
        ({"score": [softcap]}, r"score=softcap\(\.\.\.\)"),
        ({"score": 3}, "score is 3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Attention(**arguments)


def fresh(width: int, table: torch.Tensor) -> Attention:
    return Attention(causal() & (lambda b, h, i, j: i - j < width), lambda s, b, h, i, j: s + table[h, i - j])


def test_fresh_functions_and_tensors_give_an_equal_variant() -> None:
    a, b = fresh(4, torch.zeros(2, 8)), fresh(4, torch.ones(2, 16))
    assert a.variant == b.variant
    assert hash(a.variant) == hash(b.variant)
    assert a.variant.variant_key() == b.variant.variant_key()


def test_the_key_sees_what_matters() -> None:
    table = torch.zeros(2, 8)
    keys = [
        fresh(4, table),
        fresh(5, table),
        fresh(4, table.half()),
        Attention(),
        Attention(causal()),
        Attention(scale=-1),
        Attention(sink=torch.zeros(1)),
        Attention(normalizer="none"),
        Attention(score=lambda s, b, h, i, j: s * 0.0),
        Attention(score=lambda s, b, h, i, j: s * -0.0),
        Attention(score=bias(torch.zeros(1, 2, 3, 3))),
        Attention(score=bias(torch.zeros(2, 2, 3, 3))),
    ]
    assert len({spec.variant.variant_key() for spec in keys}) == len(keys)


def test_the_key_does_not_see_names_and_lines() -> None:
    def one(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        near = i - j < 4
        return torch.where(near, s, 0)

    def other(score: Any, b: Any, head: Any, q: Any, k: Any) -> Any:
        return torch.where(q - k < 4, score, 0)

    a, b = Attention(score=one).variant, Attention(score=other).variant
    assert a != b
    assert a.variant_key() == b.variant_key()


def test_the_key_of_a_deep_shared_expression_is_cheap() -> None:
    def power(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for _ in range(64):
            s = s * s
        return s

    assert len(Attention(score=power).variant.variant_key()) == 24


def test_shape_rules_of_library_masks_and_scores() -> None:
    spec = Attention(
        document(torch.zeros(2, 8, dtype=torch.int32)), [alibi(torch.ones(4)), bias(torch.zeros(8, 8))]
    )
    assert [(r.capture, [a.value for a in r.axes], r.broadcast) for r in spec.shape_rules] == [
        ("slopes", ["Hq"], False),
        ("bias", ["Sq", "Sk"], True),
        ("doc_ids", ["B", "Sq"], False),
        ("doc_ids", ["B", "Sk"], False),
    ]
