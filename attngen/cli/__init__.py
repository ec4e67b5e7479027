"""The command line: one file a subcommand. Nothing heavy is imported before a command runs: `--help` is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from attngen import __version__
from attngen.cli import bench, doctor, explain, generate, lower, tune, verify
from attngen.errors import AttngenError

COMMANDS = (generate, lower, explain, verify, tune, bench, doctor)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="attngen",
        description="A compiler that generates specialised attention kernels.",
        epilog="example:\n  attngen generate --mask causal --head-dim 128 --dtype bf16 --target sm80 -o out",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"attngen {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done; 1: what was checked does not hold; 2: a bad argument or input, said in one message."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except AttngenError as error:
        print(f"attngen: {error}", file=sys.stderr)
    except BrokenPipeError:  # the reader of a pipe has seen enough; the interpreter flushes into nothing at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"attngen: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
    return 2
