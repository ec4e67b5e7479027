"""Tuning with a made-up measure, what is kept on disk, where configurations come from; on a GPU, the real one."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from stand_in import stand_in
from support import Truth, causal_grid, check, qkv

import attngen
from attngen import measured, ops, tune, tuned
from attngen.bench.timing import Time
from attngen.cli import main
from attngen.config import AnyConfig, Config, HopperConfig
from attngen.errors import CompileError, MissingToolError, SpecError
from attngen.kernel import Kernel, kernel_for
from attngen.measured import Machine
from attngen.pipelines import ranked
from attngen.signature import IoType, Shapes, Signature
from attngen.spec import Attention
from attngen.target import SM80, SM90, Target
from attngen.variants import causal, softcap

SPEC = Attention(mask=causal(), return_lse=True)
D64 = Signature(IoType.BF16, 64, 64)
HERE = Machine("Some GPU", "nvrtc 1.2.3")
RANKED = ranked(SPEC.variant, D64, SM80)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[AnyConfig]:
    """Configurations that do not compile; the others do at once."""
    configs: set[AnyConfig] = set()

    def artifact(self: Kernel, arch: str) -> None:
        if self.config in configs:
            raise CompileError(f"refused for {arch}")

    monkeypatch.setattr(Kernel, "artifact", artifact)
    return configs


class Clock:
    """In place of the device: a configuration takes as long as it is told, 9 ms where it is not."""

    def __init__(self, ms: dict[AnyConfig, float]) -> None:
        self.ms, self.asked = ms, list[AnyConfig]()

    def __call__(self, kernels: Sequence[Kernel]) -> list[Time]:
        self.asked += [k.config for k in kernels]
        return [Time(ms, ms, ms) for ms in (self.ms.get(k.config, 9.0) for k in kernels)]


def call(spec: Attention = SPEC) -> tune.Call:
    q, k, v = qkv()
    key = ops.register(spec.variant, spec.shape_rules, SM80)
    return tune.Call(key, q, k, v, tuple(spec.tensors.values()), spec.scale_for(64))


# ---- what is measured ----------------------------------------------------------------------------------------------


def test_the_first_five_that_compile_are_measured_and_the_fastest_wins(refused: set[AnyConfig]) -> None:
    refused |= {RANKED[0], RANKED[3]}
    clock = Clock({RANKED[5]: 2.0, RANKED[2]: 3.0, RANKED[7]: 1.0})  # the last is not among the first five
    outcome = tune.compare(SPEC.variant, D64, SM80, "sm_80", clock)
    assert clock.asked == [RANKED[n] for n in (1, 2, 4, 5, 6)]
    assert [c for c, _ in outcome.trials] == [RANKED[n] for n in (5, 2, 1, 4, 6)]  # equal ones by rank
    assert outcome.config == RANKED[5]
    assert outcome.refused == ((RANKED[0], "refused for sm_80"), (RANKED[3], "refused for sm_80"))


def test_fewer_are_measured_where_asked(refused: set[AnyConfig]) -> None:
    clock = Clock({})
    assert len(tune.compare(SPEC.variant, D64, SM80, "sm_80", clock, count=2).trials) == 2
    assert clock.asked == list(RANKED[:2])


def test_nothing_compiles(refused: set[AnyConfig]) -> None:
    refused |= set(RANKED)
    with pytest.raises(CompileError, match=f"none of {len(RANKED)} configurations for sm_90 compiles") as error:
        tune.compare(SPEC.variant, D64, SM80, "sm_90", Clock({}))
    assert str(error.value).count("refused for sm_90") == len(RANKED)


def test_each_candidate_launches_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, made = stand_in(monkeypatch), call()
    kernels = [kernel_for(SPEC.variant, D64, SM80, c) for c in (Config(128, 64, 4), Config(64, 32, 2))]
    launches = tune.launches_of(made, kernels)
    assert list(launches) == ["m128n64w4 s1 ctas1", "m64n32w2 s1 ctas1"]
    for launch in launches.values():
        launch()
    assert [threads for _, threads, _ in driver.launched] == [128, 64]


def test_tuning_remembers_the_winner_for_calls(refused: set[AnyConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_plans", {("old",): None})
    monkeypatch.setattr(measured, "machine", lambda index: HERE)
    assert ops._measured(SPEC.variant, D64, SM80, 0) is None
    outcome, entry = tune.tune(call(), HERE, "sm_80", Clock({RANKED[2]: 0.5}))
    assert outcome.config == RANKED[2]
    assert ops._plans == {}  # or calls of known shapes would go on as before
    assert ops._measured(SPEC.variant, D64, SM80, 0) == RANKED[2]
    assert entry.what == "causal, B=1 H=2/1 Sq=65 Sk=65, fastest of 5"
    assert dict(entry.results)[str(RANKED[2])] == 0.5
    again, _ = tune.tune(call(), HERE, "sm_80", Clock({RANKED[1]: 0.5}))
    assert ops._measured(SPEC.variant, D64, SM80, 0) == again.config == RANKED[1]


def test_autotune_measures_once(refused: set[AnyConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that pass for a GPU's."""
    clock, index = Clock({RANKED[3]: 0.5}), qkv()[0].device.index
    monkeypatch.setattr(tune, "machine_of", lambda call: HERE)
    monkeypatch.setattr(tune, "device_arch", lambda target, at: {(SM80, index): "sm_80"}[target, at])
    monkeypatch.setattr(tune, "on_device", lambda call, settings: clock)
    for _ in range(2):
        attngen.attention(*qkv(), spec=SPEC, target="sm80", autotune=True)
        assert measured.lookup(HERE, SPEC.variant, D64, SM80) == RANKED[3]
    assert clock.asked == list(RANKED[:5])
    attngen.attention(*qkv(dtype=torch.float16), spec=SPEC, target="sm80", autotune=True)  # another kernel
    assert len(clock.asked) == 10


def test_compile_with_autotune(refused: set[AnyConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock({RANKED[2]: 0.5}), list[Shapes]()

    def sample(spec: Attention, signature: Signature, target: Target, shapes: Shapes) -> tune.Call:
        given.append(shapes)
        return call(spec)

    monkeypatch.setattr(tune, "sample_call", sample)
    monkeypatch.setattr(tune, "machine_of", lambda call: HERE)
    monkeypatch.setattr(tune, "device_arch", lambda target, index: "sm_80")
    monkeypatch.setattr(tune, "on_device", lambda call, settings: clock)
    kernel = attngen.compile(SPEC, head_dim=64, autotune=True, shapes=(3, 4, 2, 100, 200))
    assert given == [Shapes(B=3, Hq=4, Hkv=2, Sq=100, Sk=200)]
    assert kernel.config == RANKED[2]
    assert ops.entry(kernel._key).config == RANKED[2]  # what is shown runs
    plain = attngen.compile(SPEC, head_dim=64)  # the same text on every machine
    assert plain.config == RANKED[0]
    assert ops.entry(plain._key).config == RANKED[0]


def test_a_remembered_configuration_that_no_longer_derives(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "machine", lambda index: HERE)
    measured.remember(HERE, SPEC.variant, D64, SM80, tuned.Entry(HopperConfig(2, 64), "ms", ()))
    with caplog.at_level(logging.WARNING, "attngen"):
        assert ops._measured(SPEC.variant, D64, SM80, 0) is None
    assert "was measured here and is not used, measure again" in caplog.text


# ---- what is kept --------------------------------------------------------------------------------------------------


def test_tables_on_disk(folder: Path) -> None:
    hopper, ampere = HopperConfig(2, 128, issue=(1, 0)), Config(128, 64, 4, 2)
    capped = Attention(mask=causal(), score=softcap(30.0)).variant
    for variant, target, config in ((SPEC.variant, SM90, hopper), (capped, SM90, hopper), (SPEC.variant, SM80, ampere)):
        path = measured.remember(HERE, variant, D64, target, tuned.Entry(config, "ms", ((str(config), 1.5),), "x"))
        assert measured.lookup(HERE, variant, D64, target) == config
    assert path.parent == folder / measured.FOLDER
    assert sorted(p.name.split("-")[0] for p in path.parent.glob("*.json")) == ["sm80", "sm90"]
    assert measured.lookup(HERE, SPEC.variant, D64, SM90) == hopper  # beside the second of its table
    for other in (Machine("Other GPU", HERE.compiler), Machine(HERE.device, "nvrtc 1.2.4")):
        assert measured.lookup(other, SPEC.variant, D64, SM90) is None
    bf16 = IoType.BF16
    for signature in (Signature(IoType.FP16, 64, 64), Signature(bf16, 64, 128), Signature(bf16, 64, 64, 2)):
        assert measured.lookup(HERE, SPEC.variant, signature, SM90) is None
    assert measured.lookup(HERE, Attention().variant, D64, SM90) is None
    assert not [p for p in path.parent.iterdir() if p.suffix not in (".json", ".lock")]


def test_many_writers_lose_nothing() -> None:
    signatures = [Signature(IoType.BF16, d, d) for d in range(8, 136, 8)]

    def write(signature: Signature) -> None:
        entry = tuned.Entry(Config(64, signature.head_dim_v // 8 * 16, 4), "ms", ())
        measured.remember(HERE, SPEC.variant, signature, SM80, entry)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, signatures))
    found = [measured.lookup(HERE, SPEC.variant, s, SM80) for s in signatures]
    assert found == [Config(64, s.head_dim_v // 8 * 16, 4) for s in signatures]


@pytest.mark.parametrize("text", ["", "[]", '{"entries": {}}', '{"entries": {"a": {"config": {"block_m": 1}}}}'])
def test_a_damaged_table_is_not_used_and_replaced(text: str, caplog: pytest.LogCaptureFixture) -> None:
    entry = tuned.Entry(Config(64, 32, 4), "ms", ())
    path = measured.remember(HERE, SPEC.variant, D64, SM80, entry)
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "attngen"):
        assert measured.lookup(HERE, SPEC.variant, D64, SM80) is None
    assert f"the measurements in {path} cannot be read" in caplog.text
    measured.remember(HERE, SPEC.variant, D64, SM80, entry)
    assert measured.lookup(HERE, SPEC.variant, D64, SM80) == entry.config


def test_shipped_tables_have_the_same_form() -> None:
    text = (tuned.FOLDER / "sm90.json").read_text()
    table = tuned.table_of(text)
    assert len(table.entries) > 3
    assert json.loads(tuned.table_text(table)) == json.loads(text)


# ---- where a configuration comes from ------------------------------------------------------------------------------


def test_origins() -> None:
    variant, signature = SPEC.variant, Signature(IoType.BF16, 128, 128)
    shipped = tuned.lookup(variant, signature, SM90)
    assert shipped is not None

    def origin(config: AnyConfig, on: Machine | None = HERE) -> str:
        return measured.origin(variant, signature, SM90, config, on)

    assert origin(shipped).startswith("shipped measurement: NVIDIA H200, nvrtc ")
    assert "causal s4096" in origin(shipped)
    assert origin(HopperConfig(1, 16, turns=False)) == "given by the caller"
    every = ranked(variant, signature, SM90)
    assert origin(every[1]) == f"the machine model: place 2 of {len(every)}; not measured"
    assert measured.origin(variant, D64, SM80, RANKED[0]) == f"rules: place 1 of {len(RANKED)}; not measured"
    measured.remember(HERE, variant, signature, SM90, tuned.Entry(every[1], "ms", ((str(every[1]), 0.25),), "B=1"))
    assert origin(every[1]).startswith("measured here: Some GPU, nvrtc 1.2.3, 2")
    assert origin(every[1]).endswith(f": B=1: {every[1]} 0.25 ms")
    assert origin(every[1], None).startswith("the machine model")


def test_explain_shows_what_was_measured_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attngen.cli.explain.machine_here", lambda: HERE)
    arguments = ["explain", "--mask", "causal", "--head-dim", "64", "--no-compile"]
    entry = tuned.Entry(RANKED[1], "ms", ((str(RANKED[1]), 0.25),))
    measured.remember(HERE, SPEC.variant, D64, SM80, entry)
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert f"config       {RANKED[1]}\nfrom         measured here: Some GPU, " in said
    assert main([*arguments, "--config", str(RANKED[2])]) == 0
    assert "from         rules: place 3 of " in capsys.readouterr().out


# ---- errors --------------------------------------------------------------------------------------------------------


def test_autotune_needs_cuda_tensors() -> None:
    with pytest.raises(SpecError, match="autotune=True measures on a GPU, and q is on cpu"):
        attngen.attention(*qkv(), spec=SPEC, autotune=True)


def test_autotune_inside_torch_compile() -> None:
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return attngen.attention(q, k, v, autotune=True)

    with pytest.raises(Exception, match=r"autotune=True inside torch\.compile, which runs nothing while it traces"):
        torch.compile(compiled, fullgraph=True, backend="eager")(*qkv())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"autotune": True}, r"shapes=None with autotune=True. Allowed: \(batch, heads, key heads, queries, keys\)"),
        ({"autotune": True, "shapes": (1, 2, 2, 0, 64)}, "each at least 1"),
        ({"autotune": True, "config": Config(64, 32, 4), "shapes": (1, 2, 2, 64, 64)}, "which chooses it"),
        ({"shapes": (1, 2, 2, 64, 64)}, "without autotune=True"),
    ],
)
def test_wrong_arguments_of_compile(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        attngen.compile(SPEC, head_dim=64, **arguments)  # type: ignore[arg-type]


def test_an_empty_call_has_nothing_to_tune() -> None:
    q, k, v = qkv()
    out, _ = attngen.attention(q[:, :, :0], k, v, spec=SPEC, autotune=True)
    assert out.shape[2] == 0
    empty = tune.Call(call().key, q[:, :, :0], k, v, (), 1.0)
    with pytest.raises(SpecError, match="launches nothing that could be measured"):
        tune.tune(empty, HERE, "sm_80", Clock({}))


@NO_GPU
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingToolError, match="tuning measures on a GPU, and torch finds none"):
        attngen.compile(SPEC, head_dim=64, autotune=True, shapes=(1, 2, 2, 64, 64))
    assert main(["tune", "--mask", "causal"]) == 2
    assert "tuning measures on a GPU, and torch finds none" in capsys.readouterr().err


def test_tune_chooses_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--config", "m64n32w4"]) == 2
    assert "--config: 'm64n32w4' is given, and tune chooses it" in capsys.readouterr().err


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("target", [None, "sm80"])
def test_autotune(target: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = (t.cuda() for t in qkv(sq=300, sk=300))
    index = q.device.index
    on = measured.machine(index)
    assert on is not None
    before = attngen.attention(q, k, v, spec=SPEC, target=target)
    out, lse = attngen.attention(q, k, v, spec=SPEC, target=target, autotune=True)
    check(out.cpu(), lse.cpu(), Truth(causal_grid(300, 300)), q.cpu(), k.cpu(), v.cpu())
    check(before[0].cpu(), before[1].cpu(), Truth(causal_grid(300, 300)), q.cpu(), k.cpu(), v.cpu())
    (path,) = (measured.cache_directory() / measured.FOLDER).glob("*.json")
    (entry,) = tuned.table_of(path.read_text()).entries.values()
    times = dict(entry.results)
    assert len(times) == 5
    assert 0 < times[str(entry.config)] == min(times.values()) < 100
    on_target = tune.target_for(SPEC.variant, D64, q.device) if target is None else SM80
    assert measured.lookup(on, SPEC.variant, D64, on_target) == entry.config

    def measure(*_: object) -> Sequence[Time]:
        raise AssertionError("measured again")

    monkeypatch.setattr(tune, "on_device", lambda call, settings: measure)
    attngen.attention(q, k, v, spec=SPEC, target=target, autotune=True)
    kernel = attngen.compile(
        SPEC, head_dim=64, target=on_target.name, autotune=True, shapes=(1, 2, 2, 300, 300)
    )
    assert kernel.config == entry.config
    assert kernel.origin.startswith(f"measured here: {on.device}, {on.compiler}")


@pytest.mark.gpu
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--batch", "2", "--heads", "4", "--kv-heads", "2", "--seqlen", "512")
    assert main(["tune", "--mask", "causal", "--head-dim", "64", *shape, "--first", "2", "--rounds", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count(" ms  (") == 2
    assert said.count("fastest\n") == 1
    target = tune.target_for(SPEC.variant, D64, tune.device()).name
    assert f" {target}, Shapes(B=2, Hq=4, Hkv=2, Sq=512, Sk=512), " in said
    assert main(["explain", "--mask", "causal", "--head-dim", "64", "--no-compile", "--target", target]) == 0
    assert "from         measured here: " in capsys.readouterr().out


@pytest.mark.gpu
def test_tensors_that_record_gradients() -> None:
    """The forward pass is measured, and the call records as it does without."""
    q, k, v = (t.cuda() for t in qkv())
    out, _ = attngen.attention(q.requires_grad_(), k, v, spec=SPEC, autotune=True)
    assert list((measured.cache_directory() / measured.FOLDER).glob("*.json"))
    out.sum().backward()
    assert q.grad is not None
    with torch.profiler.profile(), pytest.raises(SpecError, match="needs plain tensors"):
        attngen.attention(q, k, v, spec=SPEC, autotune=True)
