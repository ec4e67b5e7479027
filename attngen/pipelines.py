"""The passes of each target, top to bottom, with the reason of the order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from attngen import tuned
from attngen.config import AnyConfig, Config, FoldPolicy, HopperConfig
from attngen.errors import VerifyError
from attngen.ir.graph import Fold, Graph, Map, Mask
from attngen.ir.program import Program
from attngen.ir.schedule import Kernel, Schedule, VerifiedSchedule
from attngen.ir.verify import verify
from attngen.layout import Swizzle
from attngen.passes.allocate import allocate
from attngen.passes.choose import candidates, facts
from attngen.passes.expand import expand
from attngen.passes.place import place
from attngen.passes.policy import policies
from attngen.passes.ranges import ranges
from attngen.passes.schedule import schedule
from attngen.passes.signs import signs
from attngen.passes.simplify import simplify
from attngen.passes.stream import stream
from attngen.passes.synchronize import synchronize
from attngen.passes.textbook import textbook
from attngen.passes.tile import tile
from attngen.passes.units import units
from attngen.passes.visit_table import add_visit_table
from attngen.signature import Signature
from attngen.spec import Variant
from attngen.target import Feature, Target

if TYPE_CHECKING:
    from attngen.passes import hopper


@dataclass(frozen=True)
class Stage:
    """The result of one pass: what `explain` prints and a dump writes."""

    name: str
    level: Graph | Program | Schedule

    def __str__(self) -> str:
        return str(self.level)


@dataclass(frozen=True)
class ScheduleStage(Stage):
    """One whose result is a schedule."""

    level: Schedule


@dataclass(frozen=True)
class Levels:
    """Everything between a variant and the text of its kernel."""

    stages: tuple[Stage, ...]
    config: AnyConfig
    verified: VerifiedSchedule

    @property
    def graph(self) -> Graph:
        return next(s.level for s in reversed(self.stages) if isinstance(s.level, Graph))

    @property
    def program(self) -> Program:
        return next(s.level for s in reversed(self.stages) if isinstance(s.level, Program))

    @property
    def schedule(self) -> Schedule:
        return self.verified.schedule


def graph_levels(variant: Variant) -> Iterator[Stage]:
    """The passes on the graph: the same for every configuration."""
    graph = textbook(variant)
    yield Stage("textbook", graph)
    # before simplify, which converts parts of an index sum one by one
    graph = signs(graph)
    yield Stage("signs", graph)
    # early, so that later passes see exp2 and constants, not the user's spelling
    graph = simplify(graph)
    yield Stage("simplify", graph)
    # the fold has to exist before anything is cut into tiles
    graph = stream(graph)
    yield Stage("stream", graph)
    # after stream: the unit of the reference is a property of the fold
    yield Stage("units", units(graph, variant.scale_positive))


def tile_levels(
    variant: Variant, signature: Signature, config: AnyConfig, above: tuple[Stage, ...] | None = None
) -> Iterator[Stage]:
    """The passes above the schedule. `above`: those on the graph, where they are done already."""
    above = above or tuple(graph_levels(variant))
    yield from above
    graph = above[-1].level
    assert isinstance(graph, Graph)
    # ranges needs block_n and gives the loop its bounds; tile is the first pass that knows the configuration
    program = tile(graph, variant, signature, config, ranges(variant.mask, config.block_n))
    yield Stage("tile", program)
    program = place(program, Swizzle.XOR if isinstance(config, Config) else Swizzle.B128)
    yield Stage("place", program)


def stages(variant: Variant, signature: Signature, target: Target, config: Config) -> Iterator[Stage]:
    """The pipeline of targets with cp.async and mma.sync."""
    above = tuple(tile_levels(variant, signature, config))
    yield from above
    program = above[-1].level
    assert isinstance(program, Program)
    # order first, then how many copies the order keeps alive, then the barriers that both need, then addresses
    plan = schedule(program, target, signature.alignment, facts(config, variant, signature, target))
    yield Stage("schedule", plan)
    plan = expand(plan)
    yield Stage("expand", plan)
    plan = synchronize(plan)
    yield Stage("synchronize", plan)
    plan = allocate(plan)
    yield Stage("allocate", plan)
    # last: the second kernel of a module needs nothing but the tile shape and the mask
    plan = add_visit_table(plan, program)
    yield Stage("visit_table", plan)


def hopper_stages(
    variant: Variant, signature: Signature, target: Target, config: HopperConfig,
    graph: tuple[Stage, ...] | None = None, explained: bool = True,
) -> Iterator[Stage]:  # fmt: skip
    """The pipeline of targets with warpgroup products and a copy engine. `explained`: with the reasons of its
    decisions, which a candidate among many does without."""
    from attngen.passes import hopper  # with the machine model: not for a process that makes other kernels

    above = tuple(tile_levels(variant, signature, config, graph))
    yield from above
    program = above[-1].level
    assert isinstance(program, Program)
    plans = tuple(hopper_schedules(program, signature, target))
    yield from plans
    plan = hopper.allocate(plans[-1].level)
    yield Stage("allocate", plan)
    plan = add_visit_table(plan, program)
    yield Stage("visit_table", plan)
    if explained:  # last: the model reads the finished schedule
        yield Stage("reasons", hopper.reasons(plan, program, signature, target))


def hopper_schedules(program: Program, signature: Signature, target: Target) -> Iterator[ScheduleStage]:
    """Which op runs in which step, then how many copies that keeps alive, then what orders the roles; addresses come
    behind."""
    from attngen.passes import hopper

    config = program.config
    assert isinstance(config, HopperConfig)
    plan = hopper.stage(program, signature, target, hopper.output_pieces(config, signature, target))
    yield ScheduleStage("stage", plan)
    plan = hopper.expand(plan, config.slots)
    yield ScheduleStage("expand", plan)
    yield ScheduleStage("synchronize", hopper.synchronize(plan, config.turns))


def derive(variant: Variant, signature: Signature, target: Target, config: AnyConfig | None = None) -> Levels:
    """All levels of a kernel. `config`: None is the best of `ranked`."""
    if config is not None:
        return _levels(variant, signature, target, config)
    refused: VerifyError | None = None
    for chosen in _in_order(variant, signature, target):
        try:
            return _levels(variant, signature, target, chosen)
        except VerifyError as error:  # a limit that ranking does not know, such as the size of the code
            refused = refused or error
    assert refused is not None
    raise refused


def _in_order(variant: Variant, signature: Signature, target: Target) -> Iterator[AnyConfig]:
    """What was measured before what is modelled; the model is not asked as long as what was measured will do."""
    measured = tuned.lookup(variant, signature, target)
    if measured is not None:
        yield measured
    if target.has(Feature.WGMMA):
        from attngen.passes import hopper

        found = [c.config for c in judged(variant, signature, target)]
        yield from (c for c in (*found, *hopper.shorter(found)) if c != measured)
    else:
        yield from (c for c in candidates(variant, signature, target) if c != measured)


def _levels(variant: Variant, signature: Signature, target: Target, config: AnyConfig) -> Levels:
    if isinstance(config, Config):
        done = tuple(stages(variant, signature, target, config))
    else:
        done = tuple(hopper_stages(variant, signature, target, config))
    last = done[-1].level
    assert isinstance(last, Schedule)
    return Levels(done, config, verify(last))


@cache
def _candidates(
    key: str, variant: Variant, signature: Signature, target: Target
) -> tuple[hopper.Candidate, ...]:
    graph = tuple(graph_levels(variant))
    last = graph[-1].level
    assert isinstance(last, Graph)
    (fold,) = last.of(Fold)
    assert isinstance(fold, Fold)

    mask = last[fold.x]
    plain = not (isinstance(mask, Mask) and isinstance(last[mask.x], Map))

    tiled: dict[tuple[int, int, FoldPolicy], tuple[Stage, ...]] = {}

    def build(config: HopperConfig) -> Kernel:
        """As far as the model reads it: without addresses. Orders of one shape share what they have in common."""
        shape = config.block_m, config.block_n, config.policy
        if shape not in tiled:
            tiled[shape] = tuple(tile_levels(variant, signature, config, graph))
        program = tiled[shape][-1].level
        assert isinstance(program, Program)
        *_, last = hopper_schedules(dataclasses.replace(program, config=config), signature, target)
        return last.level.kernels[-1]

    from attngen.passes import hopper

    return hopper.ranked(signature, target, policies(fold, plain), build, hopper.beside(variant.score))


def judged(variant: Variant, signature: Signature, target: Target) -> tuple[hopper.Candidate, ...]:
    """What the machine model says of each configuration of a target that has one, best first."""
    return _candidates(variant.variant_key(), variant, signature, target) if target.has(Feature.WGMMA) else ()


def ranked(variant: Variant, signature: Signature, target: Target) -> tuple[AnyConfig, ...]:
    """Configurations of the target, best first: what was measured before what is modelled."""
    return tuple(_in_order(variant, signature, target))
