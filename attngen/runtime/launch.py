"""Launches every kernel: one block of parameters by value, on a stream of the caller, with no
synchronisation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch

from attngen.errors import LaunchError
from attngen.runtime.load import LoadedKernel, call, current, driver

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
    if not 0 < grid <= MAX_GRID:
        raise LaunchError(f"{kernel.symbol}: a grid of {grid} blocks; allowed are 1 to {MAX_GRID}")
    if not 0 < threads <= MAX_THREADS:
        raise LaunchError(f"{kernel.symbol}: {threads} threads a block; allowed are 1 to {MAX_THREADS}")
    packed = pack(params) if isinstance(params, bytes) else params
    if packed.size != kernel.param_bytes:
        raise LaunchError(
            f"{kernel.symbol}: {packed.size} bytes of parameters; the kernel takes {kernel.param_bytes}"
        )
    handle = current_stream(kernel.device_index) if stream is None else stream
    # A thread that has made no CUDA call yet has no context, and one that works on another device has the
    # wrong one.
    if int(call("cuCtxGetCurrent")) == kernel.context_address:
        _enqueue(kernel, grid, threads, packed, handle)
    else:
        with current(kernel.context):
            _enqueue(kernel, grid, threads, packed, handle)


def current_stream(device_index: int) -> int:
    """Handle of torch's current stream on a device, without the cost of a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def _enqueue(kernel: LoadedKernel, grid: int, threads: int, params: Params, stream: int) -> None:
    (status,) = driver().cuLaunchKernel(
        kernel.function, grid, 1, 1, threads, 1, 1, kernel.smem_bytes, stream, params.address, 0
    )
    if status != 0:
        raise LaunchError(
            f"{kernel.symbol}: cuLaunchKernel failed: {getattr(status, 'name', status)} (grid {grid}, "
            f"{threads} threads, {kernel.smem_bytes} bytes of shared memory, device {kernel.device_index})"
        )
