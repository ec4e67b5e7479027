"""The passes of a derivative, top to bottom, with the reason of the order: from a variant to a module of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from attngen.config import Config, HopperSumsConfig, SumsConfig
from attngen.errors import AttngenError, GradientError, PassError, SignatureError, VerifyError
from attngen.expr import SCALE, SEQLEN_Q, DType, const, loads, mul, var, variables
from attngen.ir.graph import Axis, Graph, Input, Map, Output
from attngen.ir.ops import Assign
from attngen.ir.program import Program
from attngen.ir.schedule import Access, Elem, Fact, Kernel, Schedule, TensorArg, VerifiedSchedule, Workspace
from attngen.ir.verify import verify
from attngen.layout import Swizzle
from attngen.passes.allocate import allocate
from attngen.passes.choose import padded
from attngen.passes.choose_sums import candidates_sums as candidates_threads
from attngen.passes.choose_sums import registers, smem
from attngen.passes.choose_sums import width as tile_width
from attngen.passes.differentiate import differentiate
from attngen.passes.expand import expand
from attngen.passes.hopper.choose_sums import candidates_sums as candidates_warpgroups
from attngen.passes.hopper.sum_reasons import sum_reasons
from attngen.passes.hopper.sum_room import part_rows
from attngen.passes.hopper.sums import sums_kernel
from attngen.passes.partition import Owned, Parts, can_shed, partition
from attngen.passes.place import place
from attngen.passes.row_kernel import cast_blocks, cast_kernel, row_kernel
from attngen.passes.schedule_sums import schedule_sums
from attngen.passes.simplify import simplify
from attngen.passes.sum_names import KEY_KERNEL, tiled
from attngen.passes.synchronize import synchronize
from attngen.passes.textbook import ROWS, SINK, textbook
from attngen.passes.tile import _STORAGE, elem_of
from attngen.passes.tile_sums import tile_sums
from attngen.passes.visit_table import add_key_table, add_visit_table
from attngen.signature import ELEMENT_BYTES, VECTOR_BYTES, Signature
from attngen.spec import Normalizer, Variant
from attngen.target import Feature, Target

NARROW = 32  # columns: a narrower product of warpgroups waits for its left operand more than it computes
NARROW_PARTS = 48  # rows: the product of a part has 64, and what is beyond the tile is padding
ROW_SIZES = ("batch", "heads", "seqlen_q")
NAMES = {Axis.N: KEY_KERNEL, Axis.M: "attn_bwd_queries"}


@dataclass(frozen=True)
class Asked:
    """What of a derivative is computed. `wanted`: inputs and captured tensors that need a gradient. `dlse`: whether lse
    has one. `same_bits`: whether every run has to give the same bits."""

    wanted: frozenset[str]
    dlse: bool
    same_bits: bool = True

    def __str__(self) -> str:
        return f"gradients of {', '.join(sorted(self.wanted))}{' through lse too' if self.dlse else ''}"


Ranked = tuple[tuple[str, tuple[SumsConfig, ...]], ...]  # by kernel, best first


@dataclass(frozen=True)
class BackwardStage:
    name: str
    level: Graph | Parts | Program | Schedule

    def __str__(self) -> str:
        return str(self.level)


@dataclass(frozen=True)
class BackwardLevels:
    """Everything between a variant and the text of its derivative. `configs`: by kernel."""

    stages: tuple[BackwardStage, ...]
    configs: tuple[tuple[str, SumsConfig], ...]
    verified: VerifiedSchedule


def backward_graph(variant: Variant, asked: Asked) -> tuple[Graph, Graph]:
    """The derivative as derived, and in hardware operations."""
    seeds = ("out", "lse") if asked.dlse else ("out",)
    graph = differentiate(textbook(variant), asked.wanted, seeds)
    return graph, simplify(graph)


def candidates_sums(
    owned: Owned, variant: Variant, signature: Signature, target: Target
) -> tuple[SumsConfig, ...]:
    """Legal tile shapes of a kernel, best first."""
    if target.has(Feature.WGMMA):
        return candidates_warpgroups(owned, variant, signature, target)
    return candidates_threads(owned, variant, signature, target)


def parts_of(graph: Graph, variant: Variant, signature: Signature, target: Target, same_bits: bool) -> Parts:
    """One kernel for everything where its parts may be added in any order; sums over queries in one kernel where their
    accumulators fit beside tiles of some width, else in one each."""

    def fit(parts: Parts) -> bool:
        found = [candidates_sums(o, variant, signature, target) for o in parts.owned]
        return all(
            f and (isinstance(f[0], Config) or f[0].block_n >= (NARROW_PARTS if o.shed() else NARROW))
            for o, f in zip(parts.owned, found, strict=True)
        )

    if not same_bits and can_shed(graph):
        for apart in (False, True):
            parts = partition(graph, apart, shed=True)
            if fit(parts):
                return parts
    parts = partition(graph)
    return parts if fit(parts) else partition(graph, apart=True)


def named(parts: Parts) -> Iterator[tuple[str, Owned]]:
    """The kernels of a module by name."""
    for owned in parts.owned:
        alike = [o for o in parts.owned if o.own is owned.own]
        number = str(alike.index(owned)) if len(alike) > 1 else ""
        yield NAMES[owned.own] + number, owned


def stages(
    variant: Variant, signature: Signature, target: Target, asked: Asked, configs: Sequence[SumsConfig]
) -> Iterator[BackwardStage]:
    """`configs`: a tile shape for each kernel that owns an axis."""
    elem, aligned = elem_of(signature), signature.alignment == VECTOR_BYTES
    derived, graph = backward_graph(variant, asked)
    yield BackwardStage("differentiate", derived)
    # as in the forward pass: later passes see exp2 and constants
    yield BackwardStage("simplify", graph)
    # which axis a CTA owns decides what is a row and what a column: before tiles
    parts = parts_of(graph, variant, signature, target, asked.same_bits)
    yield BackwardStage("partition", parts)
    programs, kernels, facts, spaces = list[Program](), list[Kernel](), list[Fact](), list[Workspace]()
    for (name, owned), config in zip(named(parts), configs, strict=True):
        program = tile_sums(owned, name, variant, signature, config)
        yield BackwardStage(f"tile_sums {name}", program)
        program = place(program, Swizzle.XOR if isinstance(config, Config) else Swizzle.B128)
        yield BackwardStage(f"place {name}", program)
        programs.append(program)
        facts += program.facts
        if isinstance(config, HopperSumsConfig):
            kernel = sums_kernel(program, target)
            facts += sum_reasons(kernel, config)
        else:
            kernel = schedule_sums(program, aligned)
            text = f"{registers(config, owned, signature)} registers of sums and products, "
            facts.append(Fact(subject=name, text=f"{config}: {text}{smem(config, owned, signature)} bytes"))
        kernels.append(kernel)
    plan = Schedule(
        name="attn_bwd", target=target.name, kernels=tuple(kernels), head_dim_qk=signature.head_dim_qk,
        head_dim_v=signature.head_dim_v, facts=tuple(facts),
    )  # fmt: skip
    yield BackwardStage("schedule_sums", plan)
    if not target.has(Feature.WGMMA):
        # as in the forward pass: slots, then barriers, then addresses
        plan = expand(plan)
        plan = synchronize(plan)
        plan = allocate(plan)
        yield BackwardStage("allocate", plan)
    for (_, owned), program in zip(named(parts), programs, strict=True):
        spaces += [w for w in program.workspaces if w not in spaces]
        if owned.own is Axis.M:
            plan = add_visit_table(dataclasses.replace(plan, workspaces=program.workspaces), program)
        else:
            plan = add_key_table(plan, program)
    kept = {t.name for k in plan.kernels for t in k.tensors if t.access is Access.WORK}
    rows_graph = with_vectors(parts.rows, programs, kept)
    if rows_graph is not None:
        rows = row_kernel(rows_graph, "attn_bwd_rows", elem, signature.head_dim_v, captures(variant), aligned)
        made = [t for t in rows.tensors if t.name in kept and all(t.name != w.name for w in spaces)]
        spaces += [
            Workspace(name=t.name, elem=t.elem, shape=tuple(var(n, DType.I32) for n in ROW_SIZES)) for t in made
        ]
        plan = dataclasses.replace(plan, kernels=(rows, *plan.kernels))
    for owned, config in zip(parts.owned, configs, strict=True):
        for out, node in owned.shed():
            # rows and columns of padding too: they are added to without a condition
            width = signature.head_dim_qk if node.axes[3] is Axis.D else signature.head_dim_v
            lead, rows_of_tiles = (var(n, DType.I32) for n in ROW_SIZES[:2]), tiled(SEQLEN_Q, config.block_n)
            if target.has(Feature.WGMMA):
                size = mul(rows_of_tiles, const(padded(width)))
                spaces.append(Workspace(name=node.id, elem=Elem.F32, shape=(*lead, size), zero=True))
                cast = cast_blocks(owned.graph, out, node, elem, padded(width), part_rows(config.block_n))
            else:
                shape = (*lead, rows_of_tiles, const(tile_width(owned, width)))
                spaces.append(Workspace(name=node.id, elem=Elem.F32, shape=shape, zero=True))
                cast = cast_kernel(owned.graph, out, node, elem, width)
            plan = dataclasses.replace(plan, kernels=(*plan.kernels, cast))
    plan = dataclasses.replace(plan, workspaces=tuple(spaces))
    yield BackwardStage("module", plan)


def with_vectors(rows: Graph | None, programs: Sequence[Program], kept: set[str]) -> Graph | None:
    """The graph of row values with those that kernels read as vectors, and without what no kernel reads. `kept`:
    workspaces that kernels read."""
    nodes = list(rows.nodes) if rows is not None else []
    spaces = {n.x for n in nodes if isinstance(n, Output) and n.mode is not Assign.REDUCE_ADD}
    nodes = [n for n in nodes if not (isinstance(n, Output) and n.x in spaces and n.x not in kept)]
    for name, e in {name: e for p in programs for name, e in p.rows}.items():
        known = {n.id for n in nodes}
        wanted = [v for v in sorted(variables(e)) if v != SCALE.name]
        nodes += [Input(id=v, axes=ROWS) for v in wanted if v not in known]
        nodes += [Map(id=name, axes=ROWS, inputs=tuple(wanted), expr=e), Output(id=f"{name}!", axes=ROWS, x=name)]
    return Graph("rows", tuple(nodes)).live() if nodes else None


def captures(variant: Variant) -> tuple[TensorArg, ...]:
    found = [TensorArg(name=c.name, elem=_STORAGE[c.storage], rank=c.rank, access=Access.CAPTURE, strided=True)
             for c in variant.captures]  # fmt: skip
    if variant.sink:
        found.append(TensorArg(name=SINK, elem=_STORAGE[variant.sink], rank=1, access=Access.CAPTURE, strided=True))
    return tuple(found)


def derive_backward(
    variant: Variant, signature: Signature, target: Target, asked: Asked, configs: Sequence[SumsConfig] | None = None
) -> BackwardLevels:
    """All levels of a derivative. `configs`: tile shapes of its kernels; None: the best of the rules whose code fits
    the instruction cache, which the rules do not know."""
    check(signature, target)
    ranked = choices(variant, signature, target, asked)
    if configs is not None:
        fits(ranked, configs, target)
        return _levels(variant, signature, target, asked, ranked, configs)
    chosen = tuple(r[0] for _, r in ranked)
    while True:
        try:
            return _levels(variant, signature, target, asked, ranked, chosen)
        except VerifyError as error:
            further = following(ranked, chosen, error) if error.rule == "code-size" else None
            if further is None:
                raise
            chosen = further


def fits(ranked: Ranked, configs: Sequence[SumsConfig], target: Target) -> None:
    """SignatureError for configurations of other kernels, or of another target."""
    kind = HopperSumsConfig if target.has(Feature.WGMMA) else Config
    if len(configs) != len(ranked) or not all(isinstance(c, kind) for c in configs):
        names = ", ".join(name for name, _ in ranked)
        raise SignatureError(
            f"configurations {', '.join(map(str, configs))} of gradients. Allowed for {target.name}: a "
            f"{kind.__name__} for each of {names}, such as {', '.join(str(r[0]) for _, r in ranked)}"
        )


def following(ranked: Ranked, chosen: Sequence[SumsConfig], error: AttngenError) -> tuple[SumsConfig, ...] | None:
    """The next in rank of each kernel that `error` names; None if one has no further. Raises an `error` that names
    none."""
    named = [name in str(error) for name, _ in ranked]
    if not any(named):
        raise error
    at = [r.index(c) + n for (_, r), c, n in zip(ranked, chosen, named, strict=True)]
    if any(n == len(r) for n, (_, r) in zip(at, ranked, strict=True)):
        return None
    return tuple(r[n] for n, (_, r) in zip(at, ranked, strict=True))


def _levels(
    variant: Variant, signature: Signature, target: Target, asked: Asked, ranked: Ranked, chosen: Sequence[SumsConfig]
) -> BackwardLevels:
    done = tuple(stages(variant, signature, target, asked, chosen))
    last = done[-1].level
    assert isinstance(last, Schedule)
    return BackwardLevels(done, tuple(zip((name for name, _ in ranked), chosen, strict=True)), verify(last))


def check(signature: Signature, target: Target) -> None:
    """GradientError for rows that cannot be stored, or read, as the kernels do it."""
    step = VECTOR_BYTES // ELEMENT_BYTES
    for name, d in (("q and k", signature.head_dim_qk), ("v", signature.head_dim_v)):
        if d % step:
            raise GradientError(
                f"gradients with head_dim {d} of {name}. Allowed: multiples of {step}. Pad with zeros to "
                f"{-(-d // step) * step}{'' if name == 'v' else f' and give scale=1/sqrt({d})'}; results are 0 there"
            )
    if target.has(Feature.WGMMA) and signature.alignment < VECTOR_BYTES:
        raise GradientError(
            f"gradients for {target.name} of rows on {signature.alignment} bytes, which its copy engine does not read. "
            "Allowed: rows on 16 bytes, or the target sm80, whose kernels run there too"
        )


def choices(
    variant: Variant, signature: Signature, target: Target, asked: Asked
) -> Ranked:
    """Ranked tile shapes of each kernel that owns an axis, by name."""
    parts = parts_of(backward_graph(variant, asked)[1], variant, signature, target, asked.same_bits)
    ranked = tuple((name, candidates_sums(o, variant, signature, target)) for name, o in named(parts))
    for name, found in ranked:
        if not found:
            raise PassError(f"choose_sums: no tile shape fits {name} for {signature} on {target.name}")
    return ranked


def gradient_names(variant: Variant) -> Iterable[str]:
    """What may have a gradient: inputs, captured tensors of floats that the score reads, the sink."""
    read = {e.name for e in loads(variant.score) if e.dtype is DType.F32}
    yield from ("q", "k", "v", *(c.name for c in variant.captures if c.name in read))
    if variant.sink and variant.normalizer is Normalizer.SOFTMAX:
        yield SINK
