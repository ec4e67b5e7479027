"""The text of a schedule: printing and parsing are inverse, and errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attngen.errors import ScheduleError
from attngen.expr import DType, Expr, Op, const, make, var
from attngen.ir import ops as o
from attngen.ir.ops import Heads, ReduceKind, Ref, Scope, Stmt
from attngen.ir.schedule import (
    Access,
    Barrier,
    Block,
    Buffer,
    Classes,
    Cursor,
    Elem,
    Fact,
    Guard,
    Item,
    Kernel,
    Order,
    OrderRing,
    Range,
    Ring,
    Role,
    ScalarArg,
    Schedule,
    Step,
    TensorArg,
    Tiles,
    Value,
    Work,
    WorkSource,
)
from attngen.layout import Fragment, SmemLayout, Swizzle

DATA = Path(__file__).parent / "data"
TEXTS = sorted([*DATA.glob("*.schedule"), *(DATA.parent.parent / "generated").glob("*.schedule")])


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_round_trip(path: Path) -> None:
    text = path.read_text()
    parsed = Schedule.parse(text)
    assert parsed.print() == text
    assert Schedule.parse(parsed.print()) == parsed


def test_comments_and_blank_lines_are_skipped() -> None:
    text = (DATA / "sm80_fwd_causal_d128.schedule").read_text()
    spread = "# a comment\n\n" + text.replace("\n", "\n\n      # another\n")
    assert Schedule.parse(spread).print() == text


# ---- generated schedules ------------------------------------------------------------------------------------

T, X = var("t", DType.I32), var("x", DType.F32)


def exprs() -> st.SearchStrategy[Expr]:
    leaves = st.sampled_from([T, var("seqlen_k", DType.I32)]) | st.integers(-9, 99).map(const)
    binary = st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.FLOORDIV, Op.MOD, Op.MIN, Op.MAX])
    return st.recursive(leaves, lambda e: st.builds(make, binary, e, e), max_leaves=5)


refs = st.sampled_from(["sA", "sB"]).flatmap(
    lambda name: st.builds(
        Ref,
        name=st.just(name),
        index=st.lists(st.sampled_from([T, const(0), make(Op.MOD, T, const(2))]), max_size=2).map(tuple),
        transposed=st.booleans(),
        cols=st.none() | st.just(const(1)),
    )
)
whens = st.none() | st.builds(make, st.sampled_from([Op.LT, Op.EQ]), exprs(), exprs())
notes = st.sampled_from(["", "mask causal", "score alibi model.py:12"])
floats = st.sampled_from([0.0, -1.5, float("inf"), float("-inf"), 1e-7]).map(const)
statements = st.builds(
    Stmt,
    scope=st.sampled_from([Scope.ROW, Scope.ELEM, Scope.COL]),
    target=st.sampled_from(["x", "y"]),
    value=st.builds(make, st.sampled_from([Op.ADD, Op.MAX, Op.DIV]), st.just(X), floats),
    accumulate=st.booleans(),
)
bars = st.sampled_from([Ref(name="R.full", index=(const(0),)), Ref(name="R.free", index=(T,)), Ref(name="bar")])


def any_op(number: int) -> st.SearchStrategy[o.Op]:
    head = {"id": st.just(f"S{number}"), "note": notes, "only": st.sampled_from(["", "masked"]), "when": whens}
    return st.one_of(
        st.builds(
            o.CpAsync, **head, dst=refs, src=st.just("k"), heads=st.sampled_from(Heads), row=exprs(), limit=exprs()
        ),
        st.builds(o.CpWait, **head, group=st.sampled_from(["K", "all"]), pending=st.integers(0, 3)),
        st.builds(o.MbarExpect, **head, bar=bars, bytes=st.integers(0, 99999)),
        st.builds(o.Open, **head, regs=st.lists(refs, max_size=3).map(tuple)),
        st.builds(o.Wgmma, **head, d=refs, a=refs, b=refs, group=st.just("g1"), zero=st.booleans()),
        st.builds(
            o.Map,
            **head,
            over=refs,
            copies=st.lists(refs, max_size=2).map(tuple),
            body=st.lists(statements, min_size=1, max_size=3).map(tuple),
        ),
        st.builds(o.Reduce, **head, kind=st.sampled_from(ReduceKind), dst=refs, src=refs),
        st.builds(o.Fill, **head, dst=refs, value=floats),
        st.builds(o.StFrag, **head, dst=refs, src=refs, scaled=st.sampled_from(["", "inv"])),
        st.builds(o.CtaSync, **head),
    )


@st.composite
def steps(draw: st.DrawFn, first: int) -> tuple[Step, ...]:
    result: list[Step] = []
    for k in range(draw(st.integers(0, 4))):
        op = draw(any_op(first + k))
        if draw(st.integers(0, 4)) == 0:
            pred = make(Op.LT, X, const(1.0))
            result.append(Guard(id=f"G{first + k}", pred=pred, body=(op,), touches=(Ref(name="x"),)))
        else:
            result.append(op)
    return tuple(result)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    swizzle, rows = draw(st.sampled_from(list(Swizzle))), draw(st.sampled_from([16, 64]))
    buffers = tuple(
        Buffer(
            name=n,
            elem=Elem.BF16,
            layout=SmemLayout(rows, 64, 2, swizzle),
            slots=draw(st.integers(1, 3)),
            offset=draw(st.none() | st.integers(0, 9).map(lambda k: 1024 * k)),
        )
        for n in ("sA", "sB")
    )
    tiles = Tiles(
        var="t",
        start=draw(st.integers(0, 1)),
        unroll=draw(st.integers(1, 2)),
        classes=draw(st.sampled_from(Classes)),
        ranges=(Range(cls="masked", end=draw(exprs())), Range(cls="full", end=var("seqlen_k", DType.I32))),
        lets=(Stmt(scope=Scope.ITEM, target="tile", value=make(Op.SUB, const(4), T)),),
        phase=(Stmt(scope=Scope.ITEM, target="p", value=make(Op.MOD, T, const(2))),),
        step=draw(steps(0)),
        drain=draw(steps(20)),
    )
    role = Role(
        name="math",
        first_warp=0,
        warps=4,
        regs=draw(st.integers(24, 255)),
        split=draw(st.integers(1, 2)),
        single=draw(st.booleans()),
        exit=draw(steps(40)),
        values=tuple(Value(name=n, fragment=Fragment.ROW, dtype="f32", rows=16, cols=0) for n in ("x", "y", "inv")),
        item=Item(lets=(), body=(Block(name="first", ops=draw(steps(60))), tiles)),
    )
    ring = Ring(
        name="R",
        slots=2,
        full_arrivals=1,
        full_bytes=64,
        free_arrivals=4,
        cursor=draw(st.sampled_from(Cursor)),
        buffers=("sA", "sB"),
        offset=None,
    )
    kernel = Kernel(
        name="k0",
        threads=128,
        min_ctas=draw(st.integers(1, 2)),
        buffers=buffers,
        roles=(role,),
        rings=(ring,),
        work=Work(source=draw(st.sampled_from(WorkSource)), order=draw(st.sampled_from(Order)), block_m=64),
        tensors=(TensorArg(name="k", elem=Elem.BF16, rank=4, access=draw(st.sampled_from(Access))),),
        scalars=(ScalarArg(name="seqlen_k", dtype=DType.I32),),
        orders=(OrderRing(name="tc", members=2, first=1, threads=256),),
        barriers=(Barrier(name="bar", first=3, threads=64),),
    )
    facts = (Fact(subject="why", text="because: of this"),)
    return Schedule(name="m", target="sm90", kernels=(kernel,), facts=draw(st.sampled_from([(), facts])))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_any_schedule_reads_back(schedule: Schedule) -> None:
    assert Schedule.parse(schedule.print()) == schedule


# ---- errors -------------------------------------------------------------------------------------------------


def broken(old: str, new: str) -> tuple[str, int]:
    """The sm80 text with one change, and the number of the changed line."""
    text = (DATA / "sm80_fwd_causal_d128.schedule").read_text()
    assert text.count(old) == 1
    return text.replace(old, new), text[: text.index(old)].count("\n") + 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("S2 cta_sync", "S2 cta_snyc", "unknown node"),
        ("S1 cp_wait group=K pending=0", "S1 cp_wait grup=K pending=0", "no field"),
        ("S1 cp_wait group=K pending=0", "S1 cp_wait group=K", "pending"),
        ("S1 cp_wait group=K pending=0", "S1 cp_wait group=K pending=none", "field pending"),
        ("S11 reduce kind=max", "S11 reduce kind=maximum", "max, sum"),
        ("P6 fill dst=r value={-inf}", "P6 fill dst=r value={-inff}", "inff"),
        ("smem sK elem=bf16 layout=[64,128]x2:xor", "smem sK elem=bf16 layout=64x128:xor", "[rows,cols]"),
        ("S9 cp_commit", "   S9 cp_commit", "indentation"),
        ("S9 cp_commit", "    S9 cp_commit", "more than one level"),
        ("let n = count - 1 - t", "let n : count - 1 - t", "statement"),
        ("let masked = count - full", "range cls=masked end={count}", "does not belong"),
        ("S2 cta_sync", "  row x = 1", "does not belong"),
        ("let n = count - 1 - t", "let n = count - 99999999999", "32 bits"),
        ("let n = count - 1 - t", "let n = count & t", "boolean"),
        ("let n = count - 1 - t", "let n = where(count < 1, t)", "2 arguments"),
    ],
)
def test_errors_name_the_line(old: str, new: str, words: str) -> None:
    text, line = broken(old, new)
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert f"line {line}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "kernel k threads=32\n", "schedule a target=sm80\nschedule b target=sm80\n"])
def test_one_root(text: str) -> None:
    with pytest.raises(ScheduleError, match="one root"):
        Schedule.parse(text)
