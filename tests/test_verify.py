"""The verifier: right schedules pass, and each way to break one is found by the rule that is made for it."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from attngen.errors import SignatureError, VerifyError
from attngen.ir.mutate import mutants
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.ir.verify import findings, verify
from attngen.target import SM80, SM90, Feature, target

ROOT = Path(__file__).parent
SM80_FWD, SM90_FWD, BWD = "sm80_fwd_causal_d128", "sm90_fwd_causal_d128", "bwd_step"


@cache
def text(name: str) -> str:
    return (ROOT / "data" / f"{name}.schedule").read_text()


def changed(name: str, *edits: tuple[str, str]) -> Schedule:
    """The schedule with each text, which occurs once, replaced by another."""
    result = text(name)
    for old, new in edits:
        assert result.count(old) == 1, f"{old!r} occurs {result.count(old)} times"
        result = result.replace(old, new)
    return Schedule.parse(result)


def rules(schedule: Schedule) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for f in findings(schedule):
        found.setdefault(f.rule, set()).add(f.op)
    return found


# ---- right ones ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SM80_FWD, SM90_FWD, BWD])
def test_right_schedules_pass(name: str) -> None:
    schedule = Schedule.parse(text(name))
    assert findings(schedule) == []
    verified = verify(schedule)
    assert isinstance(verified, VerifiedSchedule)
    assert verified.schedule is schedule
    assert {"order", "wgmma", "copy-groups"} <= set(verified.checks)


@pytest.mark.parametrize("path", sorted((ROOT.parent / "generated").glob("*.schedule")), ids=lambda p: p.stem)
def test_the_golden_set_passes(path: Path) -> None:
    assert findings(Schedule.parse(path.read_text())) == []


def test_the_error_names_rule_and_op() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(changed(SM80_FWD, ("S1 cp_wait group=K pending=0", "S1 cp_wait group=K pending=1")))
    assert (caught.value.rule, caught.value.op) == ("copy-groups", "S1")
    assert "group K" in str(caught.value)


# ---- one change, one rule -----------------------------------------------------------------------------------

Edits = tuple[tuple[str, str], ...]

GENERAL: list[tuple[str, str, str | None, Edits]] = [
    (SM80_FWD, "ids", "S2", (("S7 cta_sync", "S2 cta_sync"),)),
    (SM80_FWD, "names", "S16", (("a=rP b=sV", "a=rP b=sW"),)),
    (SM80_FWD, "names", "E8", (("st_tile dst=out", "st_tile dst=o"),)),
    (SM80_FWD, "names", "E6", (("scaled=inv", "scaled=inverse"),)),
    (SM80_FWD, "classes", "S10", (("map only=masked", "map only=partial"),)),
    (SM80_FWD, "features", "S16", (("S16 mma_sync d=rO a=rP b=sV", "S16 wgmma d=rO a=rP b=sV group=g"),)),
    (SM80_FWD, "convergence", "S7", (("S7 cta_sync", "S7 cta_sync when={t < 1}"),)),
    (SM80_FWD, "convergence", "S7", (("S7 cta_sync", "S7 cta_sync only=masked"),)),
    (SM80_FWD, "convergence", "S9", (("S9 cp_commit", "S9 cp_commit when={t + 1 < count}"),)),
    (SM80_FWD, "threads", None, (("first_warp=0 warps=4", "first_warp=0 warps=8"),)),
    (SM80_FWD, "threads", None, (("first_warp=0 warps=4", "first_warp=1 warps=4"),)),
    (SM80_FWD, "offsets", None, (("x2:xor offset=32768", "x2:xor"),)),
    (SM80_FWD, "offsets", None, (("x2:xor offset=32768", "x2:xor offset=32784"),)),
    (SM90_FWD, "offsets", None, (("slots=2 offset=33792", "slots=2 offset=33920"),)),
    (SM90_FWD, "offsets", None, (("buffers=(sK) offset=197648", "buffers=(sK) offset=197652"),)),
    (SM80_FWD, "smem-limit", None, (("x2:xor offset=49152", "x2:xor offset=163840"),)),
    (SM80_FWD, "smem-limit", None, (("min_ctas=2", "min_ctas=3"),)),
    (SM80_FWD, "overlap", None, (("x2:xor offset=49152", "x2:xor offset=40960"),)),
    (SM90_FWD, "overlap", None, (("buffers=(sK) offset=197648", "buffers=(sK) offset=164864"),)),
    (SM80_FWD, "slots", "S16", (("offset=49152", "slots=2 offset=49152"),)),
    (SM90_FWD, "slots", "S4", (("S4 wgmma d=rS a=sQ[w] b=sK[k].T", "S4 wgmma d=rS a=sQ[w] b=sK[k + 1].T"),)),
    (SM80_FWD, "variables", "S14", (("row l = l + s", "row l = l + s + p"),)),
    (SM80_FWD, "defined", "E3", (("P7 fill dst=l value={0.0}", "P7 fill dst=s value={0.0}"),)),
    (SM80_FWD, "unused", "S13", (("row l = l + s", "row l = l + a"),)),
    (SM80_FWD, "registers", None, (("regs=255", "regs=216"),)),
    (SM90_FWD, "registers", None, (("warps=8 regs=240", "warps=8 regs=216"),)),
    (SM80_FWD, "registers", None, (("regs=255", "regs=256"),)),
    (SM90_FWD, "setmaxnreg", None, (("warps=8 regs=240", "warps=8 regs=236"),)),
    (SM90_FWD, "setmaxnreg", None, (("warps=4 regs=24", "warps=4 regs=40"),)),
    (BWD, "setmaxnreg", None, (("first_warp=1 warps=3 regs=24", "first_warp=1 warps=3 regs=32"),)),
    (SM90_FWD, "code-size", None, (("start=1 unroll=2", "start=1 unroll=12"),)),
    (SM80_FWD, "outputs", None, (("tensor lse elem", "tensor extra elem=f32 rank=3 access=out\n    tensor lse elem"),)),
]

SM80_RULES: list[tuple[str, str, str | None, Edits]] = [
    (SM80_FWD, "copy-groups", "S6", (("S6 cp_wait group=V pending=0", "S6 cp_wait group=V pending=1"),)),
    (SM80_FWD, "copy-groups", "S6", (("S6 cp_wait group=V", "S6 cp_wait group=W"),)),
    (SM80_FWD, "race", "S5", (("S1 cp_wait group=K pending=0", "S1 cp_wait group=K pending=1"),)),
    (SM80_FWD, "copy-groups", "S1", (("P4 cp_commit group=K", "P4 cta_sync"),)),
    (
        SM80_FWD,
        "stale",
        "S5",
        (("dst=sK src=k heads=kv row={(n - 1) * 64}", "dst=sV src=k heads=kv row={(n - 1) * 64}"),),
    ),
    (SM80_FWD, "race", "S8", (("S7 cta_sync", "S7 fill dst=x value={0.0}"),)),
    (SM80_FWD, "partial", "E4", (("E3 reduce kind=sum dst=l src=l", "E3 cta_sync"),)),
]

SM90_RULES: list[tuple[str, str, str | None, Edits]] = [
    # what is in flight
    (SM90_FWD, "in-flight", None, (("            S19 retire group=g2\n", ""),)),
    (SM90_FWD, "in-flight", "S17", (("touches=(rS;rP[k];s;r;l;a;x)", "touches=(rS;rP[k];rO;s;r;l;a;x)"),)),
    (
        SM90_FWD,
        "in-flight",
        "S17",
        (("              G1 reduce", "              G0 mbar_wait bar=V.full[v]\n              G1 reduce"),),
    ),
    (
        SM90_FWD,
        "in-flight",
        "S17",
        (("copies=(rP[k])\n                row e", "copies=(rP[v])\n                row e"),),
    ),
    (SM90_FWD, "touches", "S17", (("touches=(rS;rP[k];s;r;l;a;x)", "touches=(rS;rP[k];s;r;l;a)"),)),
    (
        BWD,
        "in-flight",
        "B11",
        (("            B10 retire group=g1\n", ""), ("B12 map", "B10 retire group=g1\n            B12 map")),
    ),
    (SM90_FWD, "registers-in-flight", "S15", (("            S11 retire group=g1\n", ""),)),
    # fences and groups
    (SM90_FWD, "open", "P5", (("          P4 open\n", ""),)),
    (SM90_FWD, "open", "S8", (("            S7 open\n", ""),)),
    (SM90_FWD, "open", "S8", (("S3 open regs=(rO;rP[v])", "S3 open regs=(rP[v])"),)),
    (SM90_FWD, "open", "D3", (("D2 open regs=(rO;rP[v])", "D2 open regs=(rO;rP[k])"),)),
    (SM90_FWD, "groups", "S11", (("S11 retire group=g1", "S11 retire group=g3"),)),
    (SM90_FWD, "groups", "S9", (("S9 commit group=g2", "S9 commit group=g1"),)),
    # rings
    (
        SM90_FWD,
        "release",
        "S12",
        (
            (
                "S11 retire group=g1\n            S12 mbar_arrive bar=K.free[k]",
                "S12 mbar_arrive bar=K.free[k]\n            S11 retire group=g1",
            ),
        ),
    ),
    (SM90_FWD, "release", "S20", (("S20 mbar_arrive bar=V.free[v]", "S20 mbar_arrive bar=V.free[k]"),)),
    (SM90_FWD, "release", "P1", (("          P11 mbar_arrive when={n == 0} bar=Q.free\n", ""),)),
    (SM90_FWD, "ring-read", "S8", (("            S6 mbar_wait bar=V.full[v]\n", ""),)),
    (SM90_FWD, "fill", "L3", (("            L2 mbar_expect bar=K.full[slot] bytes=32768\n", ""),)),
    (
        SM90_FWD,
        "bytes",
        "L2",
        (("L2 mbar_expect bar=K.full[slot] bytes=32768", "L2 mbar_expect bar=K.full[slot] bytes=16384"),),
    ),
    (
        SM90_FWD,
        "bytes",
        None,
        (("ring K slots=2 full_arrivals=1 full_bytes=32768", "ring K slots=2 full_arrivals=1 full_bytes=32760"),),
    ),
    (
        BWD,
        "fill",
        "L5",
        (("            L8 bulk_load dst=sLse[slot] src=lse2 heads=q at={m * 64} bytes=256 bar=Q.full[slot]\n", ""),),
    ),
    (
        SM90_FWD,
        "arrivals",
        None,
        (
            (
                "ring K slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=8",
                "ring K slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=4",
            ),
        ),
    ),
    (
        SM90_FWD,
        "arrivals",
        None,
        (
            (
                "ring V slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=8",
                "ring V slots=2 full_arrivals=1 full_bytes=32768 free_arrivals=9",
            ),
        ),
    ),
    (SM90_FWD, "deadlock", None, (("ring V slots=2 full_arrivals=1", "ring V slots=2 full_arrivals=2"),)),
    (SM90_FWD, "trip-count", None, (("range cls=all end={n_end}", "range cls=all end={n_end - 1}"),)),
    (SM90_FWD, "trip-count", None, (("range cls=full end={n_end}", "range cls=full end={n_end + w}"),)),
    (SM90_FWD, "phase", None, (("phase k = t % 2", "phase k = t % 3"),)),
    (SM90_FWD, "order-ring", "S2", (("            S10 leave ring=tc\n", ""),)),
    (SM90_FWD, "order-ring", "S10", (("            S2 enter ring=tc\n", ""),)),
    # proxies, barriers and stores
    (SM90_FWD, "proxy", "E7", (("          E5 proxy\n", ""),)),
    (SM90_FWD, "race", "E7", (("          E6 sync bar=o[w] threads=128\n", ""),)),
    (SM90_FWD, "race", "E4", (("          E3 sync bar=o[w] threads=128\n", ""),)),
    (SM90_FWD, "barrier-count", None, (("E6 sync bar=o[w] threads=128", "E6 sync bar=o[w] threads=112"),)),
    (SM90_FWD, "deadlock", None, (("E6 sync bar=o[w] threads=128", "E6 sync bar=o[w] threads=160"),)),
    (SM90_FWD, "bulk", "E4", (("          E2 bulk_retire pending=0 until=read\n", ""),)),
    (SM90_FWD, "bulk", "E7", (("      exit\n        X1 bulk_retire pending=0 until=read\n", ""),)),
    (BWD, "proxy", "B23", (("            B17 proxy\n", ""),)),
    (BWD, "proxy", "R2", (("            B32 proxy\n", ""),)),
    (BWD, "race", "B23", (("            B21 sync bar=dS threads=256\n", ""),)),
    (BWD, "release", "R8", (("            R7 bulk_retire pending=1 until=read\n", ""),)),
    (BWD, "registers", None, (("first_warp=4 warps=8 regs=240", "first_warp=4 warps=8 regs=216"),)),
]


@pytest.mark.parametrize(("name", "rule", "op", "edits"), [*GENERAL, *SM80_RULES, *SM90_RULES])
def test_a_change_is_found_by_its_rule(name: str, rule: str, op: str | None, edits: Edits) -> None:
    found = rules(changed(name, *edits))
    assert rule in found, f"found instead: {found}"
    assert op is None or op in found[rule], f"{rule} at {found[rule]}"


def test_an_unknown_target() -> None:
    assert rules(dataclasses.replace(Schedule.parse(text(SM80_FWD)), target="sm70")) == {"target": {None}}


def test_a_lone_warp_needs_its_barriers_too() -> None:
    """The lanes of one warp share tiles: a wait is for the own copies of a thread only."""
    edits = (("threads=128", "threads=32"), ("first_warp=0 warps=4", "first_warp=0 warps=1"))
    assert findings(changed(SM80_FWD, *edits)) == []
    assert "S5" in rules(changed(SM80_FWD, *edits, ("            S2 cta_sync\n", ""))).get("race", set())


def test_a_workspace_is_written_before_it_is_read() -> None:
    schedule = Schedule.parse((ROOT.parent / "generated" / "document_d64.schedule").read_text())
    assert "outputs" in rules(dataclasses.replace(schedule, kernels=schedule.kernels[1:]))


# ---- every op deleted, every pair swapped -------------------------------------------------------------------

# Mutants that no rule can find: what is computed changes and its order does not (the emulator sees these), or nothing
# changes at all.
MISSED = {
    SM80_FWD: {
        "delete P2 ",  # Q and K in one group
        "delete S10 ",
        "delete S15 ",  # the mask, the correction of O: arithmetic
    },
    SM90_FWD: {
        "delete P12 ",
        "delete S14 ",
        "delete S21 ",  # masks, the correction of O: arithmetic
        "delete G1 ",
        "delete G3 ",
        "delete G4 ",  # parts of the rare redo: arithmetic
    },
    BWD: {
        "delete B11 ",  # the mask: arithmetic
        "delete R11 ",  # the end of the kernel waits for stores whose sources have been read
    },
}


def _missed(name: str, kind: str) -> list[str]:
    result = []
    for mutant in mutants(Schedule.parse(text(name))):
        if mutant.name.startswith(kind):
            try:
                verify(mutant.schedule)
            except VerifyError:
                continue
            result.append(mutant.name)
    return result


@pytest.mark.parametrize("name", [SM80_FWD, SM90_FWD, BWD])
def test_deleted_ops_are_found(name: str) -> None:
    missed = _missed(name, "delete")
    assert {m for m in missed if not m.startswith(tuple(MISSED[name]))} == set()
    assert len(missed) == len(MISSED[name])


def test_swapped_ops_of_sm80() -> None:
    """Left are swaps of ops that share nothing, and those that change arithmetic alone."""
    missed = [m.removeprefix("swap ").split(" <-> ") for m in _missed(SM80_FWD, "swap")]
    pairs = {(one.split()[0], two.split()[0]) for one, two in missed}
    assert pairs == {
        ("P1", "P2"),
        ("P2", "P3"),  # which group Q is in
        ("P4", "P5"),
        ("P5", "P6"),
        ("P6", "P7"),
        ("S4", "S5"),
        ("S5", "S6"),
        ("S9", "S10"),
        ("S14", "S15"),
        ("E2", "E3"),
        ("E5", "E6"),  # nothing in common
        ("S10", "S11"),
        ("S15", "S16"),  # arithmetic: the maximum before the mask, the correction after the product
    }


def test_mutants_are_schedules() -> None:
    original = Schedule.parse(text(SM80_FWD))
    listed = list(mutants(original))
    assert len({m.name for m in listed}) == len(listed) == 59
    for m in listed:
        assert m.schedule != original
        assert str(m) == m.name
        assert Schedule.parse(m.schedule.print()) == m.schedule


# ---- targets ------------------------------------------------------------------------------------------------


def test_targets() -> None:
    assert target("sm80") is SM80
    assert target("sm90") is SM90
    assert SM90.has(Feature.WGMMA)
    assert not SM80.has(Feature.TMA)
    assert (SM80.smem_per_cta, SM90.smem_per_cta) == (163 * 1024, 227 * 1024)
    with pytest.raises(SignatureError, match="sm80, sm90"):
        target("sm75")
