"""Shapes, strides and data drawn at random, for a fixed set of variants: always the formula, in every order of
copies."""

from __future__ import annotations

import os
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from cases import CASES, Sizes
from hypothesis import HealthCheck, given, settings
from support import (
    DEVICES,
    MODES,
    Truth,
    check,
    grids,
    has_schedule,
    kernels_of,
    randn,
    run,
    run_mode,
    same_bits,
)
from torch import Tensor

from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.variants import bias

VARIANTS = ["full", "causal", "top_left", "sliding", "softcap_alibi", "bias", "sink", "document", "sigmoid"]
HEAD_DIMS = [(64, 64), (40, 24), (36, 20)]
LAYOUTS = ["contiguous", "transposed", "sliced", "expanded", "odd rows", "4 bytes", "8 bytes"]
MORE_COLUMNS = {"sliced": 8, "odd rows": 1, "4 bytes": 2, "8 bytes": 4}  # behind a row, before the next one starts
DATA = ["normal", "large logits", "equal rows", "one huge key", "poison outside", "poison unseen"]
# maxima that move at every tile, down and up: on targets that keep the reference of the first tile, it is redone
TIDES = ["growing", "falling"]
UNSEEN_KEYS = "poison unseen keys"  # their values lie in visited tiles, which the copy engine brings as they are
POISON = [float("nan"), float("inf"), float("-inf")]

DRAW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@st.composite
def calls(
    draw: st.DrawFn,
    variants: tuple[tuple[str, int, int], ...] = tuple((n, d, dv) for n in VARIANTS for d, dv in HEAD_DIMS),
    layouts: tuple[str, ...] = tuple(LAYOUTS),
    data: tuple[str, ...] = tuple(DATA),
) -> dict[str, object]:
    """One call: sizes near tile borders as often as not."""
    length = st.one_of(st.integers(1, 150), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 96, 97, 127, 128, 129]))
    hkv, (name, d, dv), sq = draw(st.integers(1, 2)), draw(st.sampled_from(variants)), draw(length)
    sk = sq if name == "document" else draw(length)  # one list of document ids serves queries and keys
    return {
        "name": name,
        "dims": (d, dv),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float16])),
        "sizes": (draw(st.integers(1, 2)), hkv * draw(st.integers(1, 3)), hkv, sq, sk),
        "layout": tuple(draw(st.sampled_from(layouts)) for _ in range(3)),
        "data": draw(st.sampled_from(data)),
        "poison": draw(st.sampled_from(POISON)),
        "seed": draw(st.integers(0, 10_000)),
    }


def laid_out(t: Tensor, layout: str, around: float) -> Tensor:
    """The values of t (for `expanded`: of its first head in all heads) behind other strides."""
    b, h, s, d = t.shape
    if layout == "contiguous":
        return t
    if layout == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return t[:, :1].contiguous().expand(b, h, s, d)
    extra = MORE_COLUMNS[layout]
    wide = torch.full((b, h + 1, s + 9, d + extra), around, dtype=t.dtype, device=t.device)
    wide[:, :h, 4 : 4 + s, :d] = t
    return wide[:, :h, 4 : 4 + s, :d]


def tensors_of(call: dict[str, object], truth: Truth, device: str) -> tuple[Tensor, Tensor, Tensor]:
    b, h, hkv, sq, sk = call["sizes"]  # type: ignore[misc]
    d, dv = call["dims"]  # type: ignore[misc]
    data, poison, seed = call["data"], call["poison"], call["seed"]
    # as large at head dim 256 as at 64: beyond, eager attention in fp16 has infinite logits and nothing to compare with
    std = 30.0 * (64 / max(d, 64)) ** 0.25 if data == "large logits" else 1.0
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    q, k, v = (
        randn(*shape, dtype=call["dtype"], device=device, seed=3 * seed + n, std=std if n < 2 else 1.0)  # type: ignore[arg-type]
        for n, shape in enumerate(shapes)
    )
    if data == "equal rows":
        k = k[:, :, :1].expand_as(k).contiguous()
    if data == "one huge key":
        k[:, :, seed % sk] *= 100  # type: ignore[operator]
    if data in TIDES:
        tide = torch.linspace(0.1, 8, sk, device=device).to(k.dtype)  # type: ignore[call-overload]
        q, k = q.abs() + 0.5, (k.abs() + 0.1) * (tide if data == "falling" else tide.flip(0))[:, None]
    if data in ("poison unseen", UNSEEN_KEYS) and truth.mask is not None:
        seen = truth.mask(*grids(q, k)).expand(b, h, sq, sk).any(2).any(1).any(0)
        k[:, :, ~seen] = poison  # type: ignore[assignment]
        if data != UNSEEN_KEYS:
            v[:, :, ~seen] = poison  # type: ignore[assignment]
    around = poison if data == "poison outside" else 0.0
    q, k, v = (laid_out(t, layout, around) for t, layout in zip((q, k, v), call["layout"], strict=True))  # type: ignore
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@DRAW
@given(call=calls())
def test_any_call_is_the_formula(device: str, call: dict[str, object]) -> None:
    b, h, _, sq, sk = call["sizes"]  # type: ignore[misc]
    spec, truth = CASES[call["name"]](Sizes(b, h, sq, sk, device))  # type: ignore[index]
    q, k, v = tensors_of(call, truth, device)
    before = [t.clone() for t in (q, k, v)]
    out, lse = run(spec, q, k, v)
    check(out, lse, truth, q, k, v)
    assert all(same_bits(x, y) for x, y in zip(before, (q, k, v), strict=True))


@settings(DRAW, max_examples=25)
@given(call=calls())
def test_the_order_of_copies_does_not_matter(call: dict[str, object]) -> None:
    """Eager, late and random completion of asynchronous copies give the same bits."""
    b, h, _, sq, sk = call["sizes"]  # type: ignore[misc]
    spec, truth = CASES[call["name"]](Sizes(b, h, sq, sk))  # type: ignore[index]
    q, k, v = tensors_of(call, truth, "cpu")
    results = [run_mode(spec, q, k, v, mode, seed) for mode, seed in MODES]
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@pytest.mark.parametrize("device", DEVICES)
@settings(DRAW, max_examples=20)
@given(
    sq=st.integers(1, 70),
    sk=st.integers(1, 70),
    layout=st.sampled_from([*LAYOUTS, "keys first"]),
    seed=st.integers(0, 999),
)
def test_captured_tensors_have_any_strides(device: str, sq: int, sk: int, layout: str, seed: int) -> None:
    table = randn(2, 2, sq, sk, dtype=torch.float32, device=device, seed=seed)
    if layout == "keys first":
        table = table.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        table = laid_out(table, layout, float("nan"))
    q, k, v = (randn(2, 2, s, 64, device=device, seed=seed + n) for n, s in enumerate((sq, sk, sk), 1))
    out, lse = run(Attention(score=bias(table)), q, k, v)
    check(out, lse, Truth(score=lambda s, b, h, i, j: s + table), q, k, v)
    want, want_lse = run(Attention(score=bias(table.contiguous())), q, k, v)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


# ---- Hopper ----------------------------------------------------------------------------------------------------------


@cache
def on_hopper() -> tuple[tuple[str, int, int], ...]:
    """Variants and head dims."""
    dims = [(64, 64), (128, 128), (256, 256), (40, 24), (192, 128), (36, 20)]
    return tuple((name, d, dv) for name in CASES for d, dv in dims)


DATA_ON_HOPPER = (*(UNSEEN_KEYS if x == "poison unseen" else x for x in DATA), *TIDES)
CALLS_ON_HOPPER = st.deferred(lambda: calls(on_hopper(), data=DATA_ON_HOPPER))


@pytest.mark.parametrize("name", CASES)
def test_hopper_has_variants(name: str) -> None:
    """For the configuration that these tests take."""
    assert has_schedule(CASES[name](Sizes(1, 1, 1, 1))[0], Signature(IoType.BF16, 64, 64), "sm90")


@pytest.mark.parametrize("device", DEVICES)
@settings(DRAW, max_examples=200 if torch.cuda.is_available() else 40, derandomize=bool(os.environ.get("CI")))
@given(call=CALLS_ON_HOPPER)
def test_any_call_is_the_formula_on_hopper(device: str, call: dict[str, object]) -> None:
    with kernels_of("sm90"):
        test_any_call_is_the_formula.hypothesis.inner_test(device, call)  # type: ignore[attr-defined]


@settings(DRAW, max_examples=12)
@given(call=CALLS_ON_HOPPER)
def test_the_order_of_copies_does_not_matter_on_hopper(call: dict[str, object]) -> None:
    with kernels_of("sm90"):
        test_the_order_of_copies_does_not_matter.hypothesis.inner_test(call)  # type: ignore[attr-defined]
