"""What a kernel is compiled for, taken from the tensors of a call, and the checks of these tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch

from attngen.errors import Location, SignatureError
from attngen.spec import Variant
from attngen.trace import ShapeRule

HEAD_DIM_STEP, HEAD_DIM_MAX = 2, 256
VECTOR_BYTES, ELEMENT_BYTES = 16, 2
CP_ASYNC_BYTES = 4  # the smallest unit of cp.async
PAIR_BYTES = 4  # of two elements, as head dims are even
ALIGNMENTS = (2, 4, 8, 16)  # bytes of what copies a row: an element, cp.async, or the copy engine's demand


class IoType(Enum):
    """Storage type of q, k, v and of the output."""

    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float16 if self is IoType.FP16 else torch.bfloat16

    @property
    def c_name(self) -> str:
        """The spelling in generated text."""
        return self.value


_IO_TYPES = {t.torch_dtype: t for t in IoType}


@dataclass(frozen=True)
class Signature:
    """Compile-time properties of a call. Batch, heads, lengths and other strides are run-time arguments."""

    dtype: IoType
    head_dim_qk: int
    head_dim_v: int
    alignment: int = VECTOR_BYTES  # bytes that every row of q, k and v starts on and is a multiple of
    # captured tensors whose last dimension is not contiguous; their arguments say so
    strided: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("head_dim_qk", "head_dim_v"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SignatureError(
                    f"{name}={value!r} is a {type(value).__name__}. Allowed: an int, {HEAD_DIM_STEP} to {HEAD_DIM_MAX}"
                )
            if value % HEAD_DIM_STEP or not HEAD_DIM_STEP <= value <= HEAD_DIM_MAX:
                raise SignatureError(
                    f"{name}={value} is not supported. Allowed: multiples of {HEAD_DIM_STEP} from "
                    f"{HEAD_DIM_STEP} to {HEAD_DIM_MAX}. {_pad_hint(name, value)}"
                )
        largest = row_alignment(self.head_dim_qk, self.head_dim_v)
        allowed = [a for a in ALIGNMENTS if a <= largest]
        if self.alignment not in allowed:
            rows = "" if largest == VECTOR_BYTES else f" for rows of {self.head_dim_qk} and {self.head_dim_v} elements"
            raise SignatureError(
                f"alignment={self.alignment} is not supported{rows}. Allowed: {', '.join(map(str, allowed))}"
            )


def row_alignment(head_dim_qk: int, head_dim_v: int) -> int:
    """The largest alignment of rows of these head dims: they are copied in whole units of it."""
    every = VECTOR_BYTES | head_dim_qk * ELEMENT_BYTES | head_dim_v * ELEMENT_BYTES
    return every & -every


def store_bytes(head_dim: int) -> int:
    """Of a store to rows of this head dim, which lie one behind the other: a vector, or a pair of elements."""
    return VECTOR_BYTES if row_alignment(head_dim, head_dim) == VECTOR_BYTES else PAIR_BYTES


def signature_for(
    dtype: IoType, head_dim: int, head_dim_v: int | None = None, alignment: int | None = None,
    strided: tuple[str, ...] = (),
) -> Signature:  # fmt: skip
    """head_dim_v None: as of q and k; alignment None: the largest that rows may have."""
    dv = head_dim if head_dim_v is None else head_dim_v
    if alignment is None:  # wrong head dims are the signature's to refuse
        numbers = all(type(d) is int for d in (head_dim, dv))
        alignment = row_alignment(head_dim, dv) if numbers else VECTOR_BYTES
    return Signature(dtype, head_dim, dv, alignment, strided)


def _pad_hint(name: str, value: int) -> str:
    if value > HEAD_DIM_MAX or value < 1:
        return "Split the heads into smaller ones"
    up = -(-value // HEAD_DIM_STEP) * HEAD_DIM_STEP
    if name == "head_dim_v":
        return f"Pad v with zeros to {up} and cut the output"
    return f"Pad q and k with zeros to {up} and give scale=1/sqrt({value})"


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call; any of them may be 0."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int


class Described(Protocol):
    """A description with its captured tensors, as `Attention` is one."""

    @property
    def variant(self) -> Variant: ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def shape_rules(self) -> tuple[ShapeRule, ...]: ...


def alignment_of(*tensors: torch.Tensor) -> int:
    """The bytes that every row starts on and is a multiple of, at most a vector's. The stride of a dimension of size 1
    is never used."""
    every = VECTOR_BYTES
    for t in tensors:
        every |= t.data_ptr() | t.size(-1) * t.element_size()
        for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True):
            if n > 1:
                every |= s * t.element_size()
    return every & -every  # the lowest bit of all


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Neighbours in the last dimension are neighbours in memory."""
    return not shape or shape[-1] <= 1 or strides[-1] == 1


def strided(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Captured tensors whose last dimension is not contiguous."""
    return tuple(sorted(name for name, t in tensors.items() if not is_dense(t.shape, t.stride())))


def signature_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captures: Mapping[str, torch.Tensor] | None = None
) -> Signature:
    """The signature of checked tensors [batch, heads, seq, head_dim] and of those that a description captures."""
    dtype = _IO_TYPES.get(q.dtype)
    if dtype is None:
        raise SignatureError(f"q has dtype {q.dtype}. Allowed: float16, bfloat16. Convert q, k and v")
    return Signature(dtype, q.size(-1), v.size(-1), alignment_of(q, k, v), strided(captures or {}))


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Described) -> Shapes:
    """Check the tensors of a call against each other and against the tensors of the spec."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise SignatureError(
                f"{name} has the shape {list(t.shape)}. Allowed: 4 dimensions [batch, heads, seq, head_dim]"
            )
        if t.dtype not in _IO_TYPES:
            autocast = torch.is_autocast_enabled(t.device.type)
            more = ": autocast does not convert what attngen is given" if autocast else ""
            raise SignatureError(
                f"{name} has dtype {t.dtype}. Allowed: float16, bfloat16. Convert q, k and v{more}"
            )
        if t.stride(-1) != 1 and t.size(-1) > 1 and t.numel():
            raise SignatureError(
                f"the last dimension of {name} has stride {t.stride(-1)}. Allowed: 1 (the others are free). "
                f"Call {name}.contiguous()"
            )
    for name, t in (("k", k), ("v", v)):
        for what, own, other in (
            ("dtype", t.dtype, q.dtype),
            ("device", t.device, q.device),
            ("batch", t.size(0), q.size(0)),
        ):
            if own != other:
                raise SignatureError(f"{name} has {what} {own}, q has {other}. They must be equal")
    if k.size(3) != q.size(3):
        raise SignatureError(
            f"k has head_dim {k.size(3)}, q has {q.size(3)}. They must be equal (that of v may differ)"
        )
    for what, dim in (("heads", 1), ("keys", 2)):
        if k.size(dim) != v.size(dim):
            raise SignatureError(f"v has {v.size(dim)} {what}, k has {k.size(dim)}. They must be equal")
    shapes = Shapes(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2))
    if shapes.Hq and (not shapes.Hkv or shapes.Hq % shapes.Hkv):
        raise SignatureError(
            f"q has {shapes.Hq} heads, k and v have {shapes.Hkv}. Allowed: a number of key heads that "
            "divides the query heads"
        )
    _check_bound(q, shapes, spec)
    return shapes


def _check_bound(q: torch.Tensor, shapes: Shapes, spec: Described) -> None:
    """Devices and shapes of the captured tensors and the sink."""
    for name, t in spec.tensors.items():
        if t.device != q.device:
            where = _at(spec.variant.location_of(name))
            raise SignatureError(
                f"the tensor `{name}` is on {t.device}, q is on {q.device}. Move it: "
                f"{name}.to(q.device){where}"
            )
    sink = spec.tensors.get("sink")
    if sink is not None and sink.size(0) != shapes.Hq:
        raise SignatureError(
            f"sink has the shape {list(sink.shape)}. Allowed: [{shapes.Hq}], one logit a query head"
        )
    for rule in spec.shape_rules:
        shape = spec.tensors[rule.capture].shape
        want: list[int] = [getattr(shapes, axis.value) for axis in rule.axes]
        if any(n != w and not (rule.broadcast and n == 1) for n, w in zip(shape, want, strict=True)):
            axes = ", ".join(f"{axis.value}={w}" for axis, w in zip(rule.axes, want, strict=True))
            raise SignatureError(
                f"the tensor `{rule.capture}` has the shape {list(shape)}. Allowed: [{axes}]; {rule.hint}"
            )
    if all((shapes.B, shapes.Hq, shapes.Sq, shapes.Sk)):
        for name, t in spec.tensors.items():
            if not t.numel():  # an index is clamped into the tensor, which needs an element to end at
                raise SignatureError(
                    f"the tensor `{name}` has the shape {list(t.shape)}: no element. Allowed: sizes of at least 1. "
                    f"Give it one element, or leave out what reads it{_at(spec.variant.location_of(name))}"
                )


def _at(where: Location | None) -> str:
    return f"\n  at {where}\n    {where.text}" if where else ""
