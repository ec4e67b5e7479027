"""The report on this machine, and what it says where something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen import doctor
from attngen.doctor import Finding, Status
from attngen.errors import MissingToolError


def test_report_covers_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ATTNGEN_PRECOMPILED", str(tmp_path / "ready"))
    found = {finding.name: finding for finding in doctor.report()}
    for name in ("Python", "torch", "NVRTC", "CuPy", "cuda-bindings", "C++ compiler", "nvdisasm", "cache"):
        assert found[name].detail
    assert any(name.startswith("GPU") for name in found)
    assert found["cache"].status is Status.OK
    assert "0 kernels" in found["cache"].detail
    assert str(tmp_path / "ready") in found["cache"].detail
    assert all(finding.fix for finding in found.values() if finding.status is Status.MISSING)


def test_missing_compiler_is_a_warning_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingToolError("NVRTC was not found\n  tried: nothing")

    monkeypatch.setattr(doctor, "find_nvrtc", missing)
    (finding,) = (finding for finding in doctor.report() if finding.name == "NVRTC")
    assert finding == Finding("NVRTC", Status.WARN, "NVRTC was not found", "pip install nvidia-cuda-nvrtc")


def test_unwritable_cache_fails_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(blocker / "cache"))
    findings = doctor.report()
    (finding,) = (finding for finding in findings if finding.name == "cache")
    assert finding.status is Status.MISSING
    assert finding.fix == "set ATTNGEN_CACHE_DIR"
    assert doctor.exit_status(findings) == 1


def test_table_puts_the_fix_under_its_line() -> None:
    findings = [Finding("a", Status.OK, "fine"), Finding("longer", Status.WARN, "absent", "install it")]
    assert doctor.table(findings).splitlines() == [
        "a       ok       fine",
        "longer  warn     absent",
        "                 fix: install it",
    ]
    assert doctor.exit_status(findings) == 0


def test_main_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() in (0, 1)
    assert "NVRTC" in capsys.readouterr().out
