"""Drawings: well formed, self-contained, the same each time, and right: tiles, lives of values and links."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.bench.page import page as bench_page
from attngen.bench.record import Record
from attngen.cli import main
from attngen.draw.graph import graph_picture
from attngen.draw.kernel_page import Drawn, page, picture
from attngen.draw.listing import listings
from attngen.draw.memory import memory_picture
from attngen.draw.page import Section, html, number, svg_file
from attngen.draw.picture import Line, Picture, Rect, Text, stack, ticks
from attngen.draw.registers import moments
from attngen.draw.strip import strip_picture
from attngen.draw.tiles import Tile, tile_map
from attngen.ir.ops import Map, Ref, Wgmma
from attngen.ir.rules.registers import peak
from attngen.ir.schedule import Schedule, ops_of
from attngen.kernel import Kernel, kernel_for
from attngen.model import Span
from attngen.passes.ranges import VisitSource
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import alibi, causal, document, full, prefix_lm, sliding_window, softcap

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
PLAIN = set(
    "html head meta title style body header h1 h2 p dl div dt dd nav a main section ul li figure figcaption table "
    "thead tbody tr th td pre span svg rect path text".split()
)  # fmt: skip
ATTRIBUTES = set(
    "lang charset name content class id href x y width height viewBox role aria-label d text-anchor".split()
)


def kernel(spec: Attention, on: str = "sm80", d: int = 64) -> Kernel:
    return kernel_for(spec.variant, Signature(IoType.BF16, d, d), target(on))


def sample(name: str) -> Drawn:
    specs: dict[str, tuple[Attention, str, int]] = {
        "hopper": (Attention(mask=causal()), "sm90", 128),
        "scores": (
            Attention(mask=causal() & sliding_window(70), score=[softcap(30), alibi(torch.ones(4))]), "sm80", 64,
        ),
        "table": (Attention(mask=document(torch.arange(300, dtype=torch.int32) // 100)), "sm80", 64),
    }  # fmt: skip
    spec, on, d = specs[name]
    return Drawn(kernel(spec, on, d), spec.tensors, 300, 300, {})


SAMPLES = ("hopper", "scores", "table")


def outside(text: str) -> list[str]:
    """What a page or picture would fetch or run."""
    found = []
    for e in ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n")).iter():
        tag = e.tag.removeprefix(SVG)
        if tag not in PLAIN:
            found.append(tag)
        for name, value in e.attrib.items():
            if name not in ATTRIBUTES or (name == "href" and not value.startswith("#")):
                found.append(f"{tag} {name}={value}")
        if tag == "style" and re.search(r"url|@import|//", e.text or ""):
            found.append("style")
    return found


# ---- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_well_formed_and_self_contained(name: str) -> None:
    text = page(sample(name))
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert outside(text) == []
    ids = [e.get("id") for e in tree.iter() if e.get("id")]
    assert len(set(ids)) == len(ids)
    targets = {str(e.get("href")) for e in tree.iter() if e.get("href")}
    assert len(targets) > 40 and {t for t in targets if not t.startswith("#")} == set()
    assert {t[1:] for t in targets} <= set(ids)
    sections = {e.get("id") for e in tree.iter("section")}
    assert sections == {"graph", "tiles", "memory", "registers", "steady-state", "decisions", "schedule", "source"}
    assert len(list(tree.iter(f"{SVG}svg"))) >= 5


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_the_same_each_time(name: str) -> None:
    assert page(sample(name)) == page(sample(name))
    assert svg_file(picture(sample(name))) == svg_file(picture(sample(name)))


def test_picture_is_well_formed_and_within_its_frame() -> None:
    text = svg_file(picture(sample("scores")))
    tree = ElementTree.fromstring(text)
    assert outside(text) == [] and "--c0:" in text
    left, top, width, height = map(float, str(tree.get("viewBox")).split())
    for r in tree.iter(f"{SVG}rect"):
        x, y, w, h = (float(str(r.get(n))) for n in ("x", "y", "width", "height"))
        assert w >= 0 and h >= 0 and left <= x <= x + w <= left + width and top <= y <= y + h <= top + height


def test_the_texts_are_whole() -> None:
    """Every line of the schedule and the source, as a browser shows them."""
    drawn = sample("hopper")
    tree = ElementTree.fromstring(page(drawn).removeprefix("<!DOCTYPE html>\n"))
    schedule, source = ("".join(pre.itertext()).strip("\n") for pre in tree.iter("pre"))
    assert Schedule.parse(schedule + "\n") == drawn.kernel.schedule
    assert source == drawn.kernel.source.text.strip("\n")


@pytest.mark.parametrize("name", SAMPLES)
def test_ops_and_their_code_lead_to_each_other(name: str) -> None:
    drawn = sample(name)
    schedule, source = listings(str(drawn.kernel.schedule), drawn.kernel.source.text)
    ops = {n.anchor.removeprefix("op-"): n for n in schedule if n.anchor}
    code = {n.anchor.removeprefix("src-"): n for n in source if n.anchor}
    assert ops.keys() == code.keys() and len(ops) > 20
    for at in ops:
        assert ops[at].href == f"#src-{at}" and code[at].href == f"#op-{at}"
        op = at.rsplit("-", 1)[1]
        assert ops[at].text.split()[0] == op and code[at].text.split()[:2] == ["//", op]


def test_what_a_user_writes_is_escaped() -> None:
    text = html("<b>&", ["a < b"], [("n", "</style>")], [Section("x", "<i>", ("\"quoted\" 'text'",))])
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    assert "<b>" not in text and "<i>" not in text
    drawn = Picture("<>", 10, 10, (Rect(0, 0, 1, 1, "c0", "a & b"),), (), (Text(0, 0, "<script>"),))
    assert "<script" not in svg_file(drawn)


def test_bench_page_is_well_formed_and_self_contained() -> None:
    text = bench_page(Record.read(ROOT / "benchmarks" / "h200_forward.json"))
    assert outside(text) == []


@pytest.mark.parametrize(
    "bad",
    [
        '<a href="https://x.org/"/>', "<style>a { b: url(x.png) }</style>", "<style>@import 'x'</style>", "<script/>",
        '<p style="background: red"/>', '<img src="x.png"/>', '<link href="#x"/>',
    ],
)  # fmt: skip
def test_the_guard_sees_what_is_not_self_contained(bad: str) -> None:
    assert outside(f"<html>{bad}</html>") != []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "k.html", tmp_path / "k.svg"
    run = ["explain", "--mask", "document & causal", "--head-dim", "64", "--no-compile", "--sq", "200"]
    assert main([*run, "--html", str(files[0]), "--svg", str(files[1])]) == 0
    assert capsys.readouterr().out.split() == [str(f) for f in files]
    assert "document &amp; causal" in files[0].read_text() and "<svg" in files[1].read_text()[:5]


# ---- tiles ---------------------------------------------------------------------------------------------------------


def drawn_tiles(spec: Attention, sq: int, sk: int, m: int = 16, n: int = 32) -> Any:
    return tile_map(spec.variant.mask, spec.tensors, m, n, sq, sk)


@pytest.mark.parametrize(("sq", "sk"), [(64, 64), (50, 70), (70, 50)])
@pytest.mark.parametrize(
    "mask", [full(), causal(), sliding_window(20), prefix_lm(40), causal() | prefix_lm(3)], ids=str
)
def test_tiles_are_what_the_mask_says(mask: Any, sq: int, sk: int) -> None:
    """Element by element: no tile with a visible key is left out, none with a hidden one goes without a mask."""
    spec = Attention(mask=mask)
    found = drawn_tiles(spec, sq, sk)
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    plain: dict[str, Any] = {
        "full": lambda: i >= 0 * j, "causal": lambda: j <= i + sk - sq,
        "sliding_window(20)": lambda: (j <= i + sk - sq) & (j > i + sk - sq - 20),
        "prefix_lm(40)": lambda: (j < 40) | (j <= i + sk - sq),
        "causal | prefix_lm(3)": lambda: (j < 3) | (j <= i + sk - sq),
    }  # fmt: skip
    seen = plain[str(mask)]()
    assert len(found.rows) == -(-sq // 16)
    for m, row in enumerate(found.rows):
        assert len(row) == -(-sk // 32)
        for n, tile in enumerate(row):
            part = seen[m * 16 : m * 16 + 16, n * 32 : n * 32 + 32]
            ends = (n + 1) * 32 > sk
            if tile is Tile.FULL:
                assert part.all() and not ends
            elif tile is Tile.PARTIAL:
                assert part.any()
            else:
                assert not part.any()


def test_tiles_of_a_table() -> None:
    found = drawn_tiles(Attention(mask=document(torch.arange(64, dtype=torch.int32) // 32)), 64, 64)
    assert found.source is VisitSource.TABLE and "doc_ids" in found.reason
    assert list(found.rows) == [(Tile.FULL, Tile.EMPTY)] * 2 + [(Tile.EMPTY, Tile.FULL)] * 2


# ---- registers and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_lives_of_values(name: str) -> None:
    """Nothing is alive before it is written or after it is read last, and accumulators peak where the verifier's own
    count does."""
    from attngen.ir.rules.uses import Uses
    from attngen.ir.rules.views import Walk
    from attngen.ir.walk import Scenario, Share, Stretch, Walker, facts_of, tiles_of
    from attngen.layout import Fragment

    drawn = sample(name).kernel.schedule.kernels[-1]
    for role in drawn.roles:
        if not role.values:
            continue
        walked = moments(drawn, role)
        assert not walked[0].alive, "alive before it is written"
        sizes = {v.name: v.registers // v.copies for v in role.values if v.fragment in (Fragment.ACC, Fragment.OPA)}
        most = max(sum(sizes.get(n, 0) for n, _ in m.alive) for m in walked)
        start = max(t.start for t in tiles_of(role))
        classes = max(len(t.ranges) for t in tiles_of(role))
        scenario = Scenario((start + max(2, classes),), Share.EACH, rare=True)
        see = Uses((role,), facts_of(drawn))
        stretches = tuple(
            Stretch(s.item, s.step, tuple(see(role, e)[1] for e in s.events)) for s in Walker(role).walk(0, scenario)
        )
        assert most == peak(Walk(role, 0, scenario, stretches))[0]


def _names(refs: tuple[Ref, ...]) -> set[str]:
    return {r.name for r in refs}


def test_lives_on_hopper() -> None:
    kernel_ = sample("hopper").kernel.schedule.kernels[0]
    role = kernel_.roles[1]
    ops = {op.id: op for of, op in ops_of(kernel_) if of is role}
    walked = moments(kernel_, role)
    products = [m for m in walked if isinstance(ops[m.op], Wgmma)]
    assert len(products) > 4
    for m in products:
        op = ops[m.op]
        assert isinstance(op, Wgmma) and op.d.name in {n for n, _ in m.alive}
    weights = [k for k, m in enumerate(walked) if isinstance(ops[m.op], Map) and _names(ops[m.op].writes()) >= {"rP"}]
    assert weights and all("rP" in {n for n, _ in walked[k].alive} for k in weights)
    assert all("rS" in {n for n, _ in walked[k - 1].alive} for k in weights), "scores live until their weights"
    first = next(n for n, m in enumerate(walked) if "rO" in _names(ops[m.op].writes()))
    assert all(("rO" in {n for n, _ in m.alive}) == (k >= first) for k, m in enumerate(walked[: first + 20]))
    parts = list(dict.fromkeys(m.part for m in walked))
    assert parts == ["peel", "tile 1", "tile 2", "drain", "store"]


def test_memory_is_at_its_addresses() -> None:
    k = sample("hopper").kernel.schedule.kernels[0]
    limit = 227 * 1024
    drawn = memory_picture(k, limit)
    bars = {r.title: r for r in drawn.rects if r.title}
    assert len(bars) == sum(b.slots for b in k.buffers) + sum(r.slots for r in k.rings)
    keys = k.buffer("sK")
    assert keys is not None and keys.offset is not None and keys.slots > 1
    size = keys.layout.bytes
    first, second = (
        bars[f"sK, slot {n}: bytes {keys.offset + n * size} to {keys.offset + (n + 1) * size}"] for n in (0, 1)
    )
    assert second.x - first.x == pytest.approx(820 * size / limit) and second.y == first.y
    assert first.x - min(r.x for r in drawn.rects) == pytest.approx(820 * keys.offset / limit)


# ---- graph and strip -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_graph_has_every_node_and_edge(name: str) -> None:
    graph = sample(name).kernel.graph
    drawn = graph_picture(graph)
    assert len(drawn.rects) == len(graph.nodes) and len(drawn.lines) == graph.edges.number_of_edges()
    assert all(line.points[0][1] < line.points[-1][1] for line in drawn.lines), "an edge goes upwards"
    for n, a in enumerate(drawn.rects):
        for b in drawn.rects[n + 1 :]:
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert apart, f"{a} lies over {b}"


def test_strip() -> None:
    spans = [Span("math0", "tensor", "S4", 100, 300), Span("math0", "compute", "S15", 300, 350),
             Span("load", "copy", "L3", 90, 200), Span("load", "copy", "L9", 150, 290)]  # fmt: skip
    drawn = strip_picture("x", spans, "#op-k-{op}")
    bars = {r.href: r for r in drawn.rects if r.href}
    assert set(bars) == {"#op-k-S4", "#op-k-S15", "#op-k-L3", "#op-k-L9"}
    assert bars["#op-k-S4"].width / bars["#op-k-L3"].width == pytest.approx(200 / 110, rel=0.01)
    assert bars["#op-k-L3"].y != bars["#op-k-L9"].y, "copies in flight at the same time"
    assert bars["#op-k-S4"].x + bars["#op-k-S4"].width == pytest.approx(bars["#op-k-S15"].x, abs=1)


# ---- shapes --------------------------------------------------------------------------------------------------------


def test_numbers_and_ticks() -> None:
    assert [number(x) for x in (3, 2.5, 1 / 3, -8, 0.001)] == ["3", "2.5", "0.33", "-8", "0"]
    assert ticks(1070) == [0, 200, 400, 600, 800, 1000] and ticks(5) == [0, 1, 2, 3, 4, 5]
    assert ticks(9500, 10) == [n * 1000.0 for n in range(10)]


def test_stack() -> None:
    one = Picture("one", 30, 20, (Rect(0, 0, 5, 5, "c0"),), (Line(((0, 0), (5, 5)), "edge"),), (Text(1, 2, "t"),))
    both = stack("both", [one, one])
    assert both.width == 30 and len(both.rects) == 2 and both.rects[1].y - both.rects[0].y == 80
    assert [t.text for t in both.texts] == ["one", "t", "one", "t"]
