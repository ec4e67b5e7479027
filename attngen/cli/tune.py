"""`attngen tune`: the first configurations in rank, measured on this machine's GPU; the fastest is remembered."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from attngen.cli.options import Commands, add_command, positive, shape_options, variant_options

if TYPE_CHECKING:
    from attngen.signature import Shapes
    from attngen.tune import Outcome


def register(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tune",
        run,
        "measure the first configurations of a variant on this GPU and remember the fastest for calls on it",
        "attngen tune --mask causal --head-dim 128 --batch 4 --heads 16 --seqlen 4096",
    )
    variant_options(parser)
    parser.set_defaults(target="")
    shape_options(parser)
    parser.add_argument(
        "--seqlen", type=positive, default=4096, metavar="N", help="queries and keys, where not given (default: 4096)"
    )
    parser.add_argument("--first", type=positive, metavar="N", help="configurations to measure (default: 5)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="(default: 5)")


def run(arguments: argparse.Namespace) -> int:
    from attngen.bench.timing import Settings
    from attngen.cli.request import request_of
    from attngen.errors import SpecError
    from attngen.execute import device_arch, target_for
    from attngen.measured import FOLDER
    from attngen.runtime.cache import cache_directory
    from attngen.target import SM80
    from attngen.tune import FIRST, device, machine_of, on_device, sample_call, tune

    if arguments.config:
        raise SpecError(f"--config: {arguments.config!r} is given, and tune chooses it. Leave it out")
    given, arguments.target = arguments.target, arguments.target or SM80.name
    request, shapes = request_of(arguments), shapes_of(arguments)
    spec = request.spec(shapes)
    target = request.target if given else target_for(spec.variant, request.signature, device())
    call = sample_call(spec, request.signature, target, shapes)
    on, arch = machine_of(call), device_arch(target, call.q.device.index)
    measure = on_device(call, Settings(rounds=arguments.rounds))
    outcome, _ = tune(call, on, arch, measure, arguments.first or FIRST)
    print(f"{call.variant.description}, {request.signature}, {target.name}, {shapes}, {on.device}, {on.compiler}")
    print("\n".join(lines(outcome)))
    print(f"remembered in {cache_directory() / FOLDER}")
    return 0


def shapes_of(arguments: argparse.Namespace) -> Shapes:
    from attngen.signature import Shapes

    heads = arguments.heads or 16
    return Shapes(
        arguments.batch or 1, heads, arguments.kv_heads or heads, arguments.sq or arguments.seqlen,
        arguments.sk or arguments.seqlen,
    )  # fmt: skip


def lines(outcome: Outcome) -> Iterator[str]:
    """Fastest first, then what could not be measured."""
    best = outcome.trials[0][1].ms
    width = max(len(str(config)) for config, _ in (*outcome.trials, *outcome.refused))
    for config, time in outcome.trials:
        behind = f"+{100 * (time.ms / best - 1):.1f} %" if config != outcome.config else "fastest"
        yield f"{config!s:<{width}}  {time.ms:9.4f} ms  ({time.low:.4f} to {time.high:.4f})  {behind}"
    for config, reason in outcome.refused:
        yield f"{config!s:<{width}}  refused: {'; '.join(reason.splitlines())}"
