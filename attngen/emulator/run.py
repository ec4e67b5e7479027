"""Launches kernels of a built body."""

from __future__ import annotations

import ctypes
import enum
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.errors import EmulatorError, LaunchError

PARAMS_LIMIT = 4096
"""Bytes of parameters that a kernel may have (the limit of CUDA before 12.1)."""


class Mode(enum.Enum):
    """When an asynchronous copy takes effect. The values are those of the runtime."""

    EAGER = 0
    """When it is issued."""
    LATE = 1
    """At the wait that demands it."""
    RANDOM = 2
    """At a random moment up to its wait; threads run in random order too. The seed decides."""


@dataclass(frozen=True)
class Region:
    """A range of memory that the kernel may access: a tensor's storage."""

    name: str
    """Used in messages, as in `V+4096`."""
    ptr: int
    """Address of the first byte. The caller keeps the memory alive during the run."""
    nbytes: int
    writable: bool


@dataclass(frozen=True)
class Stats:
    """What a run cost."""

    switches: int
    """Changes from one thread to another."""
    collectives: int
    """Warp collectives and CTA barriers."""
    seconds: float
    """Wall-clock time of the launch."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("failed", ctypes.c_int),
        ("cta", ctypes.c_int),
        ("line", ctypes.c_int),
        ("message", ctypes.c_char * 4096),
        ("switches", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
    )


class _Library:
    """A loaded body. It has one launch in progress at most, hence the lock."""

    def __init__(self, path: Path) -> None:
        self._dll = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        self._lock = threading.Lock()
        self._dll.attngen_params_bytes.restype = ctypes.c_uint64
        self._dll.attngen_params_bytes.argtypes = (ctypes.c_int,)
        self._dll.attngen_run.restype = ctypes.c_int
        self._dll.attngen_run.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.POINTER(_Region),
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.POINTER(_Result),
        )

    def params_bytes(self, kernel: int) -> int:
        return int(self._dll.attngen_params_bytes(kernel))

    def run(
        self, kernel: int, grid: int, params: bytes, regions: Sequence[Region], mode: Mode, seed: int
    ) -> _Result:
        table = (_Region * len(regions))(
            *(_Region(r.name.encode(), r.ptr, r.nbytes, r.writable) for r in regions)
        )
        result = _Result()
        with self._lock:
            self._dll.attngen_run(
                kernel,
                grid,
                params,
                table,
                len(regions),
                mode.value,
                seed & (2**64 - 1),
                ctypes.byref(result),
            )
        return result


@cache
def _load(path: Path) -> _Library:
    # One object a file: the system's loader hands out one copy of the library's state, whoever asks.
    return _Library(path)


class Built:
    """A compiled body. Its kernels are launched by name."""

    def __init__(self, library: Path, kernels: Sequence[str]) -> None:
        self.library = library
        self._kernels = tuple(kernels)
        self._loaded = _load(library)

    def run(
        self,
        name: str,
        grid: int,
        params: bytes,
        regions: Sequence[Region],
        mode: Mode = Mode.LATE,
        seed: int = 0,
        line_names: Mapping[int, str] | None = None,
    ) -> Stats:
        """Run kernel `name` over `grid` CTAs, one after the other, each with fresh shared memory.

        `params` are the bytes of its parameter struct, `regions` all the global memory that it may touch.
        `seed` matters in RANDOM mode only. `line_names` gives ops their names in messages, by line of the
        body (the first is 1).

        Raises EmulatorError where the kernel does something that a GPU leaves undefined, and LaunchError when
        it cannot be launched so. After an error the outputs hold what had been written until then.
        """
        if name not in self._kernels:
            raise LaunchError(f"name={name!r}: this body has the kernels {', '.join(self._kernels)}")
        if grid < 0:
            raise LaunchError(f"grid={grid}: must be at least 0")
        kernel = self._kernels.index(name)
        expected = self._loaded.params_bytes(kernel)
        if len(params) != expected:
            raise LaunchError(f"params has {len(params)} bytes, {name}_params has {expected}")
        if expected > PARAMS_LIMIT:
            raise LaunchError(f"{name}_params has {expected} bytes, at most {PARAMS_LIMIT} can be passed")
        start = time.perf_counter()
        result = self._loaded.run(kernel, grid, params, regions, mode, seed)
        seconds = time.perf_counter() - start
        if result.failed:
            raise EmulatorError(_message(name, result, line_names or {}))
        return Stats(int(result.switches), int(result.collectives), seconds)


def _message(kernel: str, result: _Result, line_names: Mapping[int, str]) -> str:
    def named(match: re.Match[str]) -> str:
        op = line_names.get(int(match[1]))
        return f"{match[0]} ({op})" if op else match[0]

    at = f", line {result.line}" if result.line else ""
    text = f"kernel {kernel}, CTA {result.cta}{at}: {result.message.decode(errors='replace')}"
    return re.sub(r"\bline (\d+)", named, text)
