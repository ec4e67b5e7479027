"""`attngen doctor`: what this machine can do, what is missing, and the fix."""

from __future__ import annotations

import argparse

from attngen.cli.options import Commands, add_command


def register(commands: Commands) -> None:
    add_command(
        commands, "doctor", run, "say what this machine can do, what is missing, and how to get it", "attngen doctor"
    )


def run(arguments: argparse.Namespace) -> int:
    from attngen import doctor

    return doctor.main()
