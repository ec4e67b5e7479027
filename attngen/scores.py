"""Score modifications: what is done to the scaled logit before the mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import torch

from attngen import expr as ex
from attngen.errors import SpecError
from attngen.expr import B, DType, Expr, H, I, J, Op, const, make
from attngen.masks import DIAGONAL
from attngen.naming import callable_name, shown
from attngen.shared import shared
from attngen.trace import Axis, ShapeRule, Tracer

ScoreLike = Union["Score", Callable[..., Any]]


class Score(ABC):
    """A change of the scaled logit."""

    @abstractmethod
    def trace(self, tracer: Tracer, score: Expr) -> Expr:
        """The new logit from the old."""

    @abstractmethod
    def __str__(self) -> str:
        """The description used in names, reports and banners."""

    @property
    def plain(self) -> bool:
        """Whether it holds neither tensors nor functions."""
        return False


@dataclass(frozen=True, eq=False)
class ScoreFunction(Score):
    """A user's callable (s, b, h, i, j[, seqlen_q, seqlen_k]) -> float."""

    fn: Callable[..., Any]

    def trace(self, tracer: Tracer, score: Expr) -> Expr:
        result = tracer.call(self.fn, (score, B, H, I, J), "score")
        if result.dtype is DType.BOOL:
            raise tracer.fail(
                f"the score function `{callable_name(self.fn)}` returned a bool. It must return the new "
                "score: a condition belongs into `mask=`, or write `where(cond, s, -inf)`",
                self.fn,
            )
        return ex.to_f32(result)

    def __str__(self) -> str:
        return callable_name(self.fn)


# ---- scores ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Softcap(Score):
    cap: float
    approximate: bool = False

    @property
    def plain(self) -> bool:
        return True

    def trace(self, tracer: Tracer, score: Expr) -> Expr:
        cap = const(self.cap)
        return ex.mul(cap, make(Op.TANH_APPROX if self.approximate else Op.TANH, make(Op.DIV, score, cap)))

    def __str__(self) -> str:
        return f"softcap({self.cap:g}{', approximate' if self.approximate else ''})"


@dataclass(frozen=True, eq=False)
class Alibi(Score):
    slopes: torch.Tensor

    def trace(self, tracer: Tracer, score: Expr) -> Expr:
        slope = tracer.load(self.slopes, (H,), "slopes")
        tracer.rules.append(
            ShapeRule(tracer.capture(self.slopes).name, (Axis.HQ,), False, "one slope for each query head")
        )
        return ex.sub(score, ex.mul(slope, make(Op.ABS, ex.sub(DIAGONAL, J))))

    def __str__(self) -> str:
        return "alibi"


@dataclass(frozen=True, eq=False)
class Bias(Score):
    tensor: torch.Tensor

    def trace(self, tracer: Tracer, score: Expr) -> Expr:
        rank = self.tensor.dim()
        # a dimension of size 1 gets the index 0: the kernel then knows that the element is shared along it
        index = (
            const(0) if n == 1 else at
            for n, at in zip(self.tensor.shape, (B, H, I, J)[4 - rank :], strict=True)
        )
        element = tracer.load(self.tensor, tuple(index), "bias")
        axes = (Axis.B, Axis.HQ, Axis.SQ, Axis.SK)[4 - rank :]
        hint = "it must broadcast to [B, Hq, Sq, Sk]"
        tracer.rules.append(ShapeRule(tracer.capture(self.tensor).name, axes, True, hint))
        return ex.where(element, score, ex.NEG_INF) if element.dtype is DType.BOOL else ex.add(score, element)

    def __str__(self) -> str:
        return "bias"


def softcap(cap: float, approximate: bool = False) -> Score:
    """cap * tanh(score / cap).

    `approximate`: with the hardware's tanh, whose relative error is 2^-11: up to a third faster where the exponentials
    bind, and lse is off by up to cap * 2^-11. Scores rounded to bf16, as eager code has them, are off by 2^-9."""
    low, high = ex.FLOAT_RANGE
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not low <= cap <= high:
        raise SpecError(
            f"softcap: cap={shown(cap)}. Allowed: a finite number > 0, in float32's range of {low:.3g} to {high:.3g}; "
            "to have no cap, leave softcap out"
        )
    if not isinstance(approximate, bool):
        raise SpecError(f"softcap: approximate={shown(approximate)}. Allowed: True or False")
    return shared(Softcap, float(cap), approximate)


def alibi(slopes: torch.Tensor) -> Score:
    """score - slopes[h] * distance to the diagonal; `slopes` is a float tensor of shape [Hq]."""
    if not isinstance(slopes, torch.Tensor) or not slopes.is_floating_point() or slopes.dim() != 1:
        raise SpecError(f"alibi: slopes is {shown(slopes)}. Allowed: a float tensor of shape [Hq]")
    return Alibi(slopes)


def bias(tensor: torch.Tensor) -> Score:
    """score + tensor, which broadcasts to [B, Hq, Sq, Sk]; a bool tensor keeps the score where it is true."""
    ok = isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.dtype is torch.bool)
    if not ok or not 2 <= tensor.dim() <= 4:
        raise SpecError(f"bias: tensor is {shown(tensor)}. Allowed: a float or bool tensor of rank 2 to 4")
    return Bias(tensor)


def as_score(score: object) -> Score:
    """A score modification from what a user may give as one."""
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise SpecError(
            f"score is {shown(score)}. Allowed: softcap(), alibi(), bias(tensor), a callable (s, b, h, i, "
            "j), or a list of these"
        )
    return ScoreFunction(score)
