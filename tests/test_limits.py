"""Descriptions at the limits of numbers, sizes and nesting: the project's own errors, which name what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import qkv, run

import attngen
from attngen.cli import main
from attngen.errors import AttngenError, ScheduleError, SignatureError, SpecError, TraceError
from attngen.expr import DType
from attngen.exprtext import parse
from attngen.masks import Mask
from attngen.spec import Attention
from attngen.variants import causal, document, prefix_lm, sliding_window, softcap, window

EMPTY = torch.zeros(2, 0)
LARGEST = 2**31 - 1


def chained(n: int) -> Mask:
    mask = causal()
    for width in range(n):
        mask = mask | window(width, 0)
    return mask


def extended(n: int) -> Callable[..., Any]:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j <= i
        for at in range(n):
            seen = seen | (j == 3 * at)
        return seen

    return mask


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: window(2**31, 0), SpecError, f"at most {LARGEST}"),
        (lambda: window(0, 10**5000), SpecError, "int of 16610 bits"),
        (lambda: sliding_window(2**31), SpecError, f"at most {LARGEST}"),
        (lambda: prefix_lm(2**31), SpecError, f"at most {LARGEST}"),
        (lambda: softcap(10**400), SpecError, "int of 1329 bits"),
        (lambda: softcap(1e-50), SpecError, "float32"),
        (lambda: Attention(scale=1e300), SpecError, r"scale=1e\+300.*at most 3.4e\+38"),
        (lambda: Attention(scale=10**400), SpecError, "int of 1329 bits"),
        (lambda: Attention(scale=math.nan), SpecError, "scale=nan"),
        (lambda: Attention(score=lambda s, b, h, i, j: s + 10**5000).variant, TraceError, "does not fit 32 bits"),
        (lambda: Attention(score=lambda s, b, h, i, j: s**math.inf).variant, TraceError, "exponent inf"),
        (lambda: Attention(score=lambda s, b, h, i, j: s**math.nan).variant, TraceError, "exponent nan"),
        (lambda: Attention(mask=chained(600)), SpecError, "nests more than 100"),
        (lambda: attngen.compile(Attention(mask=extended(1200)), 64), SpecError, "nests too many operations"),
        (lambda: attngen.compile(Attention(), head_dim="64"), SignatureError, "head_dim_qk='64' is a str"),
        (lambda: attngen.compile(Attention(), head_dim=64.0), SignatureError, "an int"),
    ],
)
def test_beyond_the_limits(make: Callable[[], object], error: type[AttngenError], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_the_largest_numbers_are_kept() -> None:
    for mask in (window(LARGEST, LARGEST), sliding_window(LARGEST), prefix_lm(LARGEST), chained(99)):
        assert Attention(mask=mask).variant.mask.dtype is DType.BOOL
    assert Attention(scale=3.4e38).scale == 3.4e38


def test_a_tensor_without_elements_cannot_be_read() -> None:
    spec = Attention(score=lambda s, b, h, i, j: s + EMPTY[h, j])
    q, k, v = qkv(sq=5, sk=5)
    with pytest.raises(SignatureError, match=r"`EMPTY` has the shape \[2, 0\]: no element"):
        run(spec, q, k, v)
    with pytest.raises(SignatureError, match="no element"):
        attngen.attention(q, k, v, score=lambda s, b, h, i, j: s + EMPTY[h, j])
    out, _ = run(Attention(mask=document(torch.zeros(0, dtype=torch.int32))), q[:, :, :0], k[:, :, :0], v[:, :, :0])
    assert out.shape == q[:, :, :0].shape


def test_the_power_0_is_1_of_any_number() -> None:
    assert repr(Attention(score=lambda s, b, h, i, j: s**0).variant.score) == "1.0"
    assert repr(Attention(score=lambda s, b, h, i, j: s + i**0).variant.score) == "score + 1.0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min(count, 1, t)", "min has 3 arguments"),
        ("abs(t, count)", "abs has 2 arguments"),
        ("f32(t, t)", "f32 has 2 arguments"),
        ("fma(t, t)", "fma has 2 arguments"),
        ("max()", "max has 0 arguments"),
        ("min(count t)", "expected ,"),
        ("min(count, t,)", "unexpected"),
        ("count & t", "boolean"),
        ("count + 99999999999", "32 bits"),
        ("count + " + "9" * 5000, "digits"),
        ("-" * 5000 + "t", "nested too deeply"),
    ],
)
def test_texts_of_expressions(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        parse(text, {"count": DType.I32, "t": DType.I32})


@pytest.mark.parametrize("mask", ["window(99999999999,0)", "~" * 5000 + "causal", "(" * 5000 + "causal" + ")" * 5000])
def test_masks_on_the_command_line(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--head-dim", "64", "--mask", mask]) == 2
    said = capsys.readouterr().err
    assert said.startswith("attngen: --mask") or said.startswith("attngen: window")


def test_a_schedule_has_to_be_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.schedule"
    file.write_bytes(b"schedule \xff")
    assert main(["lower", str(file)]) == 2
    assert "byte 9 is not UTF-8" in capsys.readouterr().err
