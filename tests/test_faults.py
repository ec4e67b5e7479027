"""Fault injection, sampled: a broken schedule is noticed by one of the two judges, or is known to compute the same.

The full table is `attngen verify --mask causal --head-dim 64 --fault-injection --write`."""

from __future__ import annotations

import random
from functools import cache

import pytest

from attngen.backward_pipeline import Asked
from attngen.config import Config, HopperSumsConfig, SumsConfig
from attngen.emulator import Mode
from attngen.faults import Judge, Verdict, document, report
from attngen.gradient import BackwardKernel, backward_for
from attngen.ir.mutate import Mutant, mutants
from attngen.kernel import kernel_for
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal

SEED, COUNT = 20, 8


@cache
def judge() -> Judge:
    """On the smallest tile shape: a mutant costs a compile by the C++ compiler."""
    kernel = kernel_for(_spec().variant, Signature(IoType.BF16, 64, 64), target("sm80"), Config(64, 32, 4))
    return Judge.of(kernel, lambda shapes: _spec())


def _spec() -> Attention:
    return Attention(mask=causal(), return_lse=True)


def sampled() -> list[Mutant]:
    return random.Random(SEED).sample(list(mutants(judge().kernel.schedule)), COUNT)


def test_the_kernel_itself_is_innocent() -> None:
    assert len(judge().probes) == 3
    assert [probe.kind.value for probe in judge().probes if not probe.ok] == []


@pytest.mark.parametrize("number", range(COUNT))
def test_a_mutant_is_noticed(number: int) -> None:
    mutant = sampled()[number]
    verdict = judge().judge(mutant)
    assert not verdict.missed, f"{mutant}: neither the verifier nor the emulator notices"


SMALLEST: dict[str, SumsConfig] = {"sm80": Config(64, 32, 4, 2), "sm90": HopperSumsConfig(2, 64, 2, turns=True)}


@cache
def judge_of_gradients(same_bits: bool, on: str = "sm80") -> Judge:
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=same_bits)
    configs = (SMALLEST[on],) * (2 if same_bits else 1)
    kernel = backward_for(_spec().variant, Signature(IoType.BF16, 64, 64), target(on), asked, configs)
    return Judge.of(kernel, lambda shapes: _spec())


@pytest.mark.parametrize("on", SMALLEST)
@pytest.mark.parametrize("same_bits", [False, True])
def test_kernels_of_gradients_are_innocent(same_bits: bool, on: str) -> None:
    judge = judge_of_gradients(same_bits, on)
    assert [probe.kind.value for probe in judge.probes if not probe.ok] == []
    text = report(judge.kernel, ())
    assert text.startswith(f"## {on}, causal, gradients of k, q, v, ")
    assert ("the same bits in every run" if same_bits else "in any order") in text


@pytest.mark.parametrize("on", SMALLEST)
@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_a_mutant_of_gradients_is_noticed(number: int, same_bits: bool, on: str) -> None:
    judge = judge_of_gradients(same_bits, on)
    mutant = random.Random(SEED).sample(list(mutants(judge.kernel.schedule)), 4)[number]
    assert not judge.judge(mutant).missed, f"{mutant}: neither the verifier nor the emulator notices"


def test_another_order_of_a_sum_has_other_bits() -> None:
    """As right as the other, and not the same: where the same bits are promised, that is a fault."""
    judge = judge_of_gradients(True)
    kernel, (probe, *_) = judge.kernel, judge.probes
    assert isinstance(kernel, BackwardKernel)
    assert probe.finding(kernel, Mode.EAGER) == probe.finding(kernel, Mode.RANDOM) == ""
    other = backward_for(kernel.variant, kernel.signature, kernel.target, kernel.asked, (Config(64, 48, 4, 2),) * 2)
    assert "has other bits" in probe.finding(other, Mode.EAGER)


@pytest.mark.parametrize("kind", ["cp_wait", "cta_sync", "cp_commit", "mma_sync"])
def test_emulator_alone_notices_a_deleted(kind: str) -> None:
    """Whatever the verifier says: each op of the loop that copies depend on is missed by the emulator, too."""
    found = [m for m in mutants(judge().kernel.schedule) if "delete" in str(m) and f" {kind}" in str(m)]
    assert found
    assert judge().emulator(found[0]) != ""


def test_report_counts_and_lists() -> None:
    verdicts = (
        Verdict("delete A", "wait", "race"), Verdict("delete B", "", "out off by 1"), Verdict("delete C", "", ""),
        Verdict("swap D <-> E", "", "", "they share no value"),
    )  # fmt: skip
    assert [v.missed for v in verdicts] == [False, False, True, False]
    text = report(judge().kernel, verdicts)
    assert "| verifier and emulator | 1 |" in text
    assert "| emulator alone | 1 |" in text
    assert "| neither | 1 |" in text
    assert "| neither, equivalent | 1 |" in text
    assert "| swap D <-> E |  |  | they share no value |" in text
    assert "\n- delete C\n" in text
    assert "| delete A | wait | race |  |" in text


def test_a_document_has_a_section_a_kernel() -> None:
    one, two = "## sm80, causal\n\ntable\n", "## sm90, causal\n\ntable\n"
    both = document(document("", one), two)
    assert both.count("# Fault injection") == 1
    assert both.index("## sm80") < both.index("## sm90")
    again = document(both, "## sm80, causal\n\nanother\n")
    assert again == both.replace("table", "another", 1)
