"""What a user's function does with tensors alone: it runs once, when the function is traced, so a result that depends
on the values of a captured tensor would be kept when they change. Such an operation is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attngen.proxy import Proxy

_VALUES = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "equal", "allclose"}
)


class OnceOnly(TorchFunctionMode):
    """Lets views, metadata, and constants that the function makes itself pass; tells `refuse` of anything else."""

    def __init__(self, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refuse = refuse
        self._made: list[torch.Tensor] = []  # in the function, from no captured tensor

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        result = func(*args, **(kwargs or {}))
        given = list(_leaves((*args, *(kwargs or {}).values())))
        if any(isinstance(x, Proxy) for x in given):
            return result
        captured = [x for x in given if not any(x is m for m in self._made)]
        name = getattr(func, "__name__", str(func))
        if not captured:
            self._made += [r for r in _leaves((result,)) if isinstance(r, torch.Tensor)]
        elif name in _VALUES or any(not _is_view(r, given) for r in _leaves((result,))):
            raise self._refuse(
                f"`{name}` of captured tensors alone runs once, when the function is traced, and would keep its result "
                "when they change. Compute it before and capture the result, or write it so that it starts from the "
                "score or a position: (s + t * 2) as s + t + t; values are read by indexing, t[h]"
            )
        return result


def _leaves(values: Iterable[Any]) -> Iterator[torch.Tensor | Proxy]:
    for x in values:
        if isinstance(x, (torch.Tensor, Proxy)):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _leaves(x)


def _is_view(result: torch.Tensor | Proxy, given: Iterable[torch.Tensor | Proxy]) -> bool:
    return any(
        isinstance(x, torch.Tensor) and isinstance(result, torch.Tensor) and torch._C._is_alias_of(result, x)  # type: ignore[attr-defined]
        for x in given
    )
