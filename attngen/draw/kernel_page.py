"""A kernel as one page, or as one picture: graph, tiles, shared memory, registers, the steady state, and its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from attngen.draw import graph, memory, registers, strip, tiles
from attngen.draw.listing import listings, op_anchor
from attngen.draw.page import Section, Table, html
from attngen.draw.picture import Picture, stack
from attngen.ir.schedule import Kernel as ScheduledKernel
from attngen.ir.walk import tiles_of
from attngen.kernel import Kernel
from attngen.model import Estimate, estimate
from attngen.runtime import Resources


@dataclass(frozen=True)
class Drawn:
    """A kernel, the tensors and lengths that its tile map is of, and what the compiler says of it (nothing: it was not
    compiled)."""

    kernel: Kernel
    tensors: Mapping[str, Tensor]
    seqlen_q: int
    seqlen_k: int
    resources: Mapping[str, Resources]

    def tiles(self) -> Picture:
        shape = self.kernel.config.block_m, self.kernel.config.block_n, self.seqlen_q, self.seqlen_k
        found = tiles.tile_map(self.kernel.variant.mask, self.tensors, *shape)
        return tiles.tiles_picture(found, *shape)

    def memory(self) -> tuple[Picture, ...]:
        limit = self.kernel.target.smem_per_cta
        return tuple(memory.memory_picture(k, limit) for k in self.kernel.schedule.kernels if k.smem_bytes)

    def registers(self) -> tuple[Picture, ...]:
        return tuple(
            registers.registers_picture(k, role, role.regs)
            for k in self.kernel.schedule.kernels for role in k.roles if role.values
        )  # fmt: skip

    def estimates(self) -> tuple[tuple[ScheduledKernel, Estimate], ...]:
        """Of the kernels that have a steady state."""
        looping = [k for k in self.kernel.schedule.kernels if any(any(tiles_of(role)) for role in k.roles)]
        return tuple((k, estimate(k, self.kernel.target)) for k in looping)

    def strips(self) -> tuple[Picture, ...]:
        return tuple(
            strip.strip_picture(_title(e), e.strip, "#" + op_anchor(k.name, "{op}")) for k, e in self.estimates()
        )


def _title(e: Estimate) -> str:
    return f"{e.kernel}, the end of an item: {e.step:.0f} cycles a tile, tensor cores {100 * e.tensor:.0f} %"


def picture(drawn: Drawn) -> Picture:
    above = graph.graph_picture(drawn.kernel.graph), drawn.tiles()
    return stack(drawn.kernel.variant.description, [*above, *drawn.memory(), *drawn.registers(), *drawn.strips()])


def page(drawn: Drawn) -> str:
    kernel = drawn.kernel
    schedule, source = listings(str(kernel.schedule), kernel.source.text)
    sections = [
        Section("graph", "Graph", ("The formula, its reductions over the keys turned into one fold.",), graph.LEGEND,
                (graph.graph_picture(kernel.graph),)),
        Section("tiles", "Tiles", ("Which tiles of the score matrix the kernel visits for this length.",), tiles.LEGEND,
                (drawn.tiles(),)),
        Section("memory", "Shared memory", pictures=drawn.memory()),
        Section("registers", "Registers", _register_words(drawn.resources), registers.LEGEND, drawn.registers()),
        Section("steady-state", "Steady state", _busy_words(drawn.estimates()), strip.LEGEND, drawn.strips()),
        Section("decisions", "Decisions", table=_decisions(kernel)),
        Section("schedule", "Schedule", ("An op leads to its place in the source.",), code=schedule),
        Section("source", "Source", ("An op's comment leads to its line of the schedule.",), code=source),
    ]  # fmt: skip
    return html(kernel.variant.description, (), _facts(kernel), sections)


def _facts(kernel: Kernel) -> list[tuple[str, str]]:
    s, main = kernel.signature, kernel.schedule.kernels[-1]
    dims = str(s.head_dim_qk) if s.head_dim_qk == s.head_dim_v else f"{s.head_dim_qk}, {s.head_dim_v}"
    return [
        ("target", kernel.target.name), ("type", s.dtype.value), ("head dim", dims),
        ("alignment", f"{s.alignment} bytes"),
        ("config", str(kernel.config)), ("threads", str(main.threads)), ("shared memory", f"{main.smem_bytes} bytes"),
        ("kernels", ", ".join(k.name for k in kernel.schedule.kernels)),
    ]  # fmt: skip


def _register_words(resources: Mapping[str, Resources]) -> tuple[str, ...]:
    words = ("Values alive at each op of one item, in registers of a thread; addresses and counters come on top.",)
    return words + tuple(
        f"{symbol}: the compiler takes {r.registers} registers, {r.spill_store_bytes} bytes of spill stores."
        for symbol, r in resources.items()
    )


def _busy_words(found: Sequence[tuple[ScheduledKernel, Estimate]]) -> tuple[str, ...]:
    if not found:
        return ("No kernel of this module has a loop over tiles.",)
    words = ["By the machine model, with full tiles."]
    for _, e in found:
        busy = ", ".join(f"{unit} {100 * part:.0f} %" for unit, part in e.busy if part >= 0.005)
        words.append(f"{e.kernel}: {busy}; what binds: {e.binding}; {e.item:.0f} cycles an item beside its tiles.")
    return tuple(words)


def _decisions(kernel: Kernel) -> Table:
    rows = [(f.subject, f.text) for f in kernel.schedule.facts]
    rows += [("refused", text.splitlines()[0]) for text in kernel.rejected]
    return Table(("about", "reason"), tuple(rows), "words")
