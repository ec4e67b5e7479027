"""The passes of each target, top to bottom, with the reason of the order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.config import AnyConfig, Config, HopperConfig
from attngen.ir.graph import Graph
from attngen.ir.program import Program
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.ir.verify import verify
from attngen.layout import Swizzle
from attngen.passes import hopper
from attngen.passes.allocate import allocate
from attngen.passes.choose import candidates, facts
from attngen.passes.expand import expand
from attngen.passes.place import place
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


@dataclass(frozen=True)
class Stage:
    """The result of one pass: what `explain` prints and a dump writes."""

    name: str
    level: Graph | Program | Schedule

    def __str__(self) -> str:
        return str(self.level)


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


def tile_levels(variant: Variant, signature: Signature, config: AnyConfig) -> Iterator[Stage]:
    """The passes above the schedule, the same for every target."""
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
    graph = units(graph, variant.scale_positive)
    yield Stage("units", graph)
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
    plan = schedule(program, target, signature.alignment == 16, facts(config, variant, signature, target))
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


def hopper_stages(variant: Variant, signature: Signature, target: Target, config: HopperConfig) -> Iterator[Stage]:
    """The pipeline of targets with warpgroup products and a copy engine."""
    above = tuple(tile_levels(variant, signature, config))
    yield from above
    program = above[-1].level
    assert isinstance(program, Program)
    # which op runs in which step, then how many copies that keeps alive, then what orders the roles, then addresses
    plan = hopper.stage(program, target, hopper.output_pieces(config, signature, target), ())
    yield Stage("stage", plan)
    plan = hopper.expand(plan, config.slots)
    yield Stage("expand", plan)
    plan = hopper.synchronize(plan, config.turns)
    yield Stage("synchronize", plan)
    plan = hopper.allocate(plan)
    yield Stage("allocate", plan)
    plan = add_visit_table(plan, program)
    yield Stage("visit_table", plan)


def derive(variant: Variant, signature: Signature, target: Target, config: AnyConfig | None = None) -> Levels:
    """All levels of a kernel. `config`: the tile shape; None: the best of the rules (attngen.passes.choose)."""
    chosen = config or ranked(variant, signature, target)[0]
    if isinstance(chosen, Config):
        done = tuple(stages(variant, signature, target, chosen))
    else:
        done = tuple(hopper_stages(variant, signature, target, chosen))
    last = done[-1].level
    assert isinstance(last, Schedule)
    return Levels(done, chosen, verify(last))


def ranked(variant: Variant, signature: Signature, target: Target) -> tuple[AnyConfig, ...]:
    """Configurations of the target, best first."""
    pick = hopper.candidates if target.has(Feature.WGMMA) else candidates
    return pick(variant, signature, target)
