"""Compiles a generated body against the emulator's prelude, and keeps the result on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import platformdirs
from filelock import FileLock

from attngen.emulator.run import Built
from attngen.errors import CompileError, MissingToolError
from attngen.resources import templates_dir

MAX_THREADS = 1024
MAX_SMEM_BYTES = 227 * 1024
"""The most dynamic shared memory that any target gives a CTA."""

_COMMON_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # each FMA of a kernel is written as one
    "-fno-strict-aliasing",  # memory is accessed as words, floats and vectors by turns
    "-fwrapv",
    "-w",
    "-Wno-psabi",
)
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-O3")
# The traps keep a wrong index or a division by zero from killing the process: the runtime reports them.
_BODY_FLAGS = (*_COMMON_FLAGS, "-O1", "-fsanitize=bounds,integer-divide-by-zero")

# A register that the body never sets must not be zero by luck. Not every compiler has it.
_PATTERN_FLAG = "-ftrivial-auto-var-init=pattern"


@dataclass(frozen=True)
class KernelEntry:
    """A kernel of a body: `extern "C" void NAME(const NAME_params p)`."""

    name: str
    threads: int
    """Threads of a CTA: a multiple of 32, at most 1024."""
    smem_bytes: int
    """Dynamic shared memory of a CTA."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"name={self.name!r}: must be a C identifier")
        if self.threads % 32 or not 0 < self.threads <= MAX_THREADS:
            raise ValueError(f"threads={self.threads}: must be a multiple of 32 from 32 to {MAX_THREADS}")
        if not 0 <= self.smem_bytes <= MAX_SMEM_BYTES:
            raise ValueError(f"smem_bytes={self.smem_bytes}: must be from 0 to {MAX_SMEM_BYTES}")


def find_compiler() -> str:
    """The C++ compiler's path: the first that exists of $CXX, c++, g++, clang++.

    Raises MissingToolError when there is none.
    """
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(candidate) if candidate else None
        if found:
            return found
    raise MissingToolError(
        "the emulator needs a C++17 compiler and found none of $CXX, c++, g++, clang++; install one "
        "(Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX"
    )


def build(body: str, kernels: Sequence[KernelEntry], cache_dir: Path | None = None) -> Built:
    """Compile `body`, or find it compiled, and load it.

    `cache_dir` defaults to the user's cache directory. Raises CompileError with the compiler's words when the
    body is not valid, MissingToolError when there is no compiler.
    """
    compiler = find_compiler()
    directory = cache_dir or Path(platformdirs.user_cache_dir("attngen")) / "emulator"
    directory.mkdir(parents=True, exist_ok=True)
    source = _translation_unit(body, kernels)
    runtime_key = _digest(_identity(compiler), *_RUNTIME_FLAGS, _emulator_text())
    body_key = _digest(runtime_key, *_body_flags(compiler), source)
    runtime = _once(directory / f"runtime-{runtime_key}.o", partial(_build_runtime, compiler))
    library = _once(directory / f"body-{body_key}.so", partial(_build_body, compiler, source, runtime))
    return Built(library.resolve(), [kernel.name for kernel in kernels])


def _emulator_dir() -> Path:
    return templates_dir() / "emulator"


def _emulator_text() -> str:
    files = sorted((*_emulator_dir().glob("*.hpp"), *_emulator_dir().glob("*.cpp")))
    return "\n".join(f"{file.name}\n{file.read_text()}" for file in files)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def _identity(compiler: str) -> str:
    """What tells one compiler from another: its path and what it says of itself."""
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return f"{compiler}\n{said.stdout}"


@cache
def _body_flags(compiler: str) -> tuple[str, ...]:
    probe = [compiler, _PATTERN_FLAG, "-x", "c++", "-fsyntax-only", os.devnull]
    known = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return (*_BODY_FLAGS, _PATTERN_FLAG) if known else _BODY_FLAGS


def _translation_unit(body: str, kernels: Sequence[KernelEntry]) -> str:
    """The body, its first line numbered 1, between the emulator's prelude and the table of its kernels."""
    rows = "\n".join(
        f'    {{"{k.name}", {k.threads}, {k.smem_bytes}, sizeof({k.name}_params), '
        f"[](const void* p) {{ {k.name}(*(const {k.name}_params*)p); }}}},"
        for k in kernels
    )
    return (
        '#include "common.hpp"\n#include "sm80.hpp"\n#include "sm90.hpp"\n'
        f'#line 1 "body"\n{body}\n'
        '#line 1 "kernels"\n'
        f"extern const emu::KernelEntry attngen_kernels[] = {{\n{rows}\n}};\n"
    )


def _once(path: Path, make: Callable[[Path], None]) -> Path:
    """Make a file unless it exists. One process does it, the others wait; no reader ever sees half a file."""
    if path.exists():
        return path
    with FileLock(f"{path}.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch) / path.name
                make(made)
                os.replace(made, path)
    return path


def _build_runtime(compiler: str, out: Path) -> None:
    sources = sorted(str(file) for file in _emulator_dir().glob("*.cpp"))
    flags = (*_RUNTIME_FLAGS, "-r", "-nostdlib")
    _run_compiler([compiler, *flags, *sources, "-o", str(out)], "the emulator's runtime")


def _build_body(compiler: str, source: str, runtime: Path, out: Path) -> None:
    unit, compiled = out.with_suffix(".cpp"), out.with_suffix(".o")
    unit.write_text(source)
    flags = (*_body_flags(compiler), f"-I{_emulator_dir()}")
    _run_compiler([compiler, *flags, "-c", str(unit), "-o", str(compiled)], "the body")
    # Linked without the sanitizer's flag: the runtime has the handlers, no library is needed.
    _run_compiler([compiler, "-shared", str(compiled), str(runtime), "-o", str(out)], "the body")


def _run_compiler(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{command[0]} refused {what}:\n{done.stderr.strip()}")
