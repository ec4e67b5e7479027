"""The description of a call. One whose parts hold neither tensors nor functions is made and checked once: its masks and
scores are then the same objects in every call (attngen.shared), and with it what `attngen.prepare` keeps in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attngen.spec import Attention
from attngen.variants import Mask, MaskLike, Score, ScoreLike

KEPT = 1024
_made: dict[tuple[object, ...], Attention] = {}


def described(
    mask: MaskLike | None,
    score: ScoreLike | Sequence[ScoreLike] | None,
    scale: float | None,
    sink: Tensor | None,
    return_lse: bool,
    normalizer: str,
) -> Attention:
    """`Attention(...)` of the same arguments."""
    scores = tuple(score) if isinstance(score, (list, tuple)) else () if score is None else (score,)
    if (
        torch.compiler.is_dynamo_compiling()
        or sink is not None
        or not (mask is None or (isinstance(mask, Mask) and mask.plain))
        or (scores and not all(isinstance(s, Score) and s.plain for s in scores))
        # arguments of other types may be equal to these (1 to True, -0.0 to 0.0), and have to be looked at
        or not (scale is None or (type(scale) is float and scale > 0))
        or type(return_lse) is not bool
        or type(normalizer) is not str
    ):
        return Attention(mask, score, scale, sink, return_lse, normalizer)
    at = mask, scores, scale, return_lse, normalizer
    found = _made.get(at)
    if found is None:
        if len(_made) >= KEPT:
            _made.clear()
        found = _made[at] = Attention(mask, score, scale, sink, return_lse, normalizer)
    return found
