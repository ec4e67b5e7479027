"""`attngen bench`: kernels beside their peers, in one run: of the forward pass, or of the backward pass alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.cli.options import Commands, add_command, positive

if TYPE_CHECKING:
    from attngen.bench.cases import Case
    from attngen.bench.contenders import Contender
    from attngen.bench.record import Record
    from attngen.bench.timing import Mode

GROUPS = ("grid", "head-dims", "groups", "lengths", "variants", "growing", "first-call")
BACKWARD_GROUPS = ("grid", "head-dims", "groups", "variants")
PEERS = ("cuDNN", "FlashAttention-2", "FlashAttention-3", "FlexAttention")
MODES = {"gaps": ("GAPS",), "steady": ("STEADY",), "both": ("GAPS", "STEADY")}


def register(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "measure kernels beside cuDNN, FlashAttention and FlexAttention, where this machine has them",
        "attngen bench --groups grid --json h200.json --html h200.html\n"
        "  attngen bench --backward --groups grid,variants --json h200_backward.json\n"
        "  attngen bench --read h200.json --html h200.html --tables README.md",
    )
    parser.add_argument("--groups", default="grid", metavar="LIST", help=f"{', '.join(GROUPS)}, or all (default: grid)")
    parser.add_argument(
        "--backward", action="store_true",
        help=f"the backward pass alone, also with the same bits in every run; groups: {', '.join(BACKWARD_GROUPS)}",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this, as in 'causal D128'")
    parser.add_argument("--peers", default="all", metavar="LIST", help=f"{', '.join(PEERS)}; all (default), or none")
    parser.add_argument(
        "--mode", choices=tuple(MODES), default="gaps",
        help="gaps: the GPU rests before each block, for decisions; steady: back to back (default: gaps)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--read", type=Path, metavar="FILE.json", help="measure nothing: take this record")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record, also after each case")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of it")
    parser.add_argument(
        "--tables", type=Path, nargs="+", default=[], metavar="FILE.md",
        help="renew the tables between <!-- generated: NAME --> and <!-- /generated --> there",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """1 where attngen itself has no right result for a case."""
    from attngen.bench.page import page
    from attngen.bench.record import Record
    from attngen.bench.tables import fill, missing, table

    record = Record.read(arguments.read) if arguments.read else measured(arguments)
    if arguments.html:
        arguments.html.write_text(page(record), encoding="utf-8")
        print(arguments.html)
    for path in arguments.tables:
        path.write_text(fill(path.read_text(encoding="utf-8"), record), encoding="utf-8")
        print(path)
    if not (arguments.html or arguments.tables):
        for group in (*GROUPS[:-1], *(f"backward-{g}" for g in BACKWARD_GROUPS)):
            if record.cases(group):
                print(f"{group}, TFLOP/s\n{table(group, record)}\n")
        if record.first_calls:
            print(f"first call\n{table('first-call', record)}\n")
        print("\n".join(f"missing: {line}" for line in missing(record)))
    return int(bool(record.failed))


def measured(arguments: argparse.Namespace) -> Record:
    from attngen.bench import machine
    from attngen.bench.first import SAMPLES, first_call
    from attngen.bench.run import begin, by_model
    from attngen.bench.run import run as run_cases
    from attngen.bench.timing import Mode, Settings

    groups = chosen("--groups", arguments.groups, BACKWARD_GROUPS if arguments.backward else GROUPS)
    on = machine.device()
    contenders = contenders_of(arguments.peers, machine.capability(on), arguments.backward)
    modes: list[Mode] = [Mode[name] for name in MODES[arguments.mode]]
    settings = Settings(rounds=arguments.rounds)

    def keep(record: Record) -> None:
        if arguments.json:
            arguments.json.write_text(record.to_json(), encoding="utf-8")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    record = begin(on, contenders, modes, settings)
    cases = cases_of(groups, arguments.only, arguments.backward)
    predict = by_model(on, record.clocks["before"])
    run_cases(record, cases, contenders, modes, settings, on, say, keep, predict=predict)
    if "first-call" in groups:
        for pattern, head_dim in SAMPLES:
            record.first_calls.append(first_call(pattern, head_dim))
            say(str(record.first_calls[-1]))
    record.clocks["after"] = machine.clocks(on)
    keep(record)
    return record


def chosen(option: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a comma list, in the order of `allowed`."""
    from attngen.cli.syntax import meant
    from attngen.errors import SpecError

    named = {part.strip() for part in text.split(",")}
    if named == {"all"}:
        return allowed
    unknown = sorted(named - set(allowed) - {""})
    if unknown:
        named_wrong = ", ".join(f"{name}{meant(name, allowed)}" for name in unknown)
        raise SpecError(f"{option}: {named_wrong} is not known. Allowed: {', '.join(allowed)}, all")
    return tuple(name for name in allowed if name in named)


def cases_of(groups: tuple[str, ...], only: str, backward: bool = False) -> list[Case]:
    from attngen.bench.cases import GROUPS as MAKERS
    from attngen.bench.cases import backward as backward_cases

    made = (backward_cases(group) if backward else MAKERS[group]() for group in groups if group in MAKERS)
    return [case for cases in made for case in cases if only in str(case)]


def contenders_of(peers: str, capability: tuple[int, int], backward: bool = False) -> tuple[Contender, ...]:
    from attngen.bench import contenders

    names = () if peers == "none" else chosen("--peers", peers, PEERS)
    if backward:  # a peer brings its deterministic mode with it
        more = (p for p in contenders.BACKWARD_PEERS if p.name.removesuffix(contenders.SAME_BITS) in names)
        return (*contenders.own_backward(capability), *more)
    return (*contenders.own(capability), *(p for p in contenders.PEERS if p.name in names))
