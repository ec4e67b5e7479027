"""The build gate counts instructions: what the schedule has is in the machine code, as often, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from schedules import NAMES, module, schedule

from attngen.errors import MissingToolError
from attngen.ir.mutate import mutants
from attngen.ir.ops import MmaSync, Wgmma, kind_of
from attngen.ir.schedule import ops_of
from attngen.kernel import Generated
from attngen.predict import MAXIMUM, MMA, PACK, SPECIAL, WGMMA, Bounds, predicted
from attngen.runtime import compile as compiler
from attngen.runtime import gate
from attngen.runtime.cache import compile_cached
from attngen.runtime.nvrtc import find_nvrtc
from attngen.runtime.sass import find_nvdisasm

try:
    find_nvrtc(), find_nvdisasm()
    MISSING = ""
except MissingToolError as error:
    MISSING = str(error)
compiles = pytest.mark.skipif(bool(MISSING), reason=MISSING or "all is there")

# one kernel with warpgroups and one with warps
WATCHED = [
    next(n for n in NAMES if "sm90" in n and "d64" in n),
    next(n for n in NAMES if n.startswith("sample causal")),
]


def counted(m: Generated, text: str) -> gate.GateReport:
    artifact = compile_cached(text, arch=m.target.archs[0], symbols=m.symbols)
    return gate.check(artifact, expected=m.expected)


@compiles
@pytest.mark.parametrize("name", NAMES)
def test_the_machine_code_has_what_the_schedule_has(name: str) -> None:
    m = module(name)
    report = counted(m, m.source.text)
    assert report.sass_checked
    assert [f.message for f in report.findings if f.rule is gate.Rule.COUNT] == []


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_tight(name: str) -> None:
    """Products, conversions and maxima are one number each; only divisions of integers, maps whose items are worked out
    afresh, loops that the compiler unrolls in part, and packed weights that a mask takes back leave it a choice."""
    whole = schedule(name)
    taken_back = whole.target == "sm90" and "backward" in name
    for symbol, counts in predicted(whole).items():
        products = {kind_of(type(op)) for k in whole.kernels if k.name == symbol for _, op in ops_of(k)}
        assert (counts[WGMMA].most > 0) == (kind_of(Wgmma) in products)
        assert (counts[MMA].most > 0) == (kind_of(MmaSync) in products)
        exact = (WGMMA, PACK) if whole.target == "sm80" else (WGMMA, MMA, SPECIAL, PACK, MAXIMUM)
        if taken_back:
            exact = (WGMMA, MMA, MAXIMUM)
            assert counts[PACK].least * 2 >= counts[PACK].most
        assert all(counts[x].least == counts[x].most for x in exact), {k: str(v) for k, v in counts.items()}
        assert counts[SPECIAL].most - counts[SPECIAL].least <= 8


@pytest.mark.parametrize("name", WATCHED)
def test_a_deleted_op_changes_the_prediction(name: str) -> None:
    """Each op with products, exponentials, conversions or maxima is counted: the prediction does not come from a sum
    that a fault leaves as it is."""
    whole = schedule(name)
    fewer = {
        str(mutant).split()[2]
        for mutant in mutants(whole)
        if str(mutant).startswith("delete") and predicted(mutant.schedule) != predicted(whole)
    }
    assert {"reduce", "map", "st_frag", "wgmma" if whole.target == "sm90" else "mma_sync"} <= fewer
    assert not fewer & {"fill", "mbar_wait", "commit", "cp_wait", "cta_sync"}


# ---- texts that are not what the schedule says -----------------------------------------------------------------------

FIRST_ARGUMENT = re.compile(r"exp2_approx\((.*)\);$", re.MULTILINE)


def one_more_exponential(text: str) -> str:
    return FIRST_ARGUMENT.sub(r"exp2_approx(exp2_approx(\1));", text, count=1)


def one_exponential_less(text: str) -> str:
    return FIRST_ARGUMENT.sub(r"(\1);", text, count=1)


def one_product_less(text: str) -> str:
    return re.sub(r"^ *(wgmma_m64|mma_m16)n.*\);\n", "", text, count=1, flags=re.MULTILINE)


def one_product_more(text: str) -> str:
    # one that adds: the first of two that overwrite is dead, and the assembler drops it
    return re.sub(r"^( *(?:wgmma_m64n.*, 1|mma_m16n.*)\);\n)", r"\1\1", text, count=1, flags=re.MULTILINE)


def one_conversion_more(text: str) -> str:
    again = r"\1 = \2(\3);\n\1 ^= \2(packed[1], packed[0]);"
    return re.sub(r"(\w+\[[^;=]*\]) = (pack_\w+x2)\((packed\[0\], packed\[1\])\);", again, text, count=1)


def one_maximum_less(text: str) -> str:
    return re.sub(r"= max_f32\(x0, shfl_xor_f32\(x0, 2\)\)", "= shfl_xor_f32(x0, 2)", text, count=1)


FAULTS: dict[Callable[[str], str], tuple[str, str]] = {
    one_more_exponential: (SPECIAL, "more"),
    one_exponential_less: (SPECIAL, "fewer"),
    one_product_less: ("products", "fewer"),
    one_product_more: ("products", "more"),
    one_conversion_more: (PACK, "more"),
    one_maximum_less: (MAXIMUM, "fewer"),
}


@compiles
@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_tampered_text_is_refused(fault: Callable[[str], str], name: str) -> None:
    m = module(name)
    mnemonic, direction = FAULTS[fault]
    if mnemonic == "products":
        mnemonic = WGMMA if m.schedule.target == "sm90" else MMA
    text = m.source.text.replace(m.source.body, fault(m.source.body))
    assert text != m.source.text
    report = counted(m, text)
    assert not report.ok
    (finding,) = [f for f in report.findings if f.rule is gate.Rule.COUNT]
    assert finding.symbol == m.symbols[-1]
    said = rf"{m.symbols[-1]}: \d+ {mnemonic} \(.*, the schedule has \d+.*; {direction}: .*nvrtc"
    assert re.search(said, finding.message)


# ---- the gate alone --------------------------------------------------------------------------------------------------


@compiles
def test_counts_travel_with_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel from the cache is checked without the disassembler; where nothing was counted, it is asked."""
    m = module(WATCHED[0])
    artifact = compile_cached(m.source.text, arch=m.target.archs[0], symbols=m.symbols)
    (symbol,) = m.symbols
    (expected,) = predicted(m.schedule).values()
    assert all(artifact.instructions[symbol].get(x, 0) in b for x, b in expected.items())

    def missing(cubin: bytes, symbol: str) -> dict[str, int]:
        raise MissingToolError("nvdisasm was not found")

    monkeypatch.setattr(gate, "sass_counts", missing)
    assert gate.check(artifact, expected=predicted(m.schedule)).findings == ()
    blind = gate.check(dataclasses.replace(artifact, instructions={}), expected=predicted(m.schedule))
    assert blind.ok and not blind.sass_checked
    assert "instructions were not counted: nvdisasm was not found" in str(blind)
    monkeypatch.setattr(compiler, "sass_counts", missing)
    assert compiler.count_instructions(artifact.cubin, m.symbols) == {}


def test_bounds() -> None:
    assert 3 in Bounds(3, 3) and 4 not in Bounds(3, 3)
    assert str(Bounds(3, 3)) == "3" and str(Bounds(1, 4) * 2 + Bounds(1, 1)) == "3 to 9"
