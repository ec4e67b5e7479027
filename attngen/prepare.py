"""From a description to the arguments of the operator: a key, and the captured tensors in its order.

A description is split into its structure (classes, numbers, functions, types of tensors) and its tensors. The structure
alone decides the key, so the key is looked up by it; and torch.compile, which follows `split` through the user's
objects, sees every tensor as an input of the graph and guards every number.

torch.compile cannot follow how a user's function is traced. That happens beside it (`_constant`), and what the function
reads is read once more where it looks (`_guard`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen import ops
from attngen.masks import Mask, MaskFunction
from attngen.reads import Read, follow, reads
from attngen.scores import Score, ScoreFunction
from attngen.spec import Attention
from attngen.target import Target, target

Structure = tuple[Any, ...]

_TENSOR = "tensor"  # the head of a tensor's structure; that of a mask or score is its class


@dataclass(frozen=True)
class Prepared:
    """`order`: for each captured tensor its number among those that `split` found; from `len` of these on, among
    `functions`: the tensors that the user's functions read."""

    key: str
    order: tuple[int, ...]
    functions: tuple[Tensor, ...] = ()


_prepared: dict[Structure, Prepared] = {}


def prepare(spec: Attention, on: Target) -> tuple[str, list[Tensor]]:
    """The operator's key and captured tensors."""
    if torch.compiler.is_dynamo_compiling():
        tensors: list[Tensor] = []
        found = _constant(split(spec, tensors), on.name)
        _guard(spec)
    elif spec.is_traced:
        return _key(spec, on), list(spec.tensors.values())
    else:
        tensors = []
        structure = split(spec, tensors)
        if has_function(structure):  # what it reads may change between two calls
            return _key(spec, on), list(spec.tensors.values())
        at = (structure, on.name)
        found = _prepared.get(at) or _prepared.setdefault(at, build(structure, on))
    every = [*tensors, *found.functions]
    return found.key, [every[n] for n in found.order]


def _key(spec: Attention, on: Target) -> str:
    return ops.register(spec.variant, spec.shape_rules, on)


def split(spec: Attention, tensors: list[Tensor]) -> Structure:
    """The structure of a description; its tensors are appended to `tensors`."""
    mask = None if spec.mask is None else _split(spec.mask, tensors)
    scores = tuple([_split(s, tensors) for s in spec.scores])
    sink = None if spec.sink is None else _leaf(spec.sink, tensors)
    return mask, scores, sink, spec.normalizer.value, spec.scale is None or spec.scale > 0


def _split(node: Mask | Score, tensors: list[Tensor]) -> Structure:
    parts: list[Any] = [type(node)]
    for name in type(node).__match_args__:  # type: ignore[union-attr]  # the fields of a dataclass
        value = getattr(node, name)
        if isinstance(value, (Mask, Score)):
            parts.append(_split(value, tensors))
        elif isinstance(value, Tensor):
            parts.append(_leaf(value, tensors))
        else:
            parts.append(value)
    return tuple(parts)


def _leaf(tensor: Tensor, tensors: list[Tensor]) -> Structure:
    """Type of a tensor, and where its size is 1: a broadcast dimension is read differently."""
    for n, known in enumerate(tensors):  # noqa: B007 (read behind the loop)
        if known is tensor:
            break
    else:
        n = len(tensors)
        tensors.append(tensor)
    return _TENSOR, n, tensor.dtype, tuple([bool(size == 1) for size in tensor.shape])


def has_function(structure: Structure) -> bool:
    """Whether a user's function is part of it."""
    if structure and structure[0] == _TENSOR:
        return False
    return any(
        has_function(part) if isinstance(part, tuple) else callable(part) and not isinstance(part, type)
        for part in structure
    )


def build(structure: Structure, on: Target) -> Prepared:
    """Traces a description of this structure, with tensors of its types in place of the real ones."""
    stand_ins: dict[int, Tensor] = {}
    mask, scores, sink, normalizer, scale_positive = structure
    spec = Attention(
        mask=None if mask is None else _build(mask, stand_ins),
        score=[_build(s, stand_ins) for s in scores],
        scale=1.0 if scale_positive else -1.0,
        sink=None if sink is None else _stand_in(sink, stand_ins),
        normalizer=normalizer,
    )
    key = _key(spec, on)
    number = {id(t): n for n, t in stand_ins.items()}
    order, functions = [], list[Tensor]()
    for t in spec.tensors.values():
        order.append(number.get(id(t), len(stand_ins) + len(functions)))
        if id(t) not in number:
            functions.append(t)
    return Prepared(key, tuple(order), tuple(functions))


def _build(structure: Structure, stand_ins: dict[int, Tensor]) -> Any:
    cls: Callable[..., Any] = structure[0]
    return cls(*(_build_part(part, stand_ins) for part in structure[1:]))


def _build_part(part: Any, stand_ins: dict[int, Tensor]) -> Any:
    if not isinstance(part, tuple):
        return part
    return _stand_in(part, stand_ins) if part[0] == _TENSOR else _build(part, stand_ins)


def _stand_in(leaf: Structure, stand_ins: dict[int, Tensor]) -> Tensor:
    _, n, dtype, ones = leaf
    if n not in stand_ins:
        stand_ins[n] = torch.empty([1 if one else 2 for one in ones], dtype=dtype, device="meta")
    return stand_ins[n]


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _constant(structure: Structure, on: str) -> Prepared:
    """Called by torch.compile while it traces: with constants, so that the result is one."""
    return build(structure, target(on))


def _guard(node: Attention | Mask | Score) -> None:
    """Reads what the functions of a description read: when a number or a tensor is replaced, torch.compile starts anew."""
    if isinstance(node, Attention):
        for part in (node.mask, *node.scores):
            if part is not None:
                _guard(part)
    elif isinstance(node, (MaskFunction, ScoreFunction)):
        for read in _reads(node.fn):
            # in a function made inside the compiled one, torch.compile itself puts constants for its closure
            value = follow(node.fn, read.path)
            same = value is read.value if isinstance(value, Tensor) else value == read.value or value != value
            if not same:
                raise AssertionError("torch.compile and Python disagree on what a function reads")
    else:
        for name in type(node).__match_args__:
            part = getattr(node, name)
            if isinstance(part, (Mask, Score)):
                _guard(part)


@torch._dynamo.assume_constant_result
def _reads(fn: Callable[..., Any]) -> tuple[Read, ...]:
    return reads(fn)
