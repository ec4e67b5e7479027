"""Configurations of Hopper as the machine model ranks them: on another machine the answer is another, and the one that
its units let expect. One thing of the machine is changed at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from attngen import pipelines, tuned
from attngen.config import FoldPolicy, HopperConfig
from attngen.errors import PassError
from attngen.functions import where
from attngen.ir.graph import Fold, Graph, Map, Mask
from attngen.ir.schedule import Kernel, Schedule
from attngen.model import estimate
from attngen.model.rates import Instr, Rates, rates
from attngen.passes.hopper import choose
from attngen.passes.hopper.choose import Candidate, fits
from attngen.passes.policy import policies
from attngen.pipelines import graph_levels, hopper_stages
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import Target, target
from attngen.variants import alibi, causal, document, softcap

SM90 = target("sm90")
MEASURED = rates(SM90)
PLAIN = Attention(mask=causal())
CAPPED = Attention(mask=causal(), score=softcap(30.0))


def cheaper_exponentials(table: Rates, factor: float) -> Rates:
    unit = table.instructions[Instr.MUFU]
    cheap = replace(
        unit, throughput=unit.throughput * factor, stream=unit.stream * factor, beside=unit.beside * factor
    )
    return replace(table, instructions={**table.instructions, Instr.MUFU: cheap})


FAST_EXP = cheaper_exponentials(MEASURED, 0.25)
HALF_TENSOR = replace(MEASURED, tensor_flops=MEASURED.tensor_flops / 2)
# 128 registers for each of 384 threads: a load role and two warpgroups
FEW_REGISTERS = replace(SM90, regs_per_sm=128 * 384)
MACHINES = {"measured": (MEASURED, SM90), "fast exponentials": (FAST_EXP, SM90)}
MACHINES |= {"half tensor": (HALF_TENSOR, SM90), "few registers": (MEASURED, FEW_REGISTERS)}


def ranked(spec: Attention, d: int, table: Rates, chip: Target) -> tuple[Candidate, ...]:
    signature = Signature(IoType.BF16, d, d)
    above = tuple(graph_levels(spec.variant))
    graph = above[-1].level
    assert isinstance(graph, Graph)
    (fold,) = graph.of(Fold)
    assert isinstance(fold, Fold)
    mask = graph[fold.x]
    plain = not (isinstance(mask, Mask) and isinstance(graph[mask.x], Map))

    def build(config: HopperConfig) -> Kernel:
        plan = list(hopper_stages(spec.variant, signature, chip, config, above, explained=False))[-1].level
        assert isinstance(plan, Schedule)
        return plan.kernels[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "estimate", partial(estimate, table=table))
        return choose.ranked(signature, chip, policies(fold, plain), build)


@cache
def on(machine: str, d: int, spec: Attention = PLAIN) -> tuple[Candidate, ...]:
    return ranked(spec, d, *MACHINES[machine])


def best(machine: str, d: int, spec: Attention = PLAIN) -> HopperConfig:
    return on(machine, d, spec)[0].config


# ---- the machine as it is --------------------------------------------------------------------------------------------


def test_candidates_are_legal_and_distinct() -> None:
    for d in (64, 128, 256):
        found = [c.config for c in on("measured", d)]
        assert len(found) == len(set(found)) > 3
        assert all(fits(c, Signature(IoType.BF16, d, d), SM90) for c in found)


def test_ranking_is_by_cost() -> None:
    """Up to what the model can tell apart."""
    for d in (64, 128, 256):
        costs = [c.cost for c in on("measured", d)]
        assert all(a <= b * (1 + 2 * choose.TOLD_APART) for a, b in pairwise(costs))


def test_the_same_again() -> None:
    """Equal calls, equal rankings, also of objects made anew."""
    again = ranked(Attention(mask=causal()), 256, MEASURED, SM90)
    assert [(c.config, c.cost) for c in again] == [(c.config, c.cost) for c in on("measured", 256)]


def test_two_or_more_warpgroups_take_turns_everywhere() -> None:
    """One warpgroup's products beside the other's exponentials: no head dim has one warpgroup first."""
    for d in (64, 128, 256):
        assert best("measured", d).warpgroups >= 2
        assert best("measured", d).turns


# ---- another machine -------------------------------------------------------------------------------------------------


def test_cheap_exponentials_need_fewer_warpgroups() -> None:
    """At head dim 64 an exponential takes as long as the products of its element; four warpgroups hide one another's.
    With `ex2` four times cheaper three do, in wider tiles: fewer instructions a key that are not exponentials. Four
    stay ahead where rows are counted, as 4096 are no multiple of 192, by half as much as before."""

    def by_step(machine: str) -> HopperConfig:
        steps = {c.config: c.estimate.step / (c.config.block_m * c.config.block_n) for c in on(machine, 64)}
        return min(steps, key=lambda config: steps[config])

    def lead(machine: str) -> float:
        """Of four warpgroups over three."""
        least = {g: min(c.cost for c in on(machine, 64) if c.config.warpgroups == g) for g in (3, 4)}
        return least[3] / least[4] - 1

    before, after = by_step("measured"), by_step("fast exponentials")
    assert (before.warpgroups, after.warpgroups) == (4, 3)
    assert after.block_n > before.block_n
    assert 0 < lead("fast exponentials") < lead("measured") / 2
    assert on("fast exponentials", 64)[0].cost < on("measured", 64)[0].cost


def test_cheap_exponentials_change_nothing_where_products_bind() -> None:
    """At head dim 256 the tensor cores are busy all the time: what stands beside them is hidden as it is."""
    before, after = on("measured", 256)[0], on("fast exponentials", 256)[0]
    assert before.estimate.tensor > 0.95
    assert (before.config.warpgroups, before.config.block_n) == (after.config.warpgroups, after.config.block_n)
    assert after.cost == pytest.approx(before.cost, rel=0.005)


def test_slow_products_hide_a_branch() -> None:
    """With tensor cores half as fast head dim 64 is bound by them, no longer by issue slots: the branch a tile of
    ANTICIPATED costs nothing, and the best kernel takes nearly the products' time alone."""
    before, after = on("measured", 64)[0], on("half tensor", 64)[0]
    assert before.estimate.tensor < choose.TENSOR_BOUND <= after.estimate.tensor
    assert (before.config.policy, after.config.policy) == (FoldPolicy.REFERENCE, FoldPolicy.ANTICIPATED)
    assert after.config.block_n < before.config.block_n or after.config.warpgroups != before.config.warpgroups
    assert after.cost == pytest.approx(4 * 64 / HALF_TENSOR.tensor_flops, rel=0.05)


def test_slow_products_take_twice_the_time_where_they_bind() -> None:
    before, after = on("measured", 256)[0], on("half tensor", 256)[0]
    assert after.cost == pytest.approx(2 * before.cost, rel=0.04)


def test_few_registers_hold_fewer_rows() -> None:
    """With 128 registers a thread at 384 threads, three warpgroups have too few for accumulators of 128 columns, and
    two have narrower tiles than on the real machine."""
    before, after = best("measured", 128), best("few registers", 128)
    assert before.warpgroups == after.warpgroups == 2
    assert any(c.config.warpgroups > 2 for c in on("measured", 128))
    signature = Signature(IoType.BF16, 128, 128)
    assert not any(c.config.warpgroups > 2 for c in on("few registers", 128))
    assert all(fits(c.config, signature, FEW_REGISTERS) for c in on("few registers", 128))
    wide = HopperConfig(2, 128)
    assert fits(wide, signature, SM90)
    assert not fits(wide, signature, FEW_REGISTERS)
    assert after.block_n < 128


def test_no_registers_at_all() -> None:
    """Where no shape fits, the error says so."""
    with pytest.raises(PassError, match="no tile shape fits"):
        ranked(PLAIN, 256, MEASURED, replace(SM90, regs_per_sm=16384))


# ---- another score ---------------------------------------------------------------------------------------------------


def test_heavy_scores_have_their_own_answer() -> None:
    """A softcap has two more operations of the exponentials' unit an element: at head dim 128 that unit binds, not the
    tensor cores, so a branch would not be hidden. ALiBi adds an addition: the shape and the time of a plain score."""
    plain, capped = on("measured", 128)[0], on("measured", 128, CAPPED)[0]
    assert capped.config != plain.config
    assert plain.config.policy is FoldPolicy.ANTICIPATED
    assert capped.config.policy is FoldPolicy.REFERENCE
    assert choose.anticipating(capped, tuple(FoldPolicy)) == capped
    assert plain.estimate.tensor > choose.TENSOR_BOUND > capped.estimate.tensor
    assert capped.estimate.binding == "mufu"
    with_bias = on("measured", 128, Attention(mask=causal(), score=alibi(torch.ones(2))))[0]
    assert replace(with_bias.config, policy=plain.config.policy) == plain.config
    assert with_bias.cost == pytest.approx(plain.cost, rel=0.02)


def test_what_was_measured_comes_first() -> None:
    """Where a configuration was measured it precedes the ranking; a score that was not has the ranking alone."""
    signature = Signature(IoType.BF16, 128, 128)
    measured = tuned.lookup(PLAIN.variant, signature, SM90)
    first, *rest = pipelines.ranked(PLAIN.variant, signature, SM90)
    assert first == measured == HopperConfig(2, 128, 2, FoldPolicy.ANTICIPATED)
    modelled = [c.config for c in on("measured", 128) if c.config != measured]
    assert rest[: len(modelled)] == modelled
    assert {c.policy for c in rest[len(modelled) :]} == {FoldPolicy.RUNNING}  # for scores of long texts
    signature = Signature(IoType.BF16, 64, 64)
    assert tuned.lookup(CAPPED.variant, signature, SM90) is None
    modelled = [c.config for c in on("measured", 64, CAPPED)]
    assert list(pipelines.ranked(CAPPED.variant, signature, SM90))[: len(modelled)] == modelled


@pytest.mark.parametrize(("pieces", "d"), [(4, 64), (8, 128), (16, 64)])
def test_scores_of_long_texts_have_shorter_kernels(pieces: int, d: int) -> None:
    """The map stands in each phase of a loop, and again where a tile is done again: a text that is too long for the
    instruction cache has one order, two slots and no tiles that are done again."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        found = s
        for k in range(pieces):
            found = where(s > 0.5 * k, s * 0.9**k + 0.1 * k, found)
        return found

    config = pipelines.derive(Attention(score=score, mask=causal()).variant, Signature(IoType.BF16, d, d), SM90).config
    assert isinstance(config, HopperConfig)
    assert (config.policy, config.slots, config.stages) == (FoldPolicy.RUNNING, 2, (0, 0))


def test_measurements_hold_for_scores_of_one_form() -> None:
    """Whatever their constants are, and what tensors are called; not for another form, nor for another head dim."""
    d128 = Signature(IoType.BF16, 128, 128)
    first, other = torch.zeros(99), torch.zeros(15)

    def keys(score: object, mask: object = None) -> tuple[str, ...]:
        return tuned.keys_of(Attention(score=score, mask=mask).variant, d128)  # type: ignore[arg-type]

    assert keys(softcap(30.0)) == keys(softcap(50.0), causal())
    assert keys(lambda s, b, h, i, j: s + first[i - j + 49]) == keys(lambda s, b, h, i, j: s + other[i - j + 7])
    assert keys(lambda s, b, h, i, j: s + first[i - j + 49]) != keys(lambda s, b, h, i, j: s + first[j])
    assert keys(alibi(first)) != keys(softcap(30.0)) != keys(None)


def test_listed_tiles_have_measurements_of_their_own() -> None:
    """Else those of tiles in closed form."""
    listed = Attention(mask=document(torch.zeros(256, dtype=torch.int32)))
    for d, policy in ((128, FoldPolicy.REFERENCE), (256, FoldPolicy.ANTICIPATED)):
        signature = Signature(IoType.BF16, d, d)
        found = tuned.lookup(listed.variant, signature, SM90)
        assert isinstance(found, HopperConfig)
        assert found.policy is policy
        plain = tuned.lookup(PLAIN.variant, signature, SM90)
        assert plain == replace(found, policy=FoldPolicy.ANTICIPATED)


def test_scores_read_by_position_need_registers() -> None:
    """Shapes that a plain score leaves few registers are not tried for one that reads a tensor by query or key."""
    signature, table = Signature(IoType.BF16, 128, 128), torch.zeros(199)
    spec = Attention(mask=causal(), score=lambda s, b, h, i, j: s + table[i - j + 99])
    tight = HopperConfig(3, 80, 2, FoldPolicy.REFERENCE, issue=(1, 0))
    by_position, by_head = (
        [c.config for c in pipelines.judged(x.variant, signature, SM90)]
        for x in (spec, Attention(mask=causal(), score=alibi(torch.ones(2))))
    )
    assert tight in by_head
    assert tight not in by_position
    reads = choose.beside(spec.variant.score)
    assert all(choose.fragments(c, signature) + reads < 240 for c in by_position)
    assert "take 124 + 40 registers a thread, not below 160" in str(choose.excess(tight, signature, SM90, reads))
