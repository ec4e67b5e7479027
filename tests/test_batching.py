"""attngen under torch.vmap, and inside transformations that it does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import qkv
from torch import Tensor

import attngen
from attngen.errors import GradientError, SignatureError

SPEC = attngen.Attention(mask=attngen.causal(), score=attngen.alibi(torch.tensor([0.5, 0.25])), return_lse=True)


def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = attngen.attention(q, k, v, spec=SPEC)
    return out, lse


def stacked() -> list[Tensor]:
    return [torch.stack(three) for three in zip(*(qkv(sq=17, sk=17, seed=n) for n in range(3)), strict=True)]


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (2, 1, None)], ids=str)
def test_vmap_is_a_larger_batch(dims: tuple[int | None, ...]) -> None:
    plain = stacked()
    given = [t[0] if d is None else t.movedim(0, d) for t, d in zip(plain, dims, strict=True)]
    out, lse = torch.vmap(call, in_dims=dims)(*given)
    for n in range(3):
        each = [t[0] if d is None else t[n] for t, d in zip(plain, dims, strict=True)]
        want = call(*each)
        assert torch.equal(out[n], want[0]) and torch.equal(lse[n], want[1])


def test_gradients_through_vmap() -> None:
    tensors = [t.requires_grad_() for t in stacked()]
    out, _ = torch.vmap(call)(*tensors)
    got = torch.autograd.grad(out.float().square().sum(), tensors)
    for n in range(3):
        each = [t[n].detach().requires_grad_() for t in tensors]
        want = torch.autograd.grad(call(*each)[0].float().square().sum(), each)
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(one[n], other, atol=1e-2, rtol=2e-2)


def test_many_output_gradients_at_once() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(sq=17, sk=17))
    out, _ = call(q, k, v)
    seeds = torch.randn(3, *out.shape).to(out.dtype)
    got = torch.vmap(lambda seed: torch.autograd.grad(out, [q, k, v], seed, retain_graph=True))(seeds)
    for n in range(3):
        want = torch.autograd.grad(out, [q, k, v], seeds[n], retain_graph=True)
        assert all(torch.equal(one[n], other) for one, other in zip(got, want, strict=True))


TENSORS = qkv(sq=17, sk=17)


def of_table(table: Tensor) -> Any:
    return attngen.attention(*TENSORS, score=lambda s, b, h, i, j: s + table[h])


def of_batch(q: Tensor) -> Any:
    lengths = torch.tensor([9])
    return attngen.attention(q, q, q, mask=lambda b, h, i, j: j < lengths[b])


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: torch.vmap(of_table)(torch.randn(3, 2)), "over a captured tensor or a sink"),
        (lambda: torch.vmap(of_batch)(stacked()[0]), "reads the batch index b"),
    ],
)
def test_what_vmap_cannot_do(run: Callable[[], object], words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        run()


def test_gradients_of_captured_tensors_are_not_batched() -> None:
    table = torch.randn(2, requires_grad=True)
    out = of_table(table)
    with pytest.raises(GradientError, match="gradients of a captured tensor"):
        torch.vmap(lambda seed: torch.autograd.grad(out, table, seed))(torch.randn(3, *out.shape).to(out.dtype))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_functional_gradients_are_refused(transform: Callable[..., Any]) -> None:
    q, k, v = qkv(sq=9, sk=9)
    with pytest.raises(GradientError, match=r"inside a transformation of torch\.func.*torch\.autograd\.grad"):
        transform(lambda q: call(q, k, v)[0].float().sum())(q)
