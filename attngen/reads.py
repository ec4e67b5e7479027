"""What a user's function reads from outside: found by looking, named by a path from the function.

torch.compile guards what it sees being read. It does not see the tracing of a score or mask function, so the values it
depends on are listed here, and read once more where torch.compile looks (attngen.prepare)."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch


class Step:
    """Kinds of steps. Plain numbers: torch.compile cannot guard members of an Enum where they come from a constant."""

    CELL = 0  # of a closure, by number
    DEFAULT = 1  # of a parameter, by number
    MODULE = 2  # by name
    ATTRIBUTE = 3
    ITEM = 4  # of a list, tuple or dict


Path = tuple[tuple[int, Any], ...]

NUMBERS = (bool, int, float, str, type(None))
_DEPTH = 12
_ITEMS = 1024
_LIBRARIES = (os.path.dirname(__file__) + os.sep, os.path.dirname(torch.__file__) + os.sep)


@dataclass(frozen=True)
class Read:
    path: Path
    value: Any  # a number or a tensor


def reads(fn: Callable[..., Any]) -> tuple[Read, ...]:
    """Numbers and tensors that a call of `fn` may read: by closure, global name, default, attribute and item."""
    seen: set[tuple[int, frozenset[str]]] = set()
    return tuple(r for r in _below((), fn, frozenset(), _DEPTH, seen))


def _below(
    path: Path, value: Any, names: frozenset[str], depth: int, seen: set[tuple[int, frozenset[str]]]
) -> Iterator[Read]:
    if isinstance(value, (*NUMBERS, torch.Tensor)):
        yield Read(path, value)
    elif depth and (id(value), names) not in seen:
        seen.add((id(value), names))
        for step, inner, known in _inner(value, names):
            yield from _below((*path, *step), inner, known, depth - 1, seen)


def _inner(value: Any, names: frozenset[str]) -> Iterator[tuple[Path, Any, frozenset[str]]]:
    """What lies directly in a value: the steps to it, and the names by which code may go on from it."""
    if isinstance(value, FunctionType):
        if not value.__code__.co_filename.startswith(_LIBRARIES):
            yield from _in_function(value)
    elif isinstance(value, MethodType):
        code = names_in(value.__func__.__code__) if isinstance(value.__func__, FunctionType) else names
        yield ((Step.ATTRIBUTE, "__self__"),), value.__self__, code
        yield ((Step.ATTRIBUTE, "__func__"),), value.__func__, code
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield ((Step.ATTRIBUTE, name),), getattr(value, name), names
    elif isinstance(value, (list, tuple)):
        for n, item in enumerate(value[:_ITEMS]):
            yield ((Step.ITEM, n),), item, names
    elif isinstance(value, dict):
        for key, item in list(value.items())[:_ITEMS]:
            if isinstance(key, NUMBERS):
                yield ((Step.ITEM, key),), item, names
    elif not _is_library(value):
        for name in sorted(names):
            found = _attribute(value, name)
            if found is not None:
                yield ((Step.ATTRIBUTE, name),), found, names


def _attribute(value: Any, name: str) -> Any:
    """An attribute; None where there is none, or where asking for it runs code that may do anything."""
    if isinstance(value, torch.nn.Module) and any(
        name in held for held in (value._parameters, value._buffers, value._modules)
    ):
        return getattr(value, name)
    found = inspect.getattr_static(value, name, None)
    if isinstance(found, (FunctionType, property, functools.cached_property, MemberDescriptorType)):
        return getattr(value, name, None)
    return None if hasattr(found, "__get__") else found


def _in_function(fn: FunctionType) -> Iterator[tuple[Path, Any, frozenset[str]]]:
    names = names_in(fn.__code__)
    for n, cell in enumerate(fn.__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield ((Step.CELL, n),), content, names
    for n, default in enumerate(fn.__defaults__ or ()):
        yield ((Step.DEFAULT, n),), default, names
    if fn.__kwdefaults__:
        yield ((Step.ATTRIBUTE, "__kwdefaults__"),), fn.__kwdefaults__, names
    module = fn.__globals__.get("__name__")
    if isinstance(module, str) and vars(sys.modules.get(module, fn)) is fn.__globals__:
        for name in sorted(names & fn.__globals__.keys()):
            yield ((Step.MODULE, module), (Step.ATTRIBUTE, name)), fn.__globals__[name], names


def names_in(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes that a function uses, also inside its own inner functions."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_library(value: object) -> bool:
    """Modules and classes of torch, of this package, and those built into Python."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if not isinstance(module, ModuleType):
        return False
    file = getattr(module, "__file__", None)
    return file is None or file.startswith(_LIBRARIES)


def follow(fn: Any, path: Path) -> Any:
    """The value at the end of a path. Written for torch.compile, which follows it and guards each step."""
    value = fn
    for step, name in path:
        if step == Step.CELL:
            value = value.__closure__[name].cell_contents
        elif step == Step.DEFAULT:
            value = value.__defaults__[name]
        elif step == Step.MODULE:
            value = sys.modules[name]
        elif step == Step.ITEM:
            value = value[name]
        else:
            value = getattr(value, name)
    return value
