"""The sample kernels in generated/ are what the compiler writes today, and each of them compiles."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attngen import golden
from attngen.errors import MissingToolError
from attngen.ir.schedule import Schedule
from attngen.runtime.cache import compile_cached
from attngen.runtime.gate import check
from attngen.runtime.nvrtc import find_nvrtc

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "generated"
NAMES = tuple(s.name for s in golden.SAMPLES)
EVERY_SAMPLE = pytest.mark.parametrize("sample", golden.SAMPLES, ids=NAMES)


@pytest.fixture(scope="module", autouse=True)
def updated(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        golden.write(DIRECTORY)


def read(name: str) -> str:
    return (DIRECTORY / name).read_text(encoding="utf-8")


def no_nvrtc() -> str:
    try:
        find_nvrtc()
    except MissingToolError as error:
        return str(error).splitlines()[0]
    return ""


def test_the_set_is_what_the_compiler_writes() -> None:
    want = golden.render()
    have = {p.name for p in DIRECTORY.iterdir()} - {"README.md"}
    differing = sorted(n for n in want if n in have and read(n) != want[n])
    hint = "look at the difference, then run `pytest tests/test_generated.py --update-golden`"
    assert have == set(want), f"{sorted(have ^ set(want))} missing or left over: {hint}"
    assert not differing, f"{', '.join(differing)}: {hint}"


ARCHS = {"sm80": ("sm_80", "sm_90"), "sm90": ("sm_90a",)}  # by target: what every file has to compile for


def test_the_set_covers_what_it_should() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 10
    text = read("README.md")
    assert "--update-golden" in text
    listed = json.loads(read(golden.MANIFEST))["samples"]
    assert tuple(s["name"] for s in listed) == NAMES


@EVERY_SAMPLE
def test_manifest_tells_the_truth(sample: golden.Sample) -> None:
    entry = json.loads(read(f"{sample.name}.json"))
    source = read(f"{sample.name}.cu")
    assert entry["source_sha256"] == hashlib.sha256(source.encode()).hexdigest()
    assert entry["schedule_sha256"] == hashlib.sha256(read(f"{sample.name}.schedule").encode()).hexdigest()
    for kernel in entry["kernels"]:
        declared = re.search(rf"struct {kernel['symbol']}_params \{{(.*?)\}};", source, re.DOTALL)
        assert declared, f"no parameters of {kernel['symbol']} in the source"
        assert [p["declaration"] for p in kernel["params"]] == re.findall(r"^\s*([^\n;]+);", declared[1], re.MULTILINE)
        last = kernel["params"][-1]
        assert kernel["params_bytes"] >= last["offset"] + last["bytes"]


@EVERY_SAMPLE
def test_schedule_text_reads_back(sample: golden.Sample) -> None:
    text = read(f"{sample.name}.schedule")
    parsed = Schedule.parse(text)
    assert parsed.print() == text
    assert parsed == sample.kernel().schedule


@EVERY_SAMPLE
def test_emulator_runs_the_same_bytes(sample: golden.Sample) -> None:
    source = sample.kernel().source
    assert len(source.body) > 1000
    assert source.body in read(f"{sample.name}.cu")


@EVERY_SAMPLE
def test_files_are_self_contained_and_timeless(sample: golden.Sample) -> None:
    for extension in (".cu", ".schedule", ".json"):
        text = read(sample.name + extension)
        assert "#include" not in text
        assert str(ROOT) not in text
        found = re.search(
            r"(?<![\w.])/(?:home|root|usr|tmp|work|Users)/|\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b"
            r"|0x[0-9a-f]{9,}(?![0-9a-f]|ull)",
            text,
        )
        assert found is None, f"{sample.name}{extension} holds {found and found[0]!r}"


def test_equal_bytes_in_every_process() -> None:
    """Another hash seed gives another order of sets and of dicts of sets."""
    script = "import hashlib, sys; from attngen.golden import render; " \
             "print({n: hashlib.sha256(t.encode()).hexdigest() for n, t in render().items()})"  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "4242")
    ]  # fmt: skip
    assert said[0] == said[1]
    assert said[0].count(".cu") == len(NAMES)


@pytest.mark.skipif(bool(no_nvrtc()), reason=no_nvrtc() or "NVRTC is there")
@pytest.mark.parametrize(
    ("sample", "arch"),
    [pytest.param(s, arch, id=f"{s.name}-{arch}") for s in golden.SAMPLES for arch in ARCHS[s.target]],
)
def test_compiles_past_the_build_gate(sample: golden.Sample, arch: str) -> None:
    symbols = tuple(k.name for k in Schedule.parse(read(f"{sample.name}.schedule")).kernels)
    artifact = compile_cached(read(f"{sample.name}.cu"), arch=arch, symbols=symbols)
    report = check(artifact, expected=sample.kernel().expected)
    assert report.ok, str(report)
    assert set(artifact.resources) == set(symbols)
