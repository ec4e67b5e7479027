"""Every level of a few variants in small tiles, pass by pass, and parts of their text."""

from __future__ import annotations

import textwrap
from functools import cache

import torch

from attngen.config import Config
from attngen.functions import sigmoid
from attngen.ir.graph import Graph
from attngen.ir.program import Program
from attngen.ir.schedule import Schedule
from attngen.pipelines import stages
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal, document

SIGNATURE = Signature(IoType.BF16, 64, 64)
ONE_STAGE, TWO_STAGES = Config(32, 16, 2), Config(32, 16, 2, stages=2)
CAUSAL = Attention(mask=causal())
SIGMOID = Attention(mask=causal(), score=lambda s, b, h, i, j: sigmoid(s), normalizer="none")
DOCUMENT = Attention(mask=document(torch.zeros(9, dtype=torch.int32)))
PASSES = ["textbook", "signs", "simplify", "stream", "units", "tile", "place"]
PASSES += ["schedule", "expand", "synchronize", "allocate", "visit_table"]
Level = Graph | Program | Schedule


@cache
def level(spec: Attention, name: str, config: Config = ONE_STAGE) -> Level:
    """What the named pass gives from what the one before it gave."""
    return next(s.level for s in stages(spec.variant, SIGNATURE, target("sm80"), config) if s.name == name)


def part(of: Level, start: str, stop: str = "") -> str:
    """The lines of a level's text from the first that begins with `start` until one that begins with `stop`; without
    `stop`, those that begin with `start`."""
    lines = str(of).splitlines()
    if not stop:
        return textwrap.dedent("\n".join(x for x in lines if x.strip().startswith(start)))
    first = next(n for n, x in enumerate(lines) if x.strip().startswith(start))
    last = next((n for n, x in enumerate(lines) if n > first and x.strip().startswith(stop)), len(lines))
    return textwrap.dedent("\n".join(lines[first:last]))


def same(got: str, want: str) -> None:
    assert got.strip() == textwrap.dedent(want).strip()
