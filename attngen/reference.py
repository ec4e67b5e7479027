"""Attention by its formula, over full grids: what kernels are tested against. Slow, and differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.evaluate import evaluate
from attngen.spec import Attention, Normalizer


def reference(
    spec: Attention, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor | None]:
    """Output [B, Hq, Sq, Dv] and lse [B, Hq, Sq] in `dtype`; the lse is None for an unnormalized variant."""
    group = q.size(1) // max(k.size(1), 1)
    q = q.to(dtype)
    k, v = (t.to(dtype).repeat_interleave(group, dim=1) for t in (k, v))
    mask, env = visibility(spec, q, k)
    # a key that no query sees takes no part, whatever is stored there (also NaN, also in the gradient)
    seen = mask.any(dim=2)[..., None]
    k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
    logits = q @ k.transpose(2, 3) * spec.scale_for(q.size(3))
    variant = spec.variant
    score = evaluate(variant.score, {**env, "score": logits}, spec.tensors, dtype).expand(logits.shape)
    if variant.normalizer is Normalizer.NONE:
        return _apply(torch.where(mask, score, 0.0), v, mask), None
    score = torch.where(mask, score, float("-inf"))
    return _softmax(score, v, spec.sink)


def visibility(spec: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, dict[str, Tensor | int]]:
    """The mask over the whole grid, and the values of the index variables."""
    shape = (q.size(0), q.size(1), q.size(2), k.size(2))
    env: dict[str, Tensor | int] = {"seqlen_q": shape[2], "seqlen_k": shape[3]}
    for at, name in enumerate("bhij"):
        env[name] = torch.arange(shape[at], device=q.device).view([-1 if d == at else 1 for d in range(4)])
    return evaluate(spec.variant.mask, env, spec.tensors).expand(shape), env


def _softmax(score: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weighted mean of v and lse; a row without a finite score has the output 0."""
    low = score.new_full((*score.shape[:3], 1), float("-inf"))
    extra = low if sink is None else sink.to(score.dtype).view(1, -1, 1, 1).expand(low.shape)
    top = torch.cat([score, extra], dim=3).amax(dim=3, keepdim=True).detach()
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf minus -inf has no value
    weight = torch.exp(score - top)
    total = weight.sum(dim=3, keepdim=True) + torch.exp(extra - top)
    safe = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, float("-inf"), top + torch.log(safe))
    return _apply(weight / safe, v, score > float("-inf")), lse.squeeze(3)


def _apply(weight: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weight @ v, in which a value that a query does not see has no part, even if it is not finite."""
    finite = v.isfinite()
    out = weight @ torch.where(finite, v, 0.0)
    rest = torch.where(finite, 0.0, v)
    for j in (~finite).any(dim=3).any(dim=1).any(dim=0).nonzero().flatten().tolist():
        out = out + torch.where(visible[..., j, None], weight[..., j, None] * rest[:, :, j, None], 0.0)
    return out
