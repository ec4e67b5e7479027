"""`attngen bench`: what it compares is the same computation, wrong results get no time, tables are of the record."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import CPU, SMALL, Named, small, timed
from torch import Tensor
from torch.nn.attention import SDPBackend

from attngen.bench import machine
from attngen.bench.cases import GROUPS, Case, Data, Pattern, flex_mods, make
from attngen.bench.check import Truth, poison
from attngen.bench.contenders import Attngen, Call, FlashAttention3, Flex, Sdpa, UnsupportedError
from attngen.bench.page import page
from attngen.bench.predict import predicted, visited
from attngen.bench.record import FirstCall, Line, Record, RecordError
from attngen.bench.run import run
from attngen.bench.tables import fill, full, missing, table
from attngen.bench.timing import Launch, Mode, Settings, measure
from attngen.cli import bench as command
from attngen.cli import main
from attngen.errors import MissingToolError, SpecError
from attngen.evaluate import evaluate
from attngen.kernel import kernel_for
from attngen.reference import reference
from attngen.signature import signature_of
from attngen.target import SM80, SM90

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "h200_forward.json"


# ---- cases ---------------------------------------------------------------------------------------------------------


def test_groups() -> None:
    cases = [c for makers in GROUPS.values() for c in makers()]
    assert len(set(cases)) == len({(c.group, str(c)) for c in cases}) == len(cases)
    assert {p for c in cases for p in [c.pattern]} == set(Pattern)
    grid = list(GROUPS["grid"]())
    assert len(grid) == 18 and all(c.batch * c.seqlen_q == 16384 and c.heads * c.head_dim == 2048 for c in grid)
    assert {(c.head_dim, c.head_dim_v) for c in GROUPS["head-dims"]()} >= {(40, 40), (80, 80), (112, 112), (192, 128)}
    assert {c.heads // c.kv_heads for c in GROUPS["groups"]()} == {4, 8}
    assert all(c.heads % c.kv_heads == 0 for c in cases)


@pytest.mark.parametrize("pattern", Pattern)
def test_sampled_rows_are_those_of_the_reference(pattern: Pattern) -> None:
    inputs = small(pattern)
    truth = Truth(inputs)
    exact, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
    rows = torch.stack([exact[at] for at in truth.rows])
    assert (truth.exact - rows).abs().max() < 1e-12
    assert 1e-4 < truth.allowed < 5e-2


@pytest.mark.parametrize("pattern", Pattern)
def test_flex_computes_the_same_variant(pattern: Pattern) -> None:
    """Its functions against attngen's description, over the whole grid."""
    inputs = small(pattern)
    case, spec = inputs.case, inputs.spec
    score_mod, mask_mod = flex_mods(inputs)
    i, j = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)
    scores = torch.randn(case.heads, case.seqlen_q, case.seqlen_k, dtype=torch.float64)
    seen = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    for h in range(case.heads):
        env = {"b": 0, "h": h, "i": i, "j": j, "seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k, "score": scores[h]}
        visible = evaluate(spec.variant.mask, env, spec.tensors).expand(seen.shape)
        assert torch.equal(visible, seen if mask_mod is None else mask_mod(0, h, i, j).expand(seen.shape))
        want = evaluate(spec.variant.score, env, spec.tensors)
        got = scores[h] if score_mod is None else score_mod(scores[h], 0, h, i, j)
        assert (torch.where(visible, want - got, 0.0)).abs().max() < 1e-6


@pytest.mark.parametrize("pattern", Pattern)
def test_visible_pairs_are_counted(pattern: Pattern) -> None:
    inputs = small(pattern, seqlen_q=600, seqlen_k=600) if pattern is not Pattern.DOCUMENT else small(pattern)
    c = inputs.case
    env = {"b": 0, "h": 0, "i": torch.arange(c.seqlen_q)[:, None], "j": torch.arange(c.seqlen_k),
           "seqlen_q": c.seqlen_q, "seqlen_k": c.seqlen_k}  # fmt: skip
    count = evaluate(inputs.spec.variant.mask, env, inputs.spec.tensors).expand(c.seqlen_q, c.seqlen_k).sum().item()
    assert inputs.visible == (c.seqlen_q**2 / 2 if pattern is Pattern.CAUSAL else count)
    assert inputs.operations == 2 * inputs.visible * c.batch * c.heads * (c.head_dim + c.head_dim_v)


def test_growing_keys_grow_towards_the_first() -> None:
    keys = small(Pattern.FULL, data=Data.GROWING).k.float().norm(dim=-1).mean((0, 1))
    assert keys[:8].mean() > 1.2 * keys[-8:].mean()


# ---- contenders ----------------------------------------------------------------------------------------------------


def test_sdpa_computes_full_and_square_causal() -> None:
    math_ = Sdpa("math", SDPBackend.MATH)
    for inputs in (small(Pattern.FULL), small(Pattern.CAUSAL, seqlen_k=40)):
        assert Truth(inputs).check(math_.call(inputs)).ok
    with pytest.raises(UnsupportedError, match="aligned to the first key"):
        math_.call(small(Pattern.CAUSAL))
    with pytest.raises(UnsupportedError, match="no such variant"):
        math_.call(small(Pattern.ALIBI))


def test_flash_attention_3_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = FlashAttention3()
    monkeypatch.setitem(sys.modules, "fa3", None)
    assert "fa3" in str(peer.missing())
    module, seen = ModuleType("fa3"), []

    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        seen.append((q.shape, causal))
        inputs = small(Pattern.CAUSAL, head_dim=64, head_dim_v=64)
        out, _ = reference(inputs.spec, *(t.transpose(1, 2) for t in (q, k, v)))
        return out.transpose(1, 2)

    monkeypatch.setattr(module, "attention", attention, raising=False)
    monkeypatch.setitem(sys.modules, "fa3", module)
    assert peer.missing() is None
    inputs = small(Pattern.CAUSAL, head_dim=64, head_dim_v=64)
    assert Truth(inputs).check(peer.call(inputs)).ok and seen == [((2, 40, 4, 64), True)]
    with pytest.raises(UnsupportedError, match="64, 96, 128, 192, 256"):
        peer.call(small(Pattern.CAUSAL))


@pytest.mark.parametrize(
    ("pattern", "given"),
    [(Pattern.SOFTCAP, {"softcap": 30.0}), (Pattern.WINDOW, {"window_size_left": 1023, "window_size_right": 0})],
)
def test_flash_attention_3_by_its_operator(
    pattern: Pattern, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variants that it has arguments for."""
    inputs, seen = small(pattern, head_dim=64, head_dim_v=64), []

    def fwd(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        seen.append(arguments)
        out, lse = reference(inputs.spec, *(t.transpose(1, 2) for t in (q, k, v)))
        return out.transpose(1, 2), lse

    monkeypatch.setitem(sys.modules, "fa3", module := ModuleType("fa3"))
    monkeypatch.setattr(module, "attention", None, raising=False)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=fwd), raising=False)
    assert Truth(inputs).check(FlashAttention3().call(inputs)).ok
    assert seen == [{"softmax_scale": 0.125, "is_causal": True, "num_splits": 1, **given}]
    with pytest.raises(UnsupportedError, match="no such variant"):
        FlashAttention3().call(small(Pattern.ALIBI, head_dim=64, head_dim_v=64))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pattern", [Pattern.FULL, Pattern.CAUSAL, Pattern.TABLE])
def test_flex(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor, which takes long."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **how: real(fn, **how) if "backend" in how else fn)
    inputs = small(pattern, head_dim_v=32)
    assert Truth(inputs).check(Flex().call(inputs)).ok


def test_attngen_in_the_emulator() -> None:
    inputs = small(Pattern.SOFTCAP)
    assert Truth(inputs).check(Attngen().call(inputs)).ok


# ---- the check -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "break_", [lambda out: out * 1.05, lambda out: out.roll(1, 2), lambda out: out.fill_(math.nan), lambda out: out * 0]
)
def test_wrong_results_are_noticed(break_: Any) -> None:
    inputs = small(Pattern.CAUSAL)
    exact, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
    truth = Truth(inputs)
    assert truth.check(Call(lambda: exact.bfloat16())).ok
    assert not truth.check(Call(lambda: break_(exact.bfloat16()))).ok


def test_a_part_that_is_not_written_is_noticed() -> None:
    """A launch that computes nothing leaves the poison where the last contender's right result was."""
    inputs = small(Pattern.CAUSAL)
    b, h, s, _ = inputs.q.shape
    at = poison([((b, h, s, 16), torch.bfloat16), ((b, h, s), torch.float32)], inputs.q)
    assert len(at) == 2
    verdict = Truth(inputs).check(Call(lambda: torch.full((b, h, s, 16), math.nan, dtype=torch.bfloat16)))
    assert verdict.error == math.inf and not verdict.ok


# ---- timing --------------------------------------------------------------------------------------------------------


def test_medians_of_blocks_in_turn() -> None:
    """A clock that is told: what counts is the median of medians, and a block lasts as long as asked."""
    blocks: list[tuple[str, int]] = []
    slept: list[float] = []

    def timer(launch: Launch, count: int) -> Sequence[float]:
        name = launch()
        blocks.append((name, count))
        base = {"quick": 0.5, "slow": 20.0}[name] + 0.01 * len(blocks)
        return [base] * (count - 1) + [base * 50]  # one outlier a block

    settings = Settings(rounds=5)
    found = measure({"quick": lambda: "quick", "slow": lambda: "slow"}, Mode.GAPS, settings, timer, slept.append)
    assert slept == [settings.gap_seconds] * 10
    assert found["quick"].ms == pytest.approx(0.5, abs=0.15) and found["slow"].ms == pytest.approx(20, abs=0.15)
    assert found["quick"].low < found["quick"].ms < found["quick"].high < 1
    timed = blocks[2:]
    assert {n for n, _ in timed[:2]} == {n for n, _ in timed[2:4]} == {"quick", "slow"}
    assert dict(timed) == {"quick": int(30 / 0.51), "slow": 3}
    assert [n for n, _ in timed[::2]] != [timed[0][0]] * 5, "always in one order"
    slept.clear()
    measure({"quick": lambda: "quick"}, Mode.STEADY, settings, timer, slept.append)
    assert slept == []


# ---- the model -----------------------------------------------------------------------------------------------------


def test_the_model_speaks_of_chips_it_has_rates_for() -> None:
    inputs = make(Case("grid", Pattern.CAUSAL, 1, 2, 2, 1024, 1024, 128, 128), CPU)
    full = make(Case("grid", Pattern.FULL, 1, 2, 2, 1024, 1024, 128, 128), CPU)
    assert predicted(inputs, SM90, (8, 0), 132, 1980) is None
    assert predicted(inputs, SM80, (9, 0), 132, 1980) is None
    roof = 4096 * 132 * 1980e6 / 1e12
    causal_, full_ = (predicted(x, SM90, (9, 0), 132, 1980) for x in (inputs, full))
    assert causal_ is not None and full_ is not None
    assert 0.2 * roof < causal_ < full_ < roof
    kernel = kernel_for(inputs.spec.variant, signature_of(inputs.q, inputs.k, inputs.v), SM90)
    tiles = visited(kernel, inputs)
    rows, keys = kernel.config.block_m, kernel.config.block_n
    ends = [min(first + rows, 1024) for first in range(0, 1024, rows)]
    assert tiles is not None and tiles.tolist() == [-(-end // keys) for end in ends]
    assert predicted(make(replace(SMALL, pattern=Pattern.DOCUMENT, seqlen_k=40), CPU), SM80, (8, 0), 108, 1410) is None


# ---- a run ---------------------------------------------------------------------------------------------------------


def sample() -> Record:
    record = Record({"device": "a CPU", "torch": "2", "cuda": "none", "cudnn": "none", "date": "today"}, {})
    record.missing = {"FlashAttention-3": "import fa3: none"}
    contenders = [
        Named("attngen"), Named("cuDNN"), Named("FlashAttention-2", factor=1.1), Named("FlashAttention-3"),
        Named("FlexAttention", error=UnsupportedError("has no such mask")), Named("loud", error=RuntimeError("a\nb")),
    ]  # fmt: skip
    kept: list[int] = []
    cases = [SMALL, replace(SMALL, pattern=Pattern.FULL)]
    run(record, cases, contenders, [Mode.GAPS], Settings(), CPU, lambda text: None, lambda r: kept.append(len(r.lines)),
        timed)  # fmt: skip
    assert kept == [2, 4]
    return record


def test_only_right_results_have_a_time() -> None:
    record = sample()
    assert [x.name for x in record.lines] == ["attngen", "cuDNN"] * 2
    line = record.lines[0]
    assert line.ms == 9.0 and line.error is not None and line.allowed is not None and line.error <= line.allowed
    assert line.tflops == pytest.approx(make(SMALL, CPU).operations / 9.0 / 1e9)
    reasons = {a.name: a.reason for a in record.absent}
    assert reasons["FlashAttention-2"].startswith("wrong: an error of ")
    assert reasons["FlexAttention"] == "UnsupportedError: has no such mask" and reasons["loud"] == "RuntimeError: a"
    assert "FlashAttention-3" not in reasons
    assert record.failed == []
    assert len(list(missing(record))) == 5


def test_a_wrong_attngen_fails_the_command() -> None:
    record = sample()
    run(record, [SMALL], [Named("attngen sm80", factor=2.0)], [Mode.GAPS], Settings(), CPU, lambda text: None,
        lambda r: None, timed)  # fmt: skip
    assert [a.name for a in record.failed] == ["attngen sm80"]


def test_a_record_is_read_as_written(tmp_path: Path) -> None:
    record = sample()
    record.first_calls.append(FirstCall("causal", 64, 3.0, 0.25, 0.1))
    record.roof, record.matmul, record.clocks = 1000.0, {"gaps": 700.0}, {"before": {"sm_mhz": "1"}}
    path = tmp_path / "record.json"
    path.write_text(record.to_json())
    again = Record.read(path)
    assert again == record and again.to_json() == record.to_json()
    for bad in ("", "{}", '{"format": 7}', '{"format": 1, "lines": [{}]}', "[]"):
        path.write_text(bad)
        with pytest.raises(RecordError, match="not a record"):
            Record.read(path)


# ---- tables and pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "benchmarks/RESULTS.md"])
def test_pages_agree_with_the_record(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.count("<!-- generated: ") >= 1
    renew = f"attngen bench --read {RECORD.relative_to(ROOT)} --tables {name}"
    assert fill(text, Record.read(RECORD)) == text, f"renew it: {renew}"


def test_tables() -> None:
    record = sample()
    record.roof = 1e-3
    shown = full(record, "grid", Mode.GAPS)
    assert shown.head == ("case", "attngen", "of the roof", "cuDNN", "ratio")
    assert shown.rows[0][0] == "causal D32/16 S40x72 B2 H4/2" and shown.rows[0][4] == f"{7 / 9:.2f}"
    assert shown.rows[0][2] == f"{100 * record.lines[0].tflops / 1e-3:.0f} %"
    record.lines[0] = replace(record.lines[0], model=2 * record.lines[0].tflops)
    shown = full(record, "grid", Mode.GAPS)
    assert shown.head[3] == "of the model" and [row[3] for row in shown.rows] == ["50 %", "-"]
    assert fill("a <!-- generated: missing -->\nold\n<!-- /generated --> b", record).count("\n- ") == 5
    with pytest.raises(SpecError, match="the table 'x' is not known"):
        table("x", record)


def test_the_page_shows_every_line() -> None:
    record = Record.read(RECORD)
    text = page(record)
    assert text == page(Record.read(RECORD))
    assert text.count('<rect class="c0" x="250"') == sum(x.name == "attngen" for x in record.lines)
    for line in record.lines:
        assert f"{line.name}: {line.tflops:.0f} TFLOP/s, {line.ms:.3f} ms" in text


# ---- the command ---------------------------------------------------------------------------------------------------


def test_names_of_the_options() -> None:
    assert (*GROUPS, "first-call") == command.GROUPS
    from attngen.bench.contenders import PEERS

    assert tuple(p.name for p in PEERS) == command.PEERS
    assert {Mode[n] for names in command.MODES.values() for n in names} == set(Mode)
    assert command.chosen("--peers", "all", command.PEERS) == command.PEERS
    assert command.chosen("--peers", "FlexAttention, cuDNN", command.PEERS) == ("cuDNN", "FlexAttention")
    with pytest.raises(SpecError, match="--peers: fa4 is not known"):
        command.chosen("--peers", "fa4", command.PEERS)
    assert {str(c) for c in command.cases_of(("grid", "first-call"), "causal D128")} == {
        f"causal D128 S{s} B{16384 // s} H16" for s in (1024, 4096, 16384)
    }
    assert [c.name for c in command.contenders_of("none", (9, 0))] == ["attngen", "attngen sm80"]
    assert [c.name for c in command.contenders_of("cuDNN", (8, 0))] == ["attngen", "cuDNN"]


def test_reads_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    assert main(["bench", "--read", str(RECORD), "--html", str(target)]) == 0
    assert target.read_text() == page(Record.read(RECORD))
    capsys.readouterr()
    assert main(["bench", "--read", str(RECORD)]) == 0
    assert capsys.readouterr().out.startswith("grid, TFLOP/s\n| case |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingToolError):
        machine.device()
    assert main(["bench"]) == 2
    assert "finds none" in capsys.readouterr().err


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_gpu_run(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    assert main(["bench", "--groups", "grid", "--only", "causal D64 S1024", "--peers", "cuDNN,FlashAttention-2",
                 "--mode", "both", "--rounds", "2", "--json", str(target)]) == 0  # fmt: skip
    record = Record.read(target)
    lines: list[Line] = record.lines
    assert {x.name for x in lines} >= {"attngen", "cuDNN", "FlashAttention-2"} and {x.mode for x in lines} == set(Mode)
    assert all(x.poisoned for x in lines if x.name.startswith("attngen")), "the check did not see the poison"
    assert all(0 < x.low <= x.ms <= x.high and x.tflops > 1 for x in lines)
    assert record.roof is None or all(x.tflops < record.roof for x in lines)
    assert {"sm_mhz", "driver"} <= record.clocks["after"].keys() or "nvidia-smi" in record.clocks["after"]


@pytest.mark.gpu
def test_gpu_first_call() -> None:
    from attngen.bench.first import first_call

    found = first_call(Pattern.CAUSAL, 64)
    assert 0 < found.second_ms / 1e3 < found.cached_seconds < found.cold_seconds
