"""NVIDIA's compute-sanitizer over derived kernels on small shapes, each run in a process of its own with a time limit.

memcheck: every access of threads, and of the copy engine as far as it raises hardware errors, lies in an allocation
(allocations are not cached here, so tensors have nothing behind them). synccheck: barriers are used as they may be.
racecheck: hazards between accesses of threads to shared memory. On Hopper tiles come by the copy engine and products
read them through the asynchronous proxy; what racecheck knows of these two is not documented, so there its silence is
taken for the accesses of threads alone: stores and loads of fragments, and copies by threads. The order of the others
is what the emulator and the verifier check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen.runtime.load import runs_on

HERE = Path(__file__).parent
TOOLS = ("memcheck", "synccheck", "racecheck")
NAMES = ("sm80", "sm80 rows", "sm90", "sm90 rows", "backward")
FOUND = 77  # exit status of the tool where it found something
LIMIT = 300  # seconds of one run; they take about a tenth of it


def tool() -> str | None:
    beside = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def under(which: str, name: str) -> subprocess.CompletedProcess[str]:
    """tests/sanitized.py NAME under one of the tools."""
    program = tool()
    if program is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    # torch and the loader ask the driver for what it may not have: errors of theirs are not ours
    command = [program, "--tool", which, "--report-api-errors", "no", "--error-exitcode", str(FOUND), sys.executable,
               str(HERE / "sanitized.py"), name]  # fmt: skip
    path = os.pathsep.join([str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device, or this machine's access to it")
    return done


def words(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-4000:]


@cache
def summary(which: str) -> re.Pattern[str]:
    """What a clean run ends with."""
    if which == "racecheck":
        return re.compile(r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)")
    return re.compile(r"ERROR SUMMARY: 0 errors")


@pytest.mark.gpu
@pytest.mark.parametrize("which", TOOLS)
def test_the_tool_finds_a_planted_fault(which: str) -> None:
    if not runs_on("sm_90a", torch.cuda.get_device_capability()):
        pytest.skip("the planted kernels are for Hopper")
    done = under(which, f"planted {which}")
    assert "SUMMARY" in done.stdout + done.stderr, words(done)
    assert not summary(which).search(done.stdout + done.stderr), words(done)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", TOOLS)
def test_nothing_is_found_in_derived_kernels(which: str, name: str) -> None:
    if name.startswith("sm90") and not runs_on("sm_90a", torch.cuda.get_device_capability()):
        pytest.skip("the kernels of sm90 do not run on this GPU")
    done = under(which, name)
    assert done.returncode == 0, words(done)
    assert "computed" in done.stdout, words(done)
    assert summary(which).search(done.stdout + done.stderr), words(done)


def test_a_summary_is_told_from_another() -> None:
    assert summary("memcheck").search("========= ERROR SUMMARY: 0 errors")
    assert not summary("memcheck").search("========= ERROR SUMMARY: 10 errors")
    assert summary("racecheck").search("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
    assert not summary("racecheck").search("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)")
