"""`attngen verify`: a variant on random shapes, in the emulator and on a GPU where there is one, against float64."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.cli.options import Commands, add_command, positive, shape_options, variant_options
from attngen.progress import Progress

if TYPE_CHECKING:
    from attngen.backward_pipeline import Asked
    from attngen.cli.request import Request
    from attngen.gradient import BackwardKernel
    from attngen.signature import Shapes
    from attngen.spec import Variant
    from attngen.target import Target
    from attngen.trial import Data, Errors, Trial

LENGTHS = (130, 1, 17, 63, 64, 65, 128, 200, 257)  # drawn from: tile boundaries, and both sides of them
RATIOS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))  # query heads, key heads
LARGE = 1 << 15
ORDER = {False: "any order", True: "same bits"}  # of sums over tiles, by whether they are the same bits in every run
DOCUMENT = Path("docs/fault_injection.md")


def register(commands: Commands) -> None:
    parser = add_command(
        commands,
        "verify",
        run,
        "run a variant on random shapes and compare with float64; exit 1 where it fails",
        "attngen verify --mask causal --head-dim 128 --sq 256 --sk 256\n"
        "  attngen verify --mask causal --head-dim 64 --backward --target sm90\n"
        "  attngen verify --mask causal --head-dim 64 --fault-injection",
    )
    variant_options(parser)
    shape_options(parser)
    parser.add_argument(
        "--backward", action="store_true",
        help="the gradients of everything that may have one instead; --config is then of their kernels, one for all "
        "or one for each: 'm128n64g2 s2 split; m128n128g2 s2 split'",
    )  # fmt: skip
    parser.add_argument("--cases", type=positive, default=3, metavar="N", help="random shapes and data (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of shapes, data and random order (default: 0)")
    parser.add_argument(
        "--fault-injection", action="store_true", help="break the schedule in turn, report what notices"
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=DOCUMENT,
        metavar="FILE",
        help=f"with --fault-injection: write the section of this kernel (default: {DOCUMENT})",
    )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    shapes: Shapes
    data: Data
    where: str
    errors: Errors | str  # or what the emulator or the device objected to

    @property
    def ok(self) -> bool:
        return not isinstance(self.errors, str) and self.errors.ok

    def __str__(self) -> str:
        s = self.shapes
        head = f"{s.B}x{s.Hq}/{s.Hkv}x{s.Sq}x{s.Sk}"
        if isinstance(self.errors, str):
            return f"{head:<18} {self.data.value:<9} {self.where:<16} FAILED: {self.errors}"
        e = self.errors
        return (
            f"{head:<18} {self.data.value:<9} {self.where:<16} {e.out:9.2e} {e.out_torch:9.2e} {e.out_allowed:9.2e} "
            f"{e.lse:9.2e} {e.lse_allowed:9.2e}  {'ok' if e.ok else 'FAILED'}"
        )


HEADER = (
    f"{'BxHq/HkvxSqxSk':<18} {'data':<9} {'run':<16} {'out':>9} {'torch':>9} {'allowed':>9} {'lse':>9} {'allowed':>9}"
)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from attngen.cli.request import request_of

    torch.set_num_threads(1)  # the tensors are small: more threads would only wait for each other
    request = request_of(arguments)
    if arguments.fault_injection:
        return inject(request, arguments)
    if arguments.backward:
        return gradients(request, arguments)
    print(
        f"{request.spec()!r}, {request.signature}, {request.target.name}: max |x - float64|, torch: "
        f"same-dtype eager\n{HEADER}"
    )
    failed = total = 0
    with Progress() as progress:
        for row in rows(request, arguments, progress):
            print(row, flush=True)
            total += 1
            failed += not row.ok
    print(f"{total - failed} of {total} runs within tolerance")
    return int(failed > 0)


def rows(request: Request, arguments: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Every case in every mode of the emulator, and on the GPU."""
    import torch

    from attngen.kernel import kernel_for
    from attngen.trial import Data, Trial, inputs

    draw = random.Random(arguments.seed)
    for case in range(arguments.cases):
        shapes = draw_shapes(draw, request, arguments)
        data = list(Data)[case % len(Data)]
        seed = arguments.seed + case
        spec = request.spec(shapes, seed)
        trial = Trial(spec, *inputs(shapes, request.signature, data, seed))
        kernel = kernel_for(spec.variant, request.signature, request.target, request.config)
        places = ["eager", "late", "random"] + (["gpu"] if torch.cuda.is_available() else [])
        for place in places:
            progress.step(f"case {case + 1} of {arguments.cases}: {place} (the first run of a variant compiles it)")
            yield Row(
                shapes, data, place if place == "gpu" else f"emulator {place}", errors_of(trial, kernel, place, seed)
            )


def errors_of(trial: Trial, kernel: object, place: str, seed: int) -> Errors | str:
    from attngen.emulator import Mode
    from attngen.errors import EmulatorError, LaunchError
    from attngen.kernel import Generated

    assert isinstance(kernel, Generated)
    try:
        if place == "gpu":
            return trial.run(kernel, device="cuda")
        return trial.run(kernel, Mode[place.upper()], seed)
    except (EmulatorError, LaunchError) as error:
        return str(error)


def draw_shapes(draw: random.Random, request: Request, arguments: argparse.Namespace) -> Shapes:
    """A random shape; what the options give is kept."""
    from attngen.errors import SignatureError
    from attngen.signature import Shapes

    queries, keys = (given or draw.choice(LENGTHS) for given in (arguments.sq, arguments.sk))
    if request.equal_lengths:
        keys = queries = arguments.sq or arguments.sk or queries
    # the emulator takes a second for a million scores: the longer the sequences, the fewer heads
    heads, kv_heads = draw.choice(RATIOS if queries * keys < LARGE else RATIOS[:2])
    if arguments.heads or arguments.kv_heads:
        group = heads // kv_heads
        kv_heads = arguments.kv_heads or (1 if arguments.heads % group else arguments.heads // group)
        heads = arguments.heads or kv_heads * group
    if heads % kv_heads:
        raise SignatureError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    batch = draw.choice((1, 2)) if heads * queries * keys < LARGE else 1
    return Shapes(arguments.batch or batch, heads, kv_heads, queries, keys)


def gradients(request: Request, arguments: argparse.Namespace) -> int:
    """The gradients of every case, by one kernel and by two, in every mode of the emulator, and on the GPU."""
    from attngen.execute import backward_target

    on = backward_target(request.target, request.signature)
    print(f"gradients of {request.spec()!r}, {request.signature}, {on.name}: max |x - float64|")
    print(f"{'BxHq/HkvxSqxSk':<18} {'data':<9} {'run':<28} {'of':<9} {'error':>9} {'torch':>9} {'allowed':>9}")
    failed = total = 0
    orders = gradient_kernels(request)
    with Progress() as progress:
        for line, ok in gradient_rows(request, arguments, orders, progress):
            print(f"{line}  {'ok' if ok else 'FAILED'}", flush=True)
            total += 1
            failed += not ok
    print(f"{total - failed} of {total} gradients within tolerance")
    return int(failed > 0)


def gradient_rows(
    request: Request, arguments: argparse.Namespace, orders: Iterable[bool], progress: Progress
) -> Iterator[tuple[str, bool]]:
    import torch

    from attngen.backward_pipeline import Asked
    from attngen.emulator import Mode
    from attngen.errors import EmulatorError, LaunchError
    from attngen.execute import backward_target
    from attngen.gradient_trial import GradientTrial
    from attngen.trial import Data, inputs

    draw, target = random.Random(arguments.seed), backward_target(request.target, request.signature)
    for case in range(arguments.cases):
        shapes, data = draw_shapes(draw, request, arguments), list(Data)[case % len(Data)]
        seed = arguments.seed + case
        spec = request.spec(shapes, seed)
        trial = GradientTrial(spec, *inputs(shapes, request.signature, data, seed), seed)
        head = f"{shapes.B}x{shapes.Hq}/{shapes.Hkv}x{shapes.Sq}x{shapes.Sk}"
        for same_bits in orders:
            asked = Asked(frozenset(trial.names), dlse=False, same_bits=same_bits)
            kernel = gradient_kernel(request, spec.variant, target, asked)
            places = ["eager", "late", "random"] + (["gpu"] if torch.cuda.is_available() else [])
            for place in places:
                progress.step(f"case {case + 1} of {arguments.cases}: {place}")
                where = place if place == "gpu" else f"emulator {place}"
                where += f", {ORDER[same_bits]}"
                start = f"{head:<18} {data.value:<9} {where:<28}"
                try:
                    device = "cuda" if place == "gpu" else "cpu"
                    mode = Mode.LATE if place == "gpu" else Mode[place.upper()]
                    for e in trial.run(kernel, mode, seed, device):
                        yield f"{start} {e.name:<9} {e.error:9.2e} {e.torch:9.2e} {e.allowed:9.2e}", e.ok
                except (EmulatorError, LaunchError) as error:
                    yield f"{start} {error}", False


def inject(request: Request, arguments: argparse.Namespace) -> int:
    """The table of mutants. 1 where one is caught by nobody and has no reason to be harmless."""
    from attngen.faults import Judge, Verdict, report

    kernels = list(gradient_kernels(request).values()) if arguments.backward else [request.kernel()]
    verdicts = list[Verdict]()
    for kernel in kernels:
        with Progress() as progress:
            judge = Judge.of(kernel, request.spec, request.equal_lengths)
            found = judge.all(lambda done, count: progress.step(f"mutant {done} of {count}"))
        verdicts += found
        told(report(kernel, found), arguments.write)
    missed = [v for v in verdicts if v.missed]
    print(f"{len(verdicts)} mutants, {len(missed)} caught by nobody and not known to be equivalent")
    return int(bool(missed))


def gradient_kernels(request: Request) -> dict[bool, BackwardKernel]:
    """By whether the bits are the same in every run: the kernels that --config suits; the others are named.
    SignatureError where it suits none."""
    from attngen.backward_pipeline import Asked, gradient_names
    from attngen.errors import SignatureError
    from attngen.execute import backward_target

    variant, target = request.spec().variant, backward_target(request.target, request.signature)
    made: dict[bool, BackwardKernel] = {}
    refused: dict[bool, SignatureError] = {}
    for same_bits in ORDER:
        asked = Asked(frozenset(gradient_names(variant)), dlse=False, same_bits=same_bits)
        try:
            made[same_bits] = gradient_kernel(request, variant, target, asked)
        except SignatureError as error:
            refused[same_bits] = error
    if not made:
        raise refused[False]
    for same_bits, why in refused.items():
        print(f"{ORDER[same_bits]}: not run. {why}")
    return made


def gradient_kernel(request: Request, variant: Variant, target: Target, asked: Asked) -> BackwardKernel:
    """With the configurations of --config: one for all of its kernels, or one for each."""
    from attngen.backward_pipeline import choices
    from attngen.gradient import backward_for

    configs = request.sums
    if len(configs) == 1:
        configs *= len(choices(variant, request.signature, target, asked))
    return backward_for(variant, request.signature, target, asked, configs or None)


def told(text: str, file: Path | None) -> None:
    """A section of the document, into it or printed."""
    from attngen.faults import document

    if file is None:
        print(text)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    existing = file.read_text(encoding="utf-8") if file.exists() else ""
    file.write_text(document(existing, text), encoding="utf-8")
    print(file)
