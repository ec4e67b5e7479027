"""Small kernels for tests: a few statements, compiled for the emulator, called with two arrays."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from attngen import emulator
from attngen.emulator import KernelEntry, Region, Stats

SMEM = 32 * 1024
Kernel = Callable[..., Stats]
KernelMaker = Callable[..., Kernel]


def kernel_maker(cache_dir: Path) -> KernelMaker:
    """A function that compiles a kernel `k` from statements.

    They see `t` (thread), `s` (shared base), `p.x` (read-only words), `p.y` (words) and `p.n`. The first is
    on line 3.
    """

    def make(statements: str, threads: int = 64) -> Kernel:
        body = (
            "struct k_params { const u32* x; u32* y; int n; };\n"
            f'extern "C" __global__ void __launch_bounds__({threads}) k(const __grid_constant__ k_params p) '
            "{ const int t = thread_id(); const u32 s = smem_base();\n"
            f"{statements}\n}}\n"
        )
        built = emulator.build(body, (KernelEntry("k", threads, SMEM),), cache_dir)

        def run(x: Words, y: Words, n: int = 0, grid: int = 1, **options: Any) -> Stats:
            params = struct.pack("<QQi4x", x.ctypes.data, y.ctypes.data, n)
            return built.run("k", grid, params, [region("x", x, False), region("y", y, True)], **options)

        return run

    return make


Words = np.ndarray[tuple[int], np.dtype[np.uint32]]


def region(name: str, array: Words, writable: bool) -> Region:
    return Region(name, array.ctypes.data, array.nbytes, writable)


def words(count: int) -> Words:
    """`count` zero words at an address that is a multiple of 16, as torch's and CUDA's allocations are."""
    raw = np.zeros(count + 4, np.uint32)
    start = -raw.ctypes.data % 16 // 4
    return raw[start : start + count]


def filled(count: int) -> Words:
    """Words that all differ."""
    x = words(count)
    x[:] = np.arange(count) * 2654435761 & 0xFFFFFFFF
    return x
