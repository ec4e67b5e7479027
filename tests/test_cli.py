"""The command line: every command once on a small variant, its errors, and how long it takes."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attngen import expr as ex
from attngen.cli import COMMANDS, main, parser
from attngen.cli.request import SAMPLE_SHAPES, Samples, request_of
from attngen.cli.syntax import parse_mask, parse_scores
from attngen.cli.verify import gradient_kernels
from attngen.config import Config, FoldPolicy, HopperConfig, HopperSumsConfig, read
from attngen.configtext import parse_config, parse_sums
from attngen.errors import MissingToolError, SignatureError, SpecError
from attngen.evaluate import evaluate
from attngen.ir.schedule import Schedule
from attngen.progress import Progress
from attngen.reference import reference
from attngen.runtime.nvrtc import find_nvrtc
from attngen.spec import Attention

ROOT = Path(__file__).parent.parent
SAMPLES = Samples(SAMPLE_SHAPES, torch.Generator().manual_seed(0))
SMALL = ("--head-dim", "64", "--config", "m64n32w4")  # the smallest kernel compiles fastest


def has_nvrtc() -> bool:
    try:
        find_nvrtc()
    except MissingToolError:
        return False
    return True


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one message of a command that ends with status 2."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("attngen: ")
    assert "Traceback" not in said.err
    return said.err


def search_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def fresh(*argv: str) -> subprocess.CompletedProcess[str]:
    """A new Python process with the checkout on its path."""
    env = {**os.environ, "PYTHONPATH": search_path()}
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, check=False)


# ---- masks and scores as text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("causal", "causal"),
        ("causal()", "causal"),
        ("causal(align='top_left')", "causal(top_left)"),
        ("causal & sliding_window(256)", "causal & sliding_window(256)"),
        ("sliding_window=256", "sliding_window(256)"),
        ("window(3, 0)", "window(3, 0)"),
        ("window(-1, 4) | prefix_lm(16)", "window(-1, 4) | prefix_lm(16)"),
        ("~(causal | document) & full", "~(causal | document) & full"),
    ],
)
def test_masks(text: str, description: str) -> None:
    assert str(parse_mask(text, SAMPLES.masks)) == description


def test_mask_operators_mean_what_they_say() -> None:
    mask = Attention(mask=parse_mask("causal & ~window(1, -1) | prefix_lm(1)", SAMPLES.masks)).variant.mask
    i, j = torch.arange(6)[:, None], torch.arange(6)
    seen = evaluate(mask, {"i": i, "j": j, "seqlen_q": 6, "seqlen_k": 6}, {})
    assert torch.equal(seen, (j <= i) & ~(j >= i - 1) | (j < 1) | (j <= i) & (j < 1) | (j <= i))


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("softcap(30)", "softcap(30)"),
        ("softcap=30", "softcap(30)"),
        ("softcap=2.5, alibi", "softcap(2.5), alibi"),
        ("alibi,bias", "alibi, bias"),
    ],
)
def test_scores(text: str, description: str) -> None:
    assert ", ".join(map(str, parse_scores(text, SAMPLES.scores))) == description


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl", "'causl' is not known (did you mean 'causal'?). Allowed: full, causal, window, sliding_window"),
        ("causal &", "does not parse"),
        ("causal + full", "'causal + full' in 'causal + full' is not understood. Allowed: full, causal"),
        ("().__class__", "is not understood"),
        ("__import__('os')", "'__import__' is not known"),
        ("sliding_window(open('x'))", "the argument \"open('x')\" is not a number"),
        ("sliding_window(True)", "size=True (bool)"),
        ("sliding_window(None)", "the argument 'None' is not a number"),
        ("sliding_window()", "missing 1 required positional argument: 'size'"),
        ("sliding_window(0)", "size=0"),
        ("window(*(1, 2))", "is not a number"),
        ("causal('left')", "align='left' is not known"),
    ],
)
def test_bad_masks(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_mask(text, SAMPLES.masks)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softcap", "missing 1 required positional argument: 'cap'"),
        ("softcap(-1)", "cap=-1"),
        ("tanh(3)", "'tanh' is not known. Allowed: softcap, alibi, bias, sigmoid"),
        ("softcap(2) & alibi", "separated by commas"),
        ("alibi,", "does not parse"),
    ],
)
def test_bad_scores(text: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_scores(text, SAMPLES.scores)
    assert message in str(error.value)


def test_sample_tensors() -> None:
    alibi = Attention(score=parse_scores("alibi", SAMPLES.scores))
    assert alibi.tensors["slopes"].tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    document = Attention(mask=parse_mask("document", SAMPLES.masks))
    (ids,) = document.tensors.values()
    assert ids.bincount().tolist() == [SAMPLE_SHAPES.Sk // 4] * 4
    bias = Attention(score=parse_scores("bias", SAMPLES.scores))
    assert [tuple(t.shape) for t in bias.tensors.values()] == [(1, 4, 128, 128)]
    assert bias.variant.score.op is ex.Op.ADD


def test_a_score_may_be_approximate() -> None:
    (score,) = parse_scores("softcap(30, approximate=True)", SAMPLES.scores)
    assert str(score) == "softcap(30, approximate)"


def test_configurations() -> None:
    assert parse_config("m128n64w4s2c2") == Config(128, 64, 4, 2, 2)
    assert parse_config("m64n32w4") == Config(64, 32, 4, 1, 1)
    assert parse_config("m128n128g2 s4 conditional order 1+0 turns") == HopperConfig(
        2, 128, 4, FoldPolicy.CONDITIONAL, issue=(1, 0)
    )
    assert parse_config("m128n64g2") == HopperConfig(2, 64, turns=False)
    assert HopperConfig(1, 96).turns is False and HopperConfig(2, 96).turns is True
    with pytest.raises(SpecError, match="m128n64w4 with s1"):
        parse_config("128x64")
    with pytest.raises(SpecError, match=r"has m128. Allowed for g3: m192"):
        parse_config("m128n64g3 s2")
    with pytest.raises(SignatureError, match="not an order of the 3 contractions"):
        parse_config("m128n64g2 order 01+1")


def test_configurations_are_read_as_they_are_printed() -> None:
    for groups, policy, issue in itertools.product((1, 2, 3), FoldPolicy, ((0, 1), (1, 0))):
        config = HopperConfig(groups, 64, 2, policy, issue=issue, turns=groups > 1)
        assert parse_config(str(config)) == config
    for given in (Config(128, 64, 4, 2, 2), Config(64, 32, 4)):
        assert parse_config(str(given)) == given


def test_configurations_of_gradients() -> None:
    for made in (
        Config(128, 32, 4, 2, 2), HopperSumsConfig(2, 128, 2, turns=True, unroll=True),
        HopperSumsConfig(1, 64, 3, split=False), HopperSumsConfig(3, 16, 4),
        HopperSumsConfig(3, 64, 3, merged=True),
    ):  # fmt: skip
        assert parse_sums(str(made)) == made
    assert parse_sums("m128n64g2 split") == HopperSumsConfig(2, 64)
    assert parse_sums("m128n64g2 s3 split merged turns") == HopperSumsConfig(2, 64, 3, turns=True, merged=True)
    for wrong, said in (
        ("m128n64g2 s2", "split or joint"), ("m128n64g3 s2 joint", "has m128. Allowed for g3: m192"),
        ("m128n64g2 s2 reference", "is not understood for gradients"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=said):
            parse_sums(wrong)
    with pytest.raises(SignatureError, match="unroll=True with slots=3"):
        parse_sums("m128n64g2 s3 split unroll")


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.__name__.split(".")[-1])
def test_help_has_an_example_that_parses(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(getattr(command, "__name__", "")).split(".")[-1]
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    examples = [x.strip() for x in text[text.index("example:") :].splitlines()[1:] if x.strip()]
    assert examples
    for example in examples:
        words = [w.strip("'") for w in example.replace("'causal & sliding_window(256)'", "causal").split()]
        assert words[:2] == ["attngen", name]
        assert parser().parse_args(words[1:]).run is getattr(command, "run", None)


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--mask",
        "causal & sliding_window(256)",
        "--score",
        "softcap=30",
        "--head-dim",
        "64",
        "--head-dim-v",
        "32",
    ]
    assert (
        main(["generate", *options, "--dtype", "fp16", "--sink", "--config", "m64n32w4s2c2", "-o", str(tmp_path)]) == 0
    )
    name = "softcap_30_causal_sliding_window_256_sink_d64v32_fp16_sm80"
    written = [Path(line).name for line in capsys.readouterr().out.split()]
    assert written == [f"{name}.cu", f"{name}.schedule", f"{name}.json"]
    entry = json.loads((tmp_path / f"{name}.json").read_text())
    assert entry["config"] == {"block_m": 64, "block_n": 32, "warps": 4, "stages": 2, "min_ctas": 2}
    assert entry["signature"]["head_dim_v"] == 32
    assert entry["kernels"][0]["threads"] == 128
    schedule = Schedule.parse((tmp_path / f"{name}.schedule").read_text())
    assert {"sink", "lse"} <= {t.name for t in schedule.kernels[0].tensors}
    assert entry["variant"]["score"] == "30.0 * tanh(score / 30.0)"


def test_generate_for_hopper(tmp_path: Path) -> None:
    config = "m128n64g2 s2 conditional order 01+ turns"
    arguments = ["--mask", "causal", "--head-dim", "64", "--target", "sm90", "--config", config, "--name", "x"]
    assert main(["generate", *arguments, "-o", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "x.json").read_text())["config"]
    assert read(made) == parse_config(config)
    assert made["policy"] == "conditional"
    assert Schedule.parse((tmp_path / "x.schedule").read_text()).target == "sm90"


def test_generate_is_quick(tmp_path: Path) -> None:
    """A second of a core in a fresh process, or less, beside the import of torch; other tests run at the same time."""
    script = (
        "import torch, time; start = time.process_time(); from attngen.cli import main; "
        f"main(['generate', '--mask', 'causal', '-o', {str(tmp_path)!r}]); print(time.process_time() - start)"
    )
    runs = [fresh("-c", script) for _ in range(3)]
    assert [r.returncode for r in runs] == [0, 0, 0]
    assert min(float(r.stdout.split()[-1]) for r in runs) < 1.2


def test_module_and_errors_without_traceback(tmp_path: Path) -> None:
    done = fresh("-m", "attngen", "generate", "--head-dim", "21", "-o", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("attngen: head_dim_qk=21 is not supported. Allowed: multiples of 2")
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m attngen explain --no-compile | head -n 1",
        shell=True, env={**os.environ, "PYTHONPATH": search_path()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("== variant\n", "")


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "target='sm70': allowed are sm80" in fails(capsys, "generate", "--target", "sm70")
    assert "No such file" in fails(capsys, "lower", str(tmp_path / "none.schedule"))
    broken = tmp_path / "broken.schedule"
    broken.write_text("schedule x target=sm80\n   kernel y\n")
    assert "line 2: indentation" in fails(capsys, "lower", str(broken))


@pytest.fixture
def small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["generate", "--mask", "causal", *SMALL, "--name", "small", "-o", str(tmp_path)]) == 0
    capsys.readouterr()
    return tmp_path / "small.schedule"


def test_lower_emulates(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = small.with_suffix(".lowered.cu")
    assert main(["lower", str(small), "--emulate", "--mask", "causal", "--sq", "40", "--sk", "70", "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "128 threads" in said
    assert said.count(" ok\n") == 3
    body = small.with_suffix(".cu").read_text().split("extern", 1)[1]
    assert body in out.read_text()  # the same kernel as from the description; only the banner differs


def test_lower_notices_another_mask(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lower", str(small), "--emulate", "--mask", "full", "--sq", "40", "--sk", "70"]) == 1
    said = capsys.readouterr().out
    assert said.count(" FAILED\n") == 3
    assert said.endswith("compared with plain attention: give --mask and --score if the schedule computes a variant\n")
    assert main(["lower", str(small), "--emulate", "--score", "alibi"]) == 2
    assert "the schedule reads the tensors none, --mask and --score give slopes" in capsys.readouterr().err


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
def test_lower_compiles(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lower", str(small), "--compile", "--arch", "sm_90"]) == 0
    assert "attn_fwd sm_90: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time on")
def test_lower_needs_a_gpu_to_time(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lower", str(small), "--time"]) == 2
    assert "--time needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_lower_times(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lower", str(small), "--time", "--mask", "causal", "--sq", "512", "--sk", "512", "--rounds", "3"]) == 0
    said = capsys.readouterr().out
    assert "median of 3 interleaved rounds" in said
    assert "torch SDPA" in said


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["explain", "--mask", "causal", "--score", "softcap=30, alibi", "--head-dim", "64", "--no-compile"]) == 0
    )
    said = capsys.readouterr().out
    for title in (
        "graph after textbook",
        "graph after stream",
        "program after tile",
        "schedule after allocate",
        "decisions",
    ):
        assert f"== {title}\n" in said
    assert "tensor    slopes: f32, rank 1, a run-time argument" in said
    assert "block_m: " in said
    assert said.count(" chosen\n") == 1
    assert " behind: " in said


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
def test_explain_reads_resources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--mask", "causal", *SMALL, "--source"]) == 0
    said = capsys.readouterr().out
    assert " registers, 0 bytes of spill stores" in said
    assert "m64n32w4 s1 ctas1" in said
    assert 'extern "C"' in said


def test_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--mask", "causal", *SMALL, "--cases", "2", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    places = 3 + torch.cuda.is_available()
    assert said.count("  ok\n") == 2 * places
    assert f"{2 * places} of {2 * places} runs within tolerance" in said


def test_verify_gradients_of_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--mask", "causal", "--head-dim", "32", "--cases", "1", "--batch", "1", "--sq", "70", "--sk", "80")
    assert main(["verify", "--backward", *small, "--target", "sm90"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith(", sm90: max |x - float64|")
    runs = 2 * 3 * (3 + torch.cuda.is_available())
    assert f"{runs} of {runs} gradients within tolerance" in said


def test_verify_takes_configurations_of_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """One for all kernels, or one for each; what they do not suit is said, and an error where they suit nothing."""
    small = ("--mask", "causal", "--head-dim", "32", "--cases", "1", "--batch", "1", "--sq", "30", "--sk", "40")
    asked = ("verify", "--backward", *small)
    request = request_of(parser().parse_args([*asked, "--target", "sm90", "--config", "m128n64g2 s3 joint"]))
    one, two = gradient_kernels(request).values()
    joint = HopperSumsConfig(2, 64, 3, split=False)
    assert (one.configs, two.configs) == ((joint,), (joint, joint))
    assert main([*asked, "--config", "m64n32w4 s2"]) == 0
    assert main([*asked, "--config", "m64n32w4 s2; m64n32w4 s2"]) == 0
    said = capsys.readouterr().out
    assert "any order: not run. configurations m64n32w4 s2 ctas1, m64n32w4 s2 ctas1 of gradients" in said
    assert "9 of 9 gradients within tolerance" in said and "same bits  " in said
    assert main([*asked, "--config", "m64n32w4; m64n32w4; m64n32w4"]) == 2
    assert "Allowed for sm80: a Config for each of attn_bwd_keys" in capsys.readouterr().err
    assert main([*asked, "--target", "sm90", "--config", "m128n64g2 s2 joint merged"]) == 0
    assert "same bits: not run. merged=True for a kernel that adds nothing up" in capsys.readouterr().out
    assert main([*asked, "--target", "sm90", "--config", "m128n96g2 s2 joint"]) == 0
    assert "any order: not run. block_n=96 for attn_bwd_keys, which adds parts of 64" in capsys.readouterr().out
    assert main([*asked, "--target", "sm90", "--config", "m64n32w4"]) == 2
    assert "Allowed for sm90: a HopperSumsConfig" in capsys.readouterr().err


def test_verify_keeps_given_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ("--batch", "2", "--heads", "3", "--kv-heads", "1", "--sq", "33", "--sk", "21")
    assert main(["verify", "--mask", "causal", *SMALL, "--cases", "1", *shapes]) == 0
    assert "2x3/1x33x21" in capsys.readouterr().out
    assert main(["verify", "--heads", "3", "--kv-heads", "2"]) == 2
    assert "--heads 3 is not a multiple of --kv-heads 2" in capsys.readouterr().err


def test_verify_fails_where_the_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reference for another scale."""
    monkeypatch.setattr("attngen.trial.reference", lambda spec, q, k, v: reference(spec, q * 1.1, k, v))
    assert main(["verify", "--mask", "causal", *SMALL, "--cases", "1", "--sq", "40", "--sk", "40"]) == 1
    assert capsys.readouterr().out.count("FAILED\n") == 3 + torch.cuda.is_available()


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    assert "C++ compiler" in capsys.readouterr().out


# ---- progress ------------------------------------------------------------------------------------------------------


def test_progress_is_silent_at_first_then_says_what_runs() -> None:
    stream = io.StringIO()
    with Progress(stream, quiet=0.15) as progress:
        progress.step("quick")
    assert stream.getvalue() == ""
    with Progress(stream, quiet=0.05) as progress:
        progress.step("slow")
        deadline = time.monotonic() + 5
        while "slow" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "s] slow\n" in stream.getvalue()
