"""Kernels of gradients for Hopper: roles, weights that are made in two maps, parts of a sum from a role of their own.
In the emulator, and on a GPU that has them."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
from cases import CASES, Sizes
from support import MODES, qkv
from torch import Tensor

import attngen
from attngen import backward_pipeline, causal, gradient, ops, softcap
from attngen.backward_pipeline import Asked, choices, derive_backward
from attngen.config import HopperSumsConfig
from attngen.emulator import Mode
from attngen.errors import EmulatorError, GradientError, MissingToolError, SignatureError, VerifyError
from attngen.gradient import BackwardKernel
from attngen.gradient_trial import GradientTrial
from attngen.ir.mutate import mutants
from attngen.ir.ops import RedFrag
from attngen.ir.schedule import Schedule, VerifiedSchedule, ops_of
from attngen.ir.verify import verify
from attngen.kernel import kernel_for, settled
from attngen.lower import lower
from attngen.runtime.load import runs_on
from attngen.runtime.nvrtc import find_nvrtc
from attngen.signature import IoType, Signature, signature_of
from attngen.spec import Attention
from attngen.target import SM80, SM90
from attngen.variants import window

HOPPER = torch.cuda.is_available() and runs_on("sm_90a", torch.cuda.get_device_capability())
DEVICES = [
    pytest.param("cpu", id="emulator"),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")]),
]


def derivative(
    spec: Attention, q: Tensor, k: Tensor, v: Tensor, wanted: str | list[str] = "qkv", same_bits: bool = False,
    configs: tuple[HopperSumsConfig, ...] | None = None,
) -> BackwardKernel:  # fmt: skip
    asked = Asked(frozenset(wanted), dlse=False, same_bits=same_bits)
    return gradient.backward_for(spec.variant, signature_of(q, k, v), SM90, asked, configs)


def check(trial: GradientTrial, device: str, same_bits: bool = False) -> None:
    """Within twice the error of torch; sums over many elements at least as near as by sm80's kernels, whose error is
    that of the stored output."""
    wanted = list(trial.names)
    errors = trial.run(derivative(trial.spec, trial.q, trial.k, trial.v, wanted, same_bits), device=device)
    assert [e.name for e in errors] == wanted
    if not all(e.ok for e in errors):
        asked = Asked(frozenset(wanted), dlse=False, same_bits=True)
        other = gradient.backward_for(trial.spec.variant, signature_of(trial.q, trial.k, trial.v), SM80, asked)
        beside = trial.run(other)
        assert all(e.ok or (e.name not in "qkv" and e.error <= 1.02 * b.error)
                   for e, b in zip(errors, beside, strict=True)), [str(e) for e in errors]  # fmt: skip


# ---- variants, sizes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_variants(name: str, same_bits: bool, device: str) -> None:
    sq, sk = (100, 100) if name == "document" else (70, 150)
    spec = CASES[name](Sizes(2, 2, sq, sk, "cpu"))[0]
    check(GradientTrial(spec, *qkv(b=2, hkv=1, sq=sq, sk=sk, d=32)), device, same_bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("h", "hkv", "sq", "sk", "d", "dv", "dtype"),
    [
        (4, 2, 290, 130, 64, 64, torch.float16),  # several tiles, rows without a key
        (2, 1, 200, 330, 128, 128, torch.bfloat16),  # keys that no whole tile of queries sees
        (6, 1, 129, 129, 40, 72, torch.bfloat16),
        (1, 1, 1, 1, 8, 8, torch.float16),
        (2, 2, 65, 63, 192, 128, torch.bfloat16),
        (1, 1, 40, 33, 256, 256, torch.bfloat16),
        (2, 1, 150, 260, 256, 256, torch.float16),  # two accumulators do not fit; parts of 48 rows
        (2, 1, 190, 130, 192, 192, torch.bfloat16),
        (1, 1, 130, 190, 64, 256, torch.bfloat16),
        (2, 1, 70, 65, 80, 112, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("same_bits", [False, True])
def test_sizes(
    h: int, hkv: int, sq: int, sk: int, d: int, dv: int, dtype: torch.dtype, same_bits: bool, device: str
) -> None:
    tensors = qkv(h=h, hkv=hkv, sq=sq, sk=sk, d=d, dv=dv, dtype=dtype)
    check(GradientTrial(Attention(mask=causal()), *tensors), device, same_bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["softcap_alibi", "document", "sink", "negative_scale"])
def test_variants_where_two_accumulators_do_not_fit(name: str, device: str) -> None:
    """A kernel for dv, and one for dk and for what is added up in memory."""
    sq, sk = (100, 100) if name == "document" else (70, 150)
    spec = CASES[name](Sizes(1, 2, sq, sk, "cpu"))[0]
    trial = GradientTrial(spec, *qkv(b=1, hkv=1, sq=sq, sk=sk, d=256))
    kernel = derivative(spec, trial.q, trial.k, trial.v, list(trial.names))
    assert [k.name for k in kernel.schedule.kernels if k.name.startswith("attn_bwd_keys")] == [
        "attn_bwd_keys0", "attn_bwd_keys1",
    ]  # fmt: skip
    check(trial, device)


LOOPS = [
    HopperSumsConfig(2, 64, 2, unroll=True, turns=True), HopperSumsConfig(2, 64, 3), HopperSumsConfig(2, 128, 2),
    HopperSumsConfig(1, 64, 2, turns=False), HopperSumsConfig(2, 64, 2, split=False),
    HopperSumsConfig(3, 64, 4, merged=True), HopperSumsConfig(3, 64, 3, turns=True, merged=True),
    HopperSumsConfig(2, 128, 2, merged=True), HopperSumsConfig(2, 64, 2, turns=True, merged=True, short=True),
    HopperSumsConfig(2, 48, 2, merged=True, short=True), HopperSumsConfig(2, 48, 2, short=True),
    HopperSumsConfig(3, 32, 3, turns=True, merged=True), HopperSumsConfig(2, 16, 3),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "seed"), MODES)
@pytest.mark.parametrize("config", LOOPS, ids=str)
def test_any_order_of_copies_and_products(config: HopperSumsConfig, mode: Any, seed: int) -> None:
    """Copies land, and products read, early, late or at random: the same bits each time."""
    q, k, v = qkv(h=4, hkv=2, sq=300, sk=200, d=32)
    trial = GradientTrial(Attention(mask=window(90, 8)), q, k, v)
    kernel = derivative(trial.spec, q, k, v, configs=(config,))
    assert all(e.ok for e in trial.run(kernel))
    first, again = trial.gradients(kernel), trial.gradients(kernel, mode, seed)
    assert all(torch.equal(first[n], again[n]) for n in "kv")  # parts of dq are added in another order


@pytest.mark.parametrize("seed", [7, 8])
def test_a_thread_that_a_random_copy_wakes_as_it_blocks_goes_on(seed: int) -> None:
    """Of all threads that can run, the scheduler may draw the one that leaves."""
    ids = (torch.arange(400) // 37 * 5 % 8).to(torch.int32)
    flags = torch.zeros(2, 400, dtype=torch.int32)
    flags[0, :150], flags[1, 20:] = 1, 1
    spec = Attention(mask=lambda b, h, i, j: (ids[i] == ids[j]) & (flags[b, i] == 1))
    trial = GradientTrial(spec, *qkv(b=2, h=4, hkv=2, sq=130, sk=385, d=16))
    config = HopperSumsConfig(3, 64, 3 if seed == 7 else 2, turns=seed == 7, merged=True)
    kernel = derivative(spec, trial.q, trial.k, trial.v, configs=(config,))
    assert all(e.ok for e in trial.run(kernel, Mode.RANDOM, seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same_bits", [False, True])
def test_masks_without_closed_forms_visit_listed_tiles(same_bits: bool, device: str) -> None:
    ids = (torch.arange(300) // 37 * 5 % 8).to(torch.int32)
    flags = torch.zeros(2, 300, dtype=torch.int32)
    flags[0, :150], flags[1, 20:] = 1, 1

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (ids[i] == ids[j]) & (flags[b, i] == 1)

    trial = GradientTrial(Attention(mask=mask), *qkv(b=2, h=2, hkv=1, sq=300, sk=300, d=32))
    check(trial, device, same_bits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("wanted", ["q v", "q v table", "table", "k table", "v table"])
def test_any_subset_of_gradients(wanted: str, same_bits: bool, device: str) -> None:
    """Parts of dq are left out of a kernel that has no dk; a kernel may do no more than add to a captured tensor."""
    table = torch.linspace(-1, 1, 200)
    names = wanted.split()
    score = (lambda s, b, h, i, j: s + table[i - j + 100]) if "table" in names else None
    trial = GradientTrial(Attention(mask=causal(), score=score), *qkv(sq=70, sk=90, d=16))
    errors = trial.run(derivative(trial.spec, trial.q, trial.k, trial.v, names, same_bits), device=device)
    assert {e.name for e in errors if e.ok} == set(names), [str(e) for e in errors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("same_bits", [False, True])
def test_listed_rows_that_see_no_key(same_bits: bool, device: str) -> None:
    """A list of no tiles: one tile is visited, and adds nothing."""
    ids = (torch.arange(300) // 70).to(torch.int32)
    spec = Attention(mask=lambda b, h, i, j: (ids[i] == 1) & (ids[j] == 3))
    trial = GradientTrial(spec, *qkv(sq=300, sk=300, d=16))
    check(trial, device, same_bits)
    got = trial.gradients(derivative(spec, trial.q, trial.k, trial.v, same_bits=same_bits), device=device)
    assert not got["q"][:, :, 140:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_of_keys_that_nothing_sees_have_no_part(device: str) -> None:
    """Their keys and values are NaN, as memory that nobody wrote may be: exact zeros, and no NaN in dq."""
    q, k, v = qkv(h=2, hkv=1, sq=300, sk=500)
    k[:, :, 384:], v[:, :, 384:] = math.nan, math.nan
    spec = Attention(mask=lambda b, h, i, j: j < 200)
    clean = GradientTrial(spec, q, k.nan_to_num(), v.nan_to_num())
    out, lse, _ = clean.forward
    assert lse is not None
    given = {"q": q, "k": k, "v": v, "out": out.detach().bfloat16(), "lse": lse.detach().float(), "dout": clean.dout}
    moved = {n: t.to(device) for n, t in given.items()}
    got = gradient.run(derivative(spec, q, k, v), moved, {}, spec.scale_for(64))
    want = clean.gradients(derivative(spec, q, k, v), device=device)
    assert not got["k"][:, :, 200:].any()
    assert not got["v"][:, :, 200:].any()
    assert torch.equal(got["k"], want["k"])
    assert got["q"].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_saturated_caps_have_zeros(device: str) -> None:
    """C12: the slope of the cap is kept in 16 bits between the maps, and is 0."""
    q, k, v = qkv(hkv=2, sq=70, sk=70)
    trial = GradientTrial(Attention(mask=causal(), score=softcap(2.0)), q.abs() * 20, k.abs() * 20, v)
    got = trial.gradients(derivative(trial.spec, q, k, v), device=device)
    assert not got["q"].any()
    assert not got["k"].any()
    assert got["v"].isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("same_bits", [False, True])
def test_gpu_runs_have_the_same_bits(same_bits: bool, head_dim: int) -> None:
    """Fifty runs: dk and dv in any case, dq where it is asked for; else as near as float32 sums in any order are."""
    q, k, v = qkv(b=2, h=4, hkv=2, sq=700, sk=900, d=head_dim)
    trial = GradientTrial(Attention(mask=causal()), q, k, v)
    kernel = derivative(trial.spec, q, k, v, same_bits=same_bits)
    first = trial.gradients(kernel, device="cuda")
    for _ in range(50):
        again = trial.gradients(kernel, device="cuda")
        assert torch.equal(first["k"], again["k"])
        assert torch.equal(first["v"], again["v"])
        assert torch.equal(first["q"], again["q"]) or not same_bits
        assert (first["q"].float() - again["q"].float()).abs().max() <= 0.01 * first["q"].abs().max()


# ---- schedules -----------------------------------------------------------------------------------------------------


def module(head_dim: int = 64, same_bits: bool = False, spec: Attention | None = None) -> Schedule:
    variant = (spec or Attention(mask=causal())).variant
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=same_bits)
    return derive_backward(variant, Signature(IoType.BF16, head_dim, head_dim), SM90, asked).verified.schedule


def test_the_text_of_a_module_parses_back() -> None:
    for schedule in (module(), module(same_bits=True), module(256)):
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 112, 128, 160, 192, 256])
@pytest.mark.parametrize("same_bits", [False, True])
def test_configurations_are_legal(head_dim: int, same_bits: bool) -> None:
    """The rules of choosing count registers and bytes as the verifier does: what they let pass, it lets pass, the best
    and the last."""
    variant, signature = Attention(mask=causal()).variant, Signature(IoType.BF16, head_dim, head_dim)
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=same_bits)
    ranked = [found for _, found in choices(variant, signature, SM90, asked)]
    for at in (0, -1):
        derive_backward(variant, signature, SM90, asked, [found[at] for found in ranked])


def test_one_kernel_where_its_parts_may_be_added_in_any_order() -> None:
    assert [k.name for k in module().kernels] == ["attn_bwd_rows", "attn_bwd_keys", "attn_bwd_cast_dq"]
    apart = module(same_bits=True)
    assert [k.name for k in apart.kernels] == ["attn_bwd_rows", "attn_bwd_keys", "attn_bwd_queries"]
    assert not any(isinstance(op, RedFrag) for k in apart.kernels for _, op in ops_of(k))


def test_operands_share_registers_where_the_weights_split() -> None:
    """p and ds are one value, in turn: the sum that reads p is issued before ds takes its place."""
    text = str(module(128))
    assert "wgmma d=rdV a=rP b=sdOut" in text
    assert "wgmma d=rdK_sum a=rP b=sQ" in text
    assert "elem rP = rdP * rP" in text
    capped = str(module(128, spec=Attention(mask=causal(), score=softcap(20.0))))
    assert "elem rdS = rdP * rdS" in capped  # p and p f'(s) are two values


def broken(kernel: BackwardKernel, mutant: Schedule) -> BackwardKernel:
    result = copy.copy(kernel)
    result.verified = VerifiedSchedule(mutant)
    result.source = lower(result.verified, "// mutant\n")
    return result


def test_deleted_ops_are_noticed() -> None:
    """By the verifier; where what is missing is wrong in numbers only, since registers are read that were written, by
    the emulator."""
    q, k, v = qkv(h=1, sq=400, sk=400)  # masked and full tiles
    trial = GradientTrial(Attention(mask=causal()), q, k, v)
    kernel, passed, unneeded = derivative(trial.spec, q, k, v), [], []
    for mutant in mutants(kernel.schedule):
        if mutant.name.startswith("delete"):
            try:
                verify(mutant.schedule)
                passed.append(mutant)
            except VerifyError:
                pass
    for mutant in passed:
        try:
            if all(e.ok for e in trial.run(broken(kernel, mutant.schedule))):
                unneeded.append(mutant.name)
        except EmulatorError:
            pass
    assert unneeded == []
    assert all(" wgmma " in m.name or " map " in m.name for m in passed)


def test_what_reads_an_accumulator_stands_before_the_fence() -> None:
    """Of the next product into it; numbers do not show it, since the compiler mostly keeps the order."""
    mutant = next(m for m in mutants(module(128)) if re.match(r"swap R\d+ red_frag .* <-> R\d+ open$", m.name))
    with pytest.raises(VerifyError, match=r"\[open\] .* rdQ_sum was read since the last wgmma.fence"):
        verify(mutant.schedule)


@pytest.mark.parametrize("kind", ["proxy", "mbar_wait bar=dS.full", "mbar_wait bar=dS.free"])
def test_what_orders_the_roles_is_missed_by_the_emulator_too(kind: str) -> None:
    q, k, v = qkv(sq=300, sk=130)
    trial = GradientTrial(Attention(mask=causal()), q, k, v)
    kernel = derivative(trial.spec, q, k, v)
    mutant = next(m for m in mutants(kernel.schedule)
                  if m.name.startswith("delete") and m.name.split(" ", 2)[2].startswith(kind)
                  and (kind != "proxy" or m.name.split()[1].startswith("S")))  # fmt: skip
    wrong = broken(kernel, mutant.schedule)
    noticed = 0
    for mode, seed in MODES:
        try:
            trial.run(wrong, mode, seed)
        except EmulatorError:
            noticed += 1
    assert noticed


def test_configurations_say_what_is_allowed() -> None:
    for wrong, said in (
        ({"warpgroups": 5}, "1 to 4"), ({"block_n": 24}, "multiples of 16"), ({"slots": 1}, "2 to 8"),
        ({"warpgroups": 1, "turns": True}, "turns=False"), ({"slots": 3, "unroll": True}, "slots=2"),
    ):  # fmt: skip
        with pytest.raises(SignatureError, match=said):
            HopperSumsConfig(**{"warpgroups": 2, "block_n": 64, **wrong})  # type: ignore[arg-type]


# ---- what a user sees ----------------------------------------------------------------------------------------------


def test_a_kernel_gives_gradients_for_its_target() -> None:
    bound = attngen.compile(Attention(mask=causal()), head_dim=128, target="sm90")
    made = bound.backward()
    assert made.target is SM90
    said, keys = made.explain(), next(k for k in made.schedule.kernels if k.name == "attn_bwd_keys")
    assert f"\ntarget     sm90\nconfig     attn_bwd_keys {made.configs[0]}\n" in said
    assert [r.name for r in keys.roles][-2:] == ["shed", "math"]
    for role in keys.roles:
        assert f"role {role.name}: {role.warps} warps, {role.regs} a thread" in said
    slots = next(r.slots for r in keys.rings if r.name == "Q")
    assert f"attn_bwd_keys slots: {slots} of Q, 2 of dS; K and V once an item" in said
    assert "attn_bwd_keys weights: split in two maps: rP behind rS, then rP behind rdP; rdP starts at" in said
    assert attngen.compile(Attention(mask=causal())).backward().target is SM80
    assert "attn_bwd_keys copies: role load does nothing else" in bound.backward(same_bits=True).explain()
    config = HopperSumsConfig(2, 64, merged=True)
    merged = gradient.backward_for(bound.spec.variant, bound.signature, SM90, made.asked, (config,)).explain()
    assert "attn_bwd_keys copies: role shed issues them, ahead of its products" in merged
    table = torch.ones(64)
    joint = attngen.compile(Attention(score=lambda s, b, h, i, j: s * table[j - i + 9]), head_dim=64, target="sm90")
    assert "attn_bwd_keys weights: in one map: " in joint.backward().explain()


def test_rows_that_no_copy_engine_reads_have_kernels_of_sm80() -> None:
    """And they say so: nothing else was asked for, nothing else runs there."""
    made = attngen.compile(Attention(mask=causal()), head_dim=64, target="sm90", alignment=8).backward()
    assert made.target is SM80
    assert "target     sm80, on Hopper too: its copy engine reads no rows on 8 bytes" in made.explain()
    asked = Asked(frozenset("qkv"), dlse=False)
    with pytest.raises(GradientError, match="the target sm80, whose kernels run there too"):
        gradient.backward_for(Attention().variant, Signature(IoType.BF16, 64, 64, 8), SM90, asked)
    with pytest.raises(GradientError, match=r"multiples of 8\. Pad with zeros to 24"):
        attngen.compile(Attention(), head_dim=20, target="sm90").backward()


@pytest.mark.parametrize(
    ("given", "device", "aligned", "want"),
    [("sm90", SM80, True, SM90), ("sm80", SM90, True, SM80), (None, SM90, True, SM90), (None, SM80, True, SM80),
     (None, SM90, False, SM80), ("sm90", SM90, False, SM80)],
)  # fmt: skip
def test_a_call_has_gradients_for_its_target(
    monkeypatch: pytest.MonkeyPatch, given: str | None, device: Any, aligned: bool, want: Any
) -> None:
    """That of the call, else of the device: `attngen sm80` of the bench is sm80's both ways."""
    used: list[Any] = []

    def spy(variant: Any, signature: Any, target: Any, asked: Asked) -> BackwardKernel:
        used.append(target)
        return gradient.backward_for(variant, signature, target, asked)

    monkeypatch.setattr(ops, "target_for", lambda variant, signature, on: device)
    monkeypatch.setattr(ops, "backward_for", spy)
    pad = 0 if aligned else 4
    tensors = [torch.nn.functional.pad(t, (0, pad))[..., :16] for t in qkv(h=1, hkv=1, sq=9, sk=9, d=16)]
    leaves = [t.requires_grad_() for t in tensors]
    out = attngen.attention(*leaves, mask=causal(), target=given)
    dq, *_ = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert used == [want]
    assert dq.isfinite().all()


# ---- what rules do not know -----------------------------------------------------------------------------------------


def test_code_that_does_not_fit_the_instruction_cache_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is first in rank is refused by its size alone; the next that fits is right."""
    table, ranking = torch.randn(600), backward_pipeline.candidates_warpgroups

    def written_out_first(*asked: Any) -> tuple[HopperSumsConfig, ...]:
        return tuple(sorted(ranking(*asked), key=lambda config: not config.unroll))

    monkeypatch.setattr(backward_pipeline, "candidates_warpgroups", written_out_first)

    def relative(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[i - j + 300]

    spec = Attention(mask=causal(), score=[softcap(9.0), relative])
    trial = GradientTrial(spec, *qkv(h=2, hkv=1, sq=70, sk=100, d=64))
    asked = Asked(frozenset(trial.names), False, False)
    signature = signature_of(trial.q, trial.k, trial.v)
    ranked = choices(spec.variant, signature, SM90, asked)
    with pytest.raises(VerifyError, match="code-size"):
        derive_backward(spec.variant, signature, SM90, asked, [r[0] for _, r in ranked])
    kernel = derivative(spec, trial.q, trial.k, trial.v, list(trial.names))
    assert kernel.configs[0] in ranked[0][1][1:]
    check(trial, "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_of_any_strides_keeps_the_copy_engine(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a sum has stride 0: it is copied, as kernels without the engine take longer than a copy."""
    used: list[Any] = []
    real = ops.backward_for
    monkeypatch.setattr(ops, "backward_for", lambda *asked: used.append(asked[2]) or real(*asked))
    leaves = [t.to(device).requires_grad_() for t in qkv(h=2, hkv=1, sq=70, sk=90, d=64)]
    out = attngen.attention(*leaves, mask=causal(), target="sm90")
    of_sum = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    plain = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert set(used) == {SM90}
    assert all(torch.equal(a, b) for a, b in zip(of_sum[1:], plain[1:], strict=True))
    assert torch.allclose(of_sum[0], plain[0], rtol=2**-7, atol=1e-3)  # its parts are added in any order


@pytest.mark.parametrize("device", DEVICES)
def test_scores_of_positions_alone(device: str) -> None:
    """No product of q and k: the kernel reads no tile of its own, and gradients of q and k are zeros."""
    q, k, v = (x.to(device).requires_grad_() for x in qkv(h=2, hkv=1, sq=130, sk=193, d=16))
    out = attngen.attention(q, k, v, score=lambda s, b, h, i, j: 0.02 * j, target="sm90")
    out.float().square().sum().backward()
    weights = torch.softmax(0.02 * torch.arange(193, device=device).double(), 0)
    want = torch.outer(weights, 2 * out.detach()[0].double().sum((0, 1)))
    assert not q.grad.any() and not k.grad.any()
    assert torch.allclose(v.grad[0, 0].double(), want, rtol=2e-2, atol=2e-3)


def test_scores_of_positions_alone_pass_the_gate() -> None:
    """Their maxima are the same in all rows, and the compiler shares them."""
    try:
        find_nvrtc()
    except MissingToolError as error:
        pytest.skip(str(error))
    spec = Attention(score=lambda s, b, h, i, j: 0.02 * j)
    kernel = settled(kernel_for(spec.variant, Signature(IoType.BF16, 16, 16), SM90), "sm_90a")
    assert kernel.artifact("sm_90a").resources["attn_fwd"].spill_store_bytes == 0
