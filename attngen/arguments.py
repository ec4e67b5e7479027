"""From tensors to the parameter bytes of every kernel of a module: pointers, strides, sizes, workspaces, grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attngen.errors import LaunchError
from attngen.expr import Expr, Op, const, substitute, walk
from attngen.fold import fold
from attngen.ir.schedule import Elem, Kernel, Schedule, WorkSource, Workspace
from attngen.params import pack, stride_count

TORCH = {Elem.F32: torch.float32, Elem.I32: torch.int32, Elem.U8: torch.uint8}
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    grid: int
    params: bytes


def number(e: Expr, sizes: Mapping[str, int]) -> int:
    """The value of a size expression."""
    values = {v: const(sizes[v.name]) for v in walk(e) if v.op is Op.VAR}
    result = fold(substitute(e, values))
    assert result.op is Op.CONST and isinstance(result.value, int), f"{e} is not a number for {dict(sizes)}"
    return result.value


def workspaces(schedule: Schedule, sizes: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
    """Fresh uninitialised workspaces of a module."""
    return {w.name: _workspace(w, sizes, device) for w in schedule.workspaces}


def _workspace(w: Workspace, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    return torch.empty([number(e, sizes) for e in w.shape], dtype=TORCH[w.elem], device=device)


def grid(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """Number of CTAs. LaunchError beyond what one launch can have."""
    work = kernel.work
    if work.source is WorkSource.ELEMENTS:
        count = -(-sizes["elements"] // kernel.threads)
    else:
        count = -(-sizes["seqlen_q"] // work.block_m)
        count *= sizes["batch"] if work.per_batch else 1
        count *= sizes["heads"] if work.per_head else 1
    if count > MAX_GRID:
        raise LaunchError(
            f"{kernel.name}: {count} CTAs (batch x heads x row tiles); allowed are {MAX_GRID}. Split the batch"
        )
    return count


def bind(
    schedule: Schedule, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float]
) -> Sequence[Launch]:
    """The launches of a module in order. `tensors` holds every tensor argument by name, workspaces included."""
    sizes = {k: v for k, v in scalars.items() if isinstance(v, int)}
    launches = []
    for kernel in schedule.kernels:
        values: dict[str, int | float] = {s.name: scalars[s.name] for s in kernel.scalars}
        for t in kernel.tensors:
            tensor = tensors[t.name]
            values[t.name] = tensor.data_ptr()
            strides, shape = tensor.stride(), tensor.shape
            for k in range(stride_count(t.access, t.rank)):
                values[f"{t.name}_s{k}"] = strides[k]
            values.update({f"{t.name}_n{k}": shape[k] for k in range(t.rank)})
        launches.append(Launch(kernel, grid(kernel, sizes), pack(kernel, values)))
    return launches
