"""Event simulation of one SM: in-order streams, tensor cores that serve one product after the other, units that streams
share (`attngen.model.units`), barriers, rings, and the copy engine.

Between two events all speeds are constant. Barriers carry the time at which they complete, so a wait that is over costs
no event."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from attngen.errors import PassError
from attngen.ir.schedule import Kernel
from attngen.model.actions import Action, Does, Stream
from attngen.model.rates import Rates
from attngen.model.units import UNITS, Running, Units

_NEVER = math.inf


@dataclass(frozen=True)
class Span:
    """An op on a unit: `lane` is the part of the role that issued it."""

    lane: str
    unit: str
    op: str
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """What a simulation saw. `starts[s]`: when stream s began; `steps[s][k]`: its k-th step; `ends[s][i]`: when it left
    item i. At each step of the first mathematical stream, all up to then: `busy`, cycles of each unit; `blocked`, those
    that the stream waited for others."""

    starts: tuple[float, ...]
    steps: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    spans: tuple[Span, ...]
    busy: dict[str, tuple[float, ...]]
    blocked: tuple[float, ...]


@dataclass
class _Barrier:
    """An mbarrier. `done[k]`: when phase k completed."""

    arrivals: int
    done: list[float] = field(default_factory=list)
    arrived: float = 0
    expected: float = 0
    latest: float = 0.0
    waiting: list[tuple[_State, int]] = field(default_factory=list)


@dataclass
class _Product:
    state: _State
    action: Action
    left: float
    started: float = -1.0


@dataclass
class _State:
    """A stream in motion. `clock`: its own time, at or after the time of the simulation."""

    stream: Stream
    index: int
    clock: float
    at: int = 0
    issuing: _Product | None = None
    retiring: str = ""
    blocked: float = 0.0
    stopped: float = -1.0  # since when it waits for others
    waits: dict[tuple[object, ...], int] = field(default_factory=dict)
    flying: dict[str, int] = field(default_factory=dict)
    landed: dict[str, float] = field(default_factory=dict)
    copies: float = 0.0
    groups: list[float] = field(default_factory=list)
    stored: float = 0.0
    steps: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)  # blocked time at each step

    @property
    def finished(self) -> bool:
        return self.at >= len(self.stream.actions)


class Simulation:
    def __init__(self, kernel: Kernel, streams: tuple[Stream, ...], rates: Rates, offset: float, watch: range) -> None:
        """`offset`: by how much each further CTA starts later. `watch`: the steps whose spans are kept."""
        self.kernel, self.rates, self.watch = kernel, rates, watch
        self.states = [_State(s, k, s.cta * offset) for k, s in enumerate(streams)]
        self.units = Units(rates)
        self.now = 0.0
        self.barriers: dict[tuple[object, ...], _Barrier] = {}
        self.turns: dict[tuple[object, ...], tuple[int, float]] = {}  # whose turn, and since when
        self.turned: dict[tuple[object, ...], _State] = {}
        self.syncs: dict[tuple[object, ...], tuple[float, float, list[_State]]] = {}
        self.products: deque[_Product] = deque()
        self.engine = 0.0  # until when the copy engine is busy
        self.allowed = -rates.copy_credit / rates.copy_bandwidth  # until when L2 has been used up
        self.timers: list[_State] = []
        self.running: list[Running] = []
        self.whose: dict[int, _State] = {}  # who computes, by the identity of what runs
        self.spans: list[Span] = []
        self.marks: dict[str, list[float]] = {u: [] for u in UNITS}
        self.watched = next(k for k, s in enumerate(self.states) if s.stream.mathematical)
        self.does: dict[Does, Callable[[_State, Action], bool]] = {
            Does.COMPUTE: self.compute, Does.PRODUCT: self.product, Does.RETIRE: self.retire, Does.WAIT: self.wait,
            Does.ARRIVE: self.arrive, Does.EXPECT: self.expect, Does.LOAD: self.load, Does.ENTER: self.enter,
            Does.LEAVE: self.leave, Does.SYNC: self.sync, Does.COPY: self.copy, Does.COPY_COMMIT: self.copy_commit,
            Does.COPY_WAIT: self.copy_wait, Does.STORE: self.store, Does.STORE_WAIT: self.store_wait,
            Does.PASS: self.pass_, Does.STEP: self.step, Does.END: self.end,
        }  # fmt: skip

    def run(self) -> Run:
        starts = [s.clock for s in self.states]
        for state in self.states:
            self.go(state)
        while self.timers or self.running or self.products:
            self.advance()
        stuck = [s.stream.lane for s in self.states if not s.finished]
        if stuck:
            raise PassError(f"model: {', '.join(stuck)} of kernel {self.kernel.name} wait for each other for ever")
        return Run(
            starts=tuple(starts),
            steps=tuple(tuple(s.steps) for s in self.states),
            ends=tuple(tuple(s.ends) for s in self.states),
            spans=tuple(self.spans),
            busy={u: tuple(m) for u, m in self.marks.items()},
            blocked=tuple(self.states[self.watched].marks),
        )

    # ---- time ----------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """To the next event, at the speeds that hold until then."""
        products, running = self.products, self.running
        speed = self.units.share(running, bool(products))
        step = min((s.clock for s in self.timers), default=_NEVER) - self.now
        for r in running:
            step = min(step, r.left / r.speed)
        if products:
            head = products[0]
            threshold = self.threshold(head)
            left = head.left - threshold if head.state.issuing is head and head.left > threshold else head.left
            step = min(step, left / speed)
        step = max(step, 0.0)
        self.units.account(running, step, bool(products), speed)
        self.now += step
        for r in running:
            r.left -= step * r.speed
        if products:
            self.progress(step * speed)
        done = [r for r in running if r.left <= 1e-9]
        if done:
            self.running = [r for r in running if r.left > 1e-9]
        due = [s for s in self.timers if s.clock <= self.now + 1e-9]
        if due:
            self.timers = [s for s in self.timers if s.clock > self.now + 1e-9]
        for r in done:
            self.finish(self.whose.pop(id(r)), r)
        for s in due:
            s.clock = self.now
            self.go(s)

    # ---- products ------------------------------------------------------------------------------------------------

    def threshold(self, p: _Product) -> float:
        assert p.action.product is not None
        return self.rates.product_queue * p.action.product.step

    def progress(self, cycles: float) -> None:
        head = self.products[0]
        if head.started < 0:
            head.started = self.now - cycles
        head.left -= cycles
        state = head.state
        if state.issuing is head and head.left <= self.threshold(head) + 1e-9:
            state.issuing = None
            state.clock = self.now
            self.timers.append(state)
        if head.left > 1e-9:
            return
        self.products.popleft()
        if self.products:
            # a scheduler keeps to the warp that issued last, as long as it can issue; then the oldest goes on
            following = next((p for p in self.products if p.state is state), self.products[0])
            if following is not self.products[0]:
                self.products.remove(following)
                self.products.appendleft(following)
            following.started = self.now
            self.unblock(following.state)
        group = head.action.group
        state.flying[group] -= 1
        state.landed[group] = self.now
        self.span(state, "tensor", head.action.op, head.started, self.now)
        if state.retiring == group and not state.flying[group]:
            state.retiring = ""
            state.clock = max(state.clock, self.now + self.rates.product_latency)
            self.timers.append(state)

    # ---- streams -------------------------------------------------------------------------------------------------

    def go(self, state: _State) -> None:
        """Runs a stream until it computes or waits. An action says whether the stream goes on."""
        actions = state.stream.actions
        while state.at < len(actions):
            action = actions[state.at]
            # what takes a unit begins at the time of the simulation, not before
            if state.clock > self.now + 1e-9 and action.does in (Does.COMPUTE, Does.PRODUCT, Does.STEP):
                self.timers.append(state)
                return
            state.at += 1
            if not self.does[action.does](state, action):
                return

    def finish(self, state: _State, running: Running) -> None:
        self.span(state, "compute", state.stream.actions[state.at - 1].op, running.began, self.now)
        state.clock = self.now
        self.go(state)

    def unblock(self, state: _State) -> None:
        if state.stopped >= 0:
            state.blocked += max(0.0, max(state.clock, self.now) - state.stopped)
            state.stopped = -1.0

    def resume(self, state: _State, at: float, cost: float) -> None:
        waited = state.clock
        state.clock = max(state.clock, at)
        state.blocked += state.clock - waited
        if state.clock - waited > 1:
            self.span(state, "wait", state.stream.actions[state.at - 1].op, waited, state.clock)
        state.clock += cost
        self.go(state)

    def span(self, state: _State, unit: str, op: str, start: float, end: float) -> None:
        if state.steps and len(state.steps) - 1 in self.watch and not state.ends and state.stream.cta == 0:
            self.spans.append(Span(state.stream.lane, unit, op, start, end))

    # ---- actions -------------------------------------------------------------------------------------------------

    def compute(self, state: _State, action: Action) -> bool:
        assert action.burst is not None
        running = Running(action.burst, state.stream.fill, self.now)
        self.running.append(running)
        self.whose[id(running)] = state
        return False

    def product(self, state: _State, action: Action) -> bool:
        assert action.product is not None
        p = _Product(state, action, action.product.cycles)
        if not self.products:
            p.started = self.now
        self.products.append(p)
        state.flying[action.group] = state.flying.get(action.group, 0) + 1
        if len(self.products) > 1:
            state.stopped = state.clock
        if p.left <= self.threshold(p):
            return True
        state.issuing = p
        return False

    def retire(self, state: _State, action: Action) -> bool:
        if state.flying.get(action.group, 0):
            state.retiring = action.group
            return False
        landed = state.landed.get(action.group, -_NEVER)
        state.clock = max(state.clock + self.rates.issue, landed + self.rates.product_latency)
        return True

    def pass_(self, state: _State, action: Action) -> bool:
        state.clock += action.amount
        return True

    def step(self, state: _State, action: Action) -> bool:
        state.steps.append(state.clock)
        state.marks.append(state.blocked)
        if state.index == self.watched:
            for unit, mark in self.marks.items():
                mark.append(self.units.busy[unit])
        return True

    def end(self, state: _State, action: Action) -> bool:
        state.ends.append(state.clock)
        return True

    # ---- mbarriers and copies ------------------------------------------------------------------------------------

    def barrier(self, state: _State, action: Action) -> _Barrier:
        key = (state.stream.cta, *action.key, state.stream.part if action.own else -1)
        found = self.barriers.get(key)
        if found is None:
            name, _, side = str(key[1]).partition(".")
            ring = next((r for r in self.kernel.rings if r.name == name), None)
            if ring is None:
                raise PassError(f"model: {key[1]} is not a barrier of a ring of {self.kernel.name}")
            found = self.barriers[key] = _Barrier(ring.free_arrivals if side == "free" else ring.full_arrivals)
            if side == "free":
                found.done.append(0.0)  # the first wait for a free slot passes at once
        return found

    def wait(self, state: _State, action: Action) -> bool:
        bar = self.barrier(state, action)
        phase = state.waits.get(action.key, 0)
        state.waits[action.key] = phase + 1
        if phase < len(bar.done):
            waited = max(0.0, bar.done[phase] - state.clock)
            state.blocked += waited
            if waited > 1:
                self.span(state, "wait", action.op, state.clock, state.clock + waited)
            state.clock += waited + self.rates.wait
            return True
        bar.waiting.append((state, phase))
        return False

    def arrived(self, bar: _Barrier, count: float, size: float, at: float) -> None:
        bar.arrived += count
        bar.expected += size
        bar.latest = max(bar.latest, at)
        if bar.arrived < bar.arrivals or bar.expected > 0:
            return
        bar.done.append(bar.latest)
        bar.arrived, bar.expected, bar.latest = 0, 0, 0.0
        ready = [s for s, phase in bar.waiting if phase < len(bar.done)]
        bar.waiting = [(s, phase) for s, phase in bar.waiting if phase >= len(bar.done)]
        for s in ready:
            self.resume(s, bar.done[-1], self.rates.wait)

    def arrive(self, state: _State, action: Action) -> bool:
        state.clock += self.rates.issue
        self.arrived(self.barrier(state, action), action.amount, 0, state.clock + self.rates.arrive)
        return True

    def expect(self, state: _State, action: Action) -> bool:
        state.clock += self.rates.issue
        self.arrived(self.barrier(state, action), 1, action.amount, state.clock)
        return True

    def transfer(self, at: float, size: float) -> tuple[float, float]:
        """When a copy begins and ends. One after the other, each at the rate of one alone, as other SMs rarely load at
        the same moment; over some steps an SM gets its part of the bandwidth of L2."""
        rates = self.rates
        start = max(at, self.engine)
        self.engine = start + size / rates.copy_bytes
        self.allowed = max(self.allowed, at - rates.copy_credit / rates.copy_bandwidth) + size / rates.copy_bandwidth
        self.units.busy["copy"] += size / rates.copy_bandwidth
        return start, max(self.engine, self.allowed) + rates.copy_latency

    def load(self, state: _State, action: Action) -> bool:
        state.clock += self.rates.issue
        start, end = self.transfer(state.clock, action.moved)
        self.span(state, "copy", action.op, start, end)
        self.arrived(self.barrier(state, action), 0, -action.amount, end)
        return True

    def copy(self, state: _State, action: Action) -> bool:
        start, end = self.transfer(state.clock, action.moved)
        self.span(state, "copy", action.op, start, end)
        state.copies = max(state.copies, end)
        return True

    def copy_commit(self, state: _State, action: Action) -> bool:
        state.groups.append(state.copies)
        return True

    def copy_wait(self, state: _State, action: Action) -> bool:
        older = state.groups[: len(state.groups) - int(action.amount)]
        state.clock = max(state.clock, max(older, default=0.0)) + self.rates.wait
        return True

    def store(self, state: _State, action: Action) -> bool:
        state.stored = state.clock + self.rates.store_latency + action.moved / self.rates.copy_bytes
        return self.pass_(state, Action(Does.PASS, amount=self.rates.issue))

    def store_wait(self, state: _State, action: Action) -> bool:
        state.clock = max(state.clock, state.stored) + self.rates.issue
        return True

    # ---- order ---------------------------------------------------------------------------------------------------

    def enter(self, state: _State, action: Action) -> bool:
        key = (state.stream.cta, *action.key)
        turn, since = self.turns.get(key, (0, 0.0))
        if turn == state.stream.part:
            waited = max(0.0, since - state.clock)
            state.blocked += waited
            state.clock += waited + self.rates.issue
            return True
        mine = (*key, state.stream.part)
        self.turned[mine] = state
        return False

    def leave(self, state: _State, action: Action) -> bool:
        key = (state.stream.cta, *action.key)
        members = next(r.members for r in self.kernel.orders if r.name == action.key[0])
        following = (state.stream.part + 1) % members
        since = state.clock + self.rates.handover
        self.turns[key] = following, since
        state.clock += self.rates.issue
        theirs = (*key, following)
        other = self.turned.pop(theirs, None)
        if other is not None:
            self.resume(other, since, self.rates.issue)
        return True

    def sync(self, state: _State, action: Action) -> bool:
        key = (state.stream.cta, *action.key, state.stream.part if action.own else -1)
        count, latest, waiting = self.syncs.get(key, (0.0, 0.0, []))
        count, latest = count + state.stream.threads, max(latest, state.clock)
        if count < action.amount:
            self.syncs[key] = count, latest, [*waiting, state]
            return False
        self.syncs.pop(key, None)
        for other in waiting:
            self.resume(other, latest, self.rates.barrier)
        state.blocked += latest - state.clock
        state.clock = latest + self.rates.barrier
        return True
