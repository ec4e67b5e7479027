"""The machine model: what ops cost, bounds, and the simulation of a kernel."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from model_variants import Knobs

from attngen.errors import PassError, SignatureError
from attngen.expr import DType, Expr
from attngen.exprtext import parse
from attngen.ir import ops as o
from attngen.ir.ops import ReduceKind, Ref, Scope, Stmt
from attngen.ir.schedule import Block, Kernel, Schedule, Tiles, Value, WorkSource
from attngen.layout import Fragment
from attngen.model import bounds, estimate, rates
from attngen.model.bounds import bound
from attngen.model.cost import Costs, Work, statements_work
from attngen.model.rates import TABLES, Instr, load_rates, rates_of
from attngen.target import SM80, SM90, target

ROOT = Path(__file__).parent.parent
# copies by threads, and kernels that make a work table, are not modelled (docs/model.md)
OUTSIDE = ("_cpasync", "_unaligned", "_devicetable")
TEXTS = sorted(p for p in (ROOT / "tests/data/sm90").glob("*") if not p.stem.endswith(OUTSIDE))
TEXTS += [ROOT / "tests/data/sm80_fwd_causal_d128.schedule"]
BEST = Knobs(128, groups=2, block_n=128, slots=2, overlap=True, turns=True)
RATES = rates(SM90)

VALUES = {
    v.name: v
    for v in (
        Value(name="S", fragment=Fragment.ACC, dtype="f32", rows=16, cols=128),
        Value(name="P", fragment=Fragment.OPA, dtype="bf16x2", rows=16, cols=128),
        Value(name="r", fragment=Fragment.ROW, dtype="f32", rows=16, cols=0),
        Value(name="l", fragment=Fragment.ROW, dtype="f32", rows=16, cols=0),
        Value(name="k", fragment=Fragment.COL, dtype="f32", rows=0, cols=128),
    )
}
ROWS, COLS, ELEMS = 2, 32, 64  # of a thread


def expr(text: str) -> Expr:
    names = dict.fromkeys(("S", "r", "l", "k", "c", "p", "e"), DType.F32) | dict.fromkeys(
        ("i", "j", "h", "seqlen_k", "shift"), DType.I32
    )
    return parse(text, names, {"table": DType.F32})


def work(*statements: tuple[Scope, str, str]) -> dict[Instr, float]:
    """Counts of statements over S; `x +=` accumulates."""
    body = [
        Stmt(scope=s, target=t.removesuffix(" +"), value=expr(e), accumulate=t.endswith(" +")) for s, t, e in statements
    ]
    return dict(statements_work(body, VALUES["S"], VALUES, RATES).counts)


def kernel_of(path: Path) -> tuple[Schedule, Kernel]:
    schedule = Schedule.parse(path.read_text())
    kernels = [k for k in schedule.kernels if any(isinstance(n, Tiles) for r in k.roles for n in r.item.body)]
    return schedule, kernels[0]


# ---- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_each_number_says_where_it_comes_from(name: str) -> None:
    data = json.loads((ROOT / "attngen" / "model" / TABLES[name]).read_text())
    assert all(v["source"] for v in (*data["values"].values(), *data["instructions"].values()))
    assert set(data["instructions"]) == {k.value for k in Instr}
    assert load_rates(json.dumps(data)) == rates_of(name)


def test_ports_follow_from_what_ffma_does_beside_products() -> None:
    """A warp of FFMA takes, beside products, what they leave; two warps get twice that, at their weight."""
    fma = RATES.instructions[Instr.FMA]
    left = 1 - RATES.product_ports / RATES.slowed_by_one
    assert RATES.port / fma.beside == pytest.approx(left)
    weight = RATES.product_weight
    assert weight / (weight + 2) == pytest.approx(RATES.product_ports / RATES.slowed_by_two)


def test_a_target_without_rates_is_an_error() -> None:
    with pytest.raises(SignatureError, match="sm70"):
        rates_of("sm70")


# ---- costs ---------------------------------------------------------------------------------------------------------


def test_an_element_of_softmax() -> None:
    """One multiply-add, one ex2, half a pack, one sum; a negated operand is free."""
    found = work(
        (Scope.ROW, "s", "0.0"),
        (Scope.ELEM, "p", "exp2(fma(S, c, -r))"),
        (Scope.ELEM, "P", "p"),
        (Scope.ELEM, "l +", "p"),
    )
    assert found == {Instr.FMA: 2 * ELEMS, Instr.MUFU: ELEMS, Instr.ALU: ELEMS / 2}


def test_a_mask_is_counted_by_what_it_depends_on() -> None:
    """The row's limit once a row, the end of the keys once a column, one comparison and one select an element."""
    found = work((Scope.ELEM, "S", "where(j <= i + shift & j < seqlen_k, S, -inf)"))
    assert found == {Instr.ALU: ROWS + COLS + 2 * ELEMS}


def test_shared_subexpressions_are_counted_once() -> None:
    once = work((Scope.ELEM, "S", "exp2(S * c)"))
    twice = work((Scope.ELEM, "S", "exp2(S * c) * exp2(S * c)"))
    again = work((Scope.ELEM, "p", "exp2(S * c)"), (Scope.ELEM, "S", "exp2(S * c) + p"))
    assert once == {Instr.FMA: ELEMS, Instr.MUFU: ELEMS}
    assert twice == again == {Instr.FMA: 2 * ELEMS, Instr.MUFU: ELEMS}


def test_what_is_read_after_a_write_is_another_value() -> None:
    found = work((Scope.ELEM, "S", "exp2(S)"), (Scope.ELEM, "S", "exp2(S)"))
    assert found == {Instr.MUFU: 2 * ELEMS}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S + k * r", {Instr.FMA: 2 * ELEMS}),
        ("S + r * c", {Instr.FMA: ELEMS + ROWS}),
        ("S + c * c", {Instr.FMA: ELEMS}),
        ("rcp(1.0 + exp2(-S))", {Instr.MUFU: 2 * ELEMS, Instr.FMA: ELEMS}),
        ("max(S, r)", {Instr.ALU: ELEMS}),
        ("S + f32(i - j)", {Instr.FMA: ELEMS, Instr.ALU: ELEMS, Instr.CONVERT: ELEMS}),
        ("S + f32(i)", {Instr.FMA: ELEMS + ROWS}),
        ("S + f32(j // 16)", {Instr.FMA: ELEMS, Instr.ALU: COLS, Instr.CONVERT: COLS}),
        ("S + table[h, j]", {Instr.FMA: ELEMS + 4 * COLS, Instr.GLOBAL: COLS, Instr.ALU: COLS}),
    ],
)
def test_expressions(text: str, expected: dict[Instr, float]) -> None:
    assert work((Scope.ELEM, "S", text)) == expected


def test_a_row_max_takes_each_element_and_two_exchanges() -> None:
    kernel = BEST.schedule().kernels[0]
    math = next(r for r in kernel.roles if r.values)
    found = Costs(kernel, math, RATES).work(
        o.Reduce(id="x", kind=ReduceKind.MAX, dst=Ref(name="x"), src=Ref(name="rS"))
    )
    assert isinstance(found, Work)
    assert found.counts == {Instr.ALU: ELEMS - ROWS + 2 * ROWS, Instr.SHUFFLE: 2 * ROWS}


def test_products_cost_what_the_tensor_cores_do() -> None:
    """64 rows x n columns take n / 2 cycles for 16 of the contracted axis; both operands from shared memory take as
    long as they are read, which shows below 64 columns."""
    for block_n, cycles in ((128, 64.0), (64, 32.0), (48, 28.0)):
        kernel = replace(BEST, block_n=block_n).schedule().kernels[0]
        math = next(r for r in kernel.roles if r.values)
        steps = next(n for n in math.item.body if isinstance(n, Tiles)).step
        qk, pv = (Costs(kernel, math, RATES).product(op) for op in steps if isinstance(op, o.Wgmma))
        assert (qk.step, qk.cycles) == (cycles, cycles * 8)
        assert (pv.step, pv.cycles) == (64.0, 64.0 * block_n / 16)


# ---- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_nothing_is_faster_than_its_bound(path: Path) -> None:
    schedule, kernel = kernel_of(path)
    machine = target(schedule.target)
    least, found = bound(kernel, machine), estimate(kernel, machine)
    # CTAs that share an SM hide each other's waits, not each other's units
    steps = [cycles for unit, cycles in least.units if kernel.min_ctas == 1 or not unit.startswith("math")]
    assert found.step >= 0.995 * max(*steps, least.recurrence / kernel.min_ctas)
    assert found.tensor <= 1.0 and found.item > 0


def test_the_graph_of_a_step() -> None:
    """A slot is free two loads later, a turn comes back after a step, P is made one step before it is multiplied."""
    schedule = Schedule.parse((ROOT / "tests/data/sm90/sm90_full_d128_bf16.schedule").read_text())
    graph = bounds.dependences(schedule.kernels[0], RATES)

    def edges(a: tuple[str, str], b: tuple[str, str]) -> set[tuple[str, int]]:
        return {(d["kind"], d["distance"]) for d in graph.get_edge_data(a, b, default={}).values()}

    assert edges(("math0", "S12"), ("load", "L1")) == {("slot", 2)}
    assert edges(("load", "L3"), ("math0", "S1")) == {("slot", 0)}
    assert edges(("load", "L9"), ("math0", "S6")) == {("slot", 1)}
    assert edges(("math0", "S10"), ("math1", "S2")) == {("turn", 0)}
    assert edges(("math1", "S10"), ("math0", "S2")) == {("turn", 1)}
    assert ("value", 1) in edges(("math0", "S15"), ("math0", "S8"))
    assert edges(("math0", "S4"), ("math0", "S11")) == {("product", 0)}
    assert edges(("math0", "S20"), ("math0", "S1")) == {("order", 1)}


def test_a_recurrence_binds_where_one_group_works_alone() -> None:
    """Product, softmax, product of one warpgroup after the other: no unit is busy, and the bound says which ops wait
    for each other."""
    alone = replace(BEST, groups=1, overlap=False, turns=False).schedule().kernels[0]
    found = bound(alone, SM90, table=replace(RATES, copy_bandwidth=1000.0))
    assert found.binding == "recurrence" and found.step > 1.3 * dict(found.units)["tensor"]
    assert {lane for lane, _ in found.cycle} == {"math"}


def test_the_bound_of_a_tensor_bound_kernel() -> None:
    schedule = Schedule.parse((ROOT / "tests/data/sm90/sm90_full_d256_bf16.schedule").read_text())
    found = bound(schedule.kernels[0], SM90)
    assert (found.binding, found.step) == ("tensor", 2048.0)


# ---- the simulation ------------------------------------------------------------------------------------------------


def test_equal_schedules_have_equal_estimates() -> None:
    assert estimate(BEST.schedule().kernels[0], SM90) == estimate(BEST.schedule().kernels[0], SM90)


def test_names_mean_nothing() -> None:
    """Values, buffers, rings and groups under other names: the same estimate and the same bound."""
    text = str(BEST.schedule())
    names = ("rS", "rP", "rO", "sQ", "sK", "sV", "sO", "g1", "g2", "tc", "prob", "need", "Q", "K", "V")
    renamed = re.sub(rf"\b({'|'.join(names)})\b", lambda m: f"z{names.index(m[1])}", text)
    assert renamed != text
    one, other = BEST.schedule().kernels[0], Schedule.parse(renamed).kernels[0]
    assert replace(estimate(other, SM90), strip=()) == replace(estimate(one, SM90), strip=())
    assert bound(other, SM90).units == bound(one, SM90).units


def test_what_binds() -> None:
    """Products at D = 256; ports and ex2 at D = 64, where the tensor cores idle a quarter of the time."""
    found = {}
    for head_dim in (64, 256):
        text = (ROOT / f"tests/data/sm90/sm90_full_d{head_dim}_bf16.schedule").read_text()
        found[head_dim] = estimate(Schedule.parse(text).kernels[0], SM90)
    assert found[256].binding == "tensor" and found[256].tensor > 0.95
    assert found[64].binding in ("ports", "mufu") and 0.6 < found[64].tensor < 0.85


def test_more_work_takes_longer() -> None:
    masked = estimate(BEST.schedule().kernels[0], SM90, masked=True)
    full = estimate(BEST.schedule().kernels[0], SM90)
    assert masked.step > full.step
    assert full.cycles(10) == pytest.approx(full.item + 10 * full.step)
    assert full.share(4) < full.share(64) < full.tensor


def test_the_strip_shows_two_steps() -> None:
    found = estimate(BEST.schedule().kernels[0], SM90)
    assert {s.lane for s in found.strip} == {"load", "math0", "math1"}
    products = sorted((s for s in found.strip if s.unit == "tensor"), key=lambda s: s.start)
    assert len(products) >= 6
    assert all(a.end <= b.start + 1e-6 for a, b in pairwise(products))
    for lane in ("math0", "math1"):
        computed = sorted((s for s in found.strip if s.lane == lane and s.unit == "compute"), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-6 for a, b in pairwise(computed))


def test_each_item_starts_anew_where_ctas_do_not_persist() -> None:
    kernel = BEST.schedule().kernels[0]
    alone = replace(kernel, work=replace(kernel.work, source=WorkSource.GRID))
    assert estimate(alone, SM90).item > estimate(kernel, SM90).item + 1000
    assert estimate(alone, SM90).step == pytest.approx(estimate(kernel, SM90).step)


def test_two_ctas_hide_what_one_waits_for() -> None:
    """On sm80 a product holds its warps: one CTA leaves the tensor cores idle in its softmax, two do not."""
    _, kernel = kernel_of(ROOT / "tests/data/sm80_fwd_causal_d128.schedule")
    one, two = (estimate(replace(kernel, min_ctas=n), SM80) for n in (1, 2))
    assert two.step < 0.8 * one.step
    assert two.tensor > one.tensor


# ---- what is wrong -------------------------------------------------------------------------------------------------


def without(kernel: Kernel, kind: type[o.Op]) -> Kernel:
    """The kernel without the ops of this kind in its loops."""
    roles = []
    for role in kernel.roles:
        body = tuple(
            replace(n, step=tuple(s for s in n.step if not isinstance(s, kind))) if isinstance(n, Tiles) else n
            for n in role.item.body
        )
        roles.append(replace(role, item=replace(role.item, body=body)))
    return replace(kernel, roles=tuple(roles))


@pytest.mark.parametrize("kind", [o.Leave, o.MbarArrive, o.TmaLoad])
def test_streams_that_wait_for_ever_are_an_error(kind: type[o.Op]) -> None:
    with pytest.raises(PassError, match="wait for each other for ever"):
        estimate(without(BEST.schedule().kernels[0], kind), SM90)


def test_a_kernel_without_tiles_is_an_error() -> None:
    kernel = BEST.schedule().kernels[0]
    roles = tuple(
        replace(r, item=replace(r.item, body=tuple(n for n in r.item.body if isinstance(n, Block))))
        for r in kernel.roles
    )
    for judge in (estimate, bound):
        with pytest.raises(PassError, match="no loop over tiles"):
            judge(replace(kernel, roles=roles), SM90)
