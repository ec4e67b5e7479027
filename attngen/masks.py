"""Masks: which keys a query sees. They compose with `&`, `|`, `~`, also with plain callables.

All positions are local to the sequence; with different lengths of queries and keys the last query lies on
the last key (bottom-right)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Union

import torch

from attngen import expr as ex
from attngen.errors import SpecError
from attngen.expr import B, DType, Expr, H, I, J, Op, const, make
from attngen.naming import callable_name, shown
from attngen.shared import shared
from attngen.trace import Axis, ShapeRule, Tracer

INT_MAX = 2**31 - 1  # of the integers in a kernel

MaskLike = Union["Mask", Callable[..., Any]]

# the key position that lies on the diagonal of query i
DIAGONAL = ex.add(I, ex.sub(ex.SEQLEN_K, ex.SEQLEN_Q))


class Mask(ABC):
    """Which keys a query sees."""

    @abstractmethod
    def trace(self, tracer: Tracer) -> Expr:
        """The condition as a boolean expression."""

    @abstractmethod
    def __str__(self) -> str:
        """The description used in names, reports and banners."""

    @property
    def plain(self) -> bool:
        """Whether it holds neither tensors nor functions."""
        return False

    def __and__(self, other: MaskLike) -> Mask:
        return shared(Both, self, as_mask(other))

    def __rand__(self, other: MaskLike) -> Mask:
        return shared(Both, as_mask(other), self)

    def __or__(self, other: MaskLike) -> Mask:
        return shared(Either, self, as_mask(other))

    def __ror__(self, other: MaskLike) -> Mask:
        return shared(Either, as_mask(other), self)

    def __invert__(self) -> Mask:
        return shared(Not, self)

    def __bool__(self) -> bool:
        raise SpecError(
            f"the mask `{self}` has no truth value, so `and`, `or` and `not` would drop a part of it. "
            "Write `&`, `|`, `~`"
        )


def as_mask(mask: object) -> Mask:
    """A mask from what a user may give as one."""
    if isinstance(mask, Mask):
        return mask
    if not callable(mask):
        more = (
            "a list: combine with `&`"
            if isinstance(mask, (list, tuple))
            else "a tensor: `score=bias(tensor)`"
        )
        raise SpecError(
            f"mask is {shown(mask)}. Allowed: a mask such as causal(), a callable (b, h, i, j) -> bool "
            f"({more})"
        )
    return MaskFunction(mask)


# ---- composition -------------------------------------------------------------------------------------------


def _within(mask: Mask, *weaker: type[Mask]) -> str:
    return f"({mask})" if isinstance(mask, weaker) else str(mask)


@dataclass(frozen=True, eq=False)
class Both(Mask):
    left: Mask
    right: Mask

    @cached_property  # asked of each when it is made: no recursion
    def plain(self) -> bool:
        return self.left.plain and self.right.plain

    def trace(self, tracer: Tracer) -> Expr:
        return ex.conj(self.left.trace(tracer), self.right.trace(tracer))

    def __str__(self) -> str:
        return f"{_within(self.left, Either)} & {_within(self.right, Either)}"


@dataclass(frozen=True, eq=False)
class Either(Mask):
    left: Mask
    right: Mask

    @cached_property  # asked of each when it is made: no recursion
    def plain(self) -> bool:
        return self.left.plain and self.right.plain

    def trace(self, tracer: Tracer) -> Expr:
        a, b = self.left.trace(tracer), self.right.trace(tracer)
        return ex.TRUE if ex.TRUE in (a, b) else make(Op.OR, a, b)

    def __str__(self) -> str:
        return f"{self.left} | {self.right}"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    mask: Mask

    @cached_property
    def plain(self) -> bool:
        return self.mask.plain

    def trace(self, tracer: Tracer) -> Expr:
        inner = self.mask.trace(tracer)
        return const(not inner.value) if inner.op is Op.CONST else make(Op.NOT, inner)

    def __str__(self) -> str:
        return f"~{_within(self.mask, Both, Either)}"


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """A user's callable (b, h, i, j[, seqlen_q, seqlen_k]) -> bool."""

    fn: Callable[..., Any]

    def trace(self, tracer: Tracer) -> Expr:
        result = tracer.call(self.fn, (B, H, I, J), "mask")
        if result.dtype is not DType.BOOL:
            raise tracer.fail(
                f"the mask function `{callable_name(self.fn)}` returned {result.dtype.value}. It must "
                "return a bool, true where the query sees the key: compare, as in `j <= i`; a number that "
                "is added to the score belongs into `score=`",
                self.fn,
            )
        return result

    def __str__(self) -> str:
        return callable_name(self.fn)


MAX_NESTED = 100  # what a mask becomes is walked by recursion, and this many masks are slow long before


def _inside(mask: Mask) -> list[Mask]:
    if isinstance(mask, Not):
        return [mask.mask]
    return [mask.left, mask.right] if isinstance(mask, (Both, Either)) else []


def check_nesting(mask: Mask) -> None:
    """A chain such as `a | b | c` nests once an operator; a long one is refused before Python's stack ends."""
    level = _inside(mask)
    for _ in range(MAX_NESTED - 1):
        if not level:  # nearly always at once
            return
        level = [inner for m in level for inner in _inside(m)]
    if level:
        raise SpecError(
            f"mask nests more than {MAX_NESTED} masks with `&`, `|`, `~`. Allowed: {MAX_NESTED}; write one callable "
            "that reads a captured tensor, as in `lambda b, h, i, j: table[i, j]`"
        )


# ---- masks -------------------------------------------------------------------------------------------------


class Align(Enum):
    BOTTOM_RIGHT = "bottom_right"
    TOP_LEFT = "top_left"


_ALIGNED = {a.value: a for a in Align}  # torch.compile cannot iterate over an Enum
_ALIGNS = tuple(_ALIGNED)


@dataclass(frozen=True, eq=False)
class Full(Mask):
    @property
    def plain(self) -> bool:
        return True

    def trace(self, tracer: Tracer) -> Expr:
        return ex.TRUE

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    align: Align

    @property
    def plain(self) -> bool:
        return True

    def trace(self, tracer: Tracer) -> Expr:
        return make(Op.LE, J, DIAGONAL if self.align is Align.BOTTOM_RIGHT else I)

    def __str__(self) -> str:
        return "causal" if self.align is Align.BOTTOM_RIGHT else "causal(top_left)"


@dataclass(frozen=True, eq=False)
class Window(Mask):
    left: int
    right: int
    sliding: bool  # how it was written

    @property
    def plain(self) -> bool:
        return True

    def trace(self, tracer: Tracer) -> Expr:
        low, high = ex.TRUE, ex.TRUE
        if self.left >= 0:
            low = make(Op.GE, J, ex.sub(DIAGONAL, const(self.left)) if self.left else DIAGONAL)
        if self.right >= 0:
            high = make(Op.LE, J, ex.add(DIAGONAL, const(self.right)) if self.right else DIAGONAL)
        return ex.conj(low, high)

    def __str__(self) -> str:
        return f"sliding_window({self.left + 1})" if self.sliding else f"window({self.left}, {self.right})"


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    length: int | torch.Tensor

    @property
    def plain(self) -> bool:
        return isinstance(self.length, int)

    def trace(self, tracer: Tracer) -> Expr:
        if isinstance(self.length, int):
            end = const(self.length)
        else:
            end = tracer.load(self.length, (B,)[: self.length.dim()], "prefix")
            if self.length.dim():
                hint = "one prefix length for each batch entry"
                tracer.rules.append(ShapeRule(tracer.capture(self.length).name, (Axis.B,), False, hint))
        return make(Op.OR, make(Op.LT, J, end), make(Op.LE, J, DIAGONAL))

    def __str__(self) -> str:
        return f"prefix_lm({self.length})" if isinstance(self.length, int) else "prefix_lm"


@dataclass(frozen=True, eq=False)
class Document(Mask):
    q_ids: torch.Tensor
    k_ids: torch.Tensor

    def trace(self, tracer: Tracer) -> Expr:
        of_q = self._id(tracer, self.q_ids, "doc_ids", I, Axis.SQ)
        of_k = self._id(tracer, self.k_ids, "doc_ids_k", J, Axis.SK)
        return make(Op.EQ, of_q, of_k)

    @staticmethod
    def _id(tracer: Tracer, ids: torch.Tensor, name: str, at: Expr, axis: Axis) -> Expr:
        element = tracer.load(ids, (B, at)[2 - ids.dim() :], name)
        hint = "one document id for each position; with different lengths write document(q_ids, k_ids)"
        tracer.rules.append(ShapeRule(tracer.capture(ids).name, (Axis.B, axis)[2 - ids.dim() :], False, hint))
        return element

    def __str__(self) -> str:
        return "document"


def full() -> Mask:
    """Every query sees every key."""
    return shared(Full)


def causal(align: str = "bottom_right") -> Mask:
    """A query sees the keys up to its own position, counted from the last key or (`top_left`) the first."""
    if align not in _ALIGNS:
        raise SpecError(f"causal: align={align!r} is not known. Allowed: {', '.join(map(repr, _ALIGNS))}")
    return shared(Causal, _ALIGNED[align])


def window(left: int, right: int) -> Mask:
    """`left` keys before and `right` keys after the diagonal, and the one on it; -1 is no limit."""
    for name, value in (("left", left), ("right", right)):
        if not _is_int(value) or not -1 <= value <= INT_MAX:
            raise SpecError(
                f"window: {name}={shown(value)}. Allowed: an int >= 0, at most {INT_MAX}, or -1 for no limit"
            )
    return shared(Window, left, right, False)


def sliding_window(size: int) -> Mask:
    """The last `size` keys up to the diagonal, counting the one on it."""
    if not _is_int(size) or not 1 <= size <= INT_MAX:
        raise SpecError(
            f"sliding_window: size={shown(size)}. Allowed: an int >= 1, at most {INT_MAX} (it counts the query's "
            "own position); to have no limit, write causal()"
        )
    return shared(Window, size - 1, 0, True)


def prefix_lm(length: int | torch.Tensor) -> Mask:
    """Causal, and every query sees the first `length` keys; a tensor [B] gives each batch entry its own."""
    if isinstance(length, torch.Tensor):
        if _is_float_or_bool(length) or length.dim() > 1:
            raise SpecError(
                f"prefix_lm: length is {shown(length)}. Allowed: an int, an integer tensor of shape [] or [B]"
            )
    elif not _is_int(length) or not 0 <= length <= INT_MAX:
        raise SpecError(
            f"prefix_lm: length={shown(length)}. Allowed: an int >= 0, at most {INT_MAX}, an integer tensor of "
            "shape [] or [B]"
        )
    return PrefixLM(length) if isinstance(length, torch.Tensor) else shared(PrefixLM, length)


def document(ids: torch.Tensor, k_ids: torch.Tensor | None = None) -> Mask:
    """A query sees the keys of its own document. `ids` of shape [S] or [B, S]; `k_ids` when the keys have
    their own.

    Ids are compared as 32-bit integers: an int64 tensor is clamped to that range, so that larger ids are one document.
    Number large ids first: `torch.unique(ids, return_inverse=True)[1]`."""
    for name, value in (("ids", ids), ("k_ids", ids if k_ids is None else k_ids)):
        if not isinstance(value, torch.Tensor) or _is_float_or_bool(value) or value.dim() not in (1, 2):
            raise SpecError(
                f"document: {name} is {shown(value)}. Allowed: an integer tensor of shape [S] or [B, S]"
            )
    return Document(ids, ids if k_ids is None else k_ids)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float_or_bool(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool
