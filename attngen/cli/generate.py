"""`attngen generate`: a description in, three files out. Needs no GPU and no CUDA compiler."""

from __future__ import annotations

import argparse
from pathlib import Path

from attngen.cli.options import Commands, add_command, variant_options


def register(commands: Commands) -> None:
    parser = add_command(
        commands, "generate", run, "write the CUDA text, the schedule and a manifest of a variant",
        "attngen generate --mask 'causal & sliding_window(256)' --score softcap=30 --head-dim 128 -o out",
    )  # fmt: skip
    variant_options(parser)
    parser.add_argument("--name", help="of the files (default: from the description)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), metavar="DIR", help="directory (default: the current one)"
    )


def run(arguments: argparse.Namespace) -> int:
    from attngen.cli.request import request_of
    from attngen.files import default_name, kernel_files

    kernel = request_of(arguments).kernel()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for file in kernel_files(kernel, arguments.name or default_name(kernel)):
        path = arguments.output / file.name
        path.write_text(file.text, encoding="utf-8")
        print(path)
    return 0
