"""The facts of a derived Hopper schedule, and what `explain` says of the configurations behind it."""

from __future__ import annotations

import re
from functools import cache

import pytest
from levels import DOCUMENT, SIGMOID

from attngen.cli.explain import configuration_lines
from attngen.config import FoldPolicy, HopperConfig
from attngen.ir.schedule import Schedule
from attngen.kernel import kernel_for
from attngen.model import estimate
from attngen.model.bounds import bound
from attngen.passes import hopper
from attngen.passes.hopper.choose import every_shape, excess, shapes
from attngen.pipelines import Levels, derive, judged
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import SM90
from attngen.variants import causal

CAUSAL = Attention(mask=causal()).variant
D64, D128 = Signature(IoType.BF16, 64, 64), Signature(IoType.BF16, 128, 128)
D256 = Signature(IoType.BF16, 256, 256)
SMALL = HopperConfig(2, 64, 2, FoldPolicy.CONDITIONAL)


@cache
def levels(config: HopperConfig, signature: Signature = D64, spec: Attention | None = None) -> Levels:
    return derive(spec.variant if spec else CAUSAL, signature, SM90, config)


def facts(config: HopperConfig, signature: Signature = D64, spec: Attention | None = None) -> dict[str, str]:
    found = levels(config, signature, spec).schedule.facts
    assert len({f.subject for f in found}) == len(found)
    return {f.subject: f.text for f in found}


def test_before_and_after() -> None:
    """Facts are added in front, and nothing else."""
    before, after = (s.level for s in levels(SMALL).stages[-2:])
    assert isinstance(before, Schedule)
    assert isinstance(after, Schedule)
    assert before.kernels == after.kernels
    assert [f.subject for f in before.facts] == ["ranges"]
    added = ["tile", "estimate", "bound", "products", "turns", "slots", "fold", "output", "work", "registers"]
    assert [f.subject for f in after.facts] == [*added, "ranges"]
    assert Schedule.parse(after.print()) == after


def test_equal_input_gives_equal_bytes() -> None:
    assert derive(CAUSAL, D64, SM90, SMALL).schedule.print() == levels(SMALL).schedule.print()


def test_bound_and_estimate_are_apart() -> None:
    said, kernel = facts(SMALL), levels(SMALL).schedule.kernels[-1]
    e, b = estimate(kernel, SM90), bound(kernel, SM90)
    assert b.step < e.step
    assert said["estimate"].startswith(f"simulated {e.step:.0f} cycles a step, ")
    assert f"tensor {100 * e.tensor:.0f} %" in said["estimate"]
    assert said["bound"].startswith(f"no order of these ops takes less than {b.step:.0f} cycles a step, ")
    assert f"what binds: {b.binding}; " in said["bound"]
    assert "simulated" not in said["bound"]
    assert "no order" not in said["estimate"]
    assert not {s for s, text in said.items() if "cycles" in text} - {"estimate", "bound"}


@pytest.mark.parametrize(
    ("stages", "issue", "words"),
    [
        ((0, 1), (0, 1), "rS, then rO of the tile before, at the head of a step: rO runs beside the softmax"),
        ((0, 1), (1, 0), "rO of the tile before, then rS, at the head of a step: rO runs beside the softmax"),
        ((0, 0), (0, 1), "rS, then rO, of one tile: a warpgroup's softmax runs beside the products of others only"),
    ],
)
def test_products(stages: tuple[int, int], issue: tuple[int, int], words: str) -> None:
    config = HopperConfig(2, 64, 2, FoldPolicy.CONDITIONAL, stages, issue)
    assert facts(config)["products"].startswith(words)


def test_policies_say_their_threshold() -> None:
    for policy, words in (
        (FoldPolicy.RUNNING, "each tile takes its maximum and corrects all sums"),
        (FoldPolicy.CONDITIONAL, "moved where a correction would be below 0.00390625"),
        (FoldPolicy.REFERENCE, "sum to more than 1024, or to no number, have the tile done again"),
        (FoldPolicy.ANTICIPATED, "After a correction below 0.0625 the next tile takes its maximum first"),
    ):
        said = facts(HopperConfig(2, 64, 2, policy))["fold"]
        assert said.startswith(f"{policy.value}: ")
        assert words in said
    assert facts(HopperConfig(2, 64, 2, FoldPolicy.RUNNING), D64, SIGMOID)["fold"] == "no maximum: sums alone"


def test_memory_and_registers() -> None:
    one, two = facts(SMALL), facts(HopperConfig(2, 64, 2), D256)
    assert one["output"] == "in one piece through 16384 bytes of shared memory"
    assert one["slots"] == "2 tiles of keys and 2 of values: 49152 bytes with the queries; 4 would fit too"
    assert two["output"].startswith("in 2 blocks of columns through 32768 bytes of shared memory: one needs 65536 of ")
    assert re.search(r"; 4 would need \d+ bytes of 232448$", two["slots"])
    assert facts(HopperConfig(2, 64, 4), D64)["slots"].endswith("; the loop needs no more phases")
    load, math = levels(SMALL).schedule.kernels[-1].roles
    assert one["registers"].startswith(f"load {load.regs} a thread, math {math.regs} a thread, of 65536")


def test_turns_and_work() -> None:
    alone = HopperConfig(1, 64, 2, FoldPolicy.CONDITIONAL, turns=False)
    assert facts(alone)["turns"] == "none: warpgroups issue when they are ready"
    assert facts(SMALL)["turns"].startswith("2 warpgroups issue their products in turn")
    assert facts(SMALL)["work"].startswith("row tiles with most keys first")
    assert facts(SMALL, D64, DOCUMENT)["work"].startswith("row tiles with most keys first: the device ranks them")


# ---- candidates ----------------------------------------------------------------------------------------------------


def test_shapes_are_ranked_or_excluded_with_a_limit() -> None:
    for signature in (D64, D128, D256):
        taken = {(c.warpgroups, c.block_n) for c in shapes(signature, SM90, FoldPolicy.RUNNING)}
        out = hopper.excluded(signature, SM90)
        assert len(taken) + len(out) == len(every_shape(FoldPolicy.RUNNING))
        assert out
        for _, limit in out:
            assert re.search(r"registers a thread, not below \d+$|bytes of shared memory, more than 232448$", limit)


def test_excess_names_the_limit() -> None:
    assert excess(HopperConfig(2, 128), D128, SM90) is None
    assert "registers a thread, not below 160" in str(excess(HopperConfig(3, 128), D128, SM90))
    assert "bytes of shared memory, more than 232448" in str(excess(HopperConfig(2, 128, 4), D128, SM90))


def test_explain_lists_the_candidates_with_reasons() -> None:
    kernel = kernel_for(CAUSAL, D128, SM90)
    head, *lines = configuration_lines(kernel)
    assert head.startswith("estimates of the machine model: ")
    candidates = judged(CAUSAL, D128, SM90)
    ranked, (*out, more) = lines[: len(candidates)], lines[len(candidates) :]
    assert " more with less code, for scores whose code is too long in all of these: running, s2" in more
    assert all(re.search(r"estimate \+\d+\.\d %: \d+ cycles a step, tensor \d+ %, what binds: \w+", x) for x in ranked)
    assert min(float(x.split("estimate +")[1].split(" %")[0]) for x in ranked) == 0.0
    assert sum("chosen; " in x for x in ranked) == 1
    assert all(": does not fit: " in x for x in out)
    assert len(out) == len(hopper.excluded(D128, SM90))


def test_explain_says_why_the_build_gate_refused() -> None:
    first, second = (c.config for c in judged(CAUSAL, D128, SM90)[:2])
    kernel = kernel_for(CAUSAL, D128, SM90, second)
    kernel.rejected = (f"{first}: two\nlines",)
    try:
        lines = list(configuration_lines(kernel))
    finally:
        kernel.rejected = ()
    assert sum("  refused by the build gate: two; lines; estimate +" in x for x in lines) == 1
