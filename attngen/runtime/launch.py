"""Launches every kernel: one block of parameters by value, on a stream of the caller, with no
synchronisation."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attngen.errors import LaunchError
from attngen.runtime.load import LoadedKernel, current, driver, library

MAX_GRID = 2**31 - 1
MAX_THREADS = 1024


@dataclass(frozen=True)
class Params:
    """The parameter struct of a launch, packed once and used for any number of launches.

    The driver reads `buffer` during the call, so it may be changed between two launches."""

    buffer: ctypes.Array[ctypes.c_char] | ctypes.Structure
    size: int
    address: int
    pointers: ctypes.Array[ctypes.c_void_p] = field(repr=False)


def pack(params: bytes | ctypes.Array[ctypes.c_char] | ctypes.Structure) -> Params:
    """Prepares parameters for `launch`. Bytes are copied; a ctypes buffer or structure is referred to."""
    buffer = (ctypes.c_char * len(params)).from_buffer_copy(params) if isinstance(params, bytes) else params
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    return Params(buffer, ctypes.sizeof(buffer), ctypes.addressof(pointers), pointers)


def launch(
    kernel: LoadedKernel, *, grid: int, threads: int, params: Params | bytes, stream: int | None = None
) -> None:
    """Enqueues a kernel on its device. `stream` is a CUDA stream handle; None is torch's current stream
    there.

    Does not wait and does not allocate on the device, so it can be captured into a CUDA graph."""
    packed = pack(params) if isinstance(params, bytes) else params
    _check(kernel, grid, threads, packed.size)
    handle = current_stream(kernel.device_index) if stream is None else stream
    _enqueue(kernel, _call(kernel, grid, threads, packed), handle)


class Launcher:
    """A launch that is repeated on torch's current stream: only the front of its parameters changes.

    A call takes a buffer of its own, so threads never share one. The driver copies the parameters during the call,
    also into a graph that is being captured: the buffer is free again behind it."""

    def __init__(self, kernel: LoadedKernel, grid: int, threads: int, params: bytes, front: struct.Struct) -> None:
        """`params`: all of them, with anything where `front` lies."""
        _check(kernel, grid, threads, len(params))
        self._kernel, self._grid, self._threads = kernel, grid, threads
        self._params, self._front = params, front
        self._free: list[_Call] = []

    def run(self, values: Sequence[int | bytes]) -> None:
        try:
            call = self._free.pop()
        except IndexError:
            call = _call(self._kernel, self._grid, self._threads, pack(self._params))
        self._front.pack_into(call.params.buffer, 0, *values)
        _enqueue(self._kernel, call, current_stream(self._kernel.device_index))
        self._free.append(call)


def current_stream(device_index: int) -> int:
    """Handle of torch's current stream on a device, without the cost of a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device_index)


class _Call(NamedTuple):
    """The driver calls of a launch, with their arguments converted; the stream is set before each."""

    params: Params
    stream: ctypes.c_void_p
    launch: Any  # cuLaunchKernel
    arguments: tuple[Any, ...]
    get_context: Any  # cuCtxGetCurrent
    context: ctypes.c_void_p  # what it writes
    context_at: Any


def _check(kernel: LoadedKernel, grid: int, threads: int, size: int) -> None:
    if not 0 < grid <= MAX_GRID:
        raise LaunchError(f"{kernel.symbol}: a grid of {grid} blocks; allowed are 1 to {MAX_GRID}")
    if not 0 < threads <= MAX_THREADS:
        raise LaunchError(f"{kernel.symbol}: {threads} threads a block; allowed are 1 to {MAX_THREADS}")
    if size != kernel.param_bytes:
        raise LaunchError(f"{kernel.symbol}: {size} bytes of parameters; the kernel takes {kernel.param_bytes}")


def _call(kernel: LoadedKernel, grid: int, threads: int, params: Params) -> _Call:
    functions, number = library(), ctypes.c_uint
    stream, context, one = ctypes.c_void_p(), ctypes.c_void_p(), number(1)
    arguments = (
        ctypes.c_void_p(int(kernel.function)), number(grid), one, one, number(threads), one, one,
        number(kernel.smem_bytes), stream, ctypes.c_void_p(params.address), None,
    )  # fmt: skip
    return _Call(
        params, stream, functions.cuLaunchKernel, arguments, functions.cuCtxGetCurrent, context, ctypes.byref(context)
    )


def _enqueue(kernel: LoadedKernel, call: _Call, handle: int) -> None:
    _, stream, launch, arguments, get_context, context, context_at = call
    stream.value = handle
    # A thread that has made no CUDA call yet has no context, and one that works on another device has the
    # wrong one.
    if get_context(context_at) == 0 and context.value == kernel.context_address:
        status = launch(*arguments)
    else:
        with current(kernel.context):
            status = launch(*arguments)
    if status != 0:
        _, grid, _, _, threads, *_ = arguments
        raise LaunchError(
            f"{kernel.symbol}: cuLaunchKernel failed: {_error_name(status)} (grid {grid.value}, "
            f"{threads.value} threads, {kernel.smem_bytes} bytes of shared memory, device {kernel.device_index})"
        )


def _error_name(status: int) -> str:
    try:
        return str(driver().CUresult(status).name)
    except ValueError:  # newer than the binding
        return str(status)
