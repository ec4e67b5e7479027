"""What README, docs and examples show works: each block runs, the excerpt is what is generated, each example ends well.

CPU tensors run in the emulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from attngen import env
from attngen.kernel import kernel_for
from attngen.signature import check_tensors, signature_of
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal, sliding_window

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in found]


@cache
def namespace(page: Path) -> dict[str, object]:
    """The names that the python blocks of a page leave, run in order, under the page's own line numbers."""
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for line, text in blocks(page, "python"):
        exec(compile("\n" * (line - 1) + text, str(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(namespace(page)) > 4
    assert "Traceback" not in capsys.readouterr().out


def test_first_variant_is_ten_lines() -> None:
    _, text = blocks(ROOT / "README.md", "python")[0]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 10


def test_excerpt_is_generated_text() -> None:
    names = namespace(ROOT / "README.md")
    q, k, v = (names[n] for n in "qkv")
    assert isinstance(q, torch.Tensor)
    assert isinstance(k, torch.Tensor)
    assert isinstance(v, torch.Tensor)
    spec = Attention(mask=causal() & sliding_window(100), score=names["relative_bias"])  # type: ignore[arg-type]
    check_tensors(q, k, v, spec)
    body = kernel_for(spec.variant, signature_of(q, k, v), target("sm80")).source.body
    ((_, excerpt),) = blocks(ROOT / "README.md", "cuda")
    assert 12 <= len(excerpt.splitlines()) <= 20
    assert excerpt in body, f"paste the op from the generated text:\n{body[body.index('// S4 map') :][:1500]}"


def test_environment_variables_are_listed() -> None:
    listed = set(re.findall(r"^\| `(ATTNGEN_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert listed == {variable.name for variable in env.VARIABLES}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    assert [t for t in links if not (page.parent / t).exists()] == []
    named = re.findall(r"`((?:attngen|templates|tests|examples|docs)/[\w./]+?\.\w+)`", text)
    assert [t for t in named if not (ROOT / t).is_file()] == []


def test_commands_exist() -> None:
    """Every `attngen COMMAND` of the README is one, and its options are."""
    shown = re.findall(r"^ {4}attngen (\w+) *([^#\n]*)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {command for command, _ in shown} == {"generate", "explain", "verify", "lower", "tune", "bench", "doctor"}
    for command, rest in shown:
        run = [sys.executable, "-m", "attngen", command, "--help"]
        help_text = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert [o for o in re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest) if o not in help_text] == [], command


def test_ci_runs_the_readmes_tests() -> None:
    assert "pip install -e '.[test]' && pytest -q" in (ROOT / "README.md").read_text()
    script = (ROOT / ".ci" / "run").read_text()
    assert ".[test]" in script
    assert re.search(r"^pytest -q", script, re.MULTILINE)


@cache
def output_of(example: Path) -> str:
    """What an example prints on the CPU, from another directory."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    run = [sys.executable, str(example)]
    done = subprocess.run(run, cwd=tempfile.gettempdir(), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run(example: Path) -> None:
    assert len(output_of(example).splitlines()) >= 2


def test_quickstart_prints_the_error_beside_torchs() -> None:
    ours, torchs = map(float, re.findall(r"\d\.\d+e[+-]\d+", output_of(ROOT / "examples" / "quickstart.py")))
    assert 0 < ours <= 2 * torchs + 1e-5


def test_examples_are_the_documented_ones() -> None:
    assert {"quickstart", "custom_mask", "custom_score", "read_the_schedule"} <= {e.stem for e in EXAMPLES}
