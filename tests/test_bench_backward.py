"""`attngen bench --backward`: gradients are checked before they are timed, and peers compute the same ones."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import CPU, SMALL, Named, small, timed
from torch import Tensor
from torch.nn.attention import SDPBackend

from attngen.bench.cases import GROUPS, Direction, Inputs, Pattern, backward, flex_mods
from attngen.bench.check import GradientTruth, truth_of
from attngen.bench.contenders import Attngen, Call, FlashAttention3, Flex, SameBits, Sdpa, UnsupportedError
from attngen.bench.page import page
from attngen.bench.record import Record
from attngen.bench.run import run
from attngen.bench.tables import table
from attngen.bench.timing import Mode, Settings
from attngen.cli import bench as command
from attngen.errors import GradientError, SpecError
from attngen.reference import reference

HEADS_OF_TABLES = [Pattern.FULL, Pattern.ALIBI, Pattern.TABLE, Pattern.DOCUMENT]


def of_gradients(pattern: Pattern, **changes: Any) -> Inputs:
    return small(pattern, direction=Direction.BACKWARD, **changes)


def test_groups_of_gradients() -> None:
    cases = [c for group in command.BACKWARD_GROUPS for c in backward(group)]
    assert {c.direction for c in cases} == {Direction.BACKWARD} and len({str(c) for c in cases}) == len(cases)
    assert [c.group for c in backward("grid")] == ["backward-grid"] * 18
    assert not {str(c) for c in cases} & {str(c) for makers in GROUPS.values() for c in makers()}


@pytest.mark.parametrize("pattern", Pattern)
def test_sampled_gradients_are_those_of_the_reference(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.bench.check.EXACT_ROWS", 16)  # sums over parts of the rows
    inputs = of_gradients(pattern)
    truth = truth_of(inputs)
    assert isinstance(truth, GradientTruth) and inputs.dout is not None
    out, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
    want = torch.autograd.grad(out, inputs.leaves, inputs.dout.double())
    assert len(inputs.leaves) == (4 if pattern is Pattern.TABLE else 3)
    c = inputs.case
    assert inputs.operations == 2 * inputs.visible * c.batch * c.heads * (3 * c.head_dim + 2 * c.head_dim_v)
    for got, exact, leaf, allowed in zip(truth.exact, truth.sampled(want), inputs.leaves, truth.allowed, strict=True):
        # autograd rounds a gradient to the type of its leaf
        assert (got - exact).abs().max() <= exact.abs().max() * (2**-8 if leaf.dtype is torch.bfloat16 else 2**-22)
        assert 1e-5 < allowed < 0.2
    assert truth.check(Call(lambda: want)).ok


@pytest.mark.parametrize("pattern", HEADS_OF_TABLES)
def test_attngens_gradients_in_the_emulator(pattern: Pattern) -> None:
    inputs = of_gradients(pattern)
    assert truth_of(inputs).check(Attngen().call(inputs)).ok
    same = SameBits(Attngen())
    assert same.name == "attngen same bits"
    call = same.call(inputs)
    if pattern is Pattern.TABLE:
        with pytest.raises(GradientError, match="the gradient of `tensor`"):
            call.run()
    else:
        assert truth_of(inputs).check(call).ok
        assert all(torch.equal(a, b) for a, b in zip(call.run(), call.run(), strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_sdpas_gradients() -> None:
    inputs = of_gradients(Pattern.CAUSAL, seqlen_k=40)
    assert truth_of(inputs).check(Sdpa("math", SDPBackend.MATH).call(inputs)).ok


@pytest.mark.parametrize("pattern", [Pattern.CAUSAL, Pattern.TABLE])
def test_flexs_gradients(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention has no gradients on a CPU: by its functions over the whole grid, where it would be compiled."""
    inputs = of_gradients(pattern)

    def dense(q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, enable_gqa: bool) -> Tensor:
        assert enable_gqa
        score, visible = flex_mods(inputs)
        at = [torch.arange(n).view([-1 if d == x else 1 for d in range(4)])
              for x, n in enumerate((*q.shape[:3], k.size(2)))]  # fmt: skip
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1).double() for t in (k, v))
        logits = q.double() @ k.mT * q.size(3) ** -0.5
        logits = logits if score is None else score(logits, *at)
        assert visible is not None
        return logits.masked_fill(~visible(*at), -math.inf).softmax(3).to(v.dtype) @ v

    monkeypatch.setattr(torch, "compile", lambda fn, **how: dense)
    call = Flex().call(inputs)
    for _ in range(2):
        assert truth_of(inputs).check(Call(call.run)).ok


def test_flash_attention_3s_gradients_by_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, modes = of_gradients(Pattern.CAUSAL, head_dim=64, head_dim_v=64), list[bool]()
    out, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        assert causal and not q.requires_grad
        return out.transpose(1, 2), torch.zeros(1)

    def bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *made: Tensor,
            softmax_scale: float, is_causal: bool, deterministic: bool) -> None:  # fmt: skip
        assert softmax_scale == 64**-0.5 and is_causal and inputs.dout is not None
        modes.append(deterministic)
        exact = reference(inputs.spec, inputs.q, inputs.k, inputs.v)[0]
        for t, x in zip(made, torch.autograd.grad(exact, inputs.leaves, dout.transpose(1, 2).double()), strict=True):
            t.copy_(x.transpose(1, 2))

    module = ModuleType("fa3")
    monkeypatch.setattr(module, "forward", forward, raising=False)
    monkeypatch.setattr(module, "attention", None, raising=False)
    monkeypatch.setitem(sys.modules, "fa3", module)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(bwd=bwd), raising=False)
    peer = FlashAttention3()
    for contender in (peer, SameBits(peer)):
        assert truth_of(inputs).check(contender.call(inputs)).ok
    assert modes == [False, True]
    with pytest.raises(UnsupportedError, match="no such variant"):
        SameBits(peer).call(of_gradients(Pattern.ALIBI))


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("break_", [lambda x: x * 1.1, lambda x: x.roll(1, -2), lambda x: x * math.nan,
                                    torch.zeros_like])  # fmt: skip
def test_wrong_gradients_are_noticed(break_: Any, which: int) -> None:
    inputs = of_gradients(Pattern.TABLE)
    out, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
    assert inputs.dout is not None
    right = torch.autograd.grad(out, inputs.leaves, inputs.dout.double())
    wrong = [break_(x) if n == which else x for n, x in enumerate(right)]
    truth = truth_of(inputs)
    assert truth.check(Call(lambda: right)).ok and not truth.check(Call(lambda: wrong)).ok


def test_a_run_of_gradients_has_tables() -> None:
    class Gradients(Named):
        def call(self, inputs: Inputs) -> Call:
            out, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
            assert inputs.dout is not None
            found = torch.autograd.grad(out, inputs.leaves, inputs.dout.double())
            return Call(lambda: [x * self.factor for x in found])

    record = Record({"device": "a CPU", "torch": "2", "cuda": "none", "cudnn": "none", "date": "today"}, {})
    case = replace(SMALL, group="backward-grid", direction=Direction.BACKWARD, seqlen_q=64, seqlen_k=64)
    named = [Gradients("attngen"), Gradients("FlashAttention-3 same bits"), Gradients("cuDNN", factor=1.2)]
    run(record, [case], named, [Mode.GAPS], Settings(), CPU, lambda text: None, lambda r: None, timed)
    assert [x.name for x in record.lines] == ["attngen", "FlashAttention-3 same bits"]
    assert "wrong" in record.absent[0].reason and "the gradients of 4 heads" in record.absent[0].reason
    assert "| causal, backward D32/16 S64 B2 H4/2 |" in table("backward-grid", record)
    assert "Backward" in table("backward-summary", record)
    assert "Backward, full and causal" in page(record)


def test_peers_bring_their_deterministic_mode() -> None:
    found = command.contenders_of("FlashAttention-2,cuDNN", (9, 0), backward=True)
    want = ["attngen", "attngen sm80", "attngen same bits", "cuDNN", "FlashAttention-2", "FlashAttention-2 same bits"]
    assert [c.name for c in found] == want
    assert {c.group for c in command.cases_of(("grid", "variants"), "", True)} == {"backward-grid", "backward-variants"}
    with pytest.raises(SpecError, match="lengths is not known"):
        command.chosen("--groups", "lengths", command.BACKWARD_GROUPS)
