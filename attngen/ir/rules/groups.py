"""wgmma: what may be in flight where. Breaking these rules rarely gives wrong numbers; the compiler inserts waits, or
serialises every product of the kernel, at half the speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref, Unit
from attngen.ir.rules.case import Case, Finding
from attngen.ir.rules.uses import Cell, Use, cells
from attngen.ir.rules.views import Walk
from attngen.ir.schedule import Guard
from attngen.ir.walk import Edge, Event, Facts

WIDE = (o.Sync, o.CtaSync, o.Enter, o.Leave, o.MbarWait, o.Open, o.Commit, o.Retire, o.Wgmma, o.CpWait, o.BulkRetire)
WGMMA = (o.Wgmma, o.Open, o.Commit, o.Retire)


class _Flight:
    """Groups of one warpgroup, walked."""

    def __init__(self, walked: Walk[Use], facts: Mapping[int, Facts]) -> None:
        self.facts = facts
        self.values = {v.name: v for v in walked.role.values}
        self.found: dict[tuple[str, str | None], str] = {}
        self.fenced = False
        self.dirty: set[Cell] = set()  # written by ordinary instructions, and in no fence since
        self.seen: set[Cell] = set()  # read by ordinary instructions since the last fence
        self.open: list[tuple[o.Wgmma, Event]] = []
        self.flight: list[tuple[str, set[Cell], set[Cell]]] = []  # group, accumulators, A fragments
        for use in walked.events:
            if use.op is None:
                self.edge(use.event)
            else:
                self.op(use, use.op)

    def say(self, rule: str, op: str | None, message: str) -> None:
        self.found.setdefault((rule, op), message)

    def cells(self, event: Event, *refs: Ref) -> set[Cell]:
        return set(cells(event, refs, self.values))

    def busy(self) -> tuple[set[Cell], set[Cell]]:
        """Accumulators and A fragments of everything issued and not retired."""
        d = {c for _, acc, _ in self.flight for c in acc}
        a = {c for _, _, frag in self.flight for c in frag}
        for op, event in self.open:
            d |= self.cells(event, op.d)
            a |= self.cells(event, op.a)
        return d, a

    # ---- control flow --------------------------------------------------------------------------------------------

    def edge(self, event: Event) -> None:
        self.fenced = False
        guard = event.guard
        if event.edge is Edge.ENTER and guard is not None:
            self.guard(event, guard)
        elif event.edge is not Edge.LEAVE:
            names = [g for g, _, _ in self.flight] + [op.group for op, _ in self.open]
            if names:
                kind = event.edge.value if event.edge else ""
                self.say(
                    "in-flight", None, f"group {names[0]} is in flight across an edge of the control flow ({kind})"
                )

    def guard(self, event: Event, guard: Guard) -> None:
        bodies = [r for f in (self.facts[id(op)] for op in guard.body) for r in (*f.reads, *f.writes)]
        used = {r.name for r in bodies if r.name in self.values}
        missing = sorted(used - {r.name for r in guard.touches})
        uniform = {"uni"}
        missing = [m for m in missing if self.values[m].fragment.value not in uniform]
        if missing:
            self.say("touches", guard.id, f"the guard touches {missing[0]}, which it does not declare")
        d, a = self.busy()
        if not (d or a):
            return
        for op in guard.body:
            if isinstance(op, WIDE) or op.unit in (Unit.COPY, Unit.TENSOR):
                self.say(
                    "in-flight",
                    guard.id,
                    f"a group is in flight across this guard, and {op.id} is not an op of one warp",
                )
        both = self.cells(event, *guard.touches, *bodies) & (d | a)
        if both:
            self.say("in-flight", guard.id, f"the guard touches {min(both)[0]}, which a group in flight holds")

    # ---- ops -----------------------------------------------------------------------------------------------------

    def op(self, use: Use, op: Op) -> None:
        event = use.event
        match op:
            case o.MbarWait():
                self.fenced = False
            case o.Open():
                self.fenced = True
                self.dirty -= self.cells(event, *op.regs)
                self.seen.clear()
            case o.Wgmma():
                self.issue(event, op)
            case o.Commit():
                if not self.open:
                    self.say("groups", op.id, "closes a group without products")
                    return
                d = {c for w, e in self.open for c in self.cells(e, w.d)}
                a = {c for w, e in self.open for c in self.cells(e, w.a)}
                if any(w.group != op.group for w, _ in self.open):
                    self.say("groups", op.id, f"closes products of group {self.open[0][0].group}")
                self.flight.append((op.group, d, a))
                self.open.clear()
            case o.Retire():
                at = next((k for k, g in enumerate(self.flight) if g[0] == op.group), None)
                if at is None:
                    self.say("groups", op.id, f"no group {op.group} is in flight")
                else:
                    del self.flight[: at + 1]  # groups complete in order
                    self.fenced = False  # what reads the accumulators now is not ordered before later products
            case _:
                self.ordinary(use, op)

    def issue(self, event: Event, op: o.Wgmma) -> None:
        if not self.fenced:
            self.say("open", op.id, "a branch, a wait loop or a wait for products lies since the last wgmma.fence")
        d, a = self.cells(event, op.d), self.cells(event, op.a)
        stale = (a | (set() if op.zero else d)) & self.dirty
        if stale:
            self.say("open", op.id, f"{min(stale)[0]} was written since the last wgmma.fence that names it")
        if d & self.seen:
            self.say("open", op.id, f"{min(d & self.seen)[0]} was read since the last wgmma.fence")
        if self.open and self.open[0][0].group != op.group:
            self.say("groups", op.id, f"group {self.open[0][0].group} is not closed yet")
        busy_d, busy_a = self.busy()
        if d & busy_a or a & busy_d:
            self.say("registers-in-flight", op.id, f"{min(d & busy_a | a & busy_d)[0]} is held by a group in flight")
        self.dirty -= d
        self.open.append((op, event))

    def ordinary(self, use: Use, op: Op) -> None:
        written = set(use.writes)
        touched = written | set(use.reads)
        d, a = self.busy()
        if touched & (d | a):
            self.say(
                "registers-in-flight", op.id, f"touches {min(touched & (d | a))[0]}, which a group in flight holds"
            )
        self.dirty |= written
        self.seen |= set(use.reads)


def wgmma(case: Case) -> Iterator[Finding]:
    """No group is in flight across an edge of the control flow (a guard of warp-local ops on other registers excepted);
    each issue segment starts with a fence that names the registers written since, behind what reads its accumulators;
    groups are closed and waited for; registers of a group in flight are left alone. Named in-flight, open, groups,
    registers-in-flight, touches."""
    told: set[tuple[str, str | None]] = set()
    for walked in case.registers.walks:
        if not any(isinstance(u.op, WGMMA) or u.event.guard is not None for u in walked.events):
            continue
        for (rule, op), message in _Flight(walked, case.facts).found.items():
            if (rule, op) not in told:
                told.add((rule, op))
                yield Finding(rule, f"{message}, {walked.scenario}", op)
