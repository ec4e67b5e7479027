"""Whether torch's dispatcher would add anything to a call. The way through it takes longer than a small kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

# looked up once: a call asks all of them
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_profiled = torch._C._autograd._profiler_enabled

_PLAIN = frozenset({Tensor, torch.nn.Parameter})  # no class with a dispatch of its own


def addresses(tensors: Iterable[Tensor]) -> list[int] | None:
    """The addresses of tensors where an operator on them would go straight to its implementation: nothing transforms,
    records, fakes or differentiates it. Else None, also for tensors without an element.

    Autocast has no rule for attngen's operator, so it does not count."""
    if (
        _dispatch_modes()
        or _has_function_mode()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _profiled()
    ):
        return None
    differentiated, found = torch.is_grad_enabled(), []
    for t in tensors:
        if type(t) not in _PLAIN or (differentiated and t.requires_grad) or t.is_neg():
            return None
        found.append(t.data_ptr())
    return found if all(found) else None  # torch's own wrappers, as those of functionalization, have the address 0


def transformed() -> str:
    """The innermost transformation of torch.func around a call: Vmap, Grad, Jvp, Functionalize; empty: none."""
    top = _transform()
    return "" if top is None else str(top.key()).rpartition(".")[2]
