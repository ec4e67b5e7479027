"""`attngen explain`: every level of a variant, and why the kernel looks as it does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.cli.options import Commands, add_command, positive, variant_options
from attngen.progress import Progress

if TYPE_CHECKING:
    from attngen.cli.request import Request
    from attngen.config import AnyConfig
    from attngen.kernel import Kernel
    from attngen.measured import Machine
    from attngen.passes.hopper import Candidate


def register(commands: Commands) -> None:
    parser = add_command(
        commands,
        "explain",
        run,
        "print every level of a variant, with the reason of each decision",
        "attngen explain --mask causal --score softcap=30 --head-dim 128\n"
        "  attngen explain --mask causal --target sm90 --html causal.html",
    )
    variant_options(parser)
    parser.add_argument("--no-compile", action="store_true", help="leaves out registers and refused configurations")
    parser.add_argument("--source", action="store_true", help="print the CUDA text too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw it: one page, which needs nothing else")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="the drawings alone")
    for name, text in (("sq", "queries"), ("sk", "keys")):
        parser.add_argument(
            f"--{name}", type=positive, default=2048, metavar="N", help=f"{text} of the drawn tiles (default: 2048)"
        )


def run(arguments: argparse.Namespace) -> int:
    from attngen.cli.request import request_of
    from attngen.errors import MissingToolError
    from attngen.kernel import settled

    request = request_of(arguments)
    on = machine_here()
    kernel = request.kernel(on)
    resources = ["not compiled (--no-compile)"]
    if not arguments.no_compile:
        with Progress() as progress:
            progress.step(f"compiling for {kernel.target.archs[0]}")
            try:
                kernel = settled(kernel, kernel.target.archs[0])
                resources = list(resource_lines(kernel))
            except MissingToolError as error:
                resources = [f"not compiled: {error}"]
    if arguments.html or arguments.svg:
        for path, text in drawings(request, kernel, arguments):
            path.write_text(text, encoding="utf-8")
            print(path)
        return 0
    for title, lines in sections(kernel, resources, on):
        print(f"== {title}")
        print("\n".join(lines) + "\n")
    if arguments.source:
        print(f"== source\n{kernel.source.text}")
    return 0


def machine_here() -> Machine | None:
    """What measurements of this machine are for; None without a GPU."""
    import torch

    from attngen.measured import machine

    return machine(torch.cuda.current_device()) if torch.cuda.is_available() else None


def drawings(request: Request, kernel: Kernel, arguments: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    from attngen.draw.kernel_page import Drawn, page, picture
    from attngen.draw.page import svg_file
    from attngen.signature import Shapes

    sq = arguments.sq
    sk = sq if request.equal_lengths else arguments.sk
    spec = request.spec(Shapes(B=1, Hq=4, Hkv=2, Sq=sq, Sk=sk))
    drawn = Drawn(kernel, spec.tensors, sq, sk, {} if arguments.no_compile else kernel.resources)
    if arguments.html:
        yield arguments.html, page(drawn)
    if arguments.svg:
        yield arguments.svg, svg_file(picture(drawn))


def sections(kernel: Kernel, resources: list[str], on: Machine | None) -> Iterator[tuple[str, list[str]]]:
    from attngen.measured import origin

    variant = kernel.variant
    source = origin(variant, kernel.signature, kernel.target, kernel.config, on)
    yield (
        "variant",
        [
            f"description  {variant.description}",
            f"score        {variant.score}",
            f"mask         {variant.mask}",
            f"signature    {kernel.signature}",
            f"target       {kernel.target.name}",
            f"config       {kernel.config}",
            f"from         {source}",
        ],
    )
    yield (
        "captured",
        [
            *(f"tensor    {c.name}: {c.storage.value}, rank {c.rank}, a run-time argument" for c in variant.captures),
            *(f"constant  {name} = {value}, part of the kernel" for name, value in variant.constants),
        ]
        or ["nothing"],
    )
    for stage in kernel.levels.stages:
        yield f"{type(stage.level).__name__.lower()} after {stage.name}", str(stage).rstrip().split("\n")
    yield "decisions", [f"{fact.subject}: {fact.text}" for fact in kernel.schedule.facts]
    yield "verified", list(kernel.verified.checks) or ["no rule is recorded"]
    yield "resources", resources
    yield "configurations", list(configuration_lines(kernel))


def resource_lines(kernel: Kernel) -> Iterator[str]:
    smem = {k.name: k.smem_bytes for k in kernel.schedule.kernels}
    for symbol, used in kernel.resources.items():
        yield (
            f"{symbol}: {used.registers} registers, {used.spill_store_bytes} bytes of spill stores, "
            f"{used.spill_load_bytes} of spill loads, {smem[symbol]} bytes of dynamic shared memory"
        )


def configuration_lines(kernel: Kernel) -> Iterator[str]:
    """The legal configurations in rank, and why each is not the one; then the shapes that do not fit."""
    from attngen.passes import hopper
    from attngen.pipelines import judged
    from attngen.pipelines import ranked as ranking

    refused = dict(r.split(": ", 1) for r in kernel.rejected)
    of = kernel.variant, kernel.signature, kernel.target
    ranked, candidates = ranking(*of), {c.config: c for c in judged(*of)}
    width = max(len(str(c)) for c in ranked)
    least = min((c.cost for c in candidates.values()), default=1.0)
    if candidates:
        yield (
            f"estimates of the machine model: simulated cycles of {hopper.LENGTH} queries and keys in whole tiles, "
            "above the least; what was measured goes first"
        )
    if kernel.config not in ranked:
        yield f"{kernel.config}  given by the caller"
    shorter, left = hopper.shorter(list(candidates)), 0
    for at, config in enumerate(ranked, 1):
        said = []
        if config == kernel.config:
            said.append("chosen")
        elif str(config) in refused:
            said.append("refused by the build gate: " + "; ".join(refused[str(config)].splitlines()))
        elif not candidates:
            said.append("behind: " + ("; ".join(drawbacks(config, kernel)) or "equal by the rules"))
        if config in candidates:
            said.append(estimated(candidates[config], least))
        if config in shorter and not said:
            left += 1
            continue
        yield f"{at:>3}. {config!s:<{width}}  {'; '.join(said) or 'not among what the model ranks'}"
    spare = hopper.beside(kernel.variant.score)
    for shape, limit in hopper.excluded(kernel.signature, kernel.target, spare) if candidates else ():
        yield f"     {shape}: does not fit: {limit}"
    if left:
        least_code = f"{shorter[0].policy.value}, s{shorter[0].slots}"
        yield f"     {left} more with less code, for scores whose code is too long in all of these: {least_code}"


def estimated(candidate: Candidate, least: float) -> str:
    """What the model says of a candidate."""
    e = candidate.estimate
    binds = "order of the streams" if e.binding == "stream" else e.binding
    behind = f"+{100 * (candidate.cost / least - 1):.1f} %"
    return f"estimate {behind}: {e.step:.0f} cycles a step, tensor {100 * e.tensor:.0f} %, what binds: {binds}"


def drawbacks(config: AnyConfig, kernel: Kernel) -> Iterator[str]:
    """What a configuration has less of than the chosen one."""
    from attngen.config import Config
    from attngen.passes.choose import budget, padded

    assert isinstance(config, Config)
    assert isinstance(kernel.config, Config)
    best, allowed = kernel.config, budget(kernel.variant)
    registers = config.warp_rows // 16 * (padded(kernel.signature.head_dim_v) + config.block_n) // 2
    if registers > allowed:
        yield f"O and S take {registers} registers of {allowed}"
    for what, own, other in (
        ("rows a warp", config.warp_rows, best.warp_rows),
        ("warps an SM", config.warps * config.min_ctas, best.warps * best.min_ctas),
        ("CTAs an SM", config.min_ctas, best.min_ctas),
        ("keys a tile", config.block_n, best.block_n),
    ):
        if own < other:
            yield f"{own} {what} instead of {other}"
