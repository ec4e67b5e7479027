"""A machine that executes the order of a kernel: what waits for what, and which accesses to shared memory are ordered.

Each part of a role runs as two agents (its elected warp and the others), so that data of other warps are told from a
warp's own. Agents carry vector clocks: barriers join them, asynchronous copies and products have clock entries of their
own, which advance where the program waits for them. An access is ordered after an earlier one iff the agent's clock has
reached the tick of the earlier one; this holds for every interleaving, not only for the one executed. A second clock
advances at proxy fences alone: it says which ordinary writes the asynchronous units can see."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from attngen.errors import VerifyError
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref
from attngen.ir.rules.case import Case
from attngen.ir.rules.touch import Key, Touch, accesses, loaded_bytes, overlaps, streamed
from attngen.ir.rules.views import Walk
from attngen.ir.schedule import Role
from attngen.ir.walk import Event, Scenario

Clock = dict[str, int]


@dataclass(frozen=True)
class Act:
    """An op that an agent executes, and when."""

    op: Op
    event: Event
    item: int
    step: int


@dataclass
class Agent:
    name: str
    role: Role
    warpgroup: int
    elected: bool
    warps: int
    acts: tuple[Act, ...]
    at: int = 0
    clock: Clock = field(default_factory=dict)
    seen: Clock = field(default_factory=dict)  # what the asynchronous proxy can see of others' ordinary writes
    arrived: bool = False  # at the barrier it stands at
    generation: int = 0
    waits: Counter[tuple[str, int]] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)  # groups closed, by unit: cp, bulk, wgmma
    numbers: dict[str, int] = field(default_factory=dict)  # wgmma group -> its number
    entered: Counter[str] = field(default_factory=Counter)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def join(self, clock: Clock, seen: Clock) -> None:
        _advance(self.clock, clock)
        _advance(self.seen, seen)


@dataclass
class Barrier:
    """A named barrier, the CTA barrier, or one direction of an order ring."""

    threads: int = 0
    generation: int = 0
    clock: Clock = field(default_factory=dict)
    seen: Clock = field(default_factory=dict)

    def add(self, agent: Agent) -> None:
        self.threads += agent.threads
        _advance(self.clock, agent.clock)
        _advance(self.seen, agent.seen)


@dataclass
class Mbarrier:
    count: int
    arrivals: int = 0
    bytes: int = 0
    phase: Barrier = field(default_factory=Barrier)
    loads: list[str] = field(default_factory=list)
    done: list[Barrier] = field(default_factory=list)


@dataclass(frozen=True)
class Access:
    tick: int
    op: str
    touch: Touch
    part: int | None
    generic: bool


ELECTED = (o.MbarExpect, o.TmaLoad, o.TmaStore, o.TmaReduce, o.BulkLoad, o.BulkCommit, o.BulkRetire)


class Machine:
    def __init__(self, case: Case, scenario: Scenario, walks: tuple[Walk[Event], ...]) -> None:
        self.case, self.kernel, self.scenario, self.walks = case, case.kernel, scenario, walks
        self.found: dict[tuple[str, str | None], VerifyError] = {}
        self.agents = list(self._agents())
        self.history: dict[Key, dict[tuple[str, bool, Touch, int | None], Access]] = defaultdict(dict)
        self.content: dict[Key, tuple[str, int, int] | None] = {}
        self.consumed: dict[tuple[str, str, Key], tuple[int, int, object]] = {}
        self.barriers: dict[tuple[str, int], Barrier] = defaultdict(Barrier)
        self.mbarriers: dict[tuple[str, int], Mbarrier] = {}
        self.grants: dict[tuple[str, int], list[Barrier]] = {
            (r.name, k): [] for r in self.kernel.orders for k in range(r.members)
        }
        for ring in self.kernel.orders:
            self.grants[ring.name, 0].append(Barrier(generation=1))
        self.overlaps = overlaps(self.kernel)
        self.streamed = streamed(self.kernel)

    def _agents(self) -> Iterator[Agent]:
        alone = sum(1 if r.single else r.split * min(2, r.warps // r.split) for r in self.kernel.roles) == 1
        for walked in self.walks:
            role, w = walked.role, walked.warpgroup
            acts = tuple(Act(e.op, e, s.item, s.step) for s in walked.stretches for e in s.events if e.op is not None)
            warps = 1 if role.single else role.warps // role.split
            name = f"{role.name}[{w}]" if role.split > 1 else role.name
            yield Agent(name, role, w, True, 1, acts)
            if warps > 1 or alone:
                # lanes of one warp need a barrier between them, too: a lone warp is two agents
                yield Agent(f"{name}'", role, w, False, max(warps - 1, 1), acts)

    # ---- running -----------------------------------------------------------------------------------------------

    def run(self) -> list[VerifyError]:
        moved = True
        while moved:
            moved = False
            for agent in self.agents:
                while agent.at < len(agent.acts) and self.step(agent, agent.acts[agent.at]):
                    agent.at += 1
                    agent.arrived = False
                    moved = True
        stuck = [a for a in self.agents if a.at < len(a.acts)]
        if stuck:
            places = ", ".join(f"{a.name} at {_id(a.acts[a.at].op)}" for a in stuck)
            self.report("deadlock", stuck[0].acts[stuck[0].at].op, f"nothing can go on: {places} wait for ever")
        else:
            self.finish()
        return list(self.found.values())

    def report(self, rule: str, op: Op | None, message: str) -> None:
        key = (rule, _id(op))
        if key not in self.found:
            self.found[key] = VerifyError(rule, f"{message}, {self.scenario}", _id(op))

    def step(self, agent: Agent, act: Act) -> bool:
        """Executes one op; False: it has to wait."""
        op, event = act.op, act.event
        if isinstance(op, ELECTED) and not agent.elected:
            return True
        match op:
            case o.CtaSync():
                return self.barrier(agent, op, ("cta", 0), sum(a.threads for a in self.agents))
            case o.Sync():
                return self.barrier(agent, op, (op.bar.name, _first(event, op.bar)), op.threads)
            case o.Enter():
                return self.enter(agent, op)
            case o.Leave():
                self.leave(agent, op)
            case o.MbarWait():
                return self.mbar_wait(agent, op, event)
            case o.MbarArrive():
                count = 1 if agent.role.single else agent.threads if op.each_thread else agent.warps
                self.arrive(agent, op, self.mbarrier(event, op.bar), count, 0)
            case o.MbarExpect():
                self.arrive(agent, op, self.mbarrier(event, op.bar), 1, op.bytes)
            case o.Proxy():
                # a thread's fence speaks for its own writes and for its own copies that it has waited for
                agent.seen[agent.name] = agent.tick()
                copies = f"cp {agent.name}"
                agent.seen[copies] = agent.clock.get(copies, 0)
            case o.CpCommit():
                agent.committed["cp"] += 1
            case o.CpWait():
                _reach(agent.clock, f"cp {agent.name}", agent.committed["cp"] - op.pending)
            case o.BulkCommit():
                agent.committed["bulk"] += 1
            case o.BulkRetire():
                for clock in (agent.clock, agent.seen):
                    _reach(clock, f"bulk {agent.name}", agent.committed["bulk"] - op.pending)
            case o.Commit():
                agent.committed["wgmma"] += 1
                agent.numbers[op.group] = agent.committed["wgmma"]
            case o.Retire():
                for clock in (agent.clock, agent.seen):
                    _reach(clock, f"wgmma {agent.name}", agent.numbers.get(op.group, 0))
            case _:
                self.data(agent, act)
        return True

    def barrier(self, agent: Agent, op: Op, key: tuple[str, int], threads: int) -> bool:
        gate = self.barriers[key]
        if not agent.arrived:
            agent.arrived, agent.generation = True, gate.generation
            gate.add(agent)
            if gate.threads > threads:
                self.report("barrier-count", op, f"{gate.threads} threads arrive at a barrier of {threads}")
            if gate.threads >= threads:
                done = Barrier(generation=gate.generation + 1)
                for other in self.agents:
                    if other.arrived and other.generation == gate.generation and self.standing(other) == key:
                        other.join(gate.clock, gate.seen)
                self.barriers[key] = gate = done
        return gate.generation > agent.generation

    def standing(self, agent: Agent) -> tuple[str, int] | None:
        act = agent.acts[agent.at]
        if isinstance(act.op, o.Sync):
            return act.op.bar.name, _first(act.event, act.op.bar)
        return ("cta", 0) if isinstance(act.op, o.CtaSync) else None

    # ---- order rings ---------------------------------------------------------------------------------------------

    def enter(self, agent: Agent, op: o.Enter) -> bool:
        grants = self.grants.get((op.ring, agent.warpgroup), [])
        number = agent.entered[op.ring]
        if number >= len(grants) or not grants[number].generation:
            return False
        agent.join(grants[number].clock, grants[number].seen)
        agent.entered[op.ring] += 1
        return True

    def leave(self, agent: Agent, op: o.Leave) -> None:
        ring = next((r for r in self.kernel.orders if r.name == op.ring), None)
        if ring is None:
            return
        member = (agent.warpgroup + 1) % ring.members
        grants = self.grants[ring.name, member]
        if not grants or grants[-1].generation:
            grants.append(Barrier())
        grants[-1].add(agent)
        if grants[-1].threads >= agent.role.warps // agent.role.split * 32:
            grants[-1].generation = 1
        waiting = min(a.entered[ring.name] for a in self.agents if a.role is agent.role and a.warpgroup == member)
        if len(grants) - waiting > 1:
            self.report("order-ring", op, f"the turn in {ring.name} is handed on twice before it is taken")

    # ---- mbarriers -----------------------------------------------------------------------------------------------

    def mbarrier(self, event: Event, ref: Ref) -> Mbarrier:
        name, _, side = ref.name.partition(".")
        ring = self.case.rings[name]
        key = (ref.name, _first(event, ref))
        if key not in self.mbarriers:
            self.mbarriers[key] = Mbarrier(ring.full_arrivals if side == "full" else ring.free_arrivals)
        return self.mbarriers[key]

    def arrive(self, agent: Agent, op: Op, bar: Mbarrier, arrivals: int, size: int) -> None:
        agent.tick()
        bar.arrivals += arrivals
        bar.bytes += size
        bar.phase.add(agent)
        if bar.arrivals > bar.count:
            self.report("arrivals", op, f"{bar.arrivals} arrivals in a phase that counts {bar.count}")
        self.complete(bar)

    def complete(self, bar: Mbarrier) -> None:
        if bar.arrivals >= bar.count and bar.bytes == 0:
            for load in bar.loads:
                bar.phase.clock[load] = bar.phase.seen[load] = len(bar.done) + 1
            bar.done.append(bar.phase)
            bar.phase, bar.arrivals, bar.loads = Barrier(), 0, []

    def mbar_wait(self, agent: Agent, op: o.MbarWait, event: Event) -> bool:
        """The n-th wait for `full` is for its n-th phase; a fresh `free` barrier counts as one phase already over."""
        key = (op.bar.name, _first(event, op.bar))
        bar = self.mbarrier(event, op.bar)
        needed = agent.waits[key] + (0 if op.bar.name.endswith(".free") else 1)
        if len(bar.done) < needed:
            return False
        if len(bar.done) > needed:
            self.report(
                "parity", op, f"{op.bar.name} is a phase ahead of this wait: parity cannot tell, it waits for ever"
            )
        agent.waits[key] += 1
        if needed:
            agent.join(bar.done[needed - 1].clock, bar.done[needed - 1].seen)
        return True

    # ---- data ----------------------------------------------------------------------------------------------------

    def data(self, agent: Agent, act: Act) -> None:
        op, event = act.op, act.event
        for ref, touch, write, unit in accesses(op, self.case):
            if ref.name in self.case.buffers:
                slot, part = self.case.slot(event, ref)
            else:
                slot, part = 0, None
            who, tick = agent.name, 0
            match unit:
                case "":
                    tick = agent.tick()
                case "tma":
                    bar_ref = op.bar  # type: ignore[attr-defined]
                    bar = self.mbarrier(event, bar_ref)
                    who, tick = f"tma {bar_ref.name} {_first(event, bar_ref)}", len(bar.done) + 1
                case _:
                    who, tick = f"{unit} {agent.name}", agent.committed[unit] + 1
            access = Access(tick, op.id, touch, part, generic=write and unit in ("", "cp"))
            self.access(agent, act, (ref.name, slot), who, access, write, asynchronous=unit not in ("", "cp"))
            if unit == "tma":
                bar.loads.append(who)
                bar.bytes -= loaded_bytes(op, self.case)
                self.complete(bar)

    def access(
        self, agent: Agent, act: Act, key: Key, who: str, new: Access, write: bool, asynchronous: bool
    ) -> None:
        op = act.op
        for other in (key, *self.overlaps.get(key, ())):
            for (name, wrote, touch, part), old in self.history[other].items():
                if not (write or wrote) or (other == key and _apart(old, new, name, who, part, touch)):
                    continue
                if agent.clock.get(name, 0) < old.tick:
                    what = f"{'writes' if write else 'reads'} {key[0]}, which {old.op} {'writes' if wrote else 'reads'}"
                    self.report("race", op, f"{what} with nothing that orders the two ({agent.name} after {name})")
                elif wrote and old.generic and asynchronous and not write and agent.seen.get(name, 0) < old.tick:
                    self.report(
                        "proxy", op, f"reads {key[0]} asynchronously; no proxy fence follows the write {old.op}"
                    )
        self.history[key][who, write, new.touch, new.part] = new
        now = (op.id, act.item, act.step)
        if write:
            self.content[key] = now
            self.content.update(dict.fromkeys(self.overlaps.get(key, ())))
        else:
            self.consume(agent, act, key)

    def consume(self, agent: Agent, act: Act, key: Key) -> None:
        if self.content.get(key) is None:
            reason = (
                f"{key[0]} is overwritten by a buffer at the same place"
                if key in self.content
                else f"{key[0]} was never written"
            )
            self.report("shared-read", act.op, reason)
        elif key[0] in self.streamed:
            reader = (agent.name, act.op.id, key)
            item, step, content = self.consumed.get(reader, (-1, -1, None))
            if item == act.item and step != act.step and content == self.content[key]:
                self.report("stale", act.op, f"{key[0]} still holds the tile of an earlier step")
            self.consumed[reader] = (act.item, act.step, self.content[key])

    def finish(self) -> None:
        for (name, slot), bar in self.mbarriers.items():
            if bar.arrivals or bar.bytes:
                self.report(
                    "ring-balance", None, f"{name}[{slot}] ends in the middle of a phase: {bar.arrivals} of {bar.count}"
                )
        for key, gate in self.barriers.items():
            if gate.threads:
                self.report("barrier-count", None, f"barrier {key[0]} is left with {gate.threads} threads arrived")
        for ring in self.kernel.orders:
            for a in self.agents:
                if a.entered[ring.name]:
                    left = len(self.grants[ring.name, a.warpgroup]) - a.entered[ring.name]
                    if left != int(a.warpgroup == 0):
                        self.report("order-ring", None, f"{ring.name}: {left} turns are left over for {a.name}")


def order(case: Case) -> Iterator[VerifyError]:
    """Shared memory is written and read in one order whatever the timing; every wait ends; counts of barriers are
    right.

    Named by what is wrong: race, proxy, shared-read, stale, deadlock, parity, arrivals, ring-balance, barrier-count,
    order-ring. The first scenario that shows a fault tells of it."""
    seen: set[tuple[str, str | None]] = set()
    for scenario, walks in case.memory.scenarios.items():
        for found in Machine(case, scenario, walks).run():
            if (found.rule, found.op) not in seen:
                seen.add((found.rule, found.op))
                yield found


# ---- tables ------------------------------------------------------------------------------------------------------


def _id(op: Op | None) -> str | None:
    return None if op is None else op.id


def _first(event: Event, ref: Ref) -> int:
    index = event.index(ref)
    return (index[0] or 0) if index else 0


def _advance(clock: Clock, other: Clock) -> None:
    for key, tick in other.items():
        if clock.get(key, 0) < tick:
            clock[key] = tick


def _reach(clock: Clock, unit: str, number: int) -> None:
    _advance(clock, {unit: number})


def _apart(old: Access, new: Access, name: str, who: str, part: int | None, touch: Touch) -> bool:
    """Two accesses of one tile that cannot meet: other blocks of rows, or every warp its own part."""
    if None not in (part, new.part) and part != new.part:
        return True
    return touch is new.touch and touch is not Touch.ALL and name != who
