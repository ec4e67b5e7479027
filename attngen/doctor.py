"""Says what attngen finds on this machine, what is missing, and how to get it."""

from __future__ import annotations

import enum
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from attngen import env
from attngen.errors import AttngenError
from attngen.runtime.cache import cache_directory
from attngen.runtime.load import device_facts, driver_cuda_version
from attngen.runtime.nvrtc import find_nvrtc
from attngen.runtime.sass import find_nvdisasm

_GPU_EXTRA = "pip install attngen[cuda13]"
_MINIMUM_PYTHON = (3, 10)
_MINIMUM_CAPABILITY = (8, 0)


class Status(enum.Enum):
    """OK: works. WARN: attngen works without it, in part. MISSING: attngen does not work."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is empty where nothing has to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def report() -> list[Finding]:
    """Looks at everything attngen uses. Changes nothing but a temporary file in the cache directory."""
    return [
        _python(),
        _torch(),
        _nvrtc(),
        _package("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "loads kernels"),
        _package("cuda-bindings", ("cuda-bindings",), "launches kernels"),
        *_gpus(),
        _host_compiler(),
        _found("nvdisasm", lambda: str(find_nvdisasm()), "pip install nvidia-cuda-nvdisasm"),
        _cache(),
    ]


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, one line each; a line with a fix is followed by it."""
    width = max(len(finding.name) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.name:<{width}}  {finding.status.value:<7}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':<{width}}  {'':<7}  fix: {finding.fix}")
    return "\n".join(lines)


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when something attngen cannot do without is missing, else 0."""
    return int(any(finding.status is Status.MISSING for finding in findings))


def main() -> int:
    """Prints the report and returns the exit status."""
    findings = report()
    print(table(findings))
    return exit_status(findings)


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _MINIMUM_PYTHON:
        return Finding("Python", Status.MISSING, detail, "install Python 3.10 or later")
    return Finding("Python", Status.OK, detail)


def _torch() -> Finding:
    if torch.version.cuda is None:
        fix = "install a CUDA build of torch to run on a GPU (https://pytorch.org/get-started)"
        return Finding("torch", Status.WARN, f"{torch.__version__}, built without CUDA: CPU only", fix)
    return Finding("torch", Status.OK, f"{torch.__version__}, CUDA {torch.version.cuda}")


def _nvrtc() -> Finding:
    def detail() -> str:
        found = find_nvrtc()
        return f"{found.name} at {found.path}"

    return _found("NVRTC", detail, "pip install nvidia-cuda-nvrtc")


def _package(name: str, distributions: Sequence[str], purpose: str) -> Finding:
    # Asks for the distribution and does not import: an import of CuPy takes a second and may start the GPU.
    for distribution in distributions:
        try:
            return Finding(name, Status.OK, f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return Finding(name, Status.WARN, f"not installed; it {purpose} on a GPU", _GPU_EXTRA)


def _gpus() -> list[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return [Finding("GPU", Status.WARN, "torch sees none; kernels run in the CPU emulator only")]
    return [_gpu(index) for index in range(count)]


def _gpu(index: int) -> Finding:
    name = f"GPU {index}"
    try:
        facts = device_facts(index)
        supports = tuple(map(int, driver_cuda_version().split(".")))
    except AttngenError as error:
        return Finding(name, Status.WARN, str(error), _GPU_EXTRA)
    detail = (
        f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}, "
        f"{facts.sm_count} SMs, {facts.smem_per_block // 1024} KiB of shared memory a block, "
        f"driver for CUDA {driver_cuda_version()}"
    )
    if facts.capability < _MINIMUM_CAPABILITY:
        return Finding(name, Status.WARN, detail, "use a GPU of compute capability 8.0 or later")
    try:
        compiler = find_nvrtc()
    except AttngenError:
        return Finding(name, Status.OK, detail)  # the line on NVRTC says it
    if compiler.version[0] > supports[0]:
        fix = f"update the driver or install an NVRTC of CUDA {supports[0]}: {compiler.name} may be too new"
        return Finding(name, Status.WARN, detail, fix)
    return Finding(name, Status.OK, detail)


def _host_compiler() -> Finding:
    def detail() -> str:
        # Here, so that the report also works where the emulator cannot be imported.
        from attngen.emulator.build import find_compiler

        return find_compiler()

    return _found("C++ compiler", detail, "install g++ or clang++, or set CXX, to run the emulator")


def _cache() -> Finding:
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return Finding("cache", Status.MISSING, f"{directory}: {error.strerror}", "set ATTNGEN_CACHE_DIR")
    entries = sum(1 for _ in directory.glob("*/manifest.json"))
    return Finding("cache", Status.OK, f"{directory}, {entries} kernels{_precompiled_note()}")


def _precompiled_note() -> str:
    folders = env.PRECOMPILED.get()
    return f"; precompiled: {os.pathsep.join(map(str, folders))}" if folders else ""


def _found(name: str, detail: Callable[[], str], fix: str) -> Finding:
    try:
        return Finding(name, Status.OK, detail())
    except (AttngenError, ImportError) as error:
        return Finding(name, Status.WARN, str(error).splitlines()[0], fix)
