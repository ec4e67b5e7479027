"""CUDA source to cubin, with what the assembler reports about each kernel. Needs no GPU."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from attngen.errors import CompileError, MissingToolError
from attngen.runtime.nvrtc import SOURCE_NAME, Compilation, Nvrtc, find_nvrtc
from attngen.runtime.sass import sass_counts

# No contraction: the text says fmaf where it means it, so that the emulator and the GPU round alike. Verbose
# assembler: registers and spills are read from its report. No line table: it would hold the directory of the
# process, and one source would give two binaries.
FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v")

_ERROR = re.compile(
    rf"^{re.escape(SOURCE_NAME)}\((\d+)\): (?:catastrophic )?error(?: #[\w-]+)?: (.*)$", re.MULTILINE
)
_PTX_ERROR = re.compile(r"^ptxas .*ptx input, line (\d+); (?:fatal|error)\s*: (.*)$", re.MULTILINE)
_PTX_LOCATION = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)\b(?:.*inlined_at \d+ (\d+)\b)?")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """What one kernel uses, as the assembler reports it. Spill bytes count instructions, not executions."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class Artifact:
    """A compiled module. `resources` and `instructions` (how often each mnemonic occurs) hold every kernel of the
    module by its symbol; the latter is empty where there was no disassembler."""

    cubin: bytes = field(repr=False)
    log: str = field(repr=False)
    resources: Mapping[str, Resources]
    arch: str
    compiler: str
    seconds: float
    instructions: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the binary: the identity of the code, however it was come by."""
        return hashlib.sha256(self.cubin).hexdigest()


def flags_for(arch: str) -> tuple[str, ...]:
    """All options of a compile. Only the architecture varies."""
    return (f"--gpu-architecture={arch}", *FLAGS)


def compile_cuda(source: str, *, arch: str, symbols: tuple[str, ...], lib: Nvrtc | None = None) -> Artifact:
    """Compiles `source` for `arch` ("sm_80", "sm_90", "sm_90a") and checks that it defines `symbols`."""
    compiler = lib or find_nvrtc()
    start = time.perf_counter()
    result = compiler.compile(source, flags_for(arch))
    seconds = time.perf_counter() - start
    if not result.ok:
        raise CompileError(_explain(source, arch, compiler, result))
    resources = parse_resources(result.log)
    require_symbols(symbols, resources)
    counts = count_instructions(result.cubin, resources)
    return Artifact(result.cubin, result.log, resources, arch, compiler.name, seconds, counts)


def count_instructions(cubin: bytes, symbols: Iterable[str]) -> dict[str, Mapping[str, int]]:
    """Once a compile, so that a kernel from the cache is checked without a disassembler's half second."""
    try:
        return {symbol: dict(sorted(sass_counts(cubin, symbol).items())) for symbol in symbols}
    except MissingToolError:
        return {}


def require_symbols(symbols: tuple[str, ...], resources: Mapping[str, Resources]) -> None:
    """Raises CompileError when a kernel that the caller will look up is not in the module."""
    missing = [symbol for symbol in symbols if symbol not in resources]
    if missing:
        has = ", ".join(resources) or "no kernel"
        raise CompileError(f'the source does not define extern "C" {", ".join(missing)}; it defines {has}')


def parse_resources(log: str) -> dict[str, Resources]:
    """Reads the verbose report of the assembler: one section per kernel, spills of functions it calls
    included."""
    sections = _ENTRY.split(log)
    found: dict[str, Resources] = {}
    for symbol, text in zip(sections[1::2], sections[2::2], strict=True):
        frames = [tuple(map(int, match)) for match in _STACK.findall(text)]
        registers, shared = _REGISTERS.search(text), _SHARED.search(text)
        if registers is None:
            raise CompileError(f"the assembler's report on {symbol} has no register count:\n{text}")
        found[symbol] = Resources(
            registers=int(registers.group(1)),
            spill_store_bytes=sum(frame[1] for frame in frames),
            spill_load_bytes=sum(frame[2] for frame in frames),
            stack_bytes=sum(frame[0] for frame in frames),
            static_smem_bytes=int(shared.group(1)) if shared else 0,
        )
    return found


def _explain(source: str, arch: str, compiler: Nvrtc, result: Compilation) -> str:
    head = f"{compiler.name} refused the generated source for {arch} ({result.status})"
    errors = [(int(line), message) for line, message in _ERROR.findall(result.log)]
    if not errors and _PTX_ERROR.search(result.log):
        errors = _assembler_errors(source, arch, compiler)
    if not errors:
        return f"{head}:\n{result.log}"
    lines = source.splitlines()
    shown = [
        f"  {SOURCE_NAME}:{line}: {message}\n    {lines[line - 1].strip() if line <= len(lines) else ''}"
        for line, message in errors
    ]
    return "\n".join((f"{head}:", *shown))


def _assembler_errors(source: str, arch: str, compiler: Nvrtc) -> list[tuple[int, str]]:
    """Errors of the assembler name a line of the PTX. A second compile, with line marks, leads back to the
    source."""
    result = compiler.compile(source, (*flags_for(arch), "--generate-line-info"))
    ptx = result.ptx.splitlines()
    errors: list[tuple[int, str]] = []
    for number, message in _PTX_ERROR.findall(result.log):
        at = min(int(number), len(ptx))
        marks = (_PTX_LOCATION.match(line) for line in reversed(ptx[:at]))
        mark = next((found for found in marks if found), None)
        if mark is None:
            return []
        called = f" (called at line {mark.group(2)})" if mark.group(2) else ""
        errors.append((int(mark.group(1)), f"{message}{called} in PTX `{ptx[at - 1].strip()}`"))
    return errors
