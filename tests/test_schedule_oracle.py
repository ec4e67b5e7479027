"""An oracle for the order of a step: no order and no stages of the same ops, of the chosen tile shape, make it much
shorter than the simulation of the chosen schedule.

A step repeats every T cycles. CP-SAT looks for start times under which each stream issues one op at a time, the tensor
cores run one product at a time, every op has its inputs, and an accumulator is read before the next tile's product
overwrites it. The order of a stream's ops, the distance in steps between a product and its readers, and turns are free;
weights may have any number of copies. That is less than a schedule needs, so what is infeasible here is infeasible for
every schedule of these ops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import pytest

from attngen.config import HopperConfig
from attngen.ir.schedule import Kernel, Schedule
from attngen.model import estimate
from attngen.model.bounds import Node, bound, dependences, occupancy
from attngen.model.rates import rates
from attngen.pipelines import hopper_stages
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal, softcap

cp_model = pytest.importorskip(
    "ortools.sat.python.cp_model", reason="ortools is not installed: no constraint solver to compare schedules with"
)

SM90 = target("sm90")
TABLE = rates(SM90)
PLAIN, CAPPED = Attention(mask=causal()), Attention(mask=causal(), score=softcap(30.0))
LATER = 3  # an op belongs to a tile at most so many steps before
FREE = ("order", "tensor", "turn")  # kinds of edge that a schedule chooses


@cache
def kernel(spec: Attention, config: HopperConfig, d: int) -> Kernel:
    plan = list(hopper_stages(spec.variant, Signature(IoType.BF16, d, d), SM90, config, explained=False))[-1].level
    assert isinstance(plan, Schedule)
    return plan.kernels[-1]


@dataclass(frozen=True)
class Task:
    """Cycles for which an op holds its stream, and the tensor cores. Rounded down, as all of this is a lower bound."""

    stream: int
    tensor: int


@dataclass(frozen=True)
class Problem:
    """`after`: (first, second, latency, steps between, whether from the first's product)."""

    tasks: dict[Node, Task]
    after: tuple[tuple[Node, Node, int, int, bool], ...]
    least: float  # cycles of a step that the busiest unit needs

    def feasible(self, step: int) -> bool:
        """Whether some order repeats every `step` cycles."""
        if step < self.least:
            return False
        model = cp_model.CpModel()
        issue, busy = {}, {}
        lanes: dict[str, list[object]] = {}

        def start(name: str, length: int, lane: str) -> object:
            """A start time; its interval, and that of the step after, exclude the others of its lane."""
            at, turn = model.new_int_var(0, step - 1, name), model.new_int_var(0, LATER, f"{name}.step")
            for shift in (0, step):
                if length:
                    lanes.setdefault(lane, []).append(model.new_fixed_size_interval_var(at + shift, length, name))
            return at + step * turn

        for node, task in self.tasks.items():
            issue[node] = start(f"{node}", task.stream, node[0])
            if task.tensor:
                busy[node] = start(f"{node}.product", task.tensor, "tensor cores")
                model.add(busy[node] >= issue[node] + task.stream)
        for a, b, latency, distance, product in self.after:
            ready = busy[a] if product else issue[a]
            model.add(issue[b] + step * distance >= ready + latency)
        for intervals in lanes.values():
            model.add_no_overlap(intervals)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
        solver.parameters.max_deterministic_time = 60.0
        status = solver.solve(model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE), "the solver gave up"
        return bool(status != cp_model.INFEASIBLE)


@cache
def problem(spec: Attention, config: HopperConfig, d: int) -> Problem:
    made = kernel(spec, config, d)
    graph = dependences(made, TABLE)
    tasks, cycles = {}, {}
    for node, data in graph.nodes(data=True):
        cycles[node] = sum(a.product.cycles for a in data["actions"] if a.product)
        # a product holds its stream no longer than its issue: how long a full queue stalls depends on the order
        held = TABLE.issue if cycles[node] else occupancy(data["actions"], TABLE)
        tasks[node] = Task(math.floor(held), math.floor(cycles[node]))
    after = []
    for a, b, data in graph.edges(data=True):
        if data["kind"] in FREE:
            continue
        latency, from_product = data["latency"], bool(cycles[a])
        if from_product:  # who reads a product waits for all of it; the next one into the same accumulator only follows
            latency = cycles[a] + (0.0 if cycles[b] else TABLE.product_latency)
        if not (from_product and cycles[b]):
            after.append((a, b, math.floor(latency), data["distance"], from_product))
        if from_product and not cycles[b] and data["kind"] == "value":  # read before the next product overwrites it
            after.append((b, a, tasks[b].stream, 1 - data["distance"], False))
    streams = {s.name for s in made.roles}
    hidden = {"copy"}  # copies may be ahead of their bandwidth, for longer than the simulated item
    units = [c for name, c in bound(made, SM90).units if name.rstrip("0123456789") not in streams | hidden]
    return Problem(tasks, tuple(after), max(units))


CHOSEN = {  # the share of the simulated step by which no order is faster
    "plain 64": (PLAIN, HopperConfig(4, 64, 4, issue=(1, 0)), 64, 0.03),
    "plain 128": (PLAIN, HopperConfig(2, 128, 2), 128, 0.05),
    "plain 256": (PLAIN, HopperConfig(2, 64, 2), 256, 0.03),
    "softcap 128": (CAPPED, HopperConfig(3, 80, 2, issue=(1, 0)), 128, 0.17),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_no_order_is_much_faster(name: str) -> None:
    spec, config, d, share = CHOSEN[name]
    simulated = estimate(kernel(spec, config, d), SM90).step
    assert not problem(spec, config, d).feasible(math.floor(simulated * (1 - share)))


@pytest.mark.parametrize("name", CHOSEN)
def test_the_chosen_order_is_one_of_those(name: str) -> None:
    """What is simulated is feasible: the problem asks for nothing that a schedule need not do."""
    spec, config, d, _ = CHOSEN[name]
    simulated = estimate(kernel(spec, config, d), SM90).step
    assert problem(spec, config, d).feasible(math.ceil(simulated * 1.01))


def test_an_order_that_wastes_time_is_found() -> None:
    """One warpgroup that does a tile's ops one after another: the same ops can be done in two thirds of its time."""
    config = HopperConfig(1, 64, 2, stages=(0, 0), turns=False)
    simulated = estimate(kernel(PLAIN, config, 128), SM90).step
    assert problem(PLAIN, config, 128).feasible(math.floor(simulated * 0.67))


def test_a_step_is_no_shorter_than_its_longest_recurrence() -> None:
    """With one accumulator for scores the next product waits for the exponentials of this tile: below product, wait and
    exponentials of one warpgroup nothing is feasible, although each unit has time."""
    config = HopperConfig(1, 64, 2, turns=False)
    found = problem(PLAIN, config, 128)
    first = max(t.tensor for t in found.tasks.values())
    exponentials = max(t.stream for t in found.tasks.values())
    least = math.floor(first + TABLE.product_latency + exponentials)
    assert least > 1.1 * found.least
    assert not found.feasible(least - 1)
    assert found.feasible(math.ceil(least * 1.05))
