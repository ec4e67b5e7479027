"""What torch.vmap makes of attngen's operators: its dimension becomes a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.errors import GradientError, SignatureError

Dims = Sequence[Any]
ReadsBatch = Callable[[str], bool]  # whether the description behind a key reads the index b


def forward_rule(
    reads_batch: ReadsBatch, info: Any, in_dims: Dims, q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor],
    key: str, scale: float,
) -> tuple[tuple[Tensor, Tensor], tuple[int | None, int | None]]:  # fmt: skip
    _check(reads_batch, key, in_dims[3])
    n, batch = info.batch_size, _batch(q, in_dims[0])
    q, k, v = (folded(t, d, n) for t, d in zip((q, k, v), in_dims[:3], strict=True))
    out, lse = torch.ops.attngen.forward.default(q, k, v, captures, key, scale)
    if lse.dim() != 3:  # a variant without a sum
        return (out.unflatten(0, (n, batch)), lse), (0, None)
    return (out.unflatten(0, (n, batch)), lse.unflatten(0, (n, batch))), (0, 0)


def backward_rule(
    reads_batch: ReadsBatch, info: Any, in_dims: Dims, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor | None, dlse: Tensor | None, captures: list[Tensor], needed: list[bool], key: str, scale: float,
) -> tuple[list[Tensor], list[int]]:  # fmt: skip
    _check(reads_batch, key, in_dims[7])
    if any(needed[3:]):
        raise GradientError(
            "torch.vmap over gradients of a captured tensor or a sink, which would be one for each element. Allowed: "
            "gradients of q, k and v; take the others without vmap, or detach them"
        )
    n, batch = info.batch_size, _batch(q, in_dims[0])
    given = [
        t if t is None or (t is lse and t.dim() < 3) else folded(t, d, n)
        for t, d in zip((q, k, v, out, lse, dout, dlse), in_dims[:7], strict=True)
    ]
    found = torch.ops.attngen.backward.default(*given, captures, needed, key, scale)
    return [t.unflatten(0, (n, batch)) for t in found], [0] * len(found)


def _batch(q: Tensor, dim: int | None) -> int:
    return (q if dim is None else q.movedim(dim, 0)[0]).size(0)


def folded(t: Tensor, dim: int | None, n: int) -> Tensor:
    """The dimension of vmap, of size `n`, in front of the batch and one with it."""
    whole = (t.expand(n, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)
    return whole if whole.stride(-1) == 1 else whole.contiguous()


def _check(reads_batch: ReadsBatch, key: str, captured: Any) -> None:
    if captured is not None and any(d is not None for d in captured):
        raise SignatureError(
            "torch.vmap over a captured tensor or a sink. Allowed: over q, k and v; give captured tensors a batch "
            "dimension that the function reads with b, and call without vmap"
        )
    if reads_batch(key):
        raise SignatureError(
            "torch.vmap over a description that reads the batch index b, which would count other elements. Allowed: "
            "descriptions without b; call without vmap, with all elements in one batch"
        )
