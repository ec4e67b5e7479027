"""The wheel holds what a kernel is made of, and works in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from attngen import __version__
from attngen.kernel import kernel_for
from attngen.resources import templates_dir
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal

ROOT = Path(__file__).parent.parent

RENDER = """
import sys
from attngen import resources
from attngen.kernel import kernel_for
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal

assert resources.templates_dir().parent.name == "attngen", resources.templates_dir()
print(resources.__file__, file=sys.stderr)
kernel = kernel_for(Attention(mask=causal()).variant, Signature(IoType.BF16, 64, 64), target("sm80"))
sys.stdout.write(kernel.source.text)
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command that must succeed, without this process's import path."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment with the wheel; what it depends on is found where this process finds it."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=True)
    bin_dir = home / ("Scripts" if os.name == "nt" else "bin")
    run(bin_dir / "python", "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=home)
    (installed,) = home.rglob("attngen-*.dist-info")
    # a plain path: .pth files below it are not read, so that an editable install there does not count
    (installed.parent / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return bin_dir


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {
        f"attngen/templates/{p.relative_to(templates_dir()).as_posix()}"
        for p in templates_dir().rglob("*")
        if p.is_file()
    }
    assert templates <= names
    assert {"attngen/templates/kernel.cu.jinja", "attngen/templates/prelude/sm80.cuh"} <= templates
    assert {f"attngen/{p.relative_to(ROOT / 'attngen').as_posix()}" for p in (ROOT / "attngen").rglob("*.py")} <= names
    assert "attngen/py.typed" in names
    info = f"attngen-{__version__}.dist-info"
    assert f"{info}/licenses/LICENSE" in names
    assert {n.split("/")[0] for n in names} == {"attngen", info}, "the wheel installs something else"


def test_renders_the_same_kernel_from_another_directory(scripts: Path, tmp_path: Path) -> None:
    done = run(scripts / "python", "-c", RENDER, cwd=tmp_path)
    assert str(scripts.parent) in done.stderr
    here = kernel_for(Attention(mask=causal()).variant, Signature(IoType.BF16, 64, 64), target("sm80"))
    assert done.stdout == here.source.text


def test_command_line(scripts: Path, tmp_path: Path) -> None:
    assert __version__ in run(scripts / "attngen", "--version", cwd=tmp_path).stdout
    run(scripts / "attngen", "generate", "--mask", "causal", "--head-dim", "64", "-o", tmp_path / "out", cwd=tmp_path)
    (source,) = (tmp_path / "out").glob("*.cu")
    assert "__global__" in source.read_text()
    assert len(list((tmp_path / "out").iterdir())) == 3
