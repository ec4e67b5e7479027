"""From the options of a command to a description, with sample tensors where a mask or score reads one."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch

from attngen.cli.syntax import MaskMaker, ScoreMaker, names_in, parse_mask, parse_scores
from attngen.config import AnyConfig, SumsConfig
from attngen.configtext import parse_config, parse_sums
from attngen.functions import sigmoid
from attngen.kernel import Kernel, kernel_for
from attngen.masks import Mask, causal, document, full, prefix_lm, sliding_window, window
from attngen.measured import Machine, lookup
from attngen.scores import Score, alibi, as_score, bias, softcap
from attngen.signature import IoType, Shapes, Signature, signature_for
from attngen.spec import Attention
from attngen.target import Target, target

SAMPLE_SHAPES = Shapes(B=2, Hq=4, Hkv=2, Sq=128, Sk=128)  # of sample tensors, where no tensors are computed with
SAMPLE_DOCUMENTS = 4


@dataclass(frozen=True)
class Request:
    """What the variant options of a command say. `config`: of a forward pass. `sums`: of the kernels of gradients,
    where the command asks for these: one for all, or one for each."""

    mask: str
    score: str
    sink: bool
    scale: float | None
    normalizer: str
    signature: Signature
    target: Target
    config: AnyConfig | None
    sums: tuple[SumsConfig, ...] = ()

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
    config, sums = None, tuple[SumsConfig, ...]()
    if arguments.config and getattr(arguments, "backward", False):
        sums = tuple(parse_sums(text, "--config") for text in arguments.config.split(";"))
    elif arguments.config:
        config = parse_config(arguments.config, "--config")
    return Request(
        mask=arguments.mask, score=arguments.score, sink=arguments.sink, scale=arguments.scale,
        normalizer=arguments.normalizer,
        signature=signature_for(
            IoType(arguments.dtype), arguments.head_dim, arguments.head_dim_v, arguments.alignment
        ),
        target=target(arguments.target), config=config, sums=sums,
    )  # fmt: skip
