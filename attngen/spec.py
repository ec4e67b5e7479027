"""What is computed. `Attention` is what a user writes; `Variant` is what the compiler reads of it: no
tensors, and equal for equal descriptions, so that fresh lambdas and fresh tensors find the kernel that is
already there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType

import torch

from attngen import expr as ex
from attngen.errors import Location, SpecError
from attngen.expr import Expr
from attngen.naming import shown
from attngen.trace import Capture, ShapeRule, Storage, Tracer
from attngen.variants import Mask, MaskLike, Score, ScoreLike, mask_of, scores_of

PLAIN_SCALES = 1e-30, 1e4  # between them, scale * log2(e) times a raw score neither overflows nor vanishes in float32

__all__ = ["Attention", "Capture", "Normalizer", "Storage", "Variant"]


class Normalizer(Enum):
    """How final scores become weights."""

    SOFTMAX = "softmax"
    NONE = "none"  # the score is the weight, and masked weights are 0, as in sigmoid attention


@dataclass(frozen=True)
class Variant:
    """A traced description."""

    score: Expr  # of expr.SCORE, the scaled logit
    mask: Expr  # true where the key is visible
    normalizer: Normalizer
    scale_positive: bool
    sink: Storage | None  # how the sink's logits lie in memory; None: there is no sink
    captures: tuple[Capture, ...]  # in the order of their first use
    names: tuple[tuple[Expr, str], ...]  # the user's local variables
    locations: tuple[tuple[Expr, Location], ...]  # the user's lines
    constants: tuple[tuple[str, str], ...]  # Python numbers that became part of the kernel: name, value
    description: str

    def variant_key(self) -> str:
        """A stable name of what is computed, whatever the user's files, local variables and addresses are."""
        return self._key

    @cached_property
    def _key(self) -> str:
        # nodes by number: written out as text, a shared subexpression would be repeated at each use
        number: dict[Expr, int] = {}
        rows = [f"{self.normalizer.value} {self.scale_positive} {self.sink.value if self.sink else None}"]
        rows += [f"{c.name} {c.storage.value} {c.rank}" for c in self.captures]
        for e in ex.walk(self.score, self.mask):
            number[e] = len(number)
            args = ",".join(str(number[a]) for a in e.args)
            rows.append(f"{e.op.name} {e.dtype.value} {e.name} {e.value!r} {args}")
        rows.append(f"{number[self.score]} {number[self.mask]}")
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:24]

    def location_of(self, capture: str) -> Location | None:
        """The user's line that reads a captured tensor first."""
        return next((at for e, at in self.locations if e.op is ex.Op.LOAD and e.name == capture), None)


class Attention:
    """The description of an attention variant.

    mask: a mask such as `causal()`, or a callable (b, h, i, j) -> bool, true where query i sees key j.
    score: a score modification such as `softcap(30)`, a callable (s, b, h, i, j) -> float, or a list,
    applied in order. scale: factor of the logits; None is 1/sqrt(head_dim). Any finite number is allowed,
    also 0 and negative ones. sink: float tensor [Hq] of logits that join the softmax without a value.
    return_lse: also return the natural logarithm of the sum of the exponentials of the final scores.
    normalizer: "softmax", or "none" where the score function gives the weight itself."""

    def __init__(
        self,
        mask: MaskLike | None = None,
        score: ScoreLike | Sequence[ScoreLike] | None = None,
        scale: float | None = None,
        sink: torch.Tensor | None = None,
        return_lse: bool = False,
        normalizer: str = "softmax",
    ) -> None:
        self.mask: Mask | None = mask_of(mask)
        self.scores: tuple[Score, ...] = scores_of(score)
        self.scale = _check_scale(scale)
        self.sink = _check_sink(sink)
        if not isinstance(return_lse, bool):
            raise SpecError(f"return_lse={return_lse!r}. Allowed: True, False")
        self.return_lse = return_lse
        if normalizer not in _NORMALIZERS:
            raise SpecError(
                f"normalizer={normalizer!r} is not known. Allowed: {', '.join(map(repr, _NORMALIZERS))}"
            )
        self.normalizer = _NORMALIZERS[normalizer]
        if self.normalizer is Normalizer.NONE:
            for name, given in (("return_lse", return_lse), ("sink", sink is not None)):
                if given:
                    raise SpecError(
                        f"{name} needs normalizer='softmax'; with normalizer='none' no sum is taken. Leave "
                        "it out"
                    )
        self.kept: dict[str, object] = {}  # what attngen.prepare made of it, by target
        self._traced: tuple[Variant, Mapping[str, torch.Tensor], tuple[ShapeRule, ...]] | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy traces again: what was kept belongs to the functions and tensors of this one."""
        return {**self.__dict__, "kept": {}, "_traced": None}

    @property
    def is_traced(self) -> bool:
        """Whether its functions have been traced already."""
        return self._traced is not None

    @property
    def variant(self) -> Variant:
        """What the compiler reads; traced at the first use."""
        return self._trace()[0]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The captured tensors by capture name, and `sink`."""
        return self._trace()[1]

    @property
    def shape_rules(self) -> tuple[ShapeRule, ...]:
        """What is known about the shapes of captured tensors."""
        return self._trace()[2]

    @property
    def scale_positive(self) -> bool:
        """Whether scores may be kept unscaled until the exponential, as raw scores times scale * log2(e) in float32.

        A scale far from the usual range overflows or vanishes there: such a one is applied before the maximum, as is a
        negative one, which does not commute with it."""
        return self.scale is None or PLAIN_SCALES[0] < self.scale < PLAIN_SCALES[1]

    def scale_for(self, head_dim: int) -> float:
        """The factor of the logits for the true head dimension of queries and keys."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def _trace(self) -> tuple[Variant, Mapping[str, torch.Tensor], tuple[ShapeRule, ...]]:
        if self._traced is None:
            tracer = Tracer()
            score = ex.SCORE
            for s in self.scores:
                score = s.trace(tracer, score)
            mask = ex.TRUE if self.mask is None else self.mask.trace(tracer)
            names, locations = tracer.notes(score, mask)
            variant = Variant(
                score=score,
                mask=mask,
                normalizer=self.normalizer,
                scale_positive=self.scale_positive,
                sink=None if self.sink is None else _SINK_TYPES[self.sink.dtype],
                captures=tracer.captures,
                names=names,
                locations=locations,
                constants=tracer.constants,
                description=self.description,
            )
            sink = {} if self.sink is None else {"sink": self.sink}
            self._traced = variant, MappingProxyType({**tracer.tensors, **sink}), tuple(tracer.rules)
        return self._traced

    @property
    def description(self) -> str:
        """One line, as in `softcap(30), causal & sliding_window(256), sink`."""
        parts = [str(s) for s in self.scores]
        if self.mask is not None:
            parts.append(str(self.mask))
        if self.sink is not None:
            parts.append("sink")
        if self.normalizer is Normalizer.NONE:
            parts.append("unnormalized")
        return ", ".join(parts) or "full"

    def __repr__(self) -> str:
        scale = "" if self.scale is None else f", scale={self.scale:g}"
        return f"Attention({self.description}{scale}{', return_lse=True' if self.return_lse else ''})"


def _check_scale(scale: object) -> float | None:
    if scale is None:
        return None
    largest = ex.FLOAT_RANGE[1]
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -largest <= scale <= largest:
        raise SpecError(
            f"scale={shown(scale)}. Allowed: a finite number of float32, at most {largest:.3g} in magnitude, or None "
            "for 1/sqrt(head_dim); a learned scale goes into `score=lambda s, b, h, i, j: s * t` with a 0-dim tensor t"
        )
    return float(scale)


def _check_sink(sink: object) -> torch.Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, torch.Tensor) or sink.dim() != 1 or sink.dtype not in _SINK_TYPES:
        got = (
            f"a {sink.dtype} tensor of shape {list(sink.shape)}"
            if isinstance(sink, torch.Tensor)
            else repr(sink)
        )
        raise SpecError(
            f"sink is {got}. Allowed: a float32, float16 or bfloat16 tensor of shape [Hq], or None"
        )
    return sink


_SINK_TYPES = {torch.float32: Storage.F32, torch.float16: Storage.F16, torch.bfloat16: Storage.BF16}
_NORMALIZERS = {n.value: n for n in Normalizer}  # torch.compile cannot iterate over an Enum
