"""From a description to the arguments of the operator: a key, and the captured tensors in its order.

A description is split into its structure (classes, numbers, functions, types of tensors) and its tensors. The structure
alone decides the key, so the key is looked up by it; and torch.compile, which follows `split` through the user's
objects, sees every tensor as an input of the graph and guards every number.

torch.compile cannot follow how a user's function is traced. That happens beside it (`_constant`), and what the function
reads is read once more where it looks (`_read_again`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attngen import ops
from attngen.masks import Align, Mask, MaskFunction
from attngen.reads import Read, follow, reads
from attngen.scores import Score, ScoreFunction
from attngen.spec import Attention
from attngen.target import Target, target

Structure = tuple[Any, ...]
F = TypeVar("F", bound=Callable[..., Any])

_ATOMS = (bool, int, float, str, Align, type(None))  # known at once: the question whether it is a Mask takes longer
_TENSOR = "tensor"  # the head of a tensor's structure; that of a mask or score is its class


@dataclass(frozen=True)
class Prepared:
    """`order`: for each captured tensor its number among those of the description, those that `reads` finds in its
    functions, and `made`, which the functions make themselves."""

    key: str
    order: tuple[int, ...]
    made: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Reads:
    """What the functions of a description read, each by its number."""

    items: tuple[tuple[int, Read], ...]


_prepared: dict[Structure, Prepared] = {}


class Kept(NamedTuple):  # made in a fraction of a dataclass's time
    """What `prepare` gave for a description, as long as neither its parts nor the types of its tensors change."""

    key: str
    captures: list[Tensor]
    types: list[tuple[torch.dtype, torch.Size]]
    parts: tuple[object, ...]

    def fits(self, spec: Attention) -> bool:
        mask, scores, sink, normalizer, scale = self.parts
        return (
            spec.mask is mask and spec.scores is scores and spec.sink is sink and spec.normalizer is normalizer
            and spec.scale is scale and (not self.captures or _types(self.captures) == self.types)
        )  # fmt: skip


def prepare(spec: Attention, on: Target | None) -> tuple[str, list[Tensor]]:
    """The operator's key and captured tensors."""
    name = on.name if on else ""
    if torch.compiler.is_dynamo_compiling():
        tensors: list[Tensor] = []
        functions: list[Callable[..., Any]] = []
        structure = split(spec, tensors, functions)
        found = _constant(structure, name)
        _read_again(functions, tensors)
        return found.key, _in_order(tensors, found)
    kept = spec.kept.get(name)
    if not isinstance(kept, Kept) or not kept.fits(spec):
        key, captures = _prepare(spec, on)
        parts = (spec.mask, spec.scores, spec.sink, spec.normalizer, spec.scale)
        kept = spec.kept[name] = Kept(key, captures, _types(captures), parts)
    return kept.key, kept.captures


def _prepare(spec: Attention, on: Target | None) -> tuple[str, list[Tensor]]:
    if not spec.is_traced:
        tensors: list[Tensor] = []
        functions: list[Callable[..., Any]] = []
        structure = split(spec, tensors, functions)
        if not functions:  # what they read may change between two descriptions
            at = (structure, on.name if on else "")
            found = _prepared.get(at) or _prepared.setdefault(at, build(structure, on))
            return found.key, _in_order(tensors, found)
    return _key(spec, on), list(spec.tensors.values())


def _in_order(tensors: list[Tensor], found: Prepared) -> list[Tensor]:
    if not found.order:
        return []
    every = [*tensors, *found.made]
    return [every[n] for n in found.order]


def _types(tensors: list[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(t.dtype, t.shape) for t in tensors]


def _key(spec: Attention, on: Target | None) -> str:
    return ops.register(spec.variant, spec.shape_rules, on)


def split(spec: Attention, tensors: list[Tensor], functions: list[Callable[..., Any]]) -> Structure:
    """The structure of a description; its tensors and functions are appended to the lists."""
    mask = None if spec.mask is None else _split(spec.mask, tensors, functions)
    scores = tuple([_split(s, tensors, functions) for s in spec.scores])
    sink = None if spec.sink is None else _leaf(spec.sink, tensors)
    return mask, scores, sink, spec.normalizer.value, spec.scale_positive


def _split(node: Mask | Score, tensors: list[Tensor], functions: list[Callable[..., Any]]) -> Structure:
    parts: list[Any] = [type(node)]
    for name in type(node).__match_args__:  # type: ignore[union-attr]  # the fields of a dataclass
        value = getattr(node, name)
        if type(value) in _ATOMS:
            parts.append(value)
        elif isinstance(value, Tensor):
            parts.append(_leaf(value, tensors))
        elif isinstance(value, (Mask, Score)):
            parts.append(_split(value, tensors, functions))
        else:
            parts.append(value)
    if type(node) is MaskFunction or type(node) is ScoreFunction:
        functions.append(node.fn)
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


def build(structure: Structure, on: Target | None) -> Prepared:
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
    functions: list[Callable[..., Any]] = []
    split(spec, [], functions)
    given = [stand_ins[n] for n in range(len(stand_ins))]
    given += [r.value for _, r in _reads_of(*functions).items if isinstance(r.value, Tensor)]
    order, made = [], list[Tensor]()
    for t in spec.tensors.values():
        at = next((n for n, one in enumerate(given) if one is t), None)
        order.append(len(given) + len(made) if at is None else at)
        if at is None:
            made.append(t)
    return Prepared(key, tuple(order), tuple(made))


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


def _assumed_constant(fn: F) -> F:
    """As torch.compiler.assume_constant_result, which imports all of torch.compile first: a second, for this mark."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@_assumed_constant
def _constant(structure: Structure, on: str) -> Prepared:
    """Called by torch.compile while it traces: with constants, so that the result is one."""
    return build(structure, target(on) if on else None)


def _read_again(functions: list[Callable[..., Any]], tensors: list[Tensor]) -> None:
    """Reads what the functions of a description read. So torch.compile guards the numbers, and takes the tensors, which
    are appended to `tensors`, from where the functions take them."""
    if functions:
        for n, read in _constant_reads(*functions).items:
            value = follow(functions[n], read.path)
            if isinstance(value, Tensor):
                tensors.append(value)
            elif value != read.value:
                raise AssertionError(f"torch.compile reads {value!r} where tracing read {read.value!r}")


def _reads_of(*functions: Callable[..., Any]) -> Reads:
    return Reads(tuple((n, read) for n, fn in enumerate(functions) for read in reads(fn)))


_constant_reads = _assumed_constant(_reads_of)
