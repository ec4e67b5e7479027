"""Finds NVRTC, NVIDIA's run-time CUDA compiler, and calls it through ctypes. Needs neither nvcc nor a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attngen.errors import MissingToolError

SOURCE_NAME = "kernel.cu"
NO_CACHE = "--no-cache"  # NVRTC 12.8 and older do not know it, and keep nothing

# Relative to a directory of sys.path: NVIDIA's wheels first (CUDA 13 layout, then 12), then what torch
# bundles.
_WHEEL_GLOBS = (
    "nvidia/cu13/lib/libnvrtc.so.13*",
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.1[23]*",
    "torch/lib/libnvrtc*.so*",
)
_SYSTEM_GLOB = ("/usr/local/cuda/lib64", "libnvrtc.so*")
_BUILD = re.compile(r"release \d+\.\d+, V(\d+(?:\.\d+)+)")


@dataclass(frozen=True)
class Compilation:
    """What one call of the compiler left behind. `ptx` is filled also when only the assembler failed."""

    status: str
    log: str
    cubin: bytes
    ptx: str

    @property
    def ok(self) -> bool:
        return self.status == "NVRTC_SUCCESS"


@dataclass(frozen=True)
class Nvrtc:
    """A usable NVRTC library: its path and (major, minor) version."""

    path: str
    version: tuple[int, int]

    @property
    def name(self) -> str:
        """Name with the full build number: two patch releases of one minor version may emit different
        code."""
        return f"nvrtc {_build_number(self) or '.'.join(map(str, self.version))}"

    def compile(self, source: str, options: Sequence[str]) -> Compilation:
        """Compiles one translation unit. Never raises on a compile error: the status and the log say it.

        Newer versions keep results on disk, and a result from there comes without the assembler's report."""
        return self._compile(source, (*options, NO_CACHE) if _takes_no_cache(self) else tuple(options))

    def _compile(self, source: str, options: Sequence[str]) -> Compilation:
        lib = _open(self.path)
        program = ctypes.c_void_p()
        name = SOURCE_NAME.encode()
        _check(lib, lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name, 0, None, None))
        try:
            values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = lib.nvrtcCompileProgram(program, len(options), values)
            return Compilation(
                status=_status_name(lib, status),
                log=_text(_output(lib, program, "ProgramLog")),
                cubin=_output(lib, program, "CUBIN"),
                ptx=_text(_output(lib, program, "PTX")),
            )
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _takes_no_cache(compiler: Nvrtc) -> bool:
    return compiler._compile("", ("--gpu-architecture=sm_80", NO_CACHE)).ok


def find_nvrtc() -> Nvrtc:
    """The first NVRTC that loads. Raises MissingToolError with the command that installs one."""
    tried: list[str] = []
    for path in candidates():
        try:
            lib = _open(path)
        except OSError as error:
            tried.append(f"\n  {path}: {error}")
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(lib, lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return Nvrtc(path, (major.value, minor.value))
    raise MissingToolError(
        "NVRTC, the CUDA run-time compiler, was not found. Install it with `pip install nvidia-cuda-nvrtc` "
        "(CUDA 13) or `pip install nvidia-cuda-nvrtc-cu12` (CUDA 12)." + "".join(tried)
    )


def candidates() -> Iterator[str]:
    """Libraries to try, in order of preference."""
    for pattern in _WHEEL_GLOBS:
        for root in sys.path:
            yield from _libraries(Path(root or "."), pattern)
    linked = ctypes.util.find_library("nvrtc")
    if linked:
        yield linked
    yield from _libraries(Path(_SYSTEM_GLOB[0]), _SYSTEM_GLOB[1])


def _libraries(root: Path, pattern: str) -> Iterator[str]:
    # The wheels hold two libraries beside the compiler that match its glob and are none: its built-ins,
    # loaded by the compiler itself, and a variant with another allocator.
    for path in sorted(root.glob(pattern), reverse=True):
        if "builtins" not in path.name and ".alt." not in path.name:
            yield str(path.resolve())


@cache
def _open(path: str) -> ctypes.CDLL:
    # The compiler opens its built-ins by their bare name, and some wheels have no run path to them. What is loaded
    # already is found.
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins))
    lib = ctypes.CDLL(path)
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    lib.nvrtcCreateProgram.argtypes = (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
    )  # fmt: skip
    return lib


@cache
def _build_number(compiler: Nvrtc) -> str | None:
    # The API tells major and minor only; the header of the PTX of an empty unit has the whole number.
    match = _BUILD.search(compiler.compile("", ("--gpu-architecture=compute_80",)).ptx)
    return match.group(1) if match else None


def _output(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    if getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) != 0 or size.value == 0:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _status_name(lib: ctypes.CDLL, status: int) -> str:
    return bytes(lib.nvrtcGetErrorString(status)).decode()


def _check(lib: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise MissingToolError(f"NVRTC does not work on this machine: {_status_name(lib, status)}")
