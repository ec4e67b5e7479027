"""Rings: what passes between roles through slots of shared memory, and stores by the copy engine.

A consumer waits for `full`, reads, releases `free`; a producer waits for `free`, fills, and `full` completes. The order
of accesses between the roles is the rule `order`; here each role's own side is checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from attngen.expr import DType, Expr, var, variables
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref
from attngen.ir.rules.case import Case, Finding
from attngen.ir.rules.touch import accesses, loaded_bytes
from attngen.ir.rules.views import Walk
from attngen.ir.schedule import Role, Tiles
from attngen.ir.walk import Edge, Event, Scenario, resolved, tiles_of, value

Slot = tuple[str, int]  # ring and slot


def ranges(case: Case) -> Iterator[Finding]:
    """All roles of a ring see the same number of tiles, a tile taken before the loop exists, and the phases of an
    unrolled loop are the same in every round."""
    ends: dict[Expr, str] = {}
    for role in case.kernel.roles:
        for loop in tiles_of(role):
            last = resolved(loop.ranges[-1].end, role.item.lets)
            ends.setdefault(last, role.name)
            if "w" in variables(last) and (case.kernel.rings or case.kernel.orders):
                yield Finding("trip-count", f"the number of tiles of role {role.name} depends on the warpgroup")
            if loop.start and not _at_least(last, loop.start):
                yield Finding(
                    "trip-count", f"role {role.name} takes {loop.start} tiles before its loop; an item may have fewer"
                )
            yield from _phases(role, loop)
    if len(ends) > 1 and (case.kernel.rings or case.kernel.orders):
        yield Finding("trip-count", f"roles {' and '.join(ends.values())} do not run over the same number of tiles")


def _at_least(e: Expr, least: int) -> bool:
    if e.op is ExprOp.CONST and e.dtype is DType.I32 and e.value is not None:
        return e.value >= least
    return e.op is ExprOp.MAX and any(_at_least(a, least) for a in e.args)


def _phases(role: Role, loop: Tiles) -> Iterator[Finding]:
    t = var(loop.var, DType.I32)
    for s in loop.phase:
        for at in range(loop.start, loop.start + 2 * loop.unroll):
            one, next_round = value(s.value, {t: at}), value(s.value, {t: at + loop.unroll})
            if one is None or one != next_round:
                yield Finding("phase", f"role {role.name}: {s.target} is not the same every {loop.unroll} steps")
                break


# ---- one side of a ring ------------------------------------------------------------------------------------------


@dataclass
class _Fill:
    wait: str
    expected: int | None = None
    bytes: int = 0
    copied: str = ""  # an op by which each thread copies chunks of its own


@dataclass
class _Side:
    """A role part with the slots it holds."""

    case: Case
    walked: Walk[Event]
    held: dict[Slot, str] = field(default_factory=dict)
    filling: dict[Slot, _Fill] = field(default_factory=dict)
    readers: dict[Slot, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))  # slot -> group -> op
    groups: list[str] = field(default_factory=list)
    bulk: list[set[Slot]] = field(default_factory=lambda: [set()])
    turns: set[str] = field(default_factory=set)
    found: dict[tuple[str, str | None], str] = field(default_factory=dict)

    def say(self, rule: str, op: str | None, message: str) -> None:
        self.found.setdefault((rule, op), message)

    def slot(self, event: Event, bar: Ref) -> Slot:
        index = event.index(bar)
        return bar.name.partition(".")[0], (index[0] or 0) if index else 0

    def run(self) -> dict[tuple[str, str | None], str]:
        for event in self.walked.events:
            if event.op is not None:
                self.op(event, event.op)
            elif event.edge in (Edge.ITEM, Edge.EXIT):
                self.boundary()
        return self.found

    def boundary(self) -> None:
        for (ring, slot), wait in self.held.items():
            self.say("release", wait, f"slot {slot} of {ring} is not released before the item ends")
        for (ring, slot), fill in self.filling.items():
            self.say("fill", fill.wait, f"slot {slot} of {ring} is claimed, and not filled before the item ends")
        for ring in self.turns:
            self.say("order-ring", None, f"the turn in {ring} is kept across the end of an item")
        self.held.clear()
        self.filling.clear()
        self.turns.clear()

    def op(self, event: Event, op: Op) -> None:
        match op:
            case o.MbarWait() | o.MbarArrive() | o.MbarExpect() if op.bar.name.partition(".")[0] in self.case.rings:
                self.barrier(event, op)
            case o.Enter() | o.Leave():
                inside = op.ring in self.turns
                if isinstance(op, o.Enter) is inside:
                    self.say("order-ring", op.id, f"{'enters' if inside else 'leaves'} {op.ring} twice")
                (self.turns.discard if inside else self.turns.add)(op.ring)
            case o.Retire():
                if op.group in self.groups:
                    done = self.groups[: self.groups.index(op.group) + 1]
                    del self.groups[: len(done)]
                    for users in self.readers.values():
                        for group in done:
                            users.pop(group, None)
            case o.Commit():
                self.groups.append(op.group)
            case o.BulkCommit():
                self.bulk.append(set())
            case o.BulkRetire():
                keep = len(self.bulk) - 1 - op.pending
                self.bulk = self.bulk[max(keep, 0) :]
            case _:
                self.data(event, op)

    def barrier(self, event: Event, op: o.MbarWait | o.MbarArrive | o.MbarExpect) -> None:
        at, full = self.slot(event, op.bar), op.bar.name.endswith(".full")
        ring = self.case.rings[at[0]]
        if isinstance(op, o.MbarWait) and full:
            if at in self.held:
                self.say("release", op.id, f"slot {at[1]} of {at[0]} is waited for again and was not released")
            self.held[at] = op.id
        elif isinstance(op, o.MbarWait):
            if at in self.filling:
                self.say("fill", op.id, f"slot {at[1]} of {at[0]} is claimed again and was not filled")
            self.filling[at] = _Fill(op.id)
        elif isinstance(op, o.MbarExpect):
            if at not in self.filling:
                self.say("fill", op.id, f"slot {at[1]} of {at[0]} is filled without a wait for `free`")
            if op.bytes != ring.full_bytes:
                self.say("bytes", op.id, f"expects {op.bytes} bytes; ring {ring.name} counts {ring.full_bytes}")
            self.filling.setdefault(at, _Fill(op.id)).expected = op.bytes
        elif full:
            fill = self.filling.pop(at, None)
            if fill is None:
                self.say("fill", op.id, f"slot {at[1]} of {at[0]} is handed over without a wait for `free`")
            elif fill.copied and not (self.walked.role.single or (isinstance(op, o.MbarArrive) and op.each_thread)):
                message = f"hands over what each thread copied in {fill.copied}: each of them has to arrive"
                self.say("fill", op.id, message)
        else:
            self.release(op, at)

    def release(self, op: Op, at: Slot) -> None:
        if at not in self.held:
            self.say("release", op.id, f"slot {at[1]} of {at[0]} is released and was not waited for")
        self.held.pop(at, None)
        for group, reader in self.readers[at].items():
            self.say("release", op.id, f"slot {at[1]} of {at[0]} is released while {reader} of group {group} reads it")
        if any(at in stores for stores in self.bulk):
            self.say("release", op.id, f"slot {at[1]} of {at[0]} is released while a store reads it")

    def data(self, event: Event, op: Op) -> None:
        for ref, _, write, unit in accesses(op, self.case):
            ring = next((r for r in self.case.kernel.rings if ref.name in r.buffers), None)
            if ring is None:
                continue
            at = (ring.name, self.case.slot(event, ref)[0] if ring.slots > 1 else 0)
            if not write:
                if at not in self.held:
                    self.say(
                        "ring-read", op.id, f"reads {ref.name} outside of a wait for {ring.name}.full and its release"
                    )
                if isinstance(op, o.Wgmma):
                    self.readers[at][op.group] = op.id
                if unit == "bulk":
                    self.bulk[-1].add(at)
            elif at in self.held and isinstance(op, o.StFrag):
                continue  # a consumer may use a slot as scratch until it hands it back
            elif at not in self.filling:
                self.say(
                    "fill", op.id, f"writes {ref.name} outside of a wait for {ring.name}.free and the handing over"
                )
            elif isinstance(op, o.TmaLoad | o.BulkLoad):
                self.load(event, op, at)
            elif isinstance(op, o.CpAsync | o.CpVector | o.CopyTile):
                self.filling[at].copied = op.id

    def load(self, event: Event, op: o.TmaLoad | o.BulkLoad, at: Slot) -> None:
        fill = self.filling[at]
        if self.slot(event, op.bar) != at or not op.bar.name.endswith(".full"):
            self.say("fill", op.id, f"completes {op.bar.name}, which is not the barrier of what it writes")
        if fill.expected is None:
            self.say("fill", op.id, "is issued before its barrier expects bytes")
            return
        fill.bytes += loaded_bytes(op, self.case)
        if fill.bytes > fill.expected:
            self.say("bytes", op.id, f"brings the {fill.bytes}th byte of a phase of {fill.expected}")
        elif fill.bytes == fill.expected:
            del self.filling[at]


def _count(op: o.MbarArrive | o.MbarExpect, role: Role) -> int:
    """Arrivals of one part of a role by one op."""
    if isinstance(op, o.MbarExpect) or role.single:
        return 1
    warps = role.warps // role.split
    return 32 * warps if op.each_thread else warps


def _arrivals(case: Case, scenario: Scenario, walks: tuple[Walk[Event], ...]) -> Iterator[tuple[str, str]]:
    """A phase takes the arrivals of all who use a slot, counted once a use."""
    counts: Counter[tuple[str, int]] = Counter()
    uses: dict[tuple[str, int], int] = defaultdict(int)
    for walked in walks:
        side = _Side(case, walked)
        own: Counter[tuple[str, int]] = Counter()
        for event in walked.events:
            op = event.op
            if isinstance(op, o.MbarArrive | o.MbarExpect) and op.bar.name.partition(".")[0] in case.rings:
                counts[op.bar.name, side.slot(event, op.bar)[1]] += _count(op, walked.role)
            elif isinstance(op, o.MbarWait) and op.bar.name.endswith(".free"):
                own[side.slot(event, op.bar)] += 1
        for at, number in own.items():
            uses[at] = max(uses[at], number)
    for ring in case.kernel.rings:
        for slot in range(ring.slots):
            for name, count in ((f"{ring.name}.full", ring.full_arrivals), (f"{ring.name}.free", ring.free_arrivals)):
                used, got = uses[ring.name, slot], counts[name, slot]
                if got != used * count:
                    message = f"{name}[{slot}] gets {got} arrivals in {used} uses, and counts {count} a use"
                    yield name, f"{message}, {scenario}"


def protocol(case: Case) -> Iterator[Finding]:
    """Each use of a slot: wait for `full`, reads, one release after the last reader has retired; wait for `free`, as
    many bytes as the barrier expects. Named ring-read, release, fill, bytes, arrivals, order-ring."""
    if not (case.kernel.rings or case.kernel.orders):
        return
    told: set[tuple[str, str | None]] = set()
    for walked in case.memory.walks:
        for key, message in _Side(case, walked).run().items():
            if key not in told:
                told.add(key)
                yield Finding(key[0], f"{message}, {walked.scenario}", key[1])
    for ring in case.kernel.rings:
        carried = sum(case.buffers[b].layout.bytes for b in ring.buffers)
        if ring.full_bytes not in (0, carried):
            yield Finding(
                "bytes", f"ring {ring.name} counts {ring.full_bytes} bytes; its buffers hold {carried} a slot"
            )
    for scenario, walks in case.memory.scenarios.items():
        for name, message in _arrivals(case, scenario, walks):
            if ("arrivals", name) not in told:
                told.add(("arrivals", name))
                yield Finding("arrivals", message)


def bulk(case: Case) -> Iterator[Finding]:
    """A store by the copy engine reads its tile later: the tile stays as it is until the group is retired, and the CTA
    does not end before."""
    told: set[tuple[str, str | None]] = set()
    for walked in case.memory.walks:
        waiting: list[tuple[str, int, Op]] = []
        groups: list[list[tuple[str, int, Op]]] = []
        found: list[tuple[str, str]] = []
        for event in walked.events:
            op = event.op
            if isinstance(op, o.TmaStore | o.TmaReduce):
                waiting.append((op.src.name, case.slot(event, op.src)[0], op))
            elif isinstance(op, o.BulkCommit):
                if not waiting:
                    found.append((op.id, "closes a group without stores"))
                groups.append(waiting)
                waiting = []
            elif isinstance(op, o.BulkRetire):
                groups = groups[max(len(groups) - op.pending, 0) :]
            elif isinstance(op, o.StFrag) and op.dst.name in case.buffers:
                at = (op.dst.name, case.slot(event, op.dst)[0])
                found += [
                    (op.id, f"overwrites {at[0]}, which {s[2].id} may still read")
                    for g in (*groups, waiting)
                    for s in g
                    if s[:2] == at
                ]
        found += [(s[2].id, "is in no group: nothing waits for it") for s in waiting]
        found += [(s[2].id, "is not waited for before the CTA ends") for g in groups for s in g]
        for name, message in found:
            if ("bulk", name) not in told:
                told.add(("bulk", name))
                yield Finding("bulk", f"{message}, {walked.scenario}", name)
