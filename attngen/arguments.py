"""From tensors to the parameter bytes of every kernel of a module: pointers, strides, sizes, workspaces, grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from attngen.errors import LaunchError
from attngen.expr import Expr, Op, const, substitute, walk
from attngen.fold import fold
from attngen.ir.columns import narrow_strides
from attngen.ir.schedule import PERSISTENT, WORK_TABLE, Elem, Kernel, Schedule, WorkSource, Workspace
from attngen.params import MapUse, map_uses, pack, stride_count
from attngen.signature import is_dense
from attngen.tensormap import TensorMap, map_of
from attngen.worktable import device_table, item_count, work_table

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
    """Fresh workspaces of a module, uninitialised on a GPU. For the emulator floats are NaN: what a kernel reads and
    none has written shows."""
    return {w.name: _workspace(w, sizes, device) for w in schedule.workspaces}


def _workspace(w: Workspace, sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    shape = [number(e, sizes) for e in w.shape]
    if w.zero:
        return torch.zeros(shape, dtype=TORCH[w.elem], device=device)
    if device.type == "cpu" and w.elem is Elem.F32:
        return torch.full(shape, math.nan, dtype=torch.float32)
    return torch.empty(shape, dtype=TORCH[w.elem], device=device)


def grid(kernel: Kernel, sizes: Mapping[str, int]) -> int:
    """Number of CTAs (`ctas` for a persistent kernel). LaunchError beyond what one launch can have."""
    work = kernel.work
    if work.source in PERSISTENT:
        return sizes["ctas"]
    if work.source is WorkSource.SINGLE:
        return 1
    if work.source is WorkSource.SECTIONS:
        return -(-item_count(work.block_m, sizes) // sizes["section"])
    if work.source is WorkSource.ELEMENTS:
        count = -(-sizes["elements"] // kernel.threads)
    elif work.source is WorkSource.ROWS:
        count = sizes["batch"] * sizes["heads"] * -(-sizes["seqlen_q"] // (kernel.threads // 32 * work.block_m))
    elif work.source is WorkSource.GRID_KEYS:
        count = -(-sizes["seqlen_k"] // work.block_m)
        count *= sizes["batch"] if work.per_batch else 1
        count *= sizes["heads"] // sizes["group"] if work.per_head else 1
    else:
        count = -(-sizes["seqlen_q"] // work.block_m)
        count *= sizes["batch"] if work.per_batch else 1
        count *= sizes["heads"] if work.per_head else 1
    if count > MAX_GRID:
        raise LaunchError(
            f"{kernel.name}: {count} CTAs (batch x heads x row tiles); allowed are {MAX_GRID}. Split the batch"
        )
    return count


def tables(
    schedule: Schedule, sizes: Mapping[str, int], head_bytes: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The work table of each persistent kernel as a tensor, and its number of rounds, by `table_of` and `rounds_of` the
    kernel. For one that is made on the device no tensor, and the size of a `section` and the `rounds` of workspaces."""
    found: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    for kernel in schedule.kernels:
        if kernel.work.source in (WorkSource.TABLE, WorkSource.TABLE_KEYS):
            made = work_table(kernel, sizes, head_bytes, sizes["ctas"])
            found[table_of(kernel)] = torch.tensor(made.entries, dtype=torch.int32, device=device)
            numbers[rounds_of(kernel)] = made.rounds
        elif kernel.work.source is WorkSource.DEVICE_TABLE:
            plan = device_table(schedule, sizes, head_bytes)
            numbers |= {"section": plan.section, "rounds": plan.rounds, rounds_of(kernel): plan.rounds}
    return found, numbers


def table_of(kernel: Kernel) -> str:
    """What the work table of a kernel is called among the tensors of its module."""
    return WORK_TABLE if kernel.work.source is WorkSource.DEVICE_TABLE else f"{kernel.name}.{WORK_TABLE}"


def rounds_of(kernel: Kernel) -> str:
    return f"{kernel.name}.rounds"


def values_of(
    kernel: Kernel, shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]], scalars: Mapping[str, int | float]
) -> dict[str, int | float | bytes]:
    """All fields of a kernel's parameters but pointers and tensor maps, by name. `shapes`: shape and strides."""
    values: dict[str, int | float | bytes] = {s.name: scalars[s.name] for s in kernel.scalars}
    if kernel.work.source in PERSISTENT:
        values["rounds"] = scalars[rounds_of(kernel)]
    for t in kernel.tensors:
        shape, strides = shapes[t.name]
        if not t.strided and not is_dense(shape, strides):
            raise LaunchError(
                f"the last dimension of {t.name} has stride {strides[-1]}; this kernel is for a contiguous one. Pass a "
                "contiguous copy"
            )
        values.update({f"{t.name}_s{n}": strides[n] for n in range(stride_count(t))})
        values.update({f"{t.name}_n{n}": shape[n] for n in range(t.rank)})
    for name in narrow_strides(kernel):
        stride = values[name]
        if not isinstance(stride, int) or not -(2**31) <= stride < 2**31:
            tensor, _, dim = name.rpartition("_s")
            raise LaunchError(
                f"{tensor} has a stride of {stride!r} elements in dimension {dim}, where its index depends on the key. "
                "Allowed: below 2^31. Pass a contiguous copy"
            )
    return values


def map_for(use: MapUse, pointer: int, shape: Sequence[int], strides: Sequence[int]) -> TensorMap:
    return map_of(use.tensor.elem, pointer, shape, strides, use.rows, use.columns, use.swizzle)


def bind(
    schedule: Schedule,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, int | float],
    encode: Callable[[TensorMap], bytes],
) -> Sequence[Launch]:
    """The launches of a module in order. `tensors` holds every tensor argument by name, workspaces and tables included;
    `encode`: the tensor maps of the device that runs them."""
    sizes = {k: v for k, v in scalars.items() if isinstance(v, int)}
    shapes = {name: (t.shape, t.stride()) for name, t in tensors.items()}
    launches = []
    for kernel in schedule.kernels:
        values = values_of(kernel, shapes, scalars)
        values.update({name: t.data_ptr() for name, t in tensors.items()})
        if kernel.work.source in PERSISTENT:
            values[WORK_TABLE] = tensors[table_of(kernel)].data_ptr()
        for name, use in map_uses(kernel).items():
            values[f"{name}_map"] = encode(map_for(use, tensors[name].data_ptr(), *shapes[name]))
        launches.append(Launch(kernel, grid(kernel, sizes), pack(kernel, values)))
    return launches
