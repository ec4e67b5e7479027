"""Operations on captured tensors alone, inside a score: refused where they would keep a value, else free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen.errors import TraceError

T, W, TABLE = torch.tensor(0.5), torch.randn(10), torch.randn(2, 300)


@pytest.mark.parametrize(
    "value",
    [
        lambda: T * 2 + 1, lambda: torch.exp(T), lambda: attngen.exp(T), lambda: W.mean(), lambda: T.item(),
        lambda: float(T), lambda: 1.0 if T > 0 else 2.0, lambda: W.double()[0], lambda: (torch.arange(10) * W)[1],
    ],
)  # fmt: skip
def test_values_that_would_be_kept(value: Callable[[], Any]) -> None:
    with pytest.raises(TraceError, match=r"runs once(.|\n)*test_once.py"):
        _ = attngen.Attention(score=lambda s, b, h, i, j: s + value()).variant


@pytest.mark.parametrize(
    "value",
    [
        lambda h, j: T, lambda h, j: W[1], lambda h, j: TABLE.mT[3, 1], lambda h, j: TABLE[h, j + TABLE.size(1) // 2],
        lambda h, j: TABLE[0][3:][j], lambda h, j: (torch.arange(3) * 2)[1], lambda h, j: torch.maximum(j, T),
        lambda h, j: W.float()[j], lambda h, j: torch.tensor(2.0),
    ],
)  # fmt: skip
def test_views_metadata_and_constants(value: Callable[..., Any]) -> None:
    variant = attngen.Attention(score=lambda s, b, h, i, j: s + value(h, j)).variant
    assert len(variant.captures) == 1
