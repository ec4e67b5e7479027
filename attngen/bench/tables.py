"""Tables of a record as Markdown, and their place in a page: between `<!-- generated: NAME -->` and
`<!-- /generated -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from attngen.bench.cases import Case
from attngen.bench.record import Line, Record
from attngen.bench.timing import Mode
from attngen.draw.page import Table
from attngen.errors import SpecError

CUDNN, FA2, FA3, FLEX = "cuDNN", "FlashAttention-2", "FlashAttention-3", "FlexAttention"
OWN, OWN_SM80 = "attngen", "attngen sm80"
OWN_SAME, FA3_SAME, FA2_SAME = (f"{name} same bits" for name in (OWN, FA3, FA2))
ORDER = (OWN, OWN_SM80, OWN_SAME, CUDNN, FA3, FA3_SAME, FA2, FA2_SAME, FLEX)
HOLE = re.compile(r"<!-- generated: ([\w-]+) -->\n(.*?)<!-- /generated -->", re.DOTALL)


def fill(page: str, record: Record) -> str:
    """The page with each of its tables made from the record."""
    return HOLE.sub(lambda m: f"<!-- generated: {m[1]} -->\n{table(m[1], record)}\n<!-- /generated -->", page)


def table(name: str, record: Record) -> str:
    if name not in TABLES:
        raise SpecError(f"the table {name!r} is not known. Allowed: {', '.join(TABLES)}")
    return TABLES[name](record)


def markdown(t: Table) -> str:
    lines = [t.head, ("---",) * len(t.head), *t.rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def environment(record: Record) -> str:
    """One sentence on what was measured on."""
    e = record.environment
    cudnn = e["cudnn"]
    if cudnn.isdigit() and len(cudnn) == 5:
        cudnn = f"{int(cudnn) // 10000}.{int(cudnn) // 100 % 100}"
    device = e["device"].removeprefix("NVIDIA ")
    return f"one run on an {device} (torch {e['torch'].split('+')[0]}, CUDA {e['cuda']}, cuDNN {cudnn}, {e['date']})"


def ratio(own: Line | None, other: Line | None) -> str:
    """How many times as fast."""
    return f"{other.ms / own.ms:.2f}" if own and other else "-"


def speed(line: Line | None) -> str:
    return f"{line.tflops:.0f}" if line else "-"


def share(line: Line | None, most: float | None) -> str:
    return f"{100 * line.tflops / most:.0f} %" if line and most else "-"


def _summary(record: Record) -> str:
    """The middle length of the grid, for the README."""
    rows = []
    for case in record.cases("grid"):
        if case.seqlen_q == 4096:
            own, old = record.find(case, OWN), record.find(case, OWN_SM80)
            rows.append((
                str(case.head_dim), str(case.seqlen_q), case.pattern.value, speed(own),
                ratio(own, record.find(case, CUDNN)), ratio(own, record.find(case, FA3)),
                ratio(old, record.find(case, FA2)),
            ))  # fmt: skip
    head = ("D", "S", "case", OWN, f"to {CUDNN}", f"to {FA3}", f"{OWN_SM80}, to {FA2}")
    said = f"Forward, bf16, B·S = 16384, H·D = 2048, TFLOP/s and ratios of {environment(record)}:"
    return f"{said}\n\n{markdown(Table(head, tuple(rows)))}"


def _backward_summary(record: Record) -> str:
    """The middle length of the grid, for the README."""
    rows = []
    for case in record.cases("backward-grid"):
        if case.seqlen_q == 4096:
            own, old, same = (record.find(case, n) for n in (OWN, OWN_SM80, OWN_SAME))
            rows.append((
                str(case.head_dim), case.pattern.value, speed(own), ratio(own, record.find(case, CUDNN)),
                ratio(own, record.find(case, FA3)), ratio(old, record.find(case, FA2)),
                ratio(same, record.find(case, FA3_SAME)), ratio(same, record.find(case, FA2_SAME)),
            ))  # fmt: skip
    head = ("D", "case", OWN, f"to {CUDNN}", f"to {FA3}", f"{OWN_SM80}, to {FA2}", f"same bits, to {FA3}",
            f"same bits, to {FA2}")  # fmt: skip
    said = f"Backward alone, bf16, S = 4096, B = 4, H·D = 2048, TFLOP/s and ratios of {environment(record)}:"
    return f"{said}\n\n{markdown(Table(head, tuple(rows)))}"


def full(record: Record, group: str, mode: Mode) -> Table:
    """Every case of a group: TFLOP/s of all, and how many times as fast attngen is."""
    cases = record.cases(group)
    peers = [n for n in names(record, cases, mode) if n != OWN]
    head = ("case", OWN, "of the roof", "of the model", *(x for n in peers for x in (n, "ratio")))
    rows = [_row(record, c, mode, peers) for c in cases]
    filled = [n for n in range(len(head)) if any(row[n] != "-" for row in rows)]
    return Table(tuple(head[n] for n in filled), tuple(tuple(row[n] for n in filled) for row in rows))


def names(record: Record, cases: list[Case], mode: Mode) -> list[str]:
    """Who has a time for one of the cases, in the order of every table and picture."""
    present = {x.name for x in record.lines if x.mode is mode and x.case in cases}
    return sorted(present, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def _row(record: Record, case: Case, mode: Mode, peers: list[str]) -> tuple[str, ...]:
    own = record.find(case, OWN, mode)
    others = [record.find(case, n, mode) for n in peers]
    shares = share(own, record.roof), share(own, own.model if own else None)
    return (str(case), speed(own), *shares, *(x for o in others for x in (speed(o), ratio(own, o))))


def first(record: Record) -> Table:
    head = ("variant", "D", "cold, s", "cached, s", "second call, ms")
    return Table(head, tuple(
        (f.variant, str(f.head_dim), f"{f.cold_seconds:.2f}", f"{f.cached_seconds:.2f}", f"{f.second_ms:.2f}")
        for f in record.first_calls
    ))  # fmt: skip


def _full(group: str, mode: Mode) -> Callable[[Record], str]:
    return lambda record: markdown(full(record, group, mode))


def _missing(record: Record) -> str:
    return "\n".join(f"- {line}" for line in missing(record)) or "- nobody"


def missing(record: Record) -> Iterator[str]:
    """Who did not take part, and why; one line for equal reasons."""
    yield from (f"{name}: {reason}" for name, reason in record.missing.items())
    groups: dict[tuple[str, str], list[Case]] = {}
    for a in record.absent:
        groups.setdefault((a.name, a.reason), []).append(a.case)
    for (name, reason), cases in groups.items():
        where = f"{cases[0]}" if len(cases) == 1 else f"{len(cases)} cases such as {cases[0]}"
        yield f"{name}, {where}: {reason}"


TABLES: dict[str, Callable[[Record], str]] = {
    "summary": _summary, "first-call": lambda record: markdown(first(record)), "missing": _missing,
    **{g: _full(g, Mode.GAPS) for g in ("grid", "head-dims", "groups", "lengths", "variants", "growing")},
    **{g: _full(g, Mode.GAPS) for g in (f"backward-{g}" for g in ("grid", "head-dims", "groups", "variants"))},
    "backward-summary": _backward_summary,
    "grid-back-to-back": _full("grid", Mode.STEADY),
}  # fmt: skip
