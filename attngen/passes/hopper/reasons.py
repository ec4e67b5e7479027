"""reasons: Schedule -> Schedule. Adds a fact for each decision of a configuration, with its reason.

Before   a finished schedule
After    the same, with facts: the tile, its bound and its estimate by the machine model, the products of a step, turns,
         slots, the fold's policy, the output, the order of the work, the registers of the roles
Why      a schedule explains itself. A bound holds for every order of the same ops; an estimate is a simulation of this
         one. Each has a fact of its own, so that no line mixes them"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from attngen.config import FoldPolicy, HopperConfig
from attngen.ir.ops import Reduce, ReduceKind
from attngen.ir.program import Program
from attngen.ir.schedule import Fact, Kernel, Order, Schedule
from attngen.model import estimate
from attngen.passes.choose import padded
from attngen.passes.hopper.choose import (
    ADDRESSES,
    SLOTS,
    excess,
    fragments,
    loaded_bytes,
    needed_bytes,
    output_pieces,
    staging_room,
    tile_bytes,
)
from attngen.passes.hopper.copies import Copier, copier
from attngen.passes.hopper.stage import Stager
from attngen.passes.policy import FAR, GROWING, TOO_LARGE
from attngen.signature import VECTOR_BYTES, Signature, store_bytes
from attngen.target import Target

SHOWN = 0.5  # share of a unit from which it is named
REDO = f"a row's weights of a tile that sum to more than {TOO_LARGE:.0f}, or to no number, have the tile done again"
POLICIES = {
    FoldPolicy.RUNNING: "the maximum so far: each tile takes its maximum and corrects all sums",
    FoldPolicy.CONDITIONAL: f"moved where a correction would be below {FAR:g}; other tiles take their maximum and "
    "correct nothing",
    FoldPolicy.REFERENCE: f"that of the first tile, later ones take no maximum; {REDO} with its maximum",
    FoldPolicy.ANTICIPATED: f"that of the first tile, later ones take no maximum; {REDO} with its maximum. After a "
    f"correction below {GROWING:g} the next tile takes its maximum first",
}


def reasons(plan: Schedule, program: Program, signature: Signature, target: Target) -> Schedule:
    assert isinstance(program.config, HopperConfig)
    r = _Reasons(plan.kernels[-1], program, program.config, signature, target)
    return dataclasses.replace(plan, facts=(*r.facts(), *plan.facts))


@dataclasses.dataclass(frozen=True)
class _Reasons:
    kernel: Kernel
    program: Program
    config: HopperConfig
    signature: Signature
    target: Target

    def facts(self) -> Iterator[Fact]:
        c = self.config
        yield Fact(subject="tile", text=f"{c.block_m} rows = {c.warpgroups} x 64, {c.block_n} keys")
        yield from self.model()
        yield Fact(subject="products", text=self.products())
        yield Fact(subject="turns", text=self.turns())
        yield Fact(subject="slots", text=self.slots())
        if copier(self.signature).by_threads:
            yield Fact(subject="copies", text=self.copies())
        yield Fact(subject="fold", text=self.fold())
        yield Fact(subject="output", text=self.output())
        yield Fact(subject="work", text=self.work())
        yield from self.registers()

    def model(self) -> Iterator[Fact]:
        """Full tiles of one CTA, by the machine model of the target."""
        from attngen.model.bounds import bound  # with networkx, which no kernel of another target needs

        e, b = estimate(self.kernel, self.target), bound(self.kernel, self.target)
        binds = "the order inside the streams" if e.binding == "stream" else e.binding
        busy = ", ".join(f"{unit} {100 * share:.0f} %" for unit, share in e.busy if share >= SHOWN or unit == "tensor")
        yield Fact(
            subject="estimate",
            text=f"simulated {e.step:.0f} cycles a step, what binds: {binds}; busy: {busy}; {e.item:.0f} cycles an "
            "item beside its steps",
        )
        units = sorted(b.units, key=lambda u: (-u[1], u[0]))[:3]
        needs = ", ".join(f"{unit} {cycles:.0f}" for unit, cycles in units)
        yield Fact(
            subject="bound",
            text=f"no order of these ops takes less than {b.step:.0f} cycles a step, what binds: {b.binding}; cycles "
            f"needed: {needs}, longest recurrence {b.recurrence:.0f}",
        )

    def products(self) -> str:
        s = Stager(self.program, 1, self.signature)
        late = [name for name in s.order if s.product_stage[name]]
        order = ", then ".join(f"{name}{' of the tile before' if name in late else ''}" for name in s.order)
        if not late:
            return f"{order}, of one tile: a warpgroup's softmax runs beside the products of others only"
        return f"{order}, at the head of a step: {', '.join(late)} runs beside the softmax of the next tile"

    def turns(self) -> str:
        if self.config.turns:
            return (
                f"{self.config.warpgroups} warpgroups issue their products in turn: the softmax of one runs beside the "
                "products of another"
            )
        return "none: warpgroups issue when they are ready"

    def slots(self) -> str:
        c, most = self.config, self.target.smem_per_cta
        more = next((s for s in sorted(SLOTS) if s > c.slots), None)
        loaded = loaded_bytes(c, self.signature)
        text = f"{c.slots} tiles of keys and {c.slots} of values: {loaded} bytes with the queries"
        if more is None:
            return f"{text}; the loop needs no more phases"
        wider = dataclasses.replace(c, slots=more)
        if excess(wider, self.signature, self.target) is None:
            return f"{text}; {more} would fit too"
        return f"{text}; {more} would need {needed_bytes(wider, self.signature)} bytes of {most}"

    def copies(self) -> str:
        alignment = self.signature.alignment
        if copier(self.signature) is Copier.ASYNC:
            how = f"the threads of the load role copy them with cp.async, {alignment} bytes each time"
        else:
            how = "the threads of the load role copy them through registers, element by element"
        return f"rows start on {alignment} bytes, and the copy engine needs 16: {how}"

    def fold(self) -> str:
        maxima = any(isinstance(op, Reduce) and op.kind is ReduceKind.MAX for op in self.program.ops())
        return f"{self.config.policy.value}: {POLICIES[self.config.policy]}" if maxima else "no maximum: sums alone"

    def output(self) -> str:
        c, dv = self.config, padded(self.signature.head_dim_v)
        pieces = output_pieces(c, self.signature, self.target)
        whole, part = tile_bytes(c.block_m, dv), tile_bytes(c.block_m, dv // pieces)
        narrow = store_bytes(self.signature.head_dim_v) < VECTOR_BYTES
        by = "; its threads store it, for the copy engine writes rows of 16 bytes and multiples" if narrow else ""
        if pieces == 1:
            return f"in one piece through {part} bytes of shared memory{by}"
        room = staging_room(c, self.signature, self.target)
        needs = f"one needs {whole} of {room} left"
        return f"in {pieces} blocks of columns through {part} bytes of shared memory: {needs}{by}"

    def work(self) -> str:
        if self.kernel.work.order is Order.LONGEST_FIRST:
            return "row tiles with most keys first, so that what ends last is short"
        if self.kernel.work.order is Order.RANKED:
            return "row tiles with most keys first: the device ranks them, as the number of their keys depends on data"
        return "row tiles in their order: how many keys one has depends on data or on the head"

    def registers(self) -> Iterator[Fact]:
        used = fragments(self.config, self.signature)
        parts = ", ".join(f"{role.name} {role.regs} a thread" for role in self.kernel.roles)
        text = f"{parts}, of {self.target.regs_per_sm}: accumulators and A fragments take {used}, addresses {ADDRESSES}"
        yield Fact(subject="registers", text=text)
