"""The reasons for swaps that change nothing: given where they hold, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedules import NAMES, schedule

from attngen.commute import RULES, why_equal
from attngen.errors import VerifyError
from attngen.ir.mutate import Swap, mutants
from attngen.ir.ops import Map
from attngen.ir.schedule import Schedule, Tiles, steps_of
from attngen.ir.verify import verify

HOPPER = next(n for n in NAMES if n.startswith("text") and "causal_d128_bf16" in n)
GRADIENTS = next(n for n in NAMES if n.startswith("sample backward_causal"))
HOPPER_GRADIENTS = [n for n in NAMES if n.startswith("sample hopper_backward")]
AMPERE = next(n for n in NAMES if n.startswith("sample causal_d64"))
# pairs whose order matters, by the words of the mutant: no rule may speak for them
ORDERED = [
    ("mbar_wait bar=K.free[slot]", "mbar_expect bar=K.full[slot]"),
    ("mbar_wait bar=V.free[slot]", "mbar_expect"),
    ("open", "wgmma d=rS"),
    ("wgmma", "commit"),
    ("retire group=g1", "mbar_arrive bar=K.free"),
    ("retire group=g2", "mbar_arrive bar=V.free"),
    ("map over=rS", "reduce"),
    ("reduce", "map over=rS"),
    ("vote", "guard"),
    ("guard", "map over=rS"),
    ("bulk_retire", "sync"),
    ("sync", "st_frag"),
    ("st_frag", "proxy"),
    ("proxy", "sync"),
    ("sync", "tma_store"),
    ("tma_store", "bulk_commit"),
]


def swaps(s: Schedule) -> dict[str, Swap]:
    return {m.name.removeprefix("swap "): m.swap for m in mutants(s) if m.swap}


@pytest.mark.parametrize(("one", "two"), ORDERED)
def test_no_reason_where_the_order_matters(one: str, two: str) -> None:
    found = [
        swap
        for name, swap in swaps(schedule(HOPPER)).items()
        if name.partition(" ")[2].startswith(one) and name.partition(" <-> ")[2].partition(" ")[2].startswith(two)
    ]
    assert found
    assert [why_equal(s) for s in found] == [""] * len(found)


COPIES = [n for n in NAMES if n.startswith("text") and n.endswith(("cpasync", "unaligned"))]
# of a load role whose threads copy
ORDERED_COPIES = [
    ("mbar_wait bar=K.free", "c"),
    ("mbar_wait bar=V.free", "c"),
    ("mbar_wait when={t == 0} bar=Q.free", "c"),
    ("proxy", "mbar_arrive"),
]


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize(("one", "two"), ORDERED_COPIES)
def test_no_reason_where_the_order_of_copies_matters(name: str, one: str, two: str) -> None:
    """A slot is claimed before it is filled, made visible before it is handed over."""
    found = []
    for words, swap in swaps(schedule(name)).items():
        pair = [w.partition(" ")[2] for w in words.split(" <-> ")]
        if words.startswith("L") and pair[0].startswith(one) and pair[1].startswith(two):
            found.append(swap)
    assert found
    assert [why_equal(s) for s in found] == [""] * len(found)


@pytest.mark.parametrize("name", [HOPPER, AMPERE, GRADIENTS, *HOPPER_GRADIENTS, *COPIES[:1], *COPIES[-1:]])
def test_the_verifier_takes_what_has_a_reason(name: str) -> None:
    """A swap that is called equivalent is a schedule without a fault by the verifier's own rules, too; but that more
    values may be alive at once than there are registers for."""
    reasons, wrong = set(), []
    for mutant in mutants(schedule(name)):
        if mutant.swap and (reason := why_equal(mutant.swap)):
            reasons.add(reason)
            try:
                verify(mutant.schedule)
            except VerifyError as error:
                if error.rule != "registers":
                    wrong.append(f"{mutant}: {reason}, but the verifier says {error}")
    assert wrong == []
    assert len(reasons) >= 4


def test_a_barrier_that_is_needed_has_no_reason() -> None:
    """Of gradients: the one between staging a tile and reading it, and the one in front of copies where it is alone."""
    found = swaps(schedule(GRADIENTS))
    (read,) = [s for n, s in found.items() if n.startswith("X0s cta_sync") and "mma_sync d=rdQ_sum" in n]
    assert why_equal(read) == ""
    (copies,) = [s for n, s in found.items() if n.startswith("W0s cta_sync") and "cp_async" in n]
    assert "another barrier" in why_equal(copies)
    item = copies.role.item
    body = tuple(
        replace(n, step=tuple(s for s in n.step if s.id != "X0s")) if isinstance(n, Tiles) else n for n in item.body
    )
    assert why_equal(replace(copies, role=replace(copies.role, item=replace(item, body=body)))) == ""


# of gradients on Hopper
ORDERED_GRADIENTS = [
    ("mbar_wait bar=dS.full", "open"),
    ("retire", "red_frag"),
    ("red_frag", "open"),
    ("retire", "mbar_arrive bar=dS.free"),
    ("proxy", "mbar_arrive bar=dS.full"),
    ("mbar_wait bar=Q.full", "open"),
    ("mbar_wait bar=dOut.full", "open"),
    ("mbar_expect", "tma_load"),
    ("wgmma", "commit"),
]


@pytest.mark.parametrize(("one", "two"), ORDERED_GRADIENTS)
def test_no_reason_where_the_order_of_roles_matters(one: str, two: str) -> None:
    found = []
    for name in HOPPER_GRADIENTS:
        for words, swap in swaps(schedule(name)).items():
            pair = [w.partition(" ")[2] for w in words.split(" <-> ")]
            if pair[0].startswith(one) and pair[1].startswith(two):
                found.append(swap)
    reasons = {why_equal(s) for s in found}
    assert found
    assert reasons == {""}


def test_a_wait_has_a_reason_beside_other_tiles_alone() -> None:
    """A map that reads a vector of the tile that is waited for has to stay behind the wait; no gradient has the two
    side by side: the map is another one of the step here, and the wait is given its ring."""
    found = swaps(schedule(HOPPER_GRADIENTS[1]))
    pairs = {n: n.split(" <-> ") for n in found}
    swap = next(found[n] for n, (one, two) in pairs.items() if " map " in one and "bar=dOut.full" in two)
    at = swap.two.bar.index  # type: ignore[union-attr]
    maps = (op for op in steps_of(swap.role) if isinstance(op, Map) and any(r.name == "sDot_rows" for r in op.copies))
    (reads,) = {op for op in maps if op.copies[0].index == at}
    swap = replace(swap, one=reads)
    assert "no tile of its ring" in why_equal(swap)
    own = replace(swap.two, bar=replace(swap.two.bar, name="Q.full"))  # type: ignore[union-attr]
    assert why_equal(replace(swap, two=own)) == ""


def test_products_that_share_an_accumulator_have_no_reason() -> None:
    found = swaps(schedule(HOPPER_GRADIENTS[0]))
    swap = next(s for n, s in found.items() if all(" wgmma " in words for words in n.split("<->")))
    assert "share no result" in why_equal(swap)
    one = swap.one
    assert why_equal(replace(swap, one=replace(one, d=swap.two.d))) == ""  # type: ignore[union-attr]
    assert why_equal(replace(swap, one=replace(one, group="another"))) == ""


def test_tiles_apart_that_a_third_lies_over() -> None:
    """Of gradients: the tile that is staged and the one that is read share no bytes, however the output's lies over
    both. Moved onto one another they have no reason."""
    found = swaps(schedule(GRADIENTS))
    (swap,) = [x for n, x in found.items() if " st_frag dst=sdS" in n.split("<->")[0] and "mma_sync d=rdV" in n]
    end = sum(b.slots * b.layout.bytes for b in swap.kernel.buffers if b.name == "sdOut")

    def moved(staged: int, third: int) -> Swap:
        at = {"sdOut": 0, "sdS": staged, "sdV": third}
        buffers = tuple(replace(b, offset=at.get(b.name, 4 * end + (b.offset or 0))) for b in swap.kernel.buffers)
        return replace(swap, kernel=replace(swap.kernel, buffers=buffers))

    assert "staged beside what does not touch it" in why_equal(moved(end, third=2 * end))
    assert "staged beside what does not touch it" in why_equal(moved(end, third=end - 16))
    assert why_equal(moved(end - 16, third=2 * end)) == ""


def test_arithmetic_in_flight_has_no_reason() -> None:
    """The rules look at registers: the same ops have no reason once they share one with the products in flight."""
    found = swaps(schedule(HOPPER))
    (name,) = [n for n in found if "fill dst=rO" in n and "retire group=g1" in n]
    swap = found[name]
    assert why_equal(swap)
    fill = swap.one
    assert why_equal(replace(swap, one=replace(fill, dst=replace(fill.dst, name="rS")))) == ""  # type: ignore[union-attr]


def test_a_mask_from_below_is_needed_before_the_weights() -> None:
    """In a window a row may have seen keys in earlier tiles and have masked ones now: no guard redoes it."""
    window = next(n for n in NAMES if "window1024" in n)
    pairs = [s for n, s in swaps(schedule(window)).items() if "map only=masked" in n and "copies=(rP[p])" in n]
    assert pairs
    assert [why_equal(s) for s in pairs] == [""] * len(pairs)


def test_every_rule_has_its_own_words() -> None:
    assert all(len(reason) > 15 for _, reason in RULES)
