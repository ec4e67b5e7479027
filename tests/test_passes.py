"""Graph and Program passes, each with the text it reads and the text it gives, for causal attention in small tiles; and
sigmoid attention, which has no reduction, through all passes."""

from __future__ import annotations

import pytest
import torch
from levels import CAUSAL, ONE_STAGE, PASSES, SIGMOID, SIGNATURE, level, part, same

from attngen.errors import PassError
from attngen.expr import DType, Op, make, sub, var
from attngen.ir.graph import Graph, Map, RowReduce
from attngen.ir.ops import Reduce
from attngen.ir.schedule import Schedule, ops_of
from attngen.passes.stream import stream
from attngen.pipelines import stages
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import bias

# ---- Graph -> Graph ------------------------------------------------------------------------------------------------

TEXTBOOK = """
graph attention
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  s [B,H,M,N] = contract q . k over D
  y [B,H,M,N] = map scale * s
  z [B,H,M,N] = mask y where j <= i + (seqlen_k - seqlen_q) else -inf
  r [B,H,M] = reduce max z over N
  e [B,H,M,N] = map exp(z - r)
  l [B,H,M] = reduce sum e over N
  p [B,H,M,N] = map e / l
  out [B,H,M,Dv] = contract p . v over N
  lse [B,H,M] = map r + log(l)
  out! [B,H,M,Dv] = output out
  lse! [B,H,M] = output lse
"""

SIMPLIFY = """
graph attention
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  s [B,H,M,N] = contract q . k over D
  y [B,H,M,N] = map scale * s
  z [B,H,M,N] = mask y where j <= i + (seqlen_k - seqlen_q) else -inf
  r [B,H,M] = reduce max z over N
  e [B,H,M,N] = map exp2((z - r) * 1.4426950408889634)
  l [B,H,M] = reduce sum e over N
  p [B,H,M,N] = map e / l
  out [B,H,M,Dv] = contract p . v over N
  lse [B,H,M] = map r + log2(l) * 0.6931471805599453
  out! [B,H,M,Dv] = output out
  lse! [B,H,M] = output lse
"""

STREAM = """
graph attention
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  s [B,H,M,N] = contract q . k over D
  y [B,H,M,N] = map scale * s
  z [B,H,M,N] = mask y where j <= i + (seqlen_k - seqlen_q) else -inf
  fold [B,H,M,Dv] = fold z over N
      r = max z
      l = sum exp2((z - r) * 1.4426950408889634) | correction exp2((r_old - r) * 1.4426950408889634)
      out_sum = sum exp2((z - r) * 1.4426950408889634) . v | correction exp2((r_old - r) * 1.4426950408889634)
  r [B,H,M] = state of fold
  l [B,H,M] = state of fold
  out_sum [B,H,M,Dv] = state of fold
  out [B,H,M,Dv] = map out_sum * where(l == 0.0, 0.0, rcp(l))
  lse [B,H,M] = map r + log2(l) * 0.6931471805599453
  out! [B,H,M,Dv] = output out
  lse! [B,H,M] = output lse
"""

UNITS = """
graph attention
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  s [B,H,M,N] = contract q . k over D
  z [B,H,M,N] = mask s where j <= i + (seqlen_k - seqlen_q) else -inf
  fold [B,H,M,Dv] = fold z over N
      r = max z, times scale * 1.4426950408889634
      l = sum exp2(fma(z, scale * 1.4426950408889634, -r)) | correction exp2(r_old - r)
      out_sum = sum exp2(fma(z, scale * 1.4426950408889634, -r)) . v | correction exp2(r_old - r)
  r [B,H,M] = state of fold
  l [B,H,M] = state of fold
  out_sum [B,H,M,Dv] = state of fold
  out [B,H,M,Dv] = map out_sum * where(l == 0.0, 0.0, rcp(l))
  lse [B,H,M] = map (r + log2(l)) * 0.6931471805599453
  out! [B,H,M,Dv] = output out
  lse! [B,H,M] = output lse
"""


def test_order() -> None:
    done = [s.name for s in stages(CAUSAL.variant, SIGNATURE, target("sm80"), ONE_STAGE)]
    assert done == PASSES


def test_textbook() -> None:
    """A variant becomes the formula, the softmax over all keys at once."""
    assert str(CAUSAL.variant.score) == "score"
    assert str(CAUSAL.variant.mask) == "j <= i + (seqlen_k - seqlen_q)"
    same(str(level(CAUSAL, "textbook")), TEXTBOOK)


def test_simplify() -> None:
    """exp and log become exp2 and log2."""
    same(str(level(CAUSAL, "textbook")), TEXTBOOK)
    same(str(level(CAUSAL, "simplify")), SIMPLIFY)


def test_stream() -> None:
    """Two reductions and a contraction over N become one fold; the division by the sum leaves it."""
    same(str(level(CAUSAL, "simplify")), SIMPLIFY)
    same(str(level(CAUSAL, "stream")), STREAM)
    assert not list(level(CAUSAL, "stream").of(RowReduce))  # type: ignore[union-attr]


def test_units() -> None:
    """The exponent becomes one FMA of raw scores."""
    same(str(level(CAUSAL, "stream")), STREAM)
    same(str(level(CAUSAL, "units")), UNITS)


@pytest.mark.parametrize(
    "spec", [Attention(scale=-0.3), Attention(scale=0), Attention(score=bias(torch.zeros(2, 2))), SIGMOID]
)
def test_units_keeps_what_does_not_commute_with_the_maximum(spec: Attention) -> None:
    assert str(level(spec, "units")) == str(level(spec, "stream"))

# ---- Graph -> Program -> Program -----------------------------------------------------------------------------------

TILE = """
program attn_fwd  m32n16w2 s1 ctas1
  let i_lo = m * 32
  let i_hi = min(m * 32 + 32, seqlen_q) - 1
  let n_lo = 0
  let n_hi = max(min((i_hi + seqlen_k - seqlen_q) // 16 + 1, (seqlen_k + 15) // 16), 0)
  let full_lo = 0
  let full_hi = max(min((i_lo + seqlen_k - seqlen_q + 1) // 16, seqlen_k // 16), 0)
  let end0 = n_hi - full_hi
  let end1 = n_hi - n_lo
  let seen_hi = min(i_hi + seqlen_k - seqlen_q + 1, seqlen_k)
  let u1 = seqlen_k - seqlen_q
  let scale_log2 = scale * 1.4426950408889634
  value sQ bf16[M=32,D=64]
  value sK bf16[N=16,D=64]
  value sV bf16[N=16,Dv=64]
  value rS f32[M=32,N=16]
  value rP bf16[M=32,N=16]
  value rO f32[M=32,Dv=64]
  value x f32[M=32]
  value r_ref f32[M=32]
  value a f32[M=32]
  value inv f32[M=32]
  value lse f32[M=32]
  value r f32[M=32]
  value l f32[M=32]
  o0 load_tile dst=sQ src=q heads=q row={m * 32} limit={seqlen_q}
  o1 fill dst=r value={-inf}
  o2 fill dst=l value={0.0}
  o3 fill dst=rO value={0.0}
  for t: n = n_hi - 1 - t   (masked to end0, full to end1)
    o0 load_tile dst=sK src=k heads=kv row={n * 16} limit={seqlen_k}
    o1 contract_tile d=rS a=sQ b=sK.T zero
    o2 map only=masked over=rS  # mask causal
      col u0 = j < seqlen_k
      row u2 = i + u1
      elem rS = where(u0 & j <= u2, rS, -inf)
    o3 reduce kind=max dst=x src=rS
    o4 map over=rS
      row r_old = r
      row r = max(r_old, x * scale_log2)
      row r_ref = where(r == -inf, 0.0, r)
      row a = exp2(r_old - r_ref)
      row l = l * a
    o5 map over=rO
      elem rO = rO * a
    o6 map over=rS
      elem l += exp2(fma(rS, scale_log2, -r_ref))
      elem rP = exp2(fma(rS, scale_log2, -r_ref))
    o7 load_tile dst=sV src=v heads=kv row={n * 16} limit={seen_hi}
    o8 contract_tile d=rO a=rP b=sV
  o0 reduce kind=sum dst=l src=l
  o1 map over=rO
    row inv = where(l == 0.0, 0.0, rcp(l))
    row lse = (r + log2(l)) * 0.6931471805599453
  o2 store_tile dst=out src=rO scaled=inv row={m * 32} limit={seqlen_q}
  o3 store_vector dst=lse src=lse limit={seqlen_q}
"""


def test_tile() -> None:
    """The fold becomes a loop over visited tiles: loads, contractions, maps, reductions, and a few scalars an item."""
    same(str(level(CAUSAL, "units")), UNITS)
    same(str(level(CAUSAL, "tile")), TILE)


def test_place() -> None:
    """Loaded tiles go to swizzled shared memory, the rest to registers; nothing else changes."""
    before, after = level(CAUSAL, "tile"), level(CAUSAL, "place")
    same(part(before, "value"), """
    value sQ bf16[M=32,D=64]
    value sK bf16[N=16,D=64]
    value sV bf16[N=16,Dv=64]
    value rS f32[M=32,N=16]
    value rP bf16[M=32,N=16]
    value rO f32[M=32,Dv=64]
    value x f32[M=32]
    value r_ref f32[M=32]
    value a f32[M=32]
    value inv f32[M=32]
    value lse f32[M=32]
    value r f32[M=32]
    value l f32[M=32]
    """)
    same(part(after, "value"), """
    value sQ bf16[M=32,D=64] shared xor pitch 128
    value sK bf16[N=16,D=64] shared xor pitch 128
    value sV bf16[N=16,Dv=64] shared xor pitch 128
    value rS f32[M=32,N=16] register acc f32
    value rP bf16[M=32,N=16] register opA bf16x2
    value rO f32[M=32,Dv=64] register acc f32
    value x f32[M=32] register row f32
    value r_ref f32[M=32] register row f32
    value a f32[M=32] register row f32
    value inv f32[M=32] register row f32
    value lse f32[M=32] register row f32
    value r f32[M=32] register row f32
    value l f32[M=32] register row f32
    """)
    without = [[x for x in str(p).splitlines() if not x.startswith("  value")] for p in (before, after)]
    assert without[0] == without[1]

# ---- no maximum, no sum --------------------------------------------------------------------------------------------

SIGMOID_STREAMED = """
graph attention
  q [B,H,M,D] = input
  k [B,H,N,D] = input
  v [B,H,N,Dv] = input
  s [B,H,M,N] = contract q . k over D
  y [B,H,M,N] = map rcp(1.0 + exp2(-(scale * s) * 1.4426950408889634))
  z [B,H,M,N] = mask y where j <= i + (seqlen_k - seqlen_q) else 0.0
  fold [B,H,M,Dv] = fold z over N
      out = sum z . v
  out [B,H,M,Dv] = state of fold
  out! [B,H,M,Dv] = output out
"""

SIGMOID_LOOP = """
for t: n = n_hi - 1 - t   (masked to end0, full to end1)
  o0 load_tile dst=sK src=k heads=kv row={n * 16} limit={seqlen_k}
  o1 contract_tile d=rS a=sQ b=sK.T zero
  o2 map over=rS
    elem rS = rcp(1.0 + exp2(-(scale * rS) * 1.4426950408889634))
  o3 map only=masked over=rS
    col u0 = j < seqlen_k
    row u2 = i + u1
    elem rS = where(u0 & j <= u2, rS, 0.0)
  o4 map over=rS
    elem rP = rS
  o5 load_tile dst=sV src=v heads=kv row={n * 16} limit={seen_hi}
  o6 contract_tile d=rO a=rP b=sV
o0 store_tile dst=out src=rO scaled= row={m * 32} limit={seqlen_q}
"""


def test_sigmoid_attention_has_no_reduction_anywhere() -> None:
    """The same passes: a fold of one sum, no reference, nothing to correct, nothing to divide by."""
    same(str(level(SIGMOID, "stream")), SIGMOID_STREAMED)
    loop = part(level(SIGMOID, "place"), "for t", "end")
    same("\n".join(x.split("  #")[0] for x in loop.splitlines()), SIGMOID_LOOP)
    for name in PASSES:
        text = str(level(SIGMOID, name))
        assert "reduce " not in text
        assert "kind=max" not in text
        assert "correction" not in text
    last = level(SIGMOID, "visit_table")
    assert isinstance(last, Schedule)
    assert not [op for k in last.kernels for _, op in ops_of(k) if isinstance(op, Reduce)]
    assert "lse" not in str(last)


# ---- what has no fold ------------------------------------------------------------------------------------------------


def test_a_reduction_that_cannot_be_streamed_is_an_error() -> None:
    """softmax with tanh in place of exp: moving the maximum is no factor."""
    graph = level(CAUSAL, "simplify")
    assert isinstance(graph, Graph)
    weight = make(Op.TANH, sub(var("z", DType.F32), var("r", DType.F32)))
    nodes = tuple(Map(id="e", axes=n.axes, expr=weight, inputs=("z", "r")) if n.id == "e" else n for n in graph.nodes)
    with pytest.raises(PassError, match=r"stream: tanh\(z - r\) depends on the running maximum r"):
        stream(Graph(graph.name, nodes))
