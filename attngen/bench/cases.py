"""What is measured: groups of shapes and variants. Each variant is written for attngen and for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attngen.evaluate import evaluate
from attngen.masks import causal, document, prefix_lm, sliding_window
from attngen.scores import alibi, softcap
from attngen.spec import Attention

TOKENS, WIDTH = 16384, 2048  # B * S and H * D of the grid
WINDOW, CAP = 1024, 30.0
CUTS = (0.05, 0.2, 0.3, 0.5, 0.55, 0.8, 0.9)  # where documents end, as parts of the sequence
ROWS = 512  # of a mask that are evaluated at a time


class Pattern(Enum):
    """The variant."""

    FULL = "full"
    CAUSAL = "causal"
    WINDOW = f"causal window {WINDOW}"
    SOFTCAP = "causal, softcap"
    ALIBI = "causal, ALiBi"
    DOCUMENT = f"{len(CUTS) + 1} documents"
    PREFIX = "prefix-LM"
    TABLE = "causal, table lookup"


class Data(Enum):
    """What the inputs are like."""

    NORMAL = "normal"
    GROWING = "growing"  # keys grow towards the first: the maximum of a row moves at nearly every tile


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"  # alone: gradients of q, k, v and of a captured table

    @property
    def products(self) -> tuple[int, int]:
        """How many products over the visible pairs contract or give D, and how many Dv."""
        return {"forward": (1, 1), "backward": (3, 2)}[self.value]


@dataclass(frozen=True)
class Case:
    """One line of a figure. Tensors are [B, S, H, D] in memory, bf16."""

    group: str
    pattern: Pattern
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    data: Data = Data.NORMAL
    direction: Direction = Direction.FORWARD

    def __str__(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        lengths = f"S{self.seqlen_q}" + (f"x{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else "")
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        growing = ", growing keys" if self.data is Data.GROWING else ""
        growing += ", backward" if self.direction is Direction.BACKWARD else ""
        return f"{self.pattern.value}{growing} {dims} {lengths} B{self.batch} {heads}"


@dataclass(frozen=True)
class Inputs:
    """A case on a device: q, k, v [B, H, S, D], and the description with its captured tensors."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    spec: Attention
    more: dict[str, Tensor]  # of the variant, for those who write it otherwise
    dout: Tensor | None = field(default=None)  # where gradients are measured

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gradients are taken of."""
        return tuple(t for t in (self.q, self.k, self.v, *self.more.values()) if t.requires_grad)

    @cached_property
    def visible(self) -> float:
        """Pairs of a query and a key that sees it, of one head; half of all for a square causal mask, as is usual."""
        c = self.case
        if c.pattern in (Pattern.FULL, Pattern.CAUSAL) and c.seqlen_q == c.seqlen_k:
            return c.seqlen_q * c.seqlen_k / (2 if c.pattern is Pattern.CAUSAL else 1)
        env = {"b": 0, "h": 0, "seqlen_q": c.seqlen_q, "seqlen_k": c.seqlen_k}
        j = torch.arange(c.seqlen_k, device=self.q.device)
        return float(sum(
            evaluate(self.spec.variant.mask, {**env, "i": i[:, None], "j": j}, self.spec.tensors)
            .expand(len(i), c.seqlen_k).sum()
            for i in torch.arange(c.seqlen_q, device=self.q.device).split(ROWS)
        ))  # fmt: skip

    @property
    def operations(self) -> float:
        """Of the products over visible pairs; a multiplication and an addition are two."""
        c = self.case
        of_d, of_dv = c.direction.products
        return 2 * self.visible * c.batch * c.heads * (of_d * c.head_dim + of_dv * c.head_dim_v)


def make(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(seqlen: int, heads: int, dim: int) -> Tensor:
        shape = (case.batch, seqlen, heads, dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=random).transpose(1, 2)

    q = normal(case.seqlen_q, case.heads, case.head_dim)
    k = normal(case.seqlen_k, case.kv_heads, case.head_dim)
    v = normal(case.seqlen_k, case.kv_heads, case.head_dim_v)
    if case.data is Data.GROWING:
        k *= 1 + torch.arange(case.seqlen_k, 0, -1, device=device)[:, None] / 200
    more: dict[str, Tensor] = {}
    if case.pattern is Pattern.ALIBI:
        steps = torch.arange(1, case.heads + 1, device=device)
        more["slopes"] = torch.exp2(-8.0 * steps / case.heads)
    elif case.pattern is Pattern.DOCUMENT:
        ends = torch.tensor([int(cut * case.seqlen_k) for cut in CUTS], device=device)
        at = torch.arange(case.seqlen_k, device=device)
        more["ids"] = (at[:, None] >= ends).sum(1, dtype=torch.int32)
    elif case.pattern is Pattern.TABLE:
        shape = (case.heads, case.seqlen_q + case.seqlen_k - 1)
        more["table"] = torch.randn(shape, device=device, generator=random)
    if case.direction is Direction.FORWARD:
        return Inputs(case, q, k, v, _spec(case, more), more)
    for t in (q, k, v, *(more[n] for n in more if n == "table")):
        t.requires_grad_()
    return Inputs(case, q, k, v, _spec(case, more), more, normal(case.seqlen_q, case.heads, case.head_dim_v))


def _spec(case: Case, more: dict[str, Tensor]) -> Attention:
    match case.pattern:
        case Pattern.FULL:
            return Attention()
        case Pattern.CAUSAL:
            return Attention(mask=causal())
        case Pattern.WINDOW:
            return Attention(mask=causal() & sliding_window(WINDOW))
        case Pattern.SOFTCAP:
            return Attention(mask=causal(), score=softcap(CAP))
        case Pattern.ALIBI:
            return Attention(mask=causal(), score=alibi(more["slopes"]))
        case Pattern.DOCUMENT:
            return Attention(mask=document(more["ids"]))
        case Pattern.PREFIX:
            return Attention(mask=prefix_lm(case.seqlen_k // 4))
        case Pattern.TABLE:
            table, last = more["table"], case.seqlen_k - 1
            return Attention(mask=causal(), score=lambda s, b, h, i, j: s + table[h, i - j + last])


def flex_mods(inputs: Inputs) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """(score_mod, mask_mod) of FlexAttention."""
    case, more = inputs.case, inputs.more
    shift = case.seqlen_k - case.seqlen_q

    def lower_right(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + shift

    match case.pattern:
        case Pattern.FULL:
            return None, None
        case Pattern.CAUSAL:
            return None, lower_right
        case Pattern.WINDOW:
            return None, lambda b, h, i, j: (j <= i + shift) & (j > i + shift - WINDOW)
        case Pattern.SOFTCAP:
            return lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), lower_right
        case Pattern.ALIBI:
            slopes = more["slopes"]
            return lambda s, b, h, i, j: s - slopes[h] * (i + shift - j), lower_right
        case Pattern.DOCUMENT:
            ids = more["ids"]
            return None, lambda b, h, i, j: ids[i] == ids[j]
        case Pattern.PREFIX:
            end = case.seqlen_k // 4
            return None, lambda b, h, i, j: (j < end) | (j <= i + shift)
        case Pattern.TABLE:
            table, last = more["table"], case.seqlen_k - 1
            return lambda s, b, h, i, j: s + table[h, i - j + last], lower_right


# ---- groups --------------------------------------------------------------------------------------------------------

PLAIN = (Pattern.FULL, Pattern.CAUSAL)


def _case(group: str, pattern: Pattern, d: int, s: int, *, sk: int = 0, dv: int = 0, heads: int = 0, group_of: int = 1,
          data: Data = Data.NORMAL) -> Case:  # fmt: skip
    heads = heads or WIDTH // d
    return Case(group, pattern, max(TOKENS // s, 1), heads, heads // group_of, s, sk or s, d, dv or d, data)


def _grid() -> Iterator[Case]:
    for d in (64, 128, 256):
        for s in (1024, 4096, 16384):
            yield from (_case("grid", p, d, s) for p in PLAIN)


def _head_dims() -> Iterator[Case]:
    for d, dv in ((40, 40), (80, 80), (96, 96), (112, 112), (192, 192), (192, 128)):
        yield from (_case("head-dims", p, d, 4096, dv=dv, heads=16) for p in PLAIN)


def _groups() -> Iterator[Case]:
    for group_of in (4, 8):
        yield from (_case("groups", p, 128, 4096, group_of=group_of) for p in PLAIN)


def _lengths() -> Iterator[Case]:
    for s, sk in ((1024, 16384), (4096, 8192), (4000, 4000)):
        yield from (_case("lengths", p, 128, s, sk=sk) for p in PLAIN)


def _variants() -> Iterator[Case]:
    for s in (4096, 16384):
        yield from (_case("variants", p, 128, s) for p in Pattern if p not in PLAIN)


def _growing() -> Iterator[Case]:
    for d in (64, 128, 256):
        yield from (_case("growing", p, d, 4096, data=Data.GROWING) for p in PLAIN)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "grid": _grid, "head-dims": _head_dims, "groups": _groups, "lengths": _lengths, "variants": _variants,
    "growing": _growing,
}  # fmt: skip

def backward(group: str) -> Iterator[Case]:
    """The cases of a group, of the backward pass alone."""
    name = f"backward-{group}"
    yield from (replace(case, group=name, direction=Direction.BACKWARD) for case in GROUPS[group]())
