"""Tracing user functions: expressions, captured tensors, names, places, and the errors."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attngen import functions as fn
from attngen import golden
from attngen.errors import TraceError
from attngen.evaluate import evaluate
from attngen.expr import DType
from attngen.functions import where
from attngen.naming import c_name
from attngen.spec import Attention, Storage
from attngen.variants import MaskLike, causal

SLOPES = torch.linspace(0.1, 0.4, 4)
WIDTH = 3
Fn = Callable[..., Any]


def score_text(score: Fn) -> str:
    return repr(Attention(score=score).variant.score)


def mask_text(mask: MaskLike) -> str:
    return repr(Attention(mask=mask).variant.mask)


@pytest.mark.parametrize(
    ("score", "text"),
    [
        (lambda s, b, h, i, j: s + (i - j), "score + f32(i - j)"),
        (lambda s, b, h, i, j: 2 * s - 1, "2.0 * score - 1.0"),
        (lambda s, b, h, i, j: 1 - s, "1.0 - score"),
        (lambda s, b, h, i, j: -s / 2, "-score / 2.0"),
        (lambda s, b, h, i, j: s * ((i // 2) % 3), "score * f32(i // 2 % 3)"),
        (lambda s, b, h, i, j: s**2, "score * score"),
        (lambda s, b, h, i, j: s**-1, "1.0 / score"),
        (lambda s, b, h, i, j: 2**s, "exp2(score)"),
        (lambda s, b, h, i, j: abs(s) ** 0.5, "sqrt(abs(score))"),
        (lambda s, b, h, i, j: torch.where(j <= i, s, -float("inf")), "where(j <= i, score, -inf)"),
        (lambda s, b, h, i, j: fn.where(j <= i, s, 0), "where(j <= i, score, 0.0)"),
        (lambda s, b, h, i, j: torch.tanh(s / 20) * 20, "tanh(score / 20.0) * 20.0"),
        (lambda s, b, h, i, j: torch.clamp(s, -1, max=1), "min(max(score, -1.0), 1.0)"),
        (lambda s, b, h, i, j: (i - j).abs().to(s.dtype) + s, "f32(abs(i - j)) + score"),
        (lambda s, b, h, i, j: torch.minimum(s, torch.sigmoid(s)), "min(score, sigmoid(score))"),
        (lambda s, b, h, i, j: fn.maximum(fn.exp(s), fn.log(s)), "max(exp(score), log(score))"),
        (lambda s, b, h, i, j: s + b + h, "score + f32(b) + f32(h)"),
        (
            lambda s, b, h, i, j, seqlen_q, seqlen_k: s + seqlen_k - seqlen_q,
            "score + f32(seqlen_k) - f32(seqlen_q)",
        ),
        (lambda s, b, h, i, j, *, seqlen_k: s * seqlen_k, "score * f32(seqlen_k)"),
        (lambda s, b, h, i, j: i - j, "f32(i - j)"),
        (lambda s, b, h, i, j: 0, "0.0"),
    ],
)
def test_scores(score: Fn, text: str) -> None:
    assert score_text(score) == text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (lambda b, h, i, j: (i >= 0) & (i < 5) | ~(j == 2), "i >= 0 & i < 5 | ~(j == 2)"),
        (lambda b, h, i, j: (i < 5) ^ (j != i), "(i < 5) != (j != i)"),
        (lambda b, h, i, j: torch.logical_and(i < 5, j > 1), "i < 5 & j > 1"),
        (lambda b, h, i, j: i - j < WIDTH, "i - j < 3"),
        (lambda b, h, i, j: True, "true"),
    ],
)
def test_masks(mask: Fn, text: str) -> None:
    assert mask_text(mask) == text


class Module:
    def __init__(self) -> None:
        self.table = torch.zeros(4, 16)
        self.by_name = {"gate": torch.ones(4)}

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.table[h][(i - j) % 16] * self.by_name["gate"][h]

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.table[h, 0]


def test_captures_are_named_as_the_user_names_them() -> None:
    table, t = torch.zeros(4, 33, dtype=torch.bfloat16), torch.tensor(2.0)
    document = torch.zeros(2, 8, dtype=torch.int64)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * t + table[h, i - j + 16] + SLOPES[h] + table[h][0]

    spec = Attention(score=score, mask=lambda b, h, i, j: document[b, i] == document[b, j])
    variant = spec.variant
    assert [(c.name, c.storage, c.rank) for c in variant.captures] == [
        ("t_t", Storage.F32, 0),
        ("table", Storage.BF16, 2),
        ("SLOPES", Storage.F32, 1),
        ("document", Storage.I64, 2),
    ]
    assert repr(variant.score) == "score * t_t[] + table[h, i - j + 16] + SLOPES[h] + table[h, 0]"
    assert spec.tensors["table"] is table
    assert spec.tensors["t_t"] is t


def test_attributes_items_partials_and_callable_objects() -> None:
    module = Module()
    spec = Attention(score=[module.score, module, functools.partial(lambda k, s, b, h, i, j: s * k, 2)])
    assert [c.name for c in spec.variant.captures] == ["table", "gate"]
    assert repr(spec.variant.score) == "(score + table[h, (i - j) % 16] * gate[h]) * table[h, 0] * 2.0"
    assert spec.tensors["gate"] is module.by_name["gate"]
    assert spec.description == "score, Module, lambda"


def test_views_made_in_the_function_and_equal_names_stay_apart() -> None:
    table = torch.arange(6.0).view(2, 3)
    spec = Attention(score=lambda s, b, h, i, j: s + table[0][i] + table[1][j])
    assert [c.name for c in spec.variant.captures] == ["table", "table_1"]
    assert torch.equal(spec.tensors["table_1"], table[1])


def test_captures_named_as_something_of_the_kernel_get_another_name() -> None:
    names = ("batch", "heads", "table_s0", "k_map", "u16", "u0", "i_f", "nullptr", "or_eq", "visit", "count")
    for name in (*names, "w", "own_row", "it", "slot2", "last3", "lse_rows", "dS"):
        (capture,) = captured_as(name).variant.captures
        assert capture.name == f"{name}_t"
    (capture,) = captured_as("l").variant.captures
    assert capture.name == "l_t_t"  # a kernel has an l and an l_t
    (capture,) = captured_as("__1").variant.captures
    assert capture.name == "n1_t"


def captured_as(name: str) -> Attention:
    made: dict[str, Any] = {"torch": torch}
    exec(f"{name} = torch.zeros(4)\ndef score(s, b, h, i, j): return s + {name}[h]", made)
    return Attention(score=made["score"])


def test_the_names_of_every_sample_are_kept_from_users() -> None:
    """Values and scalars of schedules; what the code declares and calls. A captured tensor or a local of a score with
    such a name would be another thing in the kernel."""
    declared = re.compile(r"(?:^|[(,;{\s])(?:int|[ui]\d+|float|bool|char|TensorMap)\b[\s&*]+([A-Za-z_]\w*)|\b(\w+)\(")
    free = dict[str, str]()
    for sample in golden.SAMPLES:
        kernel = sample.kernel()
        captured = {c.name for c in kernel.variant.captures}
        body = re.sub(r"//.*", "", kernel.source.body)
        found = {name for pair in declared.findall(body) for name in pair if name}
        found |= {v.name for k in kernel.schedule.kernels for r in k.roles for v in r.values}
        found |= {s.name for k in kernel.schedule.kernels for s in (*k.tensors, *k.scalars, *k.buffers, *k.rings)}
        free |= {name: sample.name for name in found - captured if c_name(name, "_") == name}
    assert free == {}


def test_a_negative_constant_index_counts_from_the_end() -> None:
    table = torch.zeros(2, 3)
    assert score_text(lambda s, b, h, i, j: s + table[i, -1]) == "score + table[i, 2]"


def test_local_names_places_and_constants_are_kept() -> None:
    half = 2.5

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, span: int = 7) -> Any:
        distance = abs(i - j)
        damped = s * half
        return fn.where(distance < span, damped, s)

    variant = Attention(score=score).variant
    assert {n: repr(e) for e, n in variant.names} == {"distance": "abs(i - j)", "damped": "score * 2.5"}
    assert variant.constants == (("half", "2.5"), ("span", "7"))
    places = {repr(e): at for e, at in variant.locations}
    assert places["abs(i - j)"].file == __file__
    assert places["abs(i - j)"].text == "distance = abs(i - j)"
    assert places["score * 2.5"].line == places["abs(i - j)"].line + 1


def test_the_same_function_runs_on_tensors_and_numbers() -> None:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return fn.where(
            fn.abs(i - j) < 2,
            fn.minimum(fn.tanh(s), fn.floor(s)),
            fn.maximum(fn.sigmoid(s), 0.5) + fn.sqrt(4.0),
        )

    variant = Attention(score=score).variant
    s, i, j = torch.randn(5, 5), torch.arange(5)[:, None], torch.arange(5)
    assert torch.allclose(
        evaluate(variant.score, {"score": s, "i": i, "j": j}, float_dtype=torch.float32), score(s, 0, 0, i, j)
    )
    assert fn.exp(1.0) == pytest.approx(math.e)
    assert fn.where(True, 1, 2) == 1


ITEMS = [1, 2]
T64 = torch.zeros(3, dtype=torch.float64)
T5 = torch.zeros(1, 1, 1, 1, 1)
TABLE = torch.zeros(4, 9)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (lambda b, h, i, j: i if i > j else j, r"where\(cond, x, y\)"),
        (lambda b, h, i, j: 0 <= i < 5, r"\(0 <= x\) & \(x < 5\)"),
        (lambda b, h, i, j: i > 1 and j > 1, "`&`"),
        (lambda b, h, i, j: min(i, j) > 0, "minimum"),
        (lambda b, h, i, j: ITEMS[i] > 0, "torch.tensor"),
        (lambda b, h, i, j: {1: 2}[i] > 0, "dictionary key"),
        (lambda b, h, i, j: math.exp(i) > 1, "attngen.exp"),
        (lambda b, h, i, j: int(i) > 1, "x.int()"),
        (lambda b, h, i, j: len(i) > 1, "no length"),
        (lambda b, h, i, j: sum(i) > 1, "iterated"),
        (lambda b, h, i, j: torch.sin(i) > 0, "torch function `sin` is not supported"),
        (lambda b, h, i, j: i.cumsum() > 0, "`.cumsum` is not supported"),
        (lambda b, h, i, j: i & 1, "take bools"),
        (lambda b, h, i, j: i + "x", "str value 'x'"),
        (lambda b, h, i, j: i + 2**40 > 0, "does not fit 32 bits"),
        (lambda b, h, i, j: i**j > 0, "constant exponent"),
        (lambda b, h, i, j: T64[i] > 0, r"`T64` is torch.float64.*T64.float\(\)"),
        (lambda b, h, i, j: T5[i, i, i, i, i] > 0, "`T5` has rank 5"),
        (lambda b, h, i, j: TABLE[i] > 0, "only 1 of its indices"),
        (lambda b, h, i, j: TABLE[i, j, j] > 0, "too many indices"),
        (lambda b, h, i, j: TABLE[i, :] > 0, "slice"),
        (lambda b, h, i, j: TABLE[i, None] > 0, "None"),
        (lambda b, h, i, j: TABLE[i, 9] > 0, "out of range"),
        (lambda b, h, i, j: TABLE[i / 2, 0] > 0, "must be an integer"),
        (lambda b, h, i, j: TABLE + i > 0, "without an index"),
        (lambda b, h, i, j: fn.where(i, i, j) > 0, "condition of `where`"),
        (lambda b, h, i, j: i - j, "returned i32. It must return a bool"),
        (lambda b, h, i, j: None, "returned nothing"),
        (lambda b, h, i, j: (i, j), "returned a tuple"),
        (lambda b, h, i: i > 0, "parameters"),
        (lambda b, h, i, j, length: i > 0, "seqlen_q"),
    ],
)
def test_errors_name_the_line_and_the_way_out(mask: Fn, words: str) -> None:
    with pytest.raises(TraceError, match=words) as caught:
        mask_text(mask)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert "lambda" in caught.value.where.text


def test_a_score_must_not_be_a_condition() -> None:
    with pytest.raises(TraceError, match="returned a bool"):
        score_text(lambda s, b, h, i, j: s > 0)


def test_errors_in_library_masks_composed_with_callables_point_to_the_callable() -> None:
    with pytest.raises(TraceError, match="truth value") as caught:
        mask_text(causal() & (lambda b, h, i, j: not i))
    assert caught.value.where is not None
    assert "not i" in caught.value.where.text


def test_dtypes() -> None:
    flags = torch.zeros(4, dtype=torch.bool)
    variant = Attention(mask=lambda b, h, i, j: flags[h]).variant
    assert variant.captures[0].storage is Storage.U8
    assert variant.mask.dtype is DType.BOOL
    assert Storage.F16.torch_dtype is torch.float16
    assert Storage.I64.element is DType.I32


def test_numpy_numbers_are_constants() -> None:
    np = pytest.importorskip("numpy")
    assert score_text(lambda s, b, h, i, j: np.float32(2) * s + np.int64(3)) == "2.0 * score + 3.0"
    assert score_text(lambda s, b, h, i, j: np.array(2.0) * s - np.float64(1)) == "2.0 * score - 1.0"
    assert score_text(lambda s, b, h, i, j: where(np.int64(3) < i, s, 0.0)) == "where(i > 3, score, 0.0)"


@pytest.mark.parametrize("name", ["tanh", "where", "abs", "array", "maximum"])
def test_numpy_functions_are_refused(name: str) -> None:
    np = pytest.importorskip("numpy")
    calls = {"where": lambda s: np.where(s > 0, s, 0.0), "maximum": lambda s: np.maximum(s, 0.0)}
    with pytest.raises(TraceError, match=r"`numpy\.\w+` is called on a traced value.*`torch.tanh\(x\)`"):
        score_text(lambda s, b, h, i, j: calls.get(name, getattr(np, name))(s))


def test_numpy_arrays_are_refused() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(TraceError, match=r"ndarray of several numbers.*torch\.tensor\(values\)"):
        score_text(lambda s, b, h, i, j: s * np.array([1.0, 2.0]))


@pytest.mark.parametrize("mask", [lambda b, h, i, j: (i // 0) == 0, lambda b, h, i, j: (i % 0) == 0])
def test_a_division_by_zero_is_an_error(mask: object) -> None:
    with pytest.raises(TraceError, match=r"divided by 0[\s\S]*test_trace.py"):
        _ = Attention(mask=mask).variant  # type: ignore[arg-type]
