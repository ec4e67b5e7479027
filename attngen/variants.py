"""The library of masks and score modifications, in one place, and the checks that tell them apart."""

from __future__ import annotations

from attngen.errors import SpecError
from attngen.masks import (
    Mask,
    MaskLike,
    as_mask,
    causal,
    check_nesting,
    document,
    full,
    prefix_lm,
    sliding_window,
    window,
)  # fmt: skip
from attngen.scores import Score, ScoreLike, alibi, as_score, bias, softcap

__all__ = ["Mask", "MaskLike", "Score", "ScoreLike", "alibi", "bias", "causal", "document", "full"]
__all__ += ["mask_of", "prefix_lm", "scores_of", "sliding_window", "softcap", "window"]

_FACTORIES = (full, causal, window, sliding_window, prefix_lm, document, softcap, alibi, bias)


def mask_of(mask: object) -> Mask | None:
    """What a user gave as `mask=`."""
    if mask is None:
        return None
    if isinstance(mask, Mask):
        check_nesting(mask)
        return mask
    _check_called("mask", mask)
    if isinstance(mask, Score):
        raise SpecError(f"mask={mask} is a score modification. Give it as `score=`")
    return as_mask(mask)


def scores_of(score: object) -> tuple[Score, ...]:
    """What a user gave as `score=`: one or a list, in the order of application."""
    if score is None:
        return ()
    listed = score if isinstance(score, (list, tuple)) else (score,)
    return tuple([one if isinstance(one, Score) else _score_of(one) for one in listed])


def _score_of(one: object) -> Score:
    _check_called("score", one)
    if isinstance(one, Mask):
        raise SpecError(f"score={one} is a mask. Give it as `mask=`")
    return as_score(one)


def _check_called(argument: str, value: object) -> None:
    for factory in _FACTORIES:
        if value is factory:
            name = factory.__name__
            raise SpecError(
                f"{argument}={name} is the function that makes one. Call it: `{argument}={name}(...)`"
            )
