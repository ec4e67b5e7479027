"""A dozen attention variants, each twice: as a user describes it, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from support import Truth, randn
from torch import Tensor

from attngen.functions import sigmoid, where
from attngen.spec import Attention
from attngen.variants import alibi, bias, causal, document, prefix_lm, sliding_window, softcap, window


@dataclass(frozen=True)
class Sizes:
    """What captured tensors are made for."""

    b: int
    h: int
    sq: int
    sk: int
    device: str = "cpu"

    @property
    def diagonal(self) -> int:
        return self.sk - self.sq


Case = tuple[Attention, Truth]
CASES: dict[str, Callable[[Sizes], Case]] = {}


def _case(make: Callable[[Sizes], Case]) -> Callable[[Sizes], Case]:
    CASES[make.__name__.strip("_")] = make
    return make


def _slopes(z: Sizes) -> Tensor:
    return (2.0 ** -torch.arange(1, z.h + 1)).to(z.device)


@_case
def _full(z: Sizes) -> Case:
    return Attention(), Truth()


@_case
def _causal(z: Sizes) -> Case:
    return Attention(mask=causal()), Truth(lambda b, h, i, j: j <= i + z.diagonal)


@_case
def _top_left(z: Sizes) -> Case:
    return Attention(mask=causal(align="top_left")), Truth(lambda b, h, i, j: j <= i)


@_case
def _sliding(z: Sizes) -> Case:
    at = z.diagonal
    return Attention(mask=sliding_window(9)), Truth(lambda b, h, i, j: (j <= i + at) & (j > i + at - 9))


@_case
def _window(z: Sizes) -> Case:
    at = z.diagonal
    return Attention(mask=window(20, 3)), Truth(lambda b, h, i, j: (j <= i + at + 3) & (j >= i + at - 20))


@_case
def _hole(z: Sizes) -> Case:
    def truth(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + z.diagonal) & ((j > i + z.diagonal - 5) | (j < 4))

    return Attention(mask=causal() & (sliding_window(5) | (lambda b, h, i, j: j < 4))), Truth(truth)


@_case
def _prefix(z: Sizes) -> Case:
    lengths = ((torch.arange(z.b) * 7 + 3) % max(z.sk, 1)).to(torch.int32).to(z.device)

    def truth(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + z.diagonal) | (j < lengths[b])

    return Attention(mask=prefix_lm(lengths)), Truth(truth)


@_case
def _softcap_alibi(z: Sizes) -> Case:
    slopes, at = _slopes(z), z.diagonal

    def truth(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * torch.tanh(s / 2) - slopes[h] * (i + at - j).abs()

    spec = Attention(mask=causal(), score=[softcap(2.0), alibi(slopes)])
    return spec, Truth(lambda b, h, i, j: j <= i + at, truth)


@_case
def _bias(z: Sizes) -> Case:
    table = randn(1, z.h, z.sq, z.sk, dtype=torch.float32, device=z.device, seed=7)
    table = table.where(table > -1.5, float("-inf"))  # -inf: masked
    return Attention(score=bias(table)), Truth(score=lambda s, b, h, i, j: s + table[0, h, i, j])


@_case
def _sink(z: Sizes) -> Case:
    sink = randn(z.h, dtype=torch.float32, device=z.device, seed=8)
    return Attention(mask=causal(), sink=sink), Truth(lambda b, h, i, j: j <= i + z.diagonal, sink=sink)


@_case
def _negative_scale(z: Sizes) -> Case:
    return Attention(mask=causal(), scale=-0.3), Truth(lambda b, h, i, j: j <= i + z.diagonal, scale=-0.3)


@_case
def _document(z: Sizes) -> Case:
    length = max(z.sq, z.sk)
    ids = (torch.arange(length) // 23).to(torch.int32).to(z.device)
    return Attention(mask=document(ids)), Truth(lambda b, h, i, j: ids[i] == ids[j])


@_case
def _blocks(z: Sizes) -> Case:
    table = randn(z.h, 2 * 512 + 1, dtype=torch.float32, device=z.device, seed=9)

    def truth(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j % 3 == 0, s * 0.5, s) + table[h, i - j + 512]

    spec = Attention(
        mask=lambda b, h, i, j: (i // 16) >= (j // 16),
        score=lambda s, b, h, i, j: where(j % 3 == 0, s * 0.5, s) + table[h, i - j + 512],
    )
    return spec, Truth(lambda b, h, i, j: i // 16 >= j // 16, truth)


@_case
def _sigmoid(z: Sizes) -> Case:
    spec = Attention(mask=causal(), score=lambda s, b, h, i, j: sigmoid(s - 1.0), normalizer="none")
    return spec, Truth(
        lambda b, h, i, j: j <= i + z.diagonal, lambda s, b, h, i, j: torch.sigmoid(s - 1), softmax=False
    )
