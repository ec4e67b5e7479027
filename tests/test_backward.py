"""Gradients of attention, from the kernels: in the emulator, and on a GPU where there is one."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cases import CASES, Sizes
from stand_in import stand_in
from support import DEVICES, MODES, poisoned, qkv, randn
from torch import Tensor

import attngen
from attngen import causal, execute, gradient, softcap
from attngen.arguments import bind, workspaces
from attngen.backward_pipeline import Asked, derive_backward
from attngen.config import Config
from attngen.errors import CompileError, EmulatorError, GradientError, SpecError, VerifyError
from attngen.gradient_trial import GradientTrial
from attngen.ir.mutate import mutants
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.ir.verify import verify
from attngen.lower import lower
from attngen.params import packer
from attngen.prepare import prepare
from attngen.reference import reference
from attngen.signature import IoType, Signature, signature_of
from attngen.spec import Attention
from attngen.target import SM80
from attngen.tensormap import encode_emulator
from attngen.trial import distance, eager
from attngen.variants import bias, window

INF = math.inf


def grads(spec: Attention, tensors: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None = None) -> list[Tensor]:
    """attngen's gradients of (out * dout).sum() + (lse * dlse).sum() at q, k, v and what else is given."""
    q, k, v, *_ = tensors
    whole = Attention(spec.mask, list(spec.scores), spec.scale, spec.sink, dlse is not None, spec.normalizer.value)
    result = attngen.attention(q, k, v, spec=whole)
    out, lse = result if isinstance(result, tuple) else (result, None)
    seeds = [(out, dout), (lse, dlse)]
    outputs = [x for x, g in seeds if x is not None and g is not None]
    return list(torch.autograd.grad(outputs, list(tensors), [g for _, g in seeds if g is not None], allow_unused=True))


def exact(spec: Attention, tensors: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None = None) -> list[Tensor]:
    """The same in float64. A row that sees nothing has no lse to differentiate."""
    tensors = [*(t.detach().double().requires_grad_() for t in tensors[:3]), *tensors[3:]]
    out, lse = reference(spec, *tensors[:3])
    loss = torch.zeros((), dtype=torch.float64, device=out.device)
    if dout is not None:
        loss = loss + (out * dout.double()).sum()
    if dlse is not None and lse is not None:
        loss = loss + torch.where(lse > -INF, lse * dlse.double(), 0.0).sum()
    return list(torch.autograd.grad(loss, list(tensors), allow_unused=True))


def torchs(spec: Attention, tensors: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    """As a model that is written in torch op by op computes them."""
    out = eager(spec, *tensors[:3])
    return list(torch.autograd.grad(out, list(tensors), dout, allow_unused=True))


def check(spec: Attention, q: Tensor, k: Tensor, v: Tensor, seed: int = 0) -> None:
    """q, k, v and every captured float tensor within twice the error of torch."""
    captured = [t.requires_grad_() for t in spec.tensors.values() if t.is_floating_point()]
    tensors = [*(t.detach().requires_grad_() for t in (q, k, v)), *captured]
    dout = randn(*q.shape[:3], v.size(3), dtype=q.dtype, device=str(q.device), seed=100 + seed)
    got, want, bound = (fn(spec, tensors, dout) for fn in (grads, exact, torchs))
    for n, (g, w, b) in enumerate(zip(got, want, bound, strict=True)):
        w = torch.zeros_like(tensors[n], dtype=torch.float64) if w is None else w.double()
        b = torch.zeros_like(w) if b is None else b
        g = torch.zeros_like(w) if g is None else g
        assert g.shape == w.shape
        error, allowed = distance(g, w), 2 * distance(b, w) + 1e-5
        assert error <= allowed, f"gradient {n}: {error} > {allowed} (values to {float(w.abs().max())})"


# ---- variants, types, sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_variants(name: str, device: str) -> None:
    sq, sk = (100, 100) if name == "document" else (70, 150)
    spec = CASES[name](Sizes(2, 2, sq, sk, device))[0]
    check(spec, *qkv(device, b=2, hkv=1, sq=sq, sk=sk, d=32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("h", "hkv", "sq", "sk", "d", "dv", "dtype"),
    [
        (4, 2, 150, 70, 64, 64, torch.float16),  # C15, and rows without a key
        (6, 1, 129, 129, 40, 72, torch.bfloat16),
        (1, 1, 1, 1, 8, 8, torch.float16),
        (2, 2, 65, 63, 192, 128, torch.bfloat16),
        (1, 1, 40, 33, 256, 256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("same_bits", [False, True])
def test_sizes(
    h: int, hkv: int, sq: int, sk: int, d: int, dv: int, dtype: torch.dtype, same_bits: bool, device: str
) -> None:
    tensors = qkv(device, h=h, hkv=hkv, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype)
    with poisoned() if same_bits else contextlib.nullcontext():
        check(Attention(mask=causal()), *tensors)


CONFIGS = [
    (True, None), (True, (Config(64, 16, 4, 3), Config(64, 32, 4, 4))), (True, (Config(32, 48, 2, 2),) * 2),
    (False, None), (False, (Config(64, 16, 2, 3),)),
    (False, (Config(64, 64, 4, 2),)), (False, (Config(128, 32, 4, 2),)),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize(("same_bits", "config"), CONFIGS)
def test_any_order_of_copies(same_bits: bool, config: tuple[Config, ...] | None, mode: object, seed: int) -> None:
    """Asynchronous copies land early, late or at random, in several shapes of tiles: the same bits each time."""
    q, k, v = qkv(h=4, hkv=2, sq=100, sk=130, d=32)
    spec = Attention(mask=window(40, 8))
    out, lse = reference(spec, q, k, v)
    assert lse is not None
    given = {"q": q, "k": k, "v": v, "out": out.to(q.dtype), "lse": lse.float(), "dout": randn(1, 4, 100, 32, seed=3)}
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=same_bits)
    kernel = gradient.backward_for(spec.variant, signature_of(q, k, v), SM80, asked, config)
    first = gradient.run(kernel, given, {}, spec.scale_for(32))
    again = gradient.run(kernel, given, {}, spec.scale_for(32), mode, seed)  # type: ignore[arg-type]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    for n, (name, w) in enumerate(zip("qkv", exact(spec, leaves, given["dout"]), strict=True)):
        assert torch.equal(first[name], again[name]), name
        assert distance(first[name], w.double()) <= 2 * distance(torchs(spec, leaves, given["dout"])[n], w) + 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same_bits", [False, True])
def test_masks_without_closed_forms_visit_listed_tiles(same_bits: bool, device: str) -> None:
    """Documents that are not sorted, one mask a batch; lengths that are no whole tiles."""
    ids = (torch.arange(300, device=device) // 37 * 5 % 8).to(torch.int32)
    flags = torch.zeros(2, 300, dtype=torch.int32, device=device)
    flags[0, :150], flags[1, 20:] = 1, 1

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[i] == ids[j]) & (flags[b, i] == 1)

    spec = Attention(mask=mask)
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=same_bits)
    names = [k.name for k in derive_backward(spec.variant, Signature(IoType.BF16, 32, 32), SM80, asked)
             .verified.schedule.kernels]  # fmt: skip
    assert "visit_table_attn_bwd_keys" in names
    assert ("visit_table" in names) == same_bits
    with poisoned() if same_bits else contextlib.nullcontext():
        check(spec, *qkv(device, b=2, h=2, hkv=1, sq=300, sk=300, d=32))


@pytest.mark.parametrize("device", DEVICES)
def test_captured_tensors_at_indices_of_any_kind(device: str) -> None:
    """A row's by a table of the user's and by the lengths, a column's, a batch entry's; one read twice; in fp16."""
    kinds = (torch.arange(40, device=device) * 7 % 5).to(torch.int32)
    by_kind, by_key = randn(5, dtype=torch.float32, device=device), randn(2, 70, dtype=torch.float16, device=device)
    late, scalar = randn(70, dtype=torch.float32, device=device), torch.tensor(0.7, device=device)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        return s * (scalar + by_kind[kinds[i]] * late[i + seqlen_k - seqlen_q]) * scalar + by_key[b, j] + s * by_kind[b]

    check(Attention(mask=causal(), score=score), *qkv(device, b=2, h=2, hkv=1, sq=40, sk=70, d=32))


# ---- conventions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_key_have_zeros(device: str) -> None:
    """C01, with a gradient of lse too, also one that is not finite where lse is not."""
    tensors = [t.requires_grad_() for t in qkv(device, hkv=2, sq=5, sk=3)]
    dout, dlse = randn(1, 2, 5, 64, device=device, seed=1), randn(1, 2, 5, dtype=torch.float32, device=device, seed=2)
    got = grads(Attention(mask=causal()), tensors, dout, dlse)
    want = exact(Attention(mask=causal()), tensors, dout, dlse)
    assert not got[0][:, :, :2].any()
    for g, w in zip(got, want, strict=True):
        assert distance(g, w.double()) < 0.03


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [0.0, -0.125, 1.0])
def test_scales(scale: float, device: str) -> None:
    """C07"""
    spec, tensors = Attention(mask=causal(), scale=scale), qkv(device, hkv=2, sq=130, sk=130)
    check(spec, *tensors)
    if scale == 0.0:
        dq, dk, _ = grads(spec, [t.requires_grad_() for t in tensors], randn(1, 2, 130, 64, device=device))
        assert not dq.any()
        assert not dk.any()


@pytest.mark.parametrize("device", DEVICES)
def test_biases_at_the_edge(device: str) -> None:
    """C08: rows of -inf, of finfo.min, of one 0 and -inf else. In the second, lse in float32 is finfo.min too: it does
    not say among how many keys the weight is shared, so that row is given no gradient, as padding has none."""
    table = torch.zeros(1, 1, 4, 43, device=device)
    table[..., 0, :], table[..., 1, :], table[..., 2, :] = -INF, torch.finfo(torch.float32).min, -INF
    table[..., 2, 5] = 0.0
    spec, tensors = Attention(score=bias(table.requires_grad_())), [*qkv(device, hkv=2, sq=4, sk=43), table]
    tensors = [t.requires_grad_() for t in tensors]
    dout = randn(1, 2, 4, 64, device=device, seed=4)
    dout[:, :, 1] = 0.0
    got, want = grads(spec, tensors, dout), exact(spec, tensors, dout)
    assert not got[0][:, :, 0].any()
    for g, w in zip(got, want, strict=True):
        assert distance(g, w.nan_to_num().double()) < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_any_strides_of_the_outputs_gradient(device: str) -> None:
    """C10: an expanded scalar, a transpose, slices: bits of the contiguous clone."""
    tensors = [t.requires_grad_() for t in qkv(device, hkv=1, sq=70, sk=70)]
    wide = randn(1, 70, 2, 200, device=device, seed=5)
    for dout in (
        torch.ones((), dtype=torch.bfloat16, device=device).expand(1, 2, 70, 64),
        randn(1, 70, 2, 64, device=device, seed=6).transpose(1, 2),
        randn(1, 2, 64, 70, device=device, seed=7).transpose(2, 3),
        wide.transpose(1, 2)[..., 8:72],
        wide.transpose(1, 2)[..., 5:69],
    ):
        with poisoned():
            got, plain = (grads(Attention(mask=causal()), tensors, d) for d in (dout, dout.contiguous()))
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), dout.stride()


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_lse(device: str) -> None:
    """C11: alone, dq = scale P k, dk = scale P^T q and dv = 0; and beside that of the output."""
    q, k, v = (t.requires_grad_() for t in qkv(device, hkv=2, sq=70, sk=70))
    spec, ones = Attention(mask=causal()), torch.ones(1, 2, 70, device=device)
    dq, dk, dv = grads(spec, [q, k, v], None, ones)
    p = torch.softmax(
        (q.double() @ k.double().mT / 8).masked_fill(torch.ones(70, 70, device=device).triu(1).bool(), -INF), 3
    )
    assert distance(dq, (p @ k.double()).detach() / 8) < 0.01
    assert distance(dk, (p.mT @ q.double()).detach() / 8) < 0.01
    assert not dv.any()
    dout, dlse = randn(1, 2, 70, 64, device=device, seed=8), randn(1, 2, 70, dtype=torch.float32, device=device, seed=9)
    for g, w in zip(grads(spec, [q, k, v], dout, dlse), exact(spec, [q, k, v], dout, dlse), strict=True):
        assert distance(g, w.double()) < 0.03


@pytest.mark.parametrize("device", DEVICES)
def test_saturated_caps_have_zeros(device: str) -> None:
    """C12: logits in the hundreds, beyond a cap of 2: the slope is 0, not NaN."""
    q, k, v = qkv(device, hkv=2, sq=70, sk=70)
    q, k = (q.abs() * 20).requires_grad_(), (k.abs() * 20).requires_grad_()
    dq, dk, dv = grads(
        Attention(mask=causal(), score=softcap(2.0)), [q, k, v.requires_grad_()], randn(1, 2, 70, 64, device=device)
    )
    assert not dq.any()
    assert not dk.any()
    assert dv.isfinite().all()
    check(Attention(mask=window(3, 0), score=softcap(15.0)), *qkv(device, sq=5, sk=7, std=4.0))


@pytest.mark.parametrize("device", DEVICES)
def test_unseen_keys_and_queries_have_no_part(device: str) -> None:
    """NaN and infinities in keys and values that nobody sees, and in queries that see other keys only. On Hopper in
    tiles that nobody visits: what a visited one holds is multiplied by 0 (docs/backward.md)."""
    q, k, v = qkv(device, hkv=2, sq=300, sk=600)
    spec = Attention(mask=lambda b, h, i, j: (j <= i) & (j < 290) & (j >= i - 40))
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    k[:, :, 384 if hopper else 290 :] = math.nan
    v[:, :, 384 if hopper else 290 :] = INF
    dout = randn(1, 2, 300, 64, device=device)
    dq, dk, dv = grads(spec, [t.clone().requires_grad_() for t in (q, k, v)], dout)
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    assert not dk[:, :, 290:].any()
    assert not dv[:, :, 290:].any()
    q[:, :, 299] = math.nan
    dq, dk, dv = grads(spec, [t.clone().requires_grad_() for t in (q, k, v)], dout)
    assert dq[:, :, :299].isfinite().all()
    assert dk[:, :, :128].isfinite().all()  # a tile of keys that the query does not see
    assert dv[:, :, :128].isfinite().all()


# ---- what is wanted ------------------------------------------------------------------------------------------------


def module(wanted: str, spec: Attention | None = None, same_bits: bool = True) -> Schedule:
    variant = (spec or Attention(mask=causal())).variant
    asked = Asked(frozenset(wanted), dlse=False, same_bits=same_bits)
    return derive_backward(variant, Signature(IoType.BF16, 64, 64), SM80, asked).verified.schedule


def test_a_gradient_that_is_not_wanted_costs_no_kernel() -> None:
    assert [k.name for k in module("qkv").kernels] == ["attn_bwd_rows", "attn_bwd_keys", "attn_bwd_queries"]
    assert [k.name for k in module("q").kernels] == ["attn_bwd_rows", "attn_bwd_queries"]
    assert [k.name for k in module("v").kernels] == ["attn_bwd_rows", "attn_bwd_keys"]
    alike = module("qkv", same_bits=False)
    assert [k.name for k in alike.kernels] == ["attn_bwd_rows", "attn_bwd_keys", "attn_bwd_cast_dq"]
    assert [k.name for k in module("q", same_bits=False).kernels] == ["attn_bwd_rows", "attn_bwd_queries"]
    assert "dk" not in {t.name for k in module("v").kernels for t in k.tensors}


def test_the_text_of_a_module_parses_back() -> None:
    spec = Attention(mask=window(9, 3), score=bias(torch.zeros(1, 2, 8, 8)))
    asked = Asked(frozenset(["q", "bias"]), dlse=True)
    biased = derive_backward(spec.variant, Signature(IoType.FP16, 40, 64), SM80, asked).verified.schedule
    for text in (module("qkv"), module("qkv", same_bits=False), biased):
        assert Schedule.parse(str(text)) == text


def test_sums_in_no_fixed_order_are_refused_where_the_same_bits_are_asked_for() -> None:
    q, k, v = qkv(sq=9, sk=9)
    table, whole = torch.zeros(2, 17, requires_grad=True), torch.zeros(1, 2, 9, 9, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        out = attngen.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h, i - j + 8])
        with pytest.raises(GradientError, match=r"the gradient of `table`.*use_deterministic_algorithms"):
            out.sum().backward()
        attngen.attention(q, k, v, score=bias(whole)).float().square().sum().backward()  # one element for each score
        assert whole.grad is not None
    finally:
        torch.use_deterministic_algorithms(False)
    out = attngen.attention(q, k, v, score=lambda s, b, h, i, j: s + table[h, i - j + 8])
    out.float().square().sum().backward()
    assert table.grad is not None
    assert table.grad.isfinite().all()


def test_the_kernels_of_gradients_can_be_read() -> None:
    slopes = torch.ones(2)
    kernel = attngen.compile(Attention(mask=causal(), score=attngen.alibi(slopes)), head_dim=64)
    text = kernel.backward().explain()
    assert "---- differentiate" in text
    assert "add d_slopes to slopes[h]" in text
    assert "red.add" in kernel.backward(["q", "k", "v"]).explain()
    assert "red.add" not in kernel.backward(["q", "k", "v"], same_bits=True).explain()
    with pytest.raises(SpecError, match=r"Allowed: some of q, k, v, slopes"):
        kernel.backward(["sink"])


def test_deleted_ops_are_noticed() -> None:
    """By the verifier, but for two: a product that is missing is wrong in numbers only, and the barrier in front of the
    epilogue is one too many where the staged tiles lie over those of the loop, which a barrier has followed."""
    asked, shape = Asked(frozenset("qkv"), dlse=False, same_bits=False), Config(64, 64, 4, 2, 2)
    levels = derive_backward(Attention(mask=causal()).variant, Signature(IoType.BF16, 64, 64), SM80, asked, (shape,))
    schedule = levels.verified.schedule
    unnoticed = []
    for mutant in mutants(schedule):
        if mutant.name.startswith("delete"):
            try:
                verify(mutant.schedule)
                unnoticed.append(" ".join(mutant.name.split()[1:4]))
            except VerifyError:
                pass
    assert unnoticed == ["S11 mma_sync d=rdK_sum", "W9s cta_sync"]


def test_a_missing_barrier_is_noticed_by_the_emulator() -> None:
    """Parts of dq read what other warps have staged."""
    spec, (q, k, v) = Attention(mask=causal()), qkv(sq=70, sk=70)
    trial = GradientTrial(spec, q, k, v)
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=False)
    kernel = gradient.backward_for(spec.variant, signature_of(q, k, v), SM80, asked)
    assert all(e.ok for e in trial.run(kernel))
    (mutant,) = (m for m in mutants(kernel.schedule) if m.name.startswith("delete X0s"))
    broken = copy.copy(kernel)
    broken.verified = VerifiedSchedule(mutant.schedule)
    broken.source = lower(broken.verified, "// mutant\n")
    with pytest.raises(EmulatorError, match="race"):
        trial.run(broken)


def test_a_plan_passes_what_the_plain_way_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a GPU call, made with a stand-in for the device, against the plain way to pack parameters."""
    launched = stand_in(monkeypatch).launched
    q, k, v = qkv(sq=65, sk=65)
    table, slopes = torch.randn(2, 129), torch.randn(2)
    spec = Attention(mask=causal(), score=[lambda s, b, h, i, j: s + table[h, i - j + 64], attngen.alibi(slopes)])
    kernel = attngen.compile(spec, head_dim=64).backward()
    out, lse = torch.randn_like(q), torch.randn(q.shape[:3])
    given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": out.flip(0)}
    made = gradient.plan(kernel, given, spec.tensors, 0.125)
    for _ in range(2):
        launched.clear()
        got = made.run(given, spec.tensors)
        assert {n: t.shape for n, t in got.items()} == {n: {**given, **spec.tensors}[n].shape for n in got}
    scalars = execute.scalars_of(q, k, 0.125)
    spaces = workspaces(kernel.schedule, {n: x for n, x in scalars.items() if isinstance(x, int)}, q.device)
    results = {x.name: torch.empty_strided(*x.layout, dtype=x.dtype) for x in made.results}
    wanted = bind(kernel.schedule, {**given, **spec.tensors, **results, **spaces}, scalars, encode_emulator)
    assert len(launched) == len(wanted) == len(kernel.schedule.kernels)
    fresh = {*results, *spaces}
    for (grid, threads, params), want in zip(launched, wanted, strict=True):
        assert (grid, threads, len(params)) == (want.grid, want.kernel.threads, len(want.params))
        layout, names = packer(want.kernel)
        for name, one, other in zip(names, layout.unpack(params), layout.unpack(want.params), strict=True):
            assert one == other or name in fresh


def test_second_order_gradients_are_refused() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(sq=9, sk=9))
    (dq,) = torch.autograd.grad(attngen.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(GradientError, match="second-order"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("size", ["b", "sq", "sk"])
def test_nothing_to_do_gives_zeros(size: str) -> None:
    """C02"""
    q, k, v = (t.requires_grad_() for t in qkv(**{"sq": 5, "sk": 7, size: 0}))
    sink = torch.zeros(2, requires_grad=True)
    out = attngen.attention(q, k, v, mask=causal(), sink=sink)
    for t, g in zip((q, k, v, sink), torch.autograd.grad(out.sum(), (q, k, v, sink)), strict=True):
        assert g.shape == t.shape
        assert g.dtype == t.dtype
        assert not g.any()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_models_have_the_same_gradients(device: str) -> None:
    slopes = torch.rand(2, device=device, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, mask=causal(), score=attngen.alibi(slopes)).float().square().sum()

    torch._dynamo.reset()
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for n in (40, 70, 55):
        tensors = [t.requires_grad_() for t in qkv(device, sq=n, sk=n, d=16)]
        with poisoned():
            got, want = (torch.autograd.grad(fn(*tensors), [*tensors, slopes]) for fn in (fast, loss))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refused_tile_shapes_end_with_kernels_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def artifact(self: gradient.BackwardKernel, arch: str | None = None) -> None:
        if not self.asked.same_bits:
            raise CompileError("the build gate refused it: [spill] attn_bwd_keys: 8 bytes of spill stores")

    monkeypatch.setattr(gradient.BackwardKernel, "artifact", artifact)
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=False)
    first = gradient.backward_for(Attention().variant, Signature(IoType.BF16, 80, 80), SM80, asked)
    found = gradient.settled(first, "sm_80")
    assert [k.name for k in found.schedule.kernels] == ["attn_bwd_rows", "attn_bwd_keys", "attn_bwd_queries"]
    assert len(found.rejected) == 2
    assert "8 bytes" in found.rejected[0]


def test_opcheck() -> None:
    slopes = torch.rand(2, requires_grad=True)
    key, captures = prepare(Attention(mask=causal(), score=attngen.alibi(slopes)), None)
    q, k, v = (t.requires_grad_() for t in qkv(hkv=2, sq=40, sk=40, d=16))
    forward = torch.library.opcheck(torch.ops.attngen.forward.default, (q, k, v, captures, key, 0.25))
    given = [t.detach() for t in (q, k, v, *torch.ops.attngen.forward(q, k, v, captures, key, 0.25))]
    needed = [True, True, False, True]
    arguments = (*given, randn(1, 2, 40, 16), None, [t.detach() for t in captures], needed, key, 0.25)
    backward = torch.library.opcheck(torch.ops.attngen.backward.default, arguments)
    assert set(forward.values()) | set(backward.values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_gpu_runs_have_the_same_bits() -> None:
    """C16: 30 runs."""
    tensors = [t.requires_grad_() for t in qkv("cuda", b=2, h=8, hkv=2, sq=1024, sk=1024, d=128)]
    dout = randn(2, 8, 1024, 128, device="cuda", seed=11)
    with poisoned():
        first = grads(Attention(mask=causal()), tensors, dout)
        for _ in range(30):
            assert all(map(torch.equal, first, grads(Attention(mask=causal()), tensors, dout)))


@pytest.mark.gpu
def test_gpu_memory_grows_with_the_length() -> None:
    peaks = []
    for n in (2048, 4096, 8192):
        q, k, v = (t.requires_grad_() for t in qkv("cuda", h=8, hkv=8, sq=n, sk=n))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attngen.attention(q, k, v, mask=causal()).sum().backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[2] < 2.2 * peaks[1] < 2.2 * 2.2 * peaks[0]
