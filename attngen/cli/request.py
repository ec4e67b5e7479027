"""From the options of a command to a description, with sample tensors where a mask or score reads one."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from attngen.cli.syntax import MaskMaker, ScoreMaker, names_in, parse_mask, parse_scores
from attngen.config import AnyConfig, Config, FoldPolicy, HopperConfig
from attngen.errors import SpecError
from attngen.functions import sigmoid
from attngen.kernel import Kernel, kernel_for
from attngen.masks import Mask, causal, document, full, prefix_lm, sliding_window, window
from attngen.measured import Machine, lookup
from attngen.scores import Score, alibi, as_score, bias, softcap
from attngen.signature import IoType, Shapes, Signature
from attngen.spec import Attention
from attngen.target import Target, target

SAMPLE_SHAPES = Shapes(B=2, Hq=4, Hkv=2, Sq=128, Sk=128)  # of sample tensors, where no tensors are computed with
SAMPLE_DOCUMENTS = 4
_CONFIG = re.compile(r"m(\d+)n(\d+)w(\d+)(?: ?s(\d+))?(?: ?c(?:tas)?(\d+))?")
_HOPPER = re.compile(
    r"m(?P<m>\d+)n(?P<n>\d+)g(?P<groups>\d+)(?: ?s(?P<slots>\d+))?"
    rf"(?: (?P<policy>{'|'.join(p.value for p in FoldPolicy)}))?(?: order (?P<order>(?:\d\+?)+))?(?P<turns> turns)?"
)


@dataclass(frozen=True)
class Request:
    """What the variant options of a command say."""

    mask: str
    score: str
    sink: bool
    scale: float | None
    normalizer: str
    signature: Signature
    target: Target
    config: AnyConfig | None

    @property
    def equal_lengths(self) -> bool:
        """One list of document ids serves queries and keys."""
        return "document" in names_in(self.mask)

    def spec(self, shapes: Shapes = SAMPLE_SHAPES, seed: int = 0) -> Attention:
        """The description, its captured tensors made for these shapes."""
        samples = Samples(shapes, torch.Generator().manual_seed(seed))
        return Attention(
            mask=parse_mask(self.mask, samples.masks) if self.mask else None,
            score=parse_scores(self.score, samples.scores) if self.score else None,
            scale=self.scale,
            sink=samples.sink() if self.sink else None,
            return_lse=self.normalizer == "softmax",
            normalizer=self.normalizer,
        )

    def kernel(self, on: Machine | None = None) -> Kernel:
        """`on`: with the configuration that was measured fastest there, as a call takes it."""
        variant, config = self.spec().variant, self.config
        if config is None and on is not None:
            config = lookup(on, variant, self.signature, self.target)
        return kernel_for(variant, self.signature, self.target, config)


@dataclass(frozen=True)
class Samples:
    """Stands in for the tensors that a caller of the library would give."""

    shapes: Shapes
    random: torch.Generator

    @property
    def masks(self) -> dict[str, MaskMaker]:
        return {
            "full": full, "causal": causal, "window": window, "sliding_window": sliding_window, "prefix_lm": prefix_lm,
            "document": self.document,
        }  # fmt: skip

    @property
    def scores(self) -> dict[str, ScoreMaker]:
        return {"softcap": softcap, "alibi": self.alibi, "bias": self.bias, "sigmoid": lambda: as_score(sigmoid_score)}

    def document(self) -> Mask:
        """Equal documents."""
        length = self.shapes.Sk
        return document(torch.arange(length, dtype=torch.int32) * SAMPLE_DOCUMENTS // max(length, 1))

    def alibi(self) -> Score:
        """The slopes of the paper: 2^(-8h/H) for h = 1 .. H."""
        heads = torch.arange(1, self.shapes.Hq + 1, dtype=torch.float32)
        return alibi(torch.exp2(-8.0 * heads / self.shapes.Hq))

    def bias(self) -> Score:
        shape = (1, self.shapes.Hq, self.shapes.Sq, self.shapes.Sk)
        return bias(torch.randn(shape, generator=self.random))

    def sink(self) -> torch.Tensor:
        return torch.randn(self.shapes.Hq, generator=self.random)


def sigmoid_score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    """Sigmoid attention, with --normalizer none."""
    return sigmoid(s)


def request_of(arguments: argparse.Namespace) -> Request:
    """What the options added by `attngen.cli.options.variant_options` say."""
    head_dim_v = arguments.head_dim_v or arguments.head_dim
    return Request(
        mask=arguments.mask, score=arguments.score, sink=arguments.sink, scale=arguments.scale,
        normalizer=arguments.normalizer,
        signature=Signature(IoType(arguments.dtype), arguments.head_dim, head_dim_v, arguments.alignment),
        target=target(arguments.target), config=parse_config(arguments.config) if arguments.config else None,
    )  # fmt: skip


def parse_config(text: str) -> AnyConfig:
    """A configuration as `explain` prints it. `m128n64w4 s1 ctas2`: rows, keys, warps, stages, CTAs an SM.
    `m128n128g2 s2 anticipated order 01+ turns`: rows, keys, warpgroups, slots, policy of the fold, the products of a
    step in their order (`+`: of the tile before), turns on the tensor cores."""
    words = " ".join(text.split())
    if found := _CONFIG.fullmatch(words):
        return Config(*(int(x) if x else 1 for x in found.groups()))
    if found := _HOPPER.fullmatch(words):
        return _hopper(text, found)
    raise SpecError(
        f"--config: {text!r} is not understood. Allowed: as `attngen explain` prints one, m128n64w4 with s1 (stages) "
        "and c2 (CTAs an SM) behind it, or 'm128n128g2 s2 reference order 01+ turns'"
    )


def _hopper(text: str, found: re.Match[str]) -> HopperConfig:
    """What is left out behind the tile is as in `HopperConfig`, but turns are taken only where the text says so."""
    config = HopperConfig(int(found["groups"]), int(found["n"]), turns=found["turns"] is not None)
    if config.block_m != int(found["m"]):
        raise SpecError(
            f"--config: {text!r} has m{found['m']}. Allowed for g{config.warpgroups}: m{config.block_m}, 64 rows for "
            "each warpgroup"
        )
    if found["slots"]:
        config = replace(config, slots=int(found["slots"]))
    if found["policy"]:
        config = replace(config, policy=FoldPolicy(found["policy"]))
    if found["order"]:
        products = re.findall(r"(\d)(\+?)", found["order"])
        issue = tuple(int(n) for n, _ in products)
        later = {int(n) for n, plus in products if plus}
        config = replace(config, issue=issue, stages=tuple(int(n in later) for n in range(len(issue))))
    return config
