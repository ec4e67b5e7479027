"""Options that several commands share. Imports nothing of the compiler: it runs for every `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
) -> argparse.ArgumentParser:
    """A subcommand whose `--help` ends with an example."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def score_options(parser: argparse.ArgumentParser) -> None:
    """What is computed."""
    parser.add_argument(
        "--mask",
        default="",
        metavar="TEXT",
        help="full, causal, causal(align='top_left'), sliding_window(256), "
        "window(3,0), prefix_lm(16), document; combined with & | ~ (default: full)",
    )
    parser.add_argument(
        "--score", default="", metavar="LIST", help="comma list of softcap(30), alibi, bias, sigmoid, applied in order"
    )
    parser.add_argument("--sink", action="store_true", help="a sink logit for each head joins the softmax")
    parser.add_argument("--scale", type=float, help="factor of the logits (default: 1/sqrt(head_dim))")
    parser.add_argument("--normalizer", choices=("softmax", "none"), default="softmax")


def variant_options(parser: argparse.ArgumentParser) -> None:
    """What is computed, and what for."""
    score_options(parser)
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="of q and k (default: 128)")
    parser.add_argument("--head-dim-v", type=int, metavar="N", help="of v and the output (default: as --head-dim)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument(
        "--alignment", type=int, choices=(2, 4, 8, 16), help="of rows, in bytes (default: 16, or what divides a row)"
    )
    parser.add_argument("--target", default="sm80", help="sm80 (default) or sm90")
    parser.add_argument(
        "--config",
        default="",
        metavar="TEXT",
        help="as explain prints it: m128n64w4s1c2 (rows, keys, warps, stages, CTAs an SM), or for sm90 "
        "'m128n128g2 s2 reference order 01+ turns' (default: measured or ranked)",
    )


def shape_options(parser: argparse.ArgumentParser) -> None:
    for name, text in (
        ("batch", "batch size"),
        ("heads", "query heads"),
        ("kv-heads", "key heads"),
        ("sq", "queries"),
        ("sk", "keys"),
    ):
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=text)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value
