"""A record as a page: bars for each group of cases, the tables behind them, and who was missing."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.bench.cases import Case
from attngen.bench.record import Record
from attngen.bench.tables import (
    CUDNN,
    FA2,
    FA2_SAME,
    FA3,
    FA3_SAME,
    FLEX,
    OWN,
    OWN_SAME,
    OWN_SM80,
    first,
    full,
    missing,
    names,
)
from attngen.bench.timing import Mode
from attngen.draw.page import Section, html
from attngen.draw.picture import Line, Picture, Rect, Text, ticks

LEFT, WIDE, BAR, SPACE, TOP = 250, 800, 10, 12, 26
KINDS = {OWN: "c0", OWN_SM80: "c1", CUDNN: "c4", FA3: "c2", FA2: "c3", FLEX: "c5"}
KINDS |= {OWN_SAME: "c7", FA3_SAME: "c8", FA2_SAME: "c9"}
SHOWN = ("device", "date", "torch", "cuda", "cudnn", "triton", "attngen", "python")
TITLES = {
    "grid": "Full and causal", "head-dims": "Head dims", "groups": "Grouped heads", "lengths": "Other lengths",
    "variants": "Variants", "growing": "Keys that grow towards the first",
    "backward-grid": "Backward, full and causal", "backward-head-dims": "Backward, head dims",
    "backward-groups": "Backward, grouped heads", "backward-variants": "Backward, variants",
}  # fmt: skip


def page(record: Record) -> str:
    e = record.environment
    facts: list[tuple[str, str]] = [(n, e[n]) for n in SHOWN if n in e]
    facts += [(f"matmul, {mode}", f"{tflops:.0f} TFLOP/s") for mode, tflops in record.matmul.items()]
    facts += [("tensor roof", f"{record.roof:.0f} TFLOP/s")] if record.roof else []
    facts += [(f"clocks {when}", _clocks(now)) for when, now in record.clocks.items()]
    lead = (
        "TFLOP/s by the products over visible pairs of query and key; half of all for a square causal mask. Compare "
        "lines of this page alone: the speed of a device moves with its power limit from run to run.",
    )
    return html(f"attngen on {e['device']}", lead, facts, list(_sections(record)))


def _clocks(now: dict[str, str]) -> str:
    if "sm_mhz" not in now:
        return "; ".join(f"{n}: {v}" for n, v in now.items())
    return f"{now['sm_mhz']} of {now['sm_mhz_most']} MHz, {now['watts']} of {now['watts_most']} W, {now['celsius']} °C"


def _sections(record: Record) -> Iterator[Section]:
    for group, title in TITLES.items():
        for mode in record.modes:
            cases = record.cases(group)
            shown = names(record, cases, mode)
            if not shown:
                continue
            more = "" if mode is Mode.GAPS else ", back to back"
            yield Section(
                anchor=f"{group}-{mode.name.lower()}", title=title + more,
                legend=tuple((KINDS.get(n, "c6"), n) for n in shown), pictures=(_bars(record, cases, shown, mode),),
                table=full(record, group, mode),
            )  # fmt: skip
    if record.first_calls:
        words = ("Seconds until the first result in a fresh process: with an empty cache, and with the kernel in it.",)
        yield Section("first-call", "First call", words, table=first(record))
    yield Section("missing", "Not measured", tuple(missing(record)) or ("Nobody is missing.",))


def _bars(record: Record, cases: list[Case], shown: list[str], mode: Mode) -> Picture:
    """A block of bars for each case, a bar for each contender."""
    top = max([x.tflops for x in record.lines if x.case in cases and x.mode is mode] + [record.roof or 0]) * 1.02
    scale = WIDE / top
    rects: list[Rect] = []
    texts: list[Text] = []
    lines: list[Line] = []
    y = float(TOP)
    for case in cases:
        present = [(n, x) for n in shown if (x := record.find(case, n, mode)) is not None]
        texts.append(Text(LEFT - 12, y + BAR * len(present) / 2 + 4, str(case), "label", "end"))
        for name, x in present:
            said = f"{name}: {x.tflops:.0f} TFLOP/s, {x.ms:.3f} ms ({x.low:.3f} to {x.high:.3f})"
            rects.append(Rect(LEFT, y, x.tflops * scale, BAR - 1, KINDS.get(name, "c6"), said))
            texts.append(Text(LEFT + x.tflops * scale + 4, y + BAR - 2, f"{x.tflops:.0f}", "small"))
            y += BAR
        y += SPACE
    grid = [Line(((LEFT + t * scale, TOP - 6), (LEFT + t * scale, y - 6)), "tick") for t in ticks(top)]
    texts += [Text(LEFT + t * scale, TOP - 12, f"{t:.0f}", "note", "middle") for t in ticks(top)]
    for at, kind in ((record.roof, "roof"), (record.matmul.get(mode.value), "reached")):
        if at:
            lines.append(Line(((LEFT + at * scale, TOP - 6), (LEFT + at * scale, y - 6)), kind))
    said = "TFLOP/s; " + ("red: the roof of the tensor cores at the highest clock; " if record.roof else "")
    said += f"dotted: a product of {8192}³ in this run" if record.matmul.get(mode.value) else ""
    return Picture(said.rstrip("; "), LEFT + WIDE + 40, y, tuple(rects), (*grid, *lines), tuple(texts))
