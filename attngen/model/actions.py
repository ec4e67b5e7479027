"""A kernel as the streams of actions that the simulation runs: one in-order stream for each part of a role.

Ops are walked as the verifier walks them (`attngen.ir.walk`), so slots, copies and predicates are numbers; what each op
costs comes from `attngen.model.cost`. Rare blocks are not entered: only their branch costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from attngen.errors import PassError
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref
from attngen.ir.schedule import Guard, Kernel, Role
from attngen.ir.walk import Edge, Event, Scenario, Share, tiles_of, walk_role
from attngen.model.cost import Costs, Product, Work
from attngen.model.rates import PARTITIONS, SLOW, Instr, Rates


class Does(Enum):
    """What an action asks of the simulation."""

    COMPUTE = "compute"
    PRODUCT = "product"
    RETIRE = "retire"
    WAIT = "wait"  # for a phase of an mbarrier
    ARRIVE = "arrive"
    EXPECT = "expect"
    LOAD = "load"
    ENTER = "enter"
    LEAVE = "leave"
    SYNC = "sync"
    COPY = "copy"  # cp.async: after its instructions, a COMPUTE
    COPY_COMMIT = "copy_commit"
    COPY_WAIT = "copy_wait"
    STORE = "store"
    STORE_WAIT = "store_wait"
    PASS = "pass"  # a fixed time
    STEP = "step"  # marks: the head of a step, the end of an item
    END = "end"


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
    """`amount`: arrivals, bytes that a barrier counts, threads, cycles. `moved`: bytes that a copy reads or writes."""

    does: Does
    op: str = ""
    key: tuple[object, ...] = ()
    amount: float = 0.0
    moved: float = 0.0
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
        alone=alone + work.latency,
        beside=beside + work.latency,
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
    if not any(True for role in kernel.roles for _ in tiles_of(role)):
        raise PassError(f"model: kernel {kernel.name} has no loop over tiles")
    scenario = Scenario(tiles, Share.FIRST if first_class else Share.LAST, rare=False)
    result: list[Stream] = []
    for role in kernel.roles:
        warps = 1 if role.single else role.warps // role.split
        teams = max(1, warps // PARTITIONS)  # several warps of a part on a sub-partition: streams of their own
        builder = Builder(kernel, role, rates, teams)
        for part in range(role.split):
            actions = tuple(builder.actions(walk_role(role, part, scenario)))
            result += [
                Stream(role, part, cta, 32 * warps // teams, min(1.0, warps / PARTITIONS), actions)
                for cta in range(kernel.min_ctas)
                for _ in range(teams)
            ]
    return tuple(result)


class Builder:
    """Turns the events of one role into actions; what does not depend on the step is made once."""

    def __init__(self, kernel: Kernel, role: Role, rates: Rates, teams: int) -> None:
        self.kernel, self.role, self.rates, self.teams = kernel, role, rates, teams
        self.costs = Costs(kernel, role, rates)
        self.made: dict[int, tuple[Action, ...]] = {}  # of ops without an index, by identity
        guards = sum(isinstance(s, Guard) for loop in tiles_of(role) for s in loop.step)
        self.control = Action(Does.PASS, "loop", amount=rates.branch + guards * rates.issue)

    def actions(self, events: Iterator[Event]) -> Iterator[Action]:
        end = Action(Does.END)
        first = True
        for event in events:
            if event.op is not None:
                yield from self.of(event.op, event)
            elif event.edge is Edge.ITEM or event.edge is Edge.EXIT:
                if not first:
                    yield end
                first = False
                if event.edge is Edge.EXIT:
                    return
            elif event.edge is Edge.STEP:
                yield Action(Does.STEP, amount=event.step)
                yield self.control

    def of(self, op: Op, event: Event) -> tuple[Action, ...]:
        found = self.made.get(id(op))
        if found is None:
            found, fixed = self.make(op, event)
            if fixed:
                self.made[id(op)] = found
        return found

    def bar(self, op: str, does: Does, ref: Ref, event: Event, amount: float = 0.0, moved: float = 0.0) -> Action:
        return Action(does, op, (ref.name, *event.index(ref)), amount, moved)

    def make(self, op: Op, event: Event) -> tuple[tuple[Action, ...], bool]:
        """The actions of an op, and whether they are the same in each step."""
        rates, name = self.rates, op.id
        match op:
            case o.MbarWait():
                return (self.bar(name, Does.WAIT, op.bar, event),), not op.bar.index
            case o.MbarArrive():
                warps = 1 if self.role.single else self.role.warps // self.role.split
                return (self.bar(name, Does.ARRIVE, op.bar, event, warps),), not op.bar.index
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
                return (Action(Does.PRODUCT, name, product=self.costs.product(op), group=op.group),), True
            case o.Retire():
                return (Action(Does.RETIRE, name, group=op.group),), True
            case o.MmaSync():
                tensor = self.costs.product(op).cycles / self.teams * max(1.0, PARTITIONS / self.role.warps)
                burst = burst_of(self.costs.operands(op), rates, tensor)
                wait = Action(Does.PASS, name, amount=rates.product_latency)
                return (Action(Does.COMPUTE, name, burst=burst), wait), True
            case o.CpAsync():
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
