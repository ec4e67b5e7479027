"""`attention`, `compile` and `precompile`: what they give, what they refuse, and what they say."""

from __future__ import annotations

import ast
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Truth, causal_grid, check, qkv

import attngen
from attngen import env, ops
from attngen.config import AnyConfig, Config, HopperConfig
from attngen.errors import AttngenError, EmulationWarning, SignatureError, SpecError
from attngen.reads import reads
from attngen.runtime import cache
from attngen.signature import Shapes

SPEC = attngen.Attention(mask=attngen.causal())
NUMBER = 3


def test_public_names() -> None:
    expected = "attention compile precompile Attention causal sliding_window window prefix_lm document full alibi"
    expected += " softcap bias exp log tanh sigmoid sqrt abs where minimum maximum floor merge errors __version__"
    expected += " Config HopperConfig FoldPolicy"
    assert sorted(attngen.__all__) == sorted(expected.split())
    assert [n for n in attngen.__all__ if getattr(attngen, n, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = attngen.nothing  # type: ignore[attr-defined]
    source = ast.parse(Path(attngen.__file__).read_text())
    homes = next(n for n in source.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_HOME")
    listed = [name for names in ast.literal_eval(homes.value).values() for name in names]
    assert sorted([*listed, "errors", "__version__"]) == sorted(attngen.__all__)


# ---- attention ---------------------------------------------------------------------------------------------------


def test_attention() -> None:
    q, k, v = qkv(sq=65, sk=80)
    out, lse = attngen.attention(q, k, v, mask=attngen.causal(), return_lse=True)
    check(out, lse, Truth(causal_grid(65, 80)), q, k, v)
    alone = attngen.attention(q, k, v, mask=attngen.causal())
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)


def test_spec_equals_pieces() -> None:
    q, k, v = qkv()
    pieces: dict[str, Any] = {"mask": attngen.causal(), "score": attngen.softcap(3.0), "scale": 0.2}
    pieces |= {"sink": torch.ones(2), "return_lse": True}
    whole = attngen.attention(q, k, v, spec=attngen.Attention(**pieces))
    for got, want in zip(whole, attngen.attention(q, k, v, **pieces), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "extra",
    [
        {"mask": attngen.full()},
        {"score": attngen.softcap(1.0)},
        {"scale": 1.0},
        {"sink": torch.zeros(2)},
        {"return_lse": True},
        {"normalizer": "none"},
    ],
    ids=lambda e: next(iter(e)),
)
def test_spec_stands_alone(extra: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(extra))} is given beside spec"):
        attngen.attention(*qkv(), spec=SPEC, **extra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sink_types(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    sink = torch.tensor([0.5, -1.25])
    out, lse = attngen.attention(q, k, v, sink=sink.to(dtype), return_lse=True)
    check(out, lse, Truth(sink=sink), q, k, v)


def test_same_structure_other_tensors() -> None:
    """A fresh description with fresh tensors finds the traced one, and reads its own tensors."""
    q, k, v = qkv()
    for slopes in (torch.tensor([0.5, 0.1]), torch.tensor([1.5, 0.0])):
        out, lse = attngen.attention(q, k, v, score=attngen.alibi(slopes), return_lse=True)
        truth = Truth(score=lambda s, b, h, i, j, t=slopes: s - t.to(s.dtype)[h] * (i - j).abs())
        check(out, lse, truth, q, k, v)


def test_functions_are_traced_on_every_call() -> None:
    q, k, v = qkv()
    factor = 1.0

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor

    first = attngen.attention(q, k, v, score=score)
    factor = 2.0
    assert not torch.equal(first, attngen.attention(q, k, v, score=score))


@pytest.mark.parametrize("sizes", [(0, 5, 5), (1, 0, 5), (1, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, 2.0])])
def test_empty(sizes: tuple[int, int, int], sink: torch.Tensor | None) -> None:
    b, sq, sk = sizes
    q, k, v = qkv(b=b, sq=sq, sk=sk, dv=32)
    out, lse = attngen.attention(q, k, v, mask=attngen.causal(), sink=sink, return_lse=True)
    assert out.shape == (b, 2, sq, 32) and out.dtype == torch.bfloat16
    assert lse.shape == (b, 2, sq) and lse.dtype == torch.float32
    want = torch.full((2,), float("-inf")) if sink is None else sink
    assert not out.any() and torch.equal(lse, want.view(1, 2, 1).expand_as(lse))


@pytest.mark.parametrize(("sizes", "of_sink"), [((2, 5, 0), 10.0), ((1, 0, 5), 0.0), ((0, 5, 5), 0.0)])
def test_gradients_of_empty_calls(sizes: tuple[int, int, int], of_sink: float) -> None:
    """Without a key lse is the sink, and the gradient through it is all there is."""
    b, sq, sk = sizes
    tensors = [t.requires_grad_() for t in (*qkv(b=b, sq=sq, sk=sk), torch.tensor([0.5, 2.0]))]
    q, k, v, sink = tensors
    out, lse = attngen.attention(q, k, v, sink=sink, return_lse=True)
    *found, dsink = torch.autograd.grad(out.float().sum() + lse.sum(), tensors)
    assert all(not g.any() and g.shape == t.shape for g, t in zip(found, tensors, strict=False))
    assert torch.equal(dsink, torch.full((2,), of_sink))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 2, 5, 64, dtype=torch.float64)}, "q has dtype torch.float64. Allowed: float16, bfloat16"),
        ({"q": torch.zeros(5, 64).bfloat16()}, r"q has the shape \[5, 64\]"),
        ({"q": torch.zeros(1, 2, 5, 0).bfloat16()}, "head_dim > 0"),
        ({"k": None}, "k is a NoneType. Allowed: a tensor"),
        ({"q": torch.zeros(1, 2, 5, 64, device="meta", dtype=torch.bfloat16)}, "k has device cpu, q has meta"),
        ({"target": "sm70"}, "target='sm70'. Allowed: 'sm80', 'sm90'"),
        ({"target": "hopper"}, "target='hopper'. Allowed: 'sm80'"),
        ({"sink": torch.zeros(3)}, r"sink has the shape \[3\]. Allowed: \[2\]"),
    ],
)  # fmt: skip
def test_refused(change: dict[str, Any], words: str) -> None:
    arguments = dict(zip("qkv", qkv(), strict=True)) | change
    with pytest.raises(SignatureError, match=words):
        attngen.attention(**arguments)


# ---- the emulator's pace -------------------------------------------------------------------------------------------


def test_a_long_call_warns_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(ops, "run", lambda kernel, q, *rest: started.append("run") or (q, q))
    q, k, v = qkv(h=1, sq=16384, sk=16384)
    with pytest.warns(EmulationWarning, match=r"will take about \d\d s .*16384 queries, 16384 keys"):
        attngen.attention(q, k, v)
    assert started == ["run"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attngen.attention(*qkv(h=1, sq=16384, sk=16384), mask=attngen.sliding_window(64))
        attngen.attention(*qkv())


def test_the_estimate_counts_the_mask() -> None:
    shapes = Shapes(1, 2, 2, 65536, 65536)
    masks = (None, attngen.causal(), attngen.sliding_window(64))
    parts = [ops.visited_part(attngen.Attention(mask=m).variant, shapes, {}) for m in masks]
    assert parts[0] == 1.0
    assert 0.45 < parts[1] < 0.55
    assert parts[2] < 0.02


def test_the_estimate_is_near() -> None:
    q, k, v = qkv(h=4, hkv=4, sq=512, sk=512)
    attngen.attention(q[:, :, :64], k, v)  # compiles
    start = time.perf_counter()
    attngen.attention(q, k, v)
    seconds = time.perf_counter() - start
    estimate = ops.emulation_seconds(attngen.Attention().variant, Shapes(1, 4, 4, 512, 512), 128, {})
    assert estimate / 10 < seconds < estimate * 10


# ---- compile -----------------------------------------------------------------------------------------------------


def test_compile() -> None:
    slopes = torch.tensor([0.5, 0.25])
    spec = attngen.Attention(mask=attngen.causal(), score=attngen.alibi(slopes), scale=0.1, return_lse=True)
    kernel = attngen.compile(spec, head_dim=64, dtype=torch.float16)
    assert "causal" in repr(kernel) and kernel.target.name == "sm80"
    assert "softmax" in str(kernel.graph) or "exp" in str(kernel.graph)
    assert str(kernel.program) and str(kernel.schedule) and "__global__" in kernel.source.text
    q, k, v = qkv(dtype=torch.float16)
    out, lse = kernel(q, k, v)
    want = attngen.attention(q, k, v, attngen.causal(), attngen.alibi(slopes), 0.1, return_lse=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_a_compiled_kernel_gives_what_attention_gives() -> None:
    tensors = qkv()
    alone = attngen.compile(SPEC, head_dim=64)(*tensors)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, attngen.attention(*tensors, spec=SPEC))


def test_compile_without_a_sum() -> None:
    spec = attngen.Attention(score=lambda s, b, h, i, j: attngen.sigmoid(s), normalizer="none")
    out = attngen.compile(spec, head_dim=64)(*qkv())
    assert isinstance(out, torch.Tensor) and out.shape == (1, 2, 65, 64)


def test_compile_with_a_config() -> None:
    config = Config(64, 32, 4)
    spec = attngen.Attention(mask=attngen.causal(), return_lse=True)
    kernel = attngen.compile(spec, head_dim=64, config=config)
    assert kernel.config == config == attngen.compile(spec, head_dim=64, config="m64n32w4").config
    q, k, v = qkv()
    check(*kernel(q, k, v), Truth(causal_grid(65, 65)), q, k, v)
    ran = ops.entry(kernel._key)
    assert ran.config == config


@pytest.mark.parametrize(
    ("target", "config", "words"),
    [
        ("sm80", attngen.HopperConfig(2, 64), r"is not for target='sm80'. Allowed there: attngen.Config\("),
        ("sm90", attngen.Config(64, 32, 4), r"is not for target='sm90'. Allowed there: attngen.HopperConfig\("),
    ],
)
def test_a_config_of_another_target(target: str, config: AnyConfig, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        attngen.compile(SPEC, head_dim=64, target=target, config=config)


def test_turns_need_two_warpgroups() -> None:
    with pytest.raises(SignatureError, match="turns=True with warpgroups=1: one takes no turns"):
        attngen.HopperConfig(1, 64, turns=True)


def test_resources() -> None:
    used = attngen.compile(SPEC, head_dim=64).resources
    assert all(0 < r.registers <= 255 and r.spill_store_bytes == 0 for r in used.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"head_dim": 61}, "head_dim_qk=61 is not supported"),
        ({"head_dim": 60, "alignment": 16}, r"alignment=16 is not supported for rows of 60 .*Allowed: 2, 4, 8"),
        ({"head_dim_v": 512}, "head_dim_v=512 is not supported"),
        ({"dtype": torch.float32}, "dtype=torch.float32. Allowed: torch.float16, torch.bfloat16"),
        ({"alignment": 6}, "alignment=6 is not supported. Allowed: 2, 4, 8, 16"),
        ({"target": "sm70"}, "target='sm70'. Allowed: 'sm80', 'sm90'"),
    ],
)
def test_compile_refuses(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SignatureError, match=words):
        attngen.compile(SPEC, **arguments)
    with pytest.raises(SpecError, match="spec is a Causal"):
        attngen.compile(attngen.causal())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q.half(), k.half(), v.half()), r"q has dtype torch\.float16. Allowed: torch\.bfloat16"),
        (lambda q, k, v: (q[..., :32], k[..., :32], v), "q has head_dim 32. Allowed: 64"),
        (lambda q, k, v: (q, k, v[..., :32]), "v has head_dim 32. Allowed: 64"),
        (lambda q, k, v: (torch.zeros(q.numel() + 1).bfloat16()[1:].view(q.shape), k, v), "not aligned to 16 bytes"),
    ],
)
def test_a_kernel_refuses_other_tensors(change: Any, words: str) -> None:
    kernel = attngen.compile(SPEC, head_dim=64)
    with pytest.raises(SignatureError, match=words):
        kernel(*change(*qkv()))


# ---- precompile --------------------------------------------------------------------------------------------------


def test_precompile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filled folder, moved, serves a process that has no compiler."""
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    kernel = attngen.compile(SPEC, head_dim=64)
    entries = attngen.precompile(tmp_path / "made", [kernel], archs=["sm_80"])
    assert len(entries) == len(set(entries)) >= 1
    (tmp_path / "made").rename(tmp_path / "moved")
    monkeypatch.setenv(env.PRECOMPILED.name, str(tmp_path / "moved"))
    monkeypatch.setattr(cache, "find_nvrtc", lambda: pytest.fail("the compiler was asked for"))
    artifact = cache.compile_cached(kernel.source.text, arch="sm_80", symbols=kernel.kernel.symbols)
    assert artifact.arch == "sm_80" and artifact.cubin
    with pytest.raises(SignatureError, match="archs has 'sm_70'"):
        attngen.precompile(tmp_path, [kernel], archs=["sm_70"])


# ---- what functions read -----------------------------------------------------------------------------------------


def test_reads() -> None:
    class Settings:
        shift = 5
        unused = 6

        def twice(self) -> int:
            return self.deep * 2

        deep = 7

    settings, table, cap = Settings(), torch.zeros(3), 9

    def fn(b: Any, h: Any, i: Any, j: Any, k: int = 11) -> Any:
        return (table[h] + settings.shift + cap + settings.twice() + NUMBER) < k

    values = [r.value for r in reads(fn)]
    assert any(v is table for v in values)
    numbers = {v for v in values if isinstance(v, int)}
    assert {5, 9, 7, 11, NUMBER} <= numbers and 6 not in numbers


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: HopperConfig(2, 96, policy="conditional"), "policy='conditional'.*FoldPolicy.CONDITIONAL"),
        (lambda: HopperConfig(2, 96.0), "made of ints"),
        (lambda: HopperConfig(2, 96, turns="yes"), "turns='yes'.*True and False"),
        (lambda: attngen.compile(SPEC, head_dim=64, config={"block_n": 96}), "config=.*HopperConfig"),
        (lambda: attngen.softcap(30.0, approximate="no"), "approximate='no'.*True or False"),
    ],
)
def test_what_is_no_configuration_is_a_clear_error(make: Callable[[], object], text: str) -> None:
    with pytest.raises(AttngenError, match=text):
        make()


def test_a_configuration_takes_lists() -> None:
    given: Any = [0, 1], [1, 0]
    assert HopperConfig(2, 96, stages=given[0], issue=given[1]) == HopperConfig(2, 96, stages=(0, 1), issue=(1, 0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"is_causal": True}, r"no argument 'is_causal'\. Write mask=attngen\.causal\(\)"),
        ({"config": "m64n32w4"}, r"Write attngen\.compile\(spec, config=\.\.\.\)"),
        ({"dropout_p": 0.1}, "dropout is not supported"),
        ({"msak": None}, r"no argument 'msak'\. Allowed: q, k, v, mask, score"),
    ],
)
def test_keywords_of_other_libraries(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        attngen.attention(*qkv(), **given)


def test_autocast_is_named_where_a_type_is_wrong() -> None:
    q, k, v = (t.float() for t in qkv())
    with pytest.raises(SignatureError, match=r"Convert q, k and v$"):
        attngen.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SignatureError, match="autocast does not convert"):
        attngen.attention(q, k, v)
