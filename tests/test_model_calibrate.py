"""The microbenchmark behind the table of the H200: its kernels compile, and it does not write nonsense."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attngen.errors import AttngenError
from attngen.model.rates import Instr, load_rates

FILE = Path(__file__).parent.parent / "benchmarks" / "calibrate.py"


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calibrate", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["calibrate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plausible(calibrate: ModuleType) -> dict[str, float]:
    return {name: (low + high) / 2 for name, (low, high) in calibrate.PLAUSIBLE.items()}


def test_what_is_plausible_becomes_a_table(calibrate: ModuleType, plausible: dict[str, float]) -> None:
    calibrate.check(plausible)
    written = calibrate.table({**plausible, "mufu.stream": 9.0}, "a Hopper")
    found = load_rates(json.dumps(written))
    assert (found.device, found.handover) == ("a Hopper", plausible["handover"])
    assert found.instructions[Instr.MUFU].stream == 9.0
    assert found.instructions[Instr.ALU].beside == pytest.approx(plausible["alu.beside"], abs=0.01)


@pytest.mark.parametrize("name", ["mufu.throughput", "copy_latency", "slowed_by_two"])
def test_what_is_not_plausible_is_an_error(calibrate: ModuleType, plausible: dict[str, float], name: str) -> None:
    with pytest.raises(AttngenError, match=rf"nothing is written.*\n.*{name} = "):
        calibrate.check({**plausible, name: 100 * plausible[name]})


def test_all_numbers_that_are_measured_are_checked(calibrate: ModuleType) -> None:
    """Those of one warp alone lie between throughput and what it costs beside products."""
    shipped = json.loads(calibrate.TABLE.read_text())
    columns = ("throughput", "beside", "latency")
    known = set(shipped["values"]) | {f"{kind}.{c}" for kind in shipped["instructions"] for c in columns}
    assert set(calibrate.PLAUSIBLE) <= known


def test_kernels_compile(calibrate: ModuleType) -> None:
    """One of each sort; the whole file is compiled by `benchmarks/calibrate.py --compile`."""
    wanted = ("product_ss_128", "product_issue", "alone_mix", "beside_mix", "turns", "wait", "copy")
    artifact = calibrate.build([t for t in calibrate.all_tests() if t.name in wanted])
    assert set(artifact.resources) == set(wanted)


def test_a_side_is_measured_while_the_other_goes_on(calibrate: ModuleType) -> None:
    """An iteration takes 10 cycles, 17 while the other side, of 3 cycles each, is at work."""

    def run(mine: int, others: int) -> list[float]:
        beside = min(mine, 3 * others // 17)
        return [500.0 + 17 * beside + 10 * (mine - beside), 500.0 + 3 * others]

    assert calibrate.outlasted(run, 100) == 17
    with pytest.raises(AttngenError, match="100 iterations, 500000000 cycles, outlast"):
        calibrate.outlasted(lambda mine, others: [5e8, others], 100)
