"""A kernel as the streams of actions that the simulation runs: one in-order stream for each part of a role.

Ops are walked as the verifier walks them (`attngen.ir.walk`), so slots, copies and predicates are numbers; what each op
costs comes from `attngen.model.cost`. Rare blocks are not entered: only their branch costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto

from attngen.errors import PassError
from attngen.expr import variables
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref
from attngen.ir.schedule import Guard, Kernel, Role, Tiles, steps_of
from attngen.ir.walk import Edge, Event, Scenario, Share, Stretch, Walker, integer, tiles_of
from attngen.model.cost import WARP, Costs, Product, Work
from attngen.model.rates import PARTITIONS, SLOW, Instr, Rates

PART = integer("w")  # which part of a role


class Does(IntEnum):
    """What an action asks of the simulation (an integer, as each event looks it up)."""

    COMPUTE = auto()
    PRODUCT = auto()
    RETIRE = auto()
    WAIT = auto()  # for a phase of an mbarrier
    ARRIVE = auto()
    EXPECT = auto()
    LOAD = auto()
    ENTER = auto()
    LEAVE = auto()
    SYNC = auto()
    COPY = auto()  # cp.async: after its instructions, a COMPUTE
    COPY_COMMIT = auto()
    COPY_WAIT = auto()
    STORE = auto()
    STORE_WAIT = auto()
    PASS = auto()  # a fixed time
    STEP = auto()  # marks: the head of a step, the end of an item
    END = auto()


@dataclass(frozen=True)
class Burst:
    """Instructions of one stream between two points where it may wait. `alone`, `beside`: cycles if no other stream
    takes part of a unit, without and with products on the tensor cores. The rest: cycles of each shared unit."""

    alone: float
    beside: float
    ports: float
    slow: float
    slow_beside: float
    alu: float
    fma: float
    shared: float
    tensor: float


@dataclass(frozen=True)
class Action:
    """`key`: the barrier or ring; `own`: each part has one for itself. `amount`: arrivals, bytes that a barrier counts,
    threads, cycles. `moved`: bytes that a copy reads or writes."""

    does: Does
    op: str = ""
    key: tuple[object, ...] = ()
    amount: float = 0.0
    moved: float = 0.0
    own: bool = False
    burst: Burst | None = None
    product: Product | None = None
    group: str = ""


@dataclass(frozen=True)
class Stream:
    """`fill`: warps on a sub-partition, at most 1. `arrivals`: of its warps at a barrier. `cta`: which of the CTAs on
    the SM."""

    role: Role
    part: int
    cta: int
    threads: int
    fill: float
    actions: tuple[Action, ...]

    @property
    def lane(self) -> str:
        return f"{self.role.name}{self.part}" if self.role.split > 1 else self.role.name

    @property
    def mathematical(self) -> bool:
        """Whether it has values in registers; the others copy."""
        return bool(self.role.values)


def loops(kernel: Kernel) -> tuple[Tiles, ...]:
    """The loops over tiles of all roles."""
    found = tuple(loop for role in kernel.roles for loop in tiles_of(role))
    if not found:
        raise PassError(f"model: kernel {kernel.name} has no loop over tiles")
    return found


def burst_of(work: Work, rates: Rates, tensor: float = 0.0) -> Burst:
    """A warp issues in order, its long-latency units work meanwhile: the longer of the two counts."""

    def cycles(kinds: tuple[Instr, ...], column: str) -> float:
        return sum(n * float(getattr(rates.instructions[k], column)) for k, n in work.counts.items() if k in kinds)

    fast = tuple(k for k in Instr if k not in SLOW)
    slow_count = sum(work.counts.get(k, 0.0) for k in SLOW)
    fma = rates.instructions[Instr.FMA]
    alone = max(cycles(SLOW, "stream"), cycles(fast, "stream") + slow_count * fma.stream, work.chain, tensor)
    beside = max(cycles(SLOW, "beside"), cycles(fast, "beside") + slow_count * fma.beside, work.chain, tensor)
    # one warp pays for more than the unit is taken: the unit slows by what a warp sees of it
    mufu = rates.instructions[Instr.MUFU]
    return Burst(
        alone=max(alone + work.latency, 1.0),
        beside=max(beside + work.latency, 1.0),
        ports=work.instructions * rates.port,
        slow=cycles(SLOW, "throughput"),
        slow_beside=cycles(SLOW, "throughput") * mufu.beside / mufu.stream,
        alu=cycles((Instr.ALU,), "throughput"),
        fma=cycles((Instr.FMA,), "throughput"),
        shared=cycles((Instr.SHARED, Instr.GLOBAL), "throughput"),
        tensor=tensor,
    )


def streams(kernel: Kernel, rates: Rates, tiles: tuple[int, ...], first_class: bool) -> tuple[Stream, ...]:
    """The streams of all CTAs that share an SM. `tiles`: of each item; `first_class`: in the first range of the loops
    (masked), else in the last (full)."""
    scenario = Scenario(tiles, Share.FIRST if first_class else Share.LAST, rare=False)
    result: list[Stream] = []
    for role in kernel.roles:
        warps = 1 if role.single else role.warps // role.split
        teams = max(1, warps // PARTITIONS)  # several warps of a part on a sub-partition: streams of their own
        builder, walker = Builder(kernel, role, rates, teams), Walker(role)
        actions: tuple[Action, ...] = ()
        for part in range(role.split):
            if not part or not alike(role):
                actions = tuple(builder.actions(walker.walk(part, scenario)))
            result += [
                Stream(role, part, cta, 32 * warps // teams, min(1.0, warps / PARTITIONS), actions)
                for cta in range(kernel.min_ctas)
                for _ in range(teams)
            ]
    return tuple(result)


def alike(role: Role) -> bool:
    """Whether the parts of a role do the same, each at barriers of its own."""
    ops = [op for step in steps_of(role) for op in (step.body if isinstance(step, Guard) else (step,))]
    return not any(
        "w" in variables(*((op.when,) if op.when is not None else ()), *(i for r in bars(op) for i in r.index))
        for op in ops
    )


def bars(op: Op) -> tuple[Ref, ...]:
    """The barriers of an op, those that each part has for itself (`o[w]`) apart."""
    ref = getattr(op, "bar", None)
    return (ref,) if isinstance(ref, Ref) and ref.index != (PART,) else ()


class Builder:
    """Turns the events of one role into actions; what does not depend on the step is made once."""

    def __init__(self, kernel: Kernel, role: Role, rates: Rates, teams: int) -> None:
        self.kernel, self.role, self.rates, self.teams = kernel, role, rates, teams
        self.costs = Costs(kernel, role, rates)
        self.made: dict[int, tuple[Action, ...]] = {}  # of ops without an index, by identity
        guards = sum(isinstance(s, Guard) for loop in tiles_of(role) for s in loop.step)
        self.control = Action(Does.PASS, "loop", amount=rates.branch + guards * rates.issue)

    def actions(self, stretches: Iterator[Stretch[Event]]) -> Iterator[Action]:
        end = Action(Does.END)
        first = True
        for step, event in ((s.step, e) for s in stretches for e in s.events):
            if event.op is not None:
                yield from self.of(event.op, event)
            elif event.edge is Edge.ITEM or event.edge is Edge.EXIT:
                if not first:
                    yield end
                first = False
                if event.edge is Edge.EXIT:
                    return
            elif event.edge is Edge.STEP:
                yield Action(Does.STEP, amount=step)
                yield self.control

    def of(self, op: Op, event: Event) -> tuple[Action, ...]:
        found = self.made.get(id(op))
        if found is None:
            found, fixed = self.make(op, event)
            if fixed:
                self.made[id(op)] = found
        return found

    def bar(self, op: str, does: Does, ref: Ref, event: Event, amount: float = 0.0, moved: float = 0.0) -> Action:
        own = ref.index == (PART,)
        return Action(does, op, (ref.name, *(() if own else event.index(ref))), amount, moved, own)

    def make(self, op: Op, event: Event) -> tuple[tuple[Action, ...], bool]:
        """The actions of an op, and whether they are the same in each step."""
        rates, name = self.rates, op.id
        match op:
            case o.MbarWait():
                return (self.bar(name, Does.WAIT, op.bar, event),), not op.bar.index
            case o.MbarArrive():
                warps = 1 if self.role.single else self.role.warps // self.role.split
                arrivals = WARP * warps if op.each_thread else warps
                return (self.bar(name, Does.ARRIVE, op.bar, event, arrivals),), not op.bar.index
            case o.MbarExpect():
                return (self.bar(name, Does.EXPECT, op.bar, event, op.bytes),), not op.bar.index
            case o.TmaLoad() | o.BulkLoad():
                size = self.costs.bytes(op)
                return (self.bar(name, Does.LOAD, op.bar, event, size, self.costs.moved(op)),), not op.bar.index
            case o.Enter() | o.Leave():
                does = Does.ENTER if isinstance(op, o.Enter) else Does.LEAVE
                return (Action(does, name, (op.ring,)),), True
            case o.Sync():
                return (self.bar(name, Does.SYNC, op.bar, event, op.threads),), not op.bar.index
            case o.CtaSync():
                return (Action(Does.SYNC, name, ("cta",), self.kernel.threads),), True
            case o.Wgmma():
                if self.teams > 1:
                    raise PassError(f"model: op {name}: a part of {self.role.name} has more than one warpgroup")
                return (Action(Does.PRODUCT, name, product=self.costs.product(op), group=op.group),), True
            case o.Retire():
                return (Action(Does.RETIRE, name, group=op.group),), True
            case o.MmaSync():
                tensor = self.costs.product(op).cycles / self.teams * max(1.0, PARTITIONS / self.role.warps)
                burst = burst_of(self.costs.operands(op), rates, tensor)
                wait = Action(Does.PASS, name, amount=rates.product_latency)
                return (Action(Does.COMPUTE, name, burst=burst), wait), True
            case o.CpAsync() | o.CpVector():
                work = self.costs.work(op)
                assert work is not None
                copy = Action(Does.COPY, name, moved=self.costs.moved(op) / self.teams)
                return (Action(Does.COMPUTE, name, burst=burst_of(work, rates)), copy), True
            case o.CpCommit():
                return (Action(Does.COPY_COMMIT, name),), True
            case o.CpWait():
                return (Action(Does.COPY_WAIT, name, amount=op.pending),), True
            case o.TmaStore() | o.TmaReduce():
                return (Action(Does.STORE, name, moved=self.costs.moved(op)),), True
            case o.BulkRetire():
                return (Action(Does.STORE_WAIT, name),), True
            case o.Vote():
                work = self.costs.work(op)
                assert work is not None
                branch = Action(Does.PASS, name, amount=rates.branch)
                return (Action(Does.COMPUTE, name, burst=burst_of(work, rates)), branch), True
            case o.Open() | o.Commit() | o.Proxy() | o.BulkCommit():
                return (Action(Does.PASS, name, amount=rates.issue),), True
            case _:
                work = self.costs.work(op)
                if work is None:
                    raise PassError(f"model: op {name} ({type(op).__name__}) of {self.kernel.name} is not modelled")
                return (Action(Does.COMPUTE, name, burst=burst_of(work, rates)),), True
