"""Random masks, and an evaluator of expressions over Python integers."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st

from attngen.expr import INDICES, DType, Expr, Op, make
from attngen.exprtext import parse

Load = Callable[[str, tuple[int, ...]], int]
NAMES = {e.name: e.dtype for e in INDICES}
TENSORS = {"n": DType.I32, "doc": DType.I32, "slope": DType.F32, "keep": DType.BOOL}

_OPS: dict[Op, Callable[..., float]] = {
    Op.NEG: lambda a: -a,
    Op.ADD: lambda a, b: a + b,
    Op.SUB: lambda a, b: a - b,
    Op.MUL: lambda a, b: a * b,
    Op.FLOORDIV: lambda a, b: a // b,
    Op.MOD: lambda a, b: a % b,
    Op.MIN: min,
    Op.MAX: max,
    Op.EQ: lambda a, b: a == b,
    Op.NE: lambda a, b: a != b,
    Op.LT: lambda a, b: a < b,
    Op.LE: lambda a, b: a <= b,
    Op.GT: lambda a, b: a > b,
    Op.GE: lambda a, b: a >= b,
    Op.AND: lambda a, b: a and b,
    Op.OR: lambda a, b: a or b,
    Op.NOT: lambda a: not a,
    Op.WHERE: lambda c, a, b: a if c else b,
    Op.ABS: abs,
    Op.I32: int,
    Op.F32: float,
}


def evaluate(e: Expr, values: dict[str, int], load: Load) -> int:
    """The value of `e`; an integer that leaves 32 bits anywhere is an error, as it would be on a device."""
    if e.op is Op.CONST:
        return e.value
    if e.op is Op.VAR:
        return values[e.name]
    args = [evaluate(a, values, load) for a in e.args]
    result = load(e.name, tuple(args)) if e.op is Op.LOAD else _OPS[e.op](*args)
    if e.dtype is DType.I32:
        assert -(2**31) <= result < 2**31, f"{e} leaves 32 bits"
    return result


def mask(text: str) -> Expr:
    return parse(text, NAMES, TENSORS)


_SMALL = st.integers(-3, 20)
_POSITIVE = st.integers(1, 9)
_ROWS = ["i", "i + seqlen_k - seqlen_q", "i * 2", "i // 3", "abs(i - 5)", "i + n[b]", "i + 2 * h", "-i + 8"]
_ROW = st.sampled_from(_ROWS)


def _atom(t: tuple[str, str, int, int, int]) -> str:
    template, row, c, p, w = t
    return template.replace("ROW", f"({row})").replace("C", str(c)).replace("P", str(p)).replace("W", str(w))


# C: any constant, P: positive, W: not negative
_ATOMS = [
    "j <= ROW", "j < ROW + C", "ROW - j < P", "j > ROW", "j + C >= ROW", "ROW + C - j >= 0",
    "j - i <= C", "abs(i - j) <= W", "abs(i - j) < ROW", "abs(j - C) >= P", "j // P == i // P",
    "i // P >= j // P", "j // P <= ROW", "j // P > i // P - W", "abs(i // P - j // P) <= 1",
    "P * j <= ROW + C", "P * j >= ROW", "j - j % P <= i", "j < C", "j >= C", "C <= j", "j == C",
    "j != i", "j < n[b]", "n[h] <= j", "j < n[b] + i", "P * j < n[b] - i", "min(j, C) < ROW",
    "max(j, i) <= C", "max(j, C) >= ROW", "where(h == 1, j, i) <= C", "where(i < C, j + P, j) <= ROW",
    "(j + C) // P <= ROW", "i32(j < C) + i >= P", "(i + n[b]) // P >= j // P", "j <= max(i, C)",
    "j <= min(ROW, C)", "j <= where(h < 2, i, C)", "j <= where(i < C, i, P)", "j <= i - i % P",
    "j < P * (i // P) + P", "i < C", "i >= C", "h == 1", "b != 0", "i // P == 1", "i % P == 0",
    "h < 2 & i < C", "seqlen_k > C", "i == C", "n[b] > i", "abs(i - C) < P", "i // P < i - C",
    "slope[h] > 0.5", "keep[i]", "keep[h]", "j % P == 0", "doc[i] == doc[j]", "keep[j]", "(j * j) <= i",
    "j <= n[i]", "j >= doc[i] & j <= i", "j < 2147483647", "i - j < 1000000000", "j >= n[h] - 5",
    "j - n[b] <= n[h]", "true", "false",
]  # fmt: skip

atoms = st.tuples(st.sampled_from(_ATOMS), _ROW, _SMALL, _POSITIVE, st.integers(0, 9)).map(_atom).map(mask)
masks = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(lambda a, b: make(Op.AND, a, b), inner, inner),
        st.builds(lambda a, b: make(Op.OR, a, b), inner, inner),
        st.builds(lambda a: make(Op.NOT, a), inner),
        st.builds(lambda a, b, c: make(Op.WHERE, a, b, c), inner, inner, inner),
        st.builds(lambda a, b: make(Op.NE, a, b), inner, inner),
    ),
    max_leaves=5,
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, int], Load]:
    """Values of the variables of a tile of rows, and the contents of the captured tensors."""
    seqlen_q, seqlen_k = draw(st.integers(1, 24)), draw(st.integers(0, 24))
    i_lo = draw(st.integers(0, seqlen_q - 1))
    i_hi = draw(st.integers(i_lo, min(seqlen_q - 1, i_lo + 11)))
    names = {"b": draw(st.integers(0, 2)), "h": draw(st.integers(0, 3)), "i_lo": i_lo, "i_hi": i_hi}
    names |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    extreme = st.sampled_from([-(2**31), 2**31 - 1, 2**30, -(2**30), 2**28])
    limits = st.one_of(st.integers(-9, 30), extreme)
    table = draw(st.lists(limits, min_size=4, max_size=4))

    def load(name: str, index: tuple[int, ...]) -> int:
        if name == "n":
            return table[index[0] % 4]
        if name == "doc":
            return index[0] // 5
        return index[0] % 3 == 1

    return names, load


def visible(e: Expr, names: dict[str, int], load: Load) -> list[list[bool]] | None:
    """For each row of the tile which keys it sees; None where the mask itself overflows.

    It is evaluated at key 0 even where there is none: an overflow is then known to be the mask's own."""
    try:
        rows = [
            [bool(evaluate(e, names | {"i": i, "j": j}, load)) for j in range(max(1, names["seqlen_k"]))]
            for i in range(names["i_lo"], names["i_hi"] + 1)
        ]
    except AssertionError:
        return None
    return [row[: names["seqlen_k"]] for row in rows]
