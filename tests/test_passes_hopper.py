"""Program -> Schedule for Hopper, pass by pass: text in, text out, for causal attention at head dim 128; the texts that
were written by hand for it are what the passes derive; the orders, folds and masks that change what a pass does."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hopper_levels import (
    BEHIND,
    CAUSAL,
    CONFIG,
    FULL,
    OVERLAPPED,
    OWN,
    SM90,
    block,
    derived,
    level,
    loop,
    ordered,
    role,
    stages,
)
from levels import part, same

from attngen.config import FoldPolicy, HopperConfig
from attngen.errors import PassError
from attngen.expr import DType, Expr, Op, const, substitute, var
from attngen.exprtext import show
from attngen.fold import fold
from attngen.functions import sigmoid
from attngen.ir.ops import Fill, Map, Reduce, Ref, Retire, StFrag, TmaStore, Vote, Wgmma
from attngen.ir.ops import Op as AnyOp
from attngen.ir.schedule import Block, Guard, Kernel, Order, Schedule, Step, Tiles, ops_of
from attngen.ir.walk import tiles_of
from attngen.passes.hopper.expand import copies_of
from attngen.passes.hopper.flight import fly, writes
from attngen.pipelines import hopper_stages
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.variants import causal, document, prefix_lm, sliding_window

TEXTS = Path(__file__).parent / "data" / "sm90"


# ---- text in, text out -----------------------------------------------------------------------------------------------

STAGED = """
step
  S1 wgmma d=rS a=sQ[w] b=sK[t].T group=g1 zero
  S2 wgmma d=rO a=rP[t-1] b=sV[t-1] group=g2
  S3 map only=masked over=rS  # mask causal
    col u0 = j < seqlen_k
    row u2 = i + u1
    elem rS = where(u0 & j <= u2, rS, -inf)
  S4 map over=rS copies=(rP[t])
    row l_t = 0.0
    elem l_t += exp2(fma(rS, scale_log2, -r))
    elem rP = exp2(fma(rS, scale_log2, -r))
  S5 vote dst=need pred={~(l_t <= 1024.0)}
"""

COPIED = """
tiles var=t start=0
  range cls=all end={count}
  let n = n_hi - 1 - t
  step
    L1 tma_load dst=sK[t] src=k heads=kv row={n * 128} bar=K.full[t]
    L2 tma_load when={t == 0} dst=sQ src=q heads=q row={m * 128} bar=Q.full
    L3 tma_load dst=sV[t] src=v heads=kv row={n * 128} bar=V.full[t]
"""

EXPANDED = """
tiles var=t start=1 unroll=2
  range cls=masked end={end0}
  range cls=full end={count} whole
  let n = n_hi - 1 - t
  phase k = t % 2
  phase v = (t + 1) % 2
  step
    S1 wgmma d=rS a=sQ[w] b=sK[k].T group=g1 zero
    S2 wgmma d=rO a=rP[v] b=sV[v] group=g2
"""

SYNCHRONIZED = """
step
  S1 mbar_wait bar=K.full[k]
  S2 enter ring=tc
  S3 open regs=(rO;rP[v])
  S4 wgmma d=rS a=sQ[w] b=sK[k].T group=g1 zero
  S5 commit group=g1
  S6 mbar_wait bar=V.full[v]
  S7 open
  S8 wgmma d=rO a=rP[v] b=sV[v] group=g2
  S9 commit group=g2
  S10 leave ring=tc
  S11 retire group=g1
  S12 mbar_arrive bar=K.free[k]
  S13 mbar_arrive when={t == count - 1} bar=Q.free
"""

DRAINED = """
drain
  D1 mbar_wait bar=V.full[v]
  D2 open regs=(rO;rP[v])
  D3 wgmma d=rO a=rP[v] b=sV[v] group=g2
  D4 commit group=g2
  D5 reduce kind=sum dst=l src=l
  D6 map over=rO
    row inv = where(l == 0.0, 0.0, rcp(l))
    row lse = (r + log2(l)) * 0.6931471805599453
  D7 retire group=g2
  D8 mbar_arrive bar=V.free[v]
"""


def test_order_of_passes() -> None:
    assert [s.name for s in stages(CAUSAL)][-5:] == ["stage", "expand", "synchronize", "allocate", "visit_table"]


def test_stage() -> None:
    """Products whose inputs are there come first; the second one is of the tile before."""
    staged = level("stage")
    text = str(staged)
    math = text[text.index("role math") :]
    same(part(math, "step", "S6 "), STAGED)
    same(part(text, "tiles var=t start=0", "role math"), COPIED)


def test_expand() -> None:
    """Two slots and two copies: indices are phases, which an unrolling by two turns into numbers."""
    text = str(level("expand"))
    same(part(text[text.index("role math") :], "tiles", "S3 "), EXPANDED)
    same(part(text, "smem"), """
    smem sQ elem=bf16 layout=[128,128]x2:b128
    smem sK elem=bf16 layout=[128,128]x2:b128 slots=2
    smem sV elem=bf16 layout=[128,128]x2:b128 slots=2
    smem sO elem=bf16 layout=[128,128]x2:b128
    """)


def test_synchronize() -> None:
    """Two groups in one window between turns; the first is retired before the scores are read, and its slot freed."""
    text = str(level("synchronize"))
    math = text[text.index("role math") :]
    same(part(math, "step", "S14 "), SYNCHRONIZED)
    same(part(math, "drain", "block"), DRAINED)


def test_allocate() -> None:
    """Constant offsets, one behind the other; a role computes the scalars that it uses."""
    text = str(level("allocate"))
    same(part(text, "ring"), """
    ring Q slots=1 full_arrivals=1 full_bytes=32768 free_arrivals=8 cursor=restart buffers=(sQ) offset=196608
    ring K slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=8 cursor=restart buffers=(sK) offset=196624
    ring V slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=8 cursor=restart buffers=(sV) offset=196656
    """)
    before, after = level("synchronize").kernels[0], level("allocate").kernels[0]
    assert {s.target for s in role(before, "load").item.lets} >= {"scale_log2", "full_hi", "w_lo"}
    assert {s.target for s in role(after, "load").item.lets} == {"i_hi", "n_lo", "n_hi", "count"}


# ---- the texts that were written by hand -----------------------------------------------------------------------------

BY_HAND = {
    "causal_d128_bf16": (CAUSAL, CONFIG, 128, 128),
    "full_d128_bf16": (FULL, CONFIG, 128, 128),
    "causal_d96": (CAUSAL, CONFIG, 96, 96),
    "causal_d192_v128": (CAUSAL, HopperConfig(2, 96, 2), 192, 128),
    "causal_d256_bf16": (CAUSAL, HopperConfig(2, 64, 2), 256, 256),
    "full_d256_bf16": (FULL, HopperConfig(2, 64, 2), 256, 256),
    "causal_d64_bf16": (CAUSAL, HopperConfig(4, 64, 4, issue=(1, 0)), 64, 64),
    "window1024_d128": (Attention(mask=sliding_window(1024)), CONFIG, 128, 128),
    "causal_d128_cpasync": (CAUSAL, CONFIG, 128, 128, 4),
    "causal_d80_cpasync": (CAUSAL, CONFIG, 80, 80, 8),
    "causal_d36_cpasync": (CAUSAL, CONFIG, 36, 36, 8),
    "causal_d40_unaligned": (CAUSAL, CONFIG, 40, 40, 2),
    "full_d64_unaligned": (FULL, CONFIG, 64, 64, 2),
}


@cache
def by_hand(name: str) -> Kernel:
    (kernel,) = Schedule.parse((TEXTS / f"sm90_{name}.schedule").read_text()).kernels
    return kernel


def at(tiles: Tiles | None, t: int, steps: tuple[Step, ...]) -> list[str]:
    """Ops with their operands at a tile, phases as numbers. Of maps what they run over and which copies; of votes the
    result; of guards the condition: what is in them is the policy's (tests/test_policy.py)."""
    phases: dict[Expr, Expr] = {}
    for let in tiles.phase if tiles else ():
        value = substitute(let.value, {var("t", DType.I32): const(t)})
        phases[var(let.target, DType.I32)] = fold(value)

    def word(value: Any) -> str:
        if isinstance(value, Ref):
            index = ",".join(show(fold(substitute(i, phases))) for i in value.index)
            return f"{value.name}[{index}]{'T' if value.transposed else ''}{value.cols or ''}"
        if isinstance(value, tuple):
            return ";".join(word(v) for v in value)
        return show(value) if isinstance(value, Expr) else str(value)

    result = []
    for step in steps:
        left_out = {"id", "note", "touches", "body", "when"} | ({"pred"} if isinstance(step, Vote) else set())
        names = [f.name for f in dataclasses.fields(step) if f.name not in left_out]
        line = f"{type(step).__name__} " + " ".join(f"{n}={word(getattr(step, n))}" for n in names)
        conditional = isinstance(step, AnyOp) and step.when is not None
        result.append(line + (" when" if conditional else ""))
    return result


def movements(lines: list[str]) -> list[str]:
    """Without maps: where row values are finished is the policy's, and two maps may say what one does."""
    return [x for x in lines if not x.startswith("Map")]


# at head dim 64 the text waits for both tiles in another order, and has one guard for both of its parts
@pytest.mark.parametrize("name", [n for n in BY_HAND if n != "causal_d64_bf16"])
def test_step_is_that_of_the_text_by_hand(name: str) -> None:
    """Op for op, for every phase: kinds, operands, groups, waits and arrivals."""
    ours, theirs = loop(derived(*BY_HAND[name])), loop(by_hand(name))
    assert (ours.start, ours.unroll) == (theirs.start, theirs.unroll)
    assert [(r.cls, r.whole) for r in ours.ranges] == [(r.cls, r.whole) for r in theirs.ranges]
    for t in range(1, 1 + ours.unroll):
        assert at(ours, t, ours.step) == at(theirs, t, theirs.step)
        assert movements(at(ours, t, ours.drain)) == movements(at(theirs, t, theirs.drain))


@pytest.mark.parametrize("name", BY_HAND)
def test_frame_is_that_of_the_text_by_hand(name: str) -> None:
    """Buffers, barriers and turns with their offsets; the load role; the first tile; the store."""
    ours, theirs = derived(*BY_HAND[name]), by_hand(name)
    assert (ours.buffers, ours.rings, ours.orders, ours.barriers) == (
        theirs.buffers, theirs.rings, theirs.orders, theirs.barriers
    )  # fmt: skip
    assert (ours.threads, ours.work, ours.tensors) == (theirs.threads, theirs.work, theirs.tensors)
    assert [(r.name, r.first_warp, r.warps, r.regs, r.split, r.single) for r in ours.roles] == [
        (r.name, r.first_warp, r.warps, r.regs, r.split, r.single) for r in theirs.roles
    ]
    mine, other = loop(ours, "load"), loop(theirs, "load")
    assert at(mine, 0, mine.step) == at(other, 0, other.step)
    assert [s for s in mine.lets if s.target != "n"] == [s for s in other.lets if s.target != "n"]
    ends = [[at(None, 0, n.ops) for n in role(k, "load").item.body if isinstance(n, Block)] for k in (ours, theirs)]
    assert ends[0] == ends[1]
    for name_ in ("peel", "store"):
        a, b = (movements(at(None, 0, block(k, name_).ops)) for k in (ours, theirs))
        assert a == b


# ---- orders of products ----------------------------------------------------------------------------------------------

def description(step: Step) -> str:
    """What an op is and which tiles it writes."""
    tiles = sorted(r.name for r in writes(step) if r.name in ("rS", "rP", "rO"))
    return f"{type(step).__name__.lower()} {' '.join(tiles)}"


@pytest.mark.parametrize(
    ("order", "retired", "copies"),
    [
        # QK before the mask; PV before the accumulator is corrected, behind the new weights: they need a second copy
        (OVERLAPPED, {"rS": "map rS", "rO": "guard rO"}, 2),
        # products complete in order: waiting for the scores waits for PV, which was issued before
        (BEHIND, {"rS": "map rS", "rO": "map rS"}, 1),
        # in its own step PV has nothing behind it
        (OWN, {"rS": "map rS", "rO": "end"}, 1),
    ],
    ids=["overlapped", "behind", "own"],
)
def test_retire_points(order: Any, retired: dict[str, str], copies: int) -> None:
    config = ordered(order, FoldPolicy.REFERENCE)
    kernel = level("stage", config=config, d=64).kernels[0]
    step = loop(kernel).step
    flight = fly(step).retired
    found = {}
    for k, position in flight.items():
        product = step[k]
        assert isinstance(product, Wgmma)
        found[product.d.name] = description(step[position]) if position < len(step) else "end"
    assert found == retired
    if order is OWN:
        assert description(step[-1]) == "wgmma rO"
    assert copies_of(step, "rP") == copies
    expanded = level("expand", config=config, d=64).kernels[0]
    (weights,) = (v for v in role(expanded, "math").values if v.name == "rP")
    assert (weights.copies, loop(expanded).unroll) == (copies, 2)


def test_products_retire_before_their_operands_are_overwritten() -> None:
    """Registers that a product in flight reads, and its accumulator; other ops may run beside it."""
    weights, scores, out = Ref(name="rP"), Ref(name="rS"), Ref(name="rO")
    product = Wgmma(id="1", d=out, a=weights, b=Ref(name="sV"), group="g")
    fill = [Fill(id="2", dst=dst, value=const(0.0)) for dst in (scores, weights, out)]
    assert fly([product, fill[0], fill[1]]).retired == {0: 2}
    assert fly([product, fill[0], fill[2]]).retired == {0: 2}
    assert fly([product, fill[0]]).retired == {0: 2}  # at the end
    again = Wgmma(id="3", d=out, a=Ref(name="sQ"), b=Ref(name="sV"), group="g")
    assert fly([product, again, fill[1]]).retired == {0: 2, 1: 3}
    assert fly([product, dataclasses.replace(again, zero=True)]).retired == {0: 1, 1: 2}


def test_running_corrects_before_it_makes_weights() -> None:
    """So PV retires before the weights are overwritten, and one copy of them is enough in any order."""
    step = loop(level("stage", config=ordered(OVERLAPPED), d=64).kernels[0]).step
    flight = fly(step).retired
    (pv,) = (k for k, s in enumerate(step) if isinstance(s, Wgmma) and s.d.name == "rO")
    written = next(k for k, s in enumerate(step) if any(r.name == "rP" for r in writes(s)))
    assert flight[pv] < written
    assert copies_of(step, "rP") == 1


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_slots_set_the_unrolling(slots: int) -> None:
    """The least common multiple of slots and copies; one slot and two copies still alternate."""
    config = HopperConfig(1, 64, slots, turns=False)
    tiles = loop(derived(CAUSAL, config, 64))
    assert tiles.unroll == {1: 2, 2: 2, 3: 6, 4: 4}[slots]
    moduli = {x.args[1].value for s in tiles.phase for x in (s.value,) if x.op is Op.MOD}
    assert moduli == {2, slots} - {1}


def test_one_warpgroup_takes_no_turns() -> None:
    kernel = derived(CAUSAL, HopperConfig(1, 64, 2, turns=False), 64)
    assert not kernel.orders
    assert [b.first for b in kernel.barriers] == [1]
    assert not any(type(op).__name__ in ("Enter", "Leave") for _, op in ops_of(kernel))


def test_products_in_one_group_share_a_retire() -> None:
    """Where one wait is for both products, they are one group."""
    step = loop(derived(CAUSAL, ordered(BEHIND, FoldPolicy.REFERENCE), 64)).step
    products = [s for s in step if isinstance(s, Wgmma)]
    assert [p.d.name for p in products] == ["rO", "rS"]
    assert {p.group for p in products} == {products[0].group}
    assert [s.group for s in step if isinstance(s, Retire)] == [products[0].group]


def test_stages_that_cannot_be() -> None:
    """The second product reads what the first made: it is in no earlier stage."""
    with pytest.raises(PassError, match="rO is made in stage 0 from what stage 1 makes"):
        list(hopper_stages(CAUSAL.variant, Signature(IoType.BF16, 64, 64), SM90, HopperConfig(2, 64, stages=(1, 0))))


# ---- folds -----------------------------------------------------------------------------------------------------------


def test_scores_of_positions_alone() -> None:
    """No logits, so no copies of q and k and one product; it takes the last stage."""
    spec = Attention(mask=causal(), score=lambda s, b, h, i, j: (i - j).float() * -0.25)
    for order, where in ((OVERLAPPED, "drain"), (OWN, "step")):
        kernel = derived(spec, ordered(order, FoldPolicy.REFERENCE), 64)
        assert [r.name for r in kernel.rings] == ["V"]
        assert [b.name for b in kernel.buffers] == ["sV", "sO"]
        tiles = loop(kernel)
        products = [s for s in (*tiles.step, *tiles.drain) if isinstance(s, Wgmma)]
        assert {p.d.name for p in products} == {"rO"}
        assert bool(tiles.drain) == (where == "drain")


def test_folds_without_a_maximum() -> None:
    """Sigmoid attention: no vote, no guard, no reduction; its step is two products and a map."""
    spec = Attention(mask=causal(), score=lambda s, b, h, i, j: sigmoid(s), normalizer="none")
    kernel = derived(spec, HopperConfig(2, 64, 2, FoldPolicy.RUNNING), 64)
    ops = [s for s in loop(kernel).step if isinstance(s, Map | Vote | Guard | Reduce | Wgmma)]
    assert not any(isinstance(s, Vote | Guard | Reduce) for s in ops)
    assert sum(isinstance(s, Wgmma) for s in ops) == 2
    assert [t.name for t in kernel.tensors] == ["q", "k", "v", "out"]


def test_output_in_pieces() -> None:
    """At head dim 256 shared memory has no room for the whole output: two blocks of columns, one behind the other."""
    kernel = derived(CAUSAL, HopperConfig(2, 64, 2), 256)
    ops = block(kernel, "store").ops
    written = [op for op in ops if isinstance(op, TmaStore)]
    assert [op.column for op in written] == [0, 128]
    assert [op.src.cols for op in ops if isinstance(op, StFrag)] == [const(0), const(1)]
    staging = kernel.buffer("sO")
    assert staging is not None
    assert (staging.layout.rows, staging.layout.cols) == (128, 128)
    assert kernel.smem_bytes <= SM90.smem_per_cta
    whole = derived(CAUSAL, CONFIG, 128)
    assert [op.column for op in block(whole, "store").ops if isinstance(op, TmaStore)] == [0]


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_ranges_of_a_window() -> None:
    """Masked, full, masked: no tile that is not full may run as one, so the full range ends at whole rounds; the others
    may take a full tile along."""
    tiles = loop(derived(Attention(mask=sliding_window(1024)), CONFIG))
    assert [(r.cls, r.whole) for r in tiles.ranges] == [("masked", False), ("full", True), ("masked", False)]
    assert show(tiles.ranges[-1].end) == "count"


def test_order_of_items() -> None:
    """Row tiles with most keys first, where that follows from their place, or the device lists and ranks them; in turn
    where a tensor says it."""
    ids, lengths = torch.zeros(9, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    orders = {
        "causal": (CAUSAL, Order.LONGEST_FIRST),
        "full": (FULL, Order.LONGEST_FIRST),
        "window": (Attention(mask=sliding_window(100)), Order.LONGEST_FIRST),
        "prefix": (Attention(mask=prefix_lm(lengths)), Order.ASCENDING),
        "document": (Attention(mask=document(ids)), Order.RANKED),
        "head": (Attention(mask=lambda b, h, i, j: j <= i + h), Order.ASCENDING),
    }
    assert {k: derived(s).work.order for k, (s, _) in orders.items()} == {k: o for k, (_, o) in orders.items()}


def test_lists_of_tiles_go_through_the_same_passes() -> None:
    """A mask by captured ids has kernels in front that list the tiles and rank row tiles by their lists; the step stays
    what it is for any mask, but both roles read the next tile's number a step ahead."""
    last = stages(Attention(mask=document(torch.zeros(9, dtype=torch.int32))))[-1].level
    assert isinstance(last, Schedule)
    assert [k.name for k in last.kernels] == ["visit_table", "rank_tiles", "attn_fwd"]
    same(part(last, "kernel rank_tiles", "kernel attn_fwd"), """
    kernel rank_tiles threads=32 min_ctas=1
      work source=grid order=ascending block_m=128 per_batch=False per_head=False
      tensor visit elem=i32 rank=4 access=work
      tensor by_length elem=i32 rank=3 access=work
      scalar batch dtype=i32
      scalar heads dtype=i32
      scalar group dtype=i32
      scalar seqlen_q dtype=i32
      scalar seqlen_k dtype=i32
      role rank first_warp=0 warps=1 regs=255
        item
          block rank
            R1 rank_tile dst=by_length src=visit
    """)
    for part_of in last.kernels[-1].roles:
        assert show(part_of.item.lets[0].value) == "by_length[0, 0, rank]" and part_of.item.lets[0].target == "m"
        (tiles,) = tiles_of(part_of)
        assert tiles.ahead and [show(s.value) for s in tiles.lets if s.target == "n"] == ["visit[0, 0, m, t + 2]"]
    assert not any(tiles.ahead for role in derived(CAUSAL).roles for tiles in tiles_of(role))
    kinds = [[type(s).__name__ for s in loop(k).step] for k in (last.kernels[-1], derived(CAUSAL))]
    assert kinds[0] == kinds[1]
