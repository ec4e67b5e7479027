"""Functions for score and mask callables. On traced values they build the kernel's expression; on tensors
they are torch's, on numbers they return a number, so that the same callable also runs eagerly."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from attngen.proxy import apply, find_tracer


def _call(name: str, *args: Any) -> Any:
    tracer = find_tracer(args)
    if tracer is not None:
        return apply(tracer, name, args, {})
    tensors = [
        torch.as_tensor(a, dtype=torch.float64) if isinstance(a, float) else torch.as_tensor(a) for a in args
    ]
    if not builtins.any(isinstance(a, torch.Tensor) for a in args):
        return getattr(torch, name)(*tensors).item()
    # a number has no say in the result's type, as in torch's own operators
    return getattr(torch, name)(*(_like(a, args) for a in args))


def _like(value: Any, args: tuple[Any, ...]) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    kind = next(a for a in reversed(args) if isinstance(a, torch.Tensor))
    fits = kind.is_floating_point() or (isinstance(value, int) and kind.dtype is not torch.bool)
    return torch.as_tensor(value, dtype=kind.dtype if fits else None, device=kind.device)


def exp(x: Any) -> Any:
    """e to the power x."""
    return _call("exp", x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return _call("log", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _call("tanh", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", x)


def sqrt(x: Any) -> Any:
    """Square root."""
    return _call("sqrt", x)


def floor(x: Any) -> Any:
    """Largest integer not above x (a float stays a float)."""
    return _call("floor", x)


def abs(x: Any) -> Any:
    """Absolute value."""
    return _call("abs", x)


def where(cond: Any, x: Any, y: Any) -> Any:
    """x where cond holds, else y."""
    return _call("where", cond, x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two values."""
    return _call("minimum", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger of two values."""
    return _call("maximum", x, y)
