"""`attngen lower`: a schedule text through verify, lower, compile, emulate or time."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.cli.options import Commands, add_command, positive, score_options, shape_options
from attngen.progress import Progress

if TYPE_CHECKING:
    from attngen.ir.schedule import Schedule
    from attngen.kernel import Generated
    from attngen.signature import Signature
    from attngen.trial import Trial


def register(commands: Commands) -> None:
    parser = add_command(
        commands,
        "lower",
        run,
        "take a schedule text through verify, lower, and if asked compile, emulate or time",
        "attngen lower generated/causal_d64.schedule --compile --emulate --mask causal",
    )
    parser.add_argument("file", type=Path, metavar="FILE.schedule")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.cu", help="write the CUDA text")
    parser.add_argument("--compile", action="store_true", help="compile it and pass it through the build gate")
    parser.add_argument("--arch", help="what to compile for (default: the target's first, sm_80)")
    parser.add_argument("--emulate", action="store_true", help="run it in the emulator, against float64")
    parser.add_argument("--time", action="store_true", help="time it on the GPU, beside torch's attention")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="of timing (default: 20)")
    score_options(parser)
    shape_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from attngen.ir.schedule import Schedule
    from attngen.ir.verify import verify
    from attngen.kernel import Generated
    from attngen.target import target

    schedule = Schedule.parse(text_of(arguments.file))
    verified = verify(schedule)
    module = Generated(verified, target(schedule.target), f"lowered from {arguments.file.name}")
    print(f"{schedule.name}: verified{''.join(f', {check}' for check in verified.checks)}")
    for kernel in schedule.kernels:
        print(
            f"{kernel.name}: {kernel.threads} threads, {kernel.smem_bytes} bytes of dynamic shared memory, "
            f"{sum(v.registers for r in kernel.roles for v in r.values)} registers a thread in values"
        )
    if arguments.output:
        arguments.output.write_text(module.source.text, encoding="utf-8")
        print(arguments.output)
    with Progress() as progress:
        if arguments.compile:
            compile_it(module, arguments.arch, progress)
        status = emulate_it(module, arguments, progress) if arguments.emulate else 0
        if arguments.time:
            time_it(module, arguments, progress)
    return status


def text_of(file: Path) -> str:
    from attngen.errors import ScheduleError

    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{file}: byte {error.start} is not UTF-8. Allowed: the text of a schedule") from None


def compile_it(module: Generated, arch: str | None, progress: Progress) -> None:
    arch = arch or module.target.archs[0]
    progress.step(f"compiling for {arch}")
    artifact = module.artifact(arch)
    for symbol, used in artifact.resources.items():
        print(
            f"{symbol} {arch}: {used.registers} registers, {used.spill_store_bytes} bytes of spill stores, "
            f"{used.spill_load_bytes} of spill loads ({artifact.compiler}); build gate passed"
        )


def trial_of(schedule: Schedule, arguments: argparse.Namespace, defaults: tuple[int, int, int, int, int]) -> Trial:
    """Random inputs of the schedule's types, for the description that the options give."""
    from attngen.cli.request import Request
    from attngen.errors import SpecError
    from attngen.ir.schedule import Access
    from attngen.signature import Shapes, check_tensors
    from attngen.target import target
    from attngen.trial import Data, Trial, inputs

    main = schedule.kernels[-1]
    names = {t.name for t in main.tensors}
    if not {"q", "k", "v", "out"} <= names:
        raise SpecError(f"{main.name} has the tensors {', '.join(sorted(names))}; a forward has q, k, v and out")
    given = (arguments.batch, arguments.heads, arguments.kv_heads, arguments.sq, arguments.sk)
    shapes = Shapes(*(g or d for g, d in zip(given, defaults, strict=True)))
    request = Request(
        arguments.mask,
        arguments.score,
        arguments.sink,
        arguments.scale,
        arguments.normalizer,
        signature(schedule),
        target(schedule.target),
        None,
    )
    if request.equal_lengths:
        shapes = replace(shapes, Sk=shapes.Sq)
    spec = request.spec(shapes)
    wanted = {t.name for k in schedule.kernels for t in k.tensors if t.access is Access.CAPTURE}
    if wanted != set(spec.tensors):
        raise SpecError(
            f"the schedule reads the tensors {_named(wanted)}, --mask and --score give {_named(set(spec.tensors))}; "
            "give the options of the variant that the schedule is of"
        )
    q, k, v = inputs(shapes, request.signature, Data.NORMAL, 0)
    check_tensors(q, k, v, spec)
    return Trial(spec, q, k, v)


def _named(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def signature(schedule: Schedule) -> Signature:
    """What the tensors of a schedule say of the kernel's compile-time properties."""
    from attngen.ir.ops import CopyTile, CpAsync
    from attngen.ir.schedule import Elem, ops_of
    from attngen.signature import ELEMENT_BYTES, VECTOR_BYTES, IoType, Signature

    main = schedule.kernels[-1]
    half = next(t.elem for t in main.tensors if t.name == "q") is Elem.F16
    copies = [op for _, op in ops_of(main) if isinstance(op, CopyTile | CpAsync)]
    alignment = min((op.bytes if isinstance(op, CpAsync) else ELEMENT_BYTES for op in copies), default=VECTOR_BYTES)
    dtype = IoType.FP16 if half else IoType.BF16
    strided = tuple(sorted(t.name for t in main.tensors if t.strided))
    return Signature(dtype, schedule.head_dim_qk, schedule.head_dim_v, alignment, strided)


def emulate_it(module: Generated, arguments: argparse.Namespace, progress: Progress) -> int:
    """1 where the result is outside the tolerance."""
    from attngen.emulator import Mode

    trial = trial_of(module.schedule, arguments, (1, 2, 1, 130, 190))
    ok = True
    for mode in Mode:
        progress.step(f"emulator, {mode.name.lower()} (the first run compiles)")
        errors = trial.run(module, mode)
        ok = ok and errors.ok
        print(
            f"emulator {mode.name.lower():<7} out {errors.out:.2e} (torch {errors.out_torch:.2e}, "
            f"allowed {errors.out_allowed:.2e})  lse {errors.lse:.2e} "
            f"(allowed {errors.lse_allowed:.0e})  {'ok' if errors.ok else 'FAILED'}"
        )
    if not ok and arguments.mask in ("", "full") and not arguments.score:
        print("compared with plain attention: give --mask and --score if the schedule computes a variant")
    return int(not ok)


def time_it(module: Generated, arguments: argparse.Namespace, progress: Progress) -> None:
    """Medians of interleaved rounds by CUDA events."""
    import torch

    from attngen.errors import MissingToolError
    from attngen.execute import run as run_module

    if not torch.cuda.is_available():
        raise MissingToolError("--time needs a GPU that torch can use; --emulate runs without one")
    trial = trial_of(module.schedule, arguments, (1, 16, 16, 4096, 4096))
    q, k, v = (t.cuda() for t in (trial.q, trial.k, trial.v))
    captures = {n: t.cuda() for n, t in trial.spec.tensors.items()}
    scale = trial.spec.scale_for(q.size(3))
    calls: dict[str, Callable[[], object]] = {"attngen": lambda: run_module(module, q, k, v, captures, scale)}
    plain = not arguments.score and not arguments.sink and arguments.normalizer == "softmax"
    if plain and arguments.mask in ("", "full", "causal") and q.size(2) == k.size(2):
        causal = arguments.mask == "causal"
        sdpa = torch.nn.functional.scaled_dot_product_attention
        calls["torch SDPA"] = lambda: sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(arguments.rounds + 2):  # the first two warm up
        progress.step(f"timing, round {number + 1} of {arguments.rounds + 2}")
        for name, call in calls.items():
            elapsed = _milliseconds(call)
            if number >= 2:
                times[name].append(elapsed)
    for name, values in times.items():
        print(
            f"{name:<11} {statistics.median(values):8.3f} ms, median of {len(values)} interleaved rounds "
            f"({min(values):.3f} to {max(values):.3f}), q {list(q.shape)}, k {list(k.shape)}"
        )


def _milliseconds(call: Callable[[], object]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
