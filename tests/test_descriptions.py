"""Descriptions that a user may write and that an early version refused or got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.reference import reference

LENGTHS = torch.tensor([20.5, 90.0])
X = torch.linspace(-1, 1, 170)

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "a float bound": {"mask": lambda b, h, i, j: j < 20.5},
    "captured float bounds": {"mask": lambda b, h, i, j: j < LENGTHS[b]},
    "a float factor": {"mask": lambda b, h, i, j: i * 0.5 >= j},
    "floats of both indices": {"mask": lambda b, h, i, j: (j.float() ** 2 < i * 30) | (X[j] * i < 0)},
    "a constant score": {"score": lambda s, b, h, i, j: 0.0},
    "a score of the positions": {"score": lambda s, b, h, i, j: -0.1 * abs(i - j), "mask": attngen.causal()},
    "a score of the keys": {"score": lambda s, b, h, i, j: X[j]},
    "weights without logits": {"score": lambda s, b, h, i, j: attngen.sigmoid(X[j] * (i * 0.01)), "normalizer": "none"},
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_description_against_float64(name: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64).bfloat16() for n in (150, 170, 170))
    spec = attngen.Attention(**DESCRIPTIONS[name])
    out = attngen.attention(q, k, v, spec=spec)
    assert isinstance(out, torch.Tensor)
    want, _ = reference(spec, q, k, v)
    assert (out.double() - want).abs().max().item() <= 8e-3 * max(1.0, want.abs().max().item())


def test_a_score_without_logits_reads_neither_queries_nor_keys() -> None:
    kernel = attngen.compile(attngen.Attention(score=lambda s, b, h, i, j: X[j]), head_dim=64)
    text = str(kernel.schedule)
    assert "src=v" in text
    assert "src=q" not in text
    assert "src=k" not in text


@pytest.mark.parametrize("combine", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_and_or_not_between_masks_are_errors(combine: Any) -> None:
    with pytest.raises(attngen.errors.SpecError, match=r"the mask `causal` has no truth value.*Write `&`, `\|`, `~`"):
        combine(attngen.causal(), attngen.window(3, 3))
