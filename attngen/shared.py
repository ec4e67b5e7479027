"""One object for equal masks and scores that hold neither tensors nor functions, though a caller makes them anew at
each call. What is known of a description is then found by the identity of its parts (attngen.described)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

import torch

KEPT = 1024


class Part(Protocol):
    @property
    def plain(self) -> bool:
        """Whether it holds neither tensors nor functions, so that to keep it keeps nothing of the user's."""
        ...


Made = TypeVar("Made", bound=Part)
_made: dict[tuple[Hashable, ...], Part] = {}


def shared(cls: Callable[..., Made], *parts: Hashable) -> Made:
    """`cls(*parts)`; the same object for equal parts where it is plain. Parts are numbers, and masks as themselves."""
    if torch.compiler.is_dynamo_compiling():  # a trace has nothing to gain, and would guard the table
        return cls(*parts)
    at = cls, *parts
    found = _made.get(at)
    if found is None:
        found = cls(*parts)
        if found.plain:
            if len(_made) >= KEPT:
                _made.clear()
            _made[at] = found
    return found  # type: ignore[return-value]  # what the table has under a class is made by it
