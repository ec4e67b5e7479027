"""The derived backward: expressions against finite differences, graphs against torch's autograd in float64."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from cases import CASES, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from support import qkv
from torch import Tensor

from attngen.derivative import gradients
from attngen.errors import PassError
from attngen.evaluate import evaluate
from attngen.expr import (
    SCALE,
    SCORE,
    B,
    DType,
    Expr,
    H,
    I,
    J,
    Op,
    add,
    const,
    load,
    make,
    mul,
    sub,
    to_f32,
    var,
    where,
)  # fmt: skip
from attngen.ir.graph import Graph, Map, Output, RowReduce
from attngen.ir.interpret import run_graph
from attngen.passes.differentiate import differentiate
from attngen.passes.simplify import simplify
from attngen.passes.textbook import textbook
from attngen.polynomial import Polynomial
from attngen.reference import reference
from attngen.spec import Attention, Normalizer, Variant
from attngen.variants import alibi, bias, causal, softcap

X, Y = var("x", DType.F32), var("y", DType.F32)
SMOOTH = (Op.EXP, Op.TANH, Op.SIGMOID)
LOADS = (
    load("table", (H, sub(I, J)), DType.F32),  # clamped into the tensor
    load("table", (B, J), DType.F32),
    load("bias", (const(0), H, I, J), DType.F32),
    load("row", (I,), DType.F32),
    load("temperature", (), DType.F32),
)


def below(a: Expr, b: Expr) -> Expr:
    return make(Op.LT, a, b)


def expressions(leaves: tuple[Expr, ...]) -> st.SearchStrategy[Expr]:
    """Random score expressions of moderate size and values."""
    numbers = st.sampled_from([-1.5, -0.5, 0.25, 0.75, 2.0]).map(const)
    positions = st.sampled_from([mul(to_f32(sub(I, J)), const(0.05)), mul(to_f32(H), const(0.3))])
    conditions = st.sampled_from([make(Op.LT, J, I), make(Op.EQ, make(Op.MOD, J, const(3)), const(0))])

    def extend(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        squashed = inner.map(lambda e: make(Op.TANH, e))  # keeps exponentials and quotients in range
        return st.one_of(
            st.builds(add, inner, inner),
            st.builds(sub, inner, inner),
            st.builds(mul, squashed, inner),
            st.builds(lambda op, e: make(op, e), st.sampled_from(SMOOTH), squashed),
            st.builds(lambda a, b: make(Op.DIV, a, add(const(1.5), b)), inner, squashed),
            st.builds(lambda e: make(Op.LOG, add(const(1.5), e)), squashed),
            st.builds(lambda e: make(Op.SQRT, add(const(1.5), e)), squashed),
            st.builds(lambda op, a, b: make(op, a, b), st.sampled_from([Op.MIN, Op.MAX]), inner, inner),
            st.builds(where, st.one_of(conditions, st.builds(below, inner, inner)), inner, inner),
            inner.map(lambda e: make(Op.ABS, e)),
            inner.map(lambda e: make(Op.NEG, e)),
        )  # fmt: skip

    return st.recursive(st.one_of(st.sampled_from(leaves), numbers, positions), extend, max_leaves=12)


# ---- expressions -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(e=expressions((X, Y, X)), x=st.floats(-2, 2), y=st.floats(-2, 2))
def test_gradients_are_those_of_torch(e: Expr, x: float, y: float) -> None:
    leaves = {n: torch.tensor(value, dtype=torch.float64, requires_grad=True) for n, value in (("x", x), ("y", y))}
    env = {**leaves, "i": 5, "j": 3, "h": 1}
    value = evaluate(e, env)
    found = gradients(e, (X, Y))
    for name, leaf in leaves.items():
        got = evaluate(found.get(var(name, DType.F32), const(0.0)), env).detach()
        want = None
        if value.requires_grad:
            (want,) = torch.autograd.grad(value, leaf, retain_graph=True, allow_unused=True)
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "e",
    [make(op, X) for op in (Op.EXP2, Op.LOG2, Op.RCP, Op.TANH_APPROX)]
    + [make(Op.FMA, X, Y, X), make(Op.MOD, X, const(0.7))],
)
def test_gradients_are_finite_differences(e: Expr) -> None:
    x, y, step = 1.3, -0.4, 1e-6

    def at(x: float) -> float:
        return float(evaluate(e, {"x": x, "y": y}))

    slope = float(evaluate(gradients(e, (X,))[X], {"x": x, "y": y}))
    assert slope == pytest.approx((at(x + step) - at(x - step)) / (2 * step), rel=1e-6)


def test_a_saturated_cap_has_the_slope_zero() -> None:
    slope = gradients(make(Op.TANH, X), (X,))[X]
    for x in (1e4, -1e4, math.inf, -math.inf):
        assert float(evaluate(slope, {"x": x})) == 0.0


def test_nothing_flows_through_conditions_and_integers() -> None:
    assert gradients(where(make(Op.LT, X, Y), const(1.0), const(2.0)), (X, Y)) == {}
    assert gradients(to_f32(make(Op.I32, X)), (X,)) == {}
    assert gradients(make(Op.FLOOR, X), (X,)) == {}


def test_polynomials_cancel() -> None:
    r, lse, z = (var(n, DType.F32) for n in ("r", "lse", "z"))
    e = make(Op.DIV, make(Op.EXP, sub(z, r)), make(Op.EXP, sub(lse, r)))
    assert Polynomial.of(e).expr() is make(Op.EXP, sub(z, lse))
    assert Polynomial.of(sub(mul(add(X, Y), X), mul(Y, X))).expr() is mul(X, X)
    assert Polynomial.of(sub(X, X)).expr() is const(0.0)


# ---- graphs ------------------------------------------------------------------------------------------------------


@dataclass
class Described:
    """What `reference` reads of an Attention, for a variant made here."""

    variant: Variant
    tensors: Mapping[str, Tensor]
    scale: float

    @property
    def sink(self) -> Tensor | None:
        return self.tensors.get("sink")

    def scale_for(self, head_dim: int) -> float:
        return self.scale


def check(spec: Described, q: Tensor, k: Tensor, v: Tensor, *stages: str) -> None:
    """All gradients of (out * a).sum() + (lse * b).sum(), from the derived graph and from autograd."""
    variant, scale = spec.variant, spec.scale
    leaves = {n: t.double().requires_grad_() for n, t in (("q", q), ("k", k), ("v", v))}
    captured = {n: t.double().requires_grad_() if t.is_floating_point() else t for n, t in spec.tensors.items()}
    out, lse = reference(Described(variant, captured, scale), *leaves.values())  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    loss, given_ = (out * dout).sum(), {"out": out.detach(), "dout": dout}
    seeds = ["out"]
    if lse is not None:
        dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64)
        seen = lse > -math.inf
        loss = loss + torch.where(seen, lse * dlse, 0.0).sum()
        given_ |= {"lse": lse.detach(), "dlse": dlse}
        seeds.append("lse")
    every = {**leaves, **{n: t for n, t in captured.items() if t.requires_grad}}
    want = torch.autograd.grad(loss, list(every.values()), allow_unused=True)
    graph = differentiate(textbook(variant), every, seeds)
    for stage in stages or ("differentiate",):
        graph = simplify(graph) if stage == "simplify" else graph
        plain = [leaves[n].detach() for n in "qkv"]
        got = run_graph(graph, *plain, {n: t.detach() for n, t in captured.items()}, scale, given=given_)
        for name, w in zip(every, want, strict=True):
            w = torch.zeros_like(every[name]) if w is None else w
            torch.testing.assert_close(got.get(f"d{name}", torch.zeros_like(w)), w, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_graphs_have_torchs_gradients(name: str) -> None:
    for sq, sk in ((13, 21), (21, 13)):
        spec = CASES[name](Sizes(2, 2, sq, sk))[0]
        check(Described(spec.variant, spec.tensors, spec.scale_for(24)), *qkv(b=2, sq=sq, sk=sk, d=24, dv=16),
              "differentiate", "simplify")  # fmt: skip


TENSORS = {"table": (2, 7), "bias": (1, 2, 6, 9), "row": (6,), "temperature": ()}


@settings(max_examples=60, deadline=None)
@given(e=expressions((SCORE, *LOADS, SCORE)), softmax=st.booleans(), seed=st.integers(0, 3))
def test_random_scores_have_torchs_gradients(e: Expr, softmax: bool, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(shape, generator=g) for n, shape in TENSORS.items()}
    mask = make(Op.LE, J, add(I, const(2)))
    normalizer = Normalizer.SOFTMAX if softmax else Normalizer.NONE
    variant = replace(Attention().variant, score=e, mask=mask, normalizer=normalizer)
    check(Described(variant, tensors, 0.4), *qkv(sq=6, sk=9, d=8, seed=seed), "differentiate", "simplify")


def test_the_scale_has_a_gradient_too() -> None:
    """By finite differences of a whole call: the derivative of the score by the scale, summed with its weights."""
    q, k, v = (t.double() for t in qkv(sq=5, sk=7, d=8, hkv=2))
    spec = Attention(mask=causal(), score=softcap(1.5))
    graph = textbook(spec.variant)
    score = next(n for n in graph.nodes if n.id == "y")
    assert isinstance(score, Map)
    slope = gradients(score.expr, (SCALE,))[SCALE]

    def loss(scale: float) -> float:
        return float(run_graph(graph, q, k, v, {}, scale)["out"].sum())

    out = run_graph(graph, q, k, v, {}, 0.3)
    given_ = {**out, "dout": torch.ones_like(out["out"]), "dlse": torch.zeros_like(out["lse"])}
    back = differentiate(graph, "q")
    shown = (Output(id="dz!", axes=score.axes, x="dz"), Output(id="s!", axes=score.axes, x="s"))
    derived = Graph("scale", (*back.nodes, *shown))
    got = run_graph(derived, q, k, v, {}, 0.3, given=given_)
    at_rows, at_keys = torch.arange(5)[:, None], torch.arange(7)
    weight = torch.where(at_keys <= at_rows + 2, got["dz"] * evaluate(slope, {"s": got["s"], "scale": 0.3}), 0.0)
    assert float(weight.sum()) == pytest.approx((loss(0.3 + 1e-5) - loss(0.3 - 1e-5)) / 2e-5, rel=1e-6)


# ---- what the pass prints, leaves out and refuses ------------------------------------------------------------------

CAUSAL_BACKWARD = """\
graph attention_backward
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  out [B,H,M,Dv] = input
  dout [B,H,M,Dv] = input
  lse [B,H,M] = input
  dlse [B,H,M] = input
  s [B,H,M,N] = contract q . k over D
  y [B,H,M,N] = map scale * s
  z [B,H,M,N] = mask y where j <= i + (seqlen_k - seqlen_q) else -inf
  p [B,H,M,N] = map exp(z - where(lse == -inf, 0.0, lse))
  dp [B,H,M,N] = contract dout . v over Dv
  dv [B,H,N,Dv] = contract dout . p over M
  dout_out [B,H,M,Dv] = map dout * out
  dot [B,H,M] = reduce sum dout_out over Dv
  delta [B,H,M] = map dot - dlse
  dz [B,H,M,N] = map p * (dp - delta)
  ds_all [B,H,M,N] = map dz
  ds [B,H,M,N] = mask ds_all where j <= i + (seqlen_k - seqlen_q) else 0.0
  dq_sum [B,H,M,D] = contract ds . k over N
  dq [B,H,M,D] = map scale * dq_sum
  dk_sum [B,H,N,D] = contract ds . q over M
  dk [B,H,N,D] = map scale * dk_sum
  dv! [B,H,N,Dv] = output dv summed over the group
  dq! [B,H,M,D] = output dq
  dk! [B,H,N,D] = output dk summed over the group
"""


def test_before_and_after() -> None:
    before = textbook(Attention(mask=causal()).variant)
    assert "r [B,H,M] = reduce max z over N" in str(before)
    assert str(differentiate(before, "qkv")) == CAUSAL_BACKWARD


def test_the_page_shows_the_derived_graph() -> None:
    page = (Path(__file__).parent.parent / "docs" / "backward.md").read_text()
    assert textwrap.indent(CAUSAL_BACKWARD, "    ") in page


def test_what_is_not_wanted_costs_nothing() -> None:
    before = textbook(Attention(mask=causal(), score=alibi(torch.ones(2))).variant)
    only_v = differentiate(before, "v")
    assert not {"dp", "dz", "dot", "ds", "dk"} & {n.id for n in only_v.nodes}
    only_q = differentiate(before, "q", seeds=("out",))
    assert not {"dk", "dv", "dlse", "delta", "d_slopes"} & {n.id for n in only_q.nodes}
    assert not any(isinstance(n, Output) and n.into for n in only_q.nodes)


def test_an_output_that_keeps_its_reference_is_refused() -> None:
    before = textbook(Attention().variant)
    nodes = tuple(replace(n, x="r") if isinstance(n, Output) and n.x == "lse" else n for n in before.nodes)
    with pytest.raises(PassError, match="r depends on the maximum r"):
        differentiate(Graph("attention", nodes), "q")


def test_a_reference_that_does_not_cancel_is_refused() -> None:
    before = textbook(Attention().variant)
    nodes = tuple(replace(n, expr=n.expr.args[0]) if n.id == "e" and isinstance(n, Map) else n for n in before.nodes)
    with pytest.raises(PassError, match="maximum"):
        differentiate(Graph("attention", nodes), "q")


def test_bias_and_sink_are_added_where_they_were_read() -> None:
    table = torch.randn(1, 2, 5, 7)
    spec = Attention(score=bias(table), sink=torch.zeros(2))
    graph = differentiate(textbook(spec.variant), ["bias", "sink"])
    assert [str(n.text()) for n in graph.of(Output)] == ["add d_sink to sink[h]", "add d_bias to bias[0, h, i, j]"]
    assert any(isinstance(n, RowReduce) for n in graph.nodes)
