"""A kernel against the formula in float64, with torch's own error in the same storage type beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from attngen.emulator import Mode
from attngen.evaluate import evaluate
from attngen.execute import run_into
from attngen.kernel import Generated
from attngen.reference import reference, visibility
from attngen.signature import VECTOR_BYTES, Shapes, Signature
from attngen.spec import Attention, Normalizer

OUT_FACTOR, OUT_FLOOR = 2.0, 1e-5
LSE_ABSOLUTE, LSE_RELATIVE, LSE_LARGE = 1e-3, 1e-6, 1e3


class Data(Enum):
    """What the inputs of a trial are like; each kind has caught errors that the others hide."""

    NORMAL = "normal"
    NEGATIVE = "negative"  # every logit far below 0: a reference that starts at 0 loses them all
    GROWING = "growing"  # the maximum moves in every tile of keys
    LARGE = "large"  # logits in the hundreds
    EQUAL = "equal"  # all logits of a row are the same


@dataclass(frozen=True)
class Errors:
    """Largest distances from float64, and what is allowed. NaN and a wrong infinity count as infinite."""

    out: float
    out_torch: float
    lse: float
    lse_allowed: float

    @property
    def out_allowed(self) -> float:
        return OUT_FACTOR * self.out_torch + OUT_FLOOR

    @property
    def ok(self) -> bool:
        return self.out <= self.out_allowed and self.lse <= self.lse_allowed


def inputs(shapes: Shapes, signature: Signature, kind: Data, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the storage type of the signature, and aligned as it says."""
    g = torch.Generator().manual_seed(seed)
    d, dv = signature.head_dim_qk, signature.head_dim_v
    q = torch.randn(shapes.B, shapes.Hq, shapes.Sq, d, generator=g)
    k = torch.randn(shapes.B, shapes.Hkv, shapes.Sk, d, generator=g)
    v = torch.randn(shapes.B, shapes.Hkv, shapes.Sk, dv, generator=g)
    if kind is Data.LARGE:
        q = q * 16
    elif kind is Data.NEGATIVE:
        q, k = q.abs() + 1, -(k.abs() + 2) * 4
    elif kind is Data.GROWING:
        q, k = q.abs() + 0.5, k.abs() * torch.linspace(0.1, 8, shapes.Sk)[:, None]
    elif kind is Data.EQUAL:
        k = k[:, :, :1].expand(k.shape)
    return tuple(_stored(t, signature) for t in (q, k, v))  # type: ignore[return-value]


def _stored(t: Tensor, signature: Signature) -> Tensor:
    """A contiguous tensor, or for an alignment below a vector one that starts so many bytes late."""
    values = t.to(signature.dtype.torch_dtype).contiguous()
    if signature.alignment == VECTOR_BYTES:
        return values
    late = signature.alignment // values.element_size()
    room = torch.empty(values.numel() + late, dtype=values.dtype)[late:]
    return room.view(values.shape).copy_(values)


def eager(spec: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output as a model computes it op by op in torch: contractions in the storage type, scores in float32."""
    group = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    mask, env = visibility(spec, q, k)
    logits = (q @ k.transpose(2, 3) * spec.scale_for(q.size(3))).float()
    score = evaluate(spec.variant.score, {**env, "score": logits}, spec.tensors, torch.float32).expand(logits.shape)
    if spec.variant.normalizer is Normalizer.NONE:
        return torch.where(mask, score, 0.0).to(q.dtype) @ v
    score = torch.where(mask, score, -math.inf)
    top = score.amax(dim=3, keepdim=True)
    if spec.sink is not None:
        top = torch.maximum(top, spec.sink.float().view(1, -1, 1, 1))
    top = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(score - top)
    total = weight.sum(dim=3, keepdim=True)
    if spec.sink is not None:
        total = total + torch.exp(spec.sink.float().view(1, -1, 1, 1) - top)
    return (weight / torch.where(total == 0, 1.0, total)).to(q.dtype) @ v


@dataclass(frozen=True)
class Trial:
    """One set of inputs."""

    spec: Attention
    q: Tensor
    k: Tensor
    v: Tensor

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor | None]:
        return reference(self.spec, self.q, self.k, self.v)

    @cached_property
    def out_torch(self) -> float:
        return distance(eager(self.spec, self.q, self.k, self.v), self.exact[0])

    def run(self, module: Generated, mode: Mode = Mode.LATE, seed: int = 0, device: str = "cpu") -> Errors:
        """Runs a module into outputs that held NaN. EmulatorError where it does what a GPU leaves undefined."""
        q, k, v = (t.to(device) for t in (self.q, self.k, self.v))
        captures = {n: t.to(device) for n, t in self.spec.tensors.items()}
        out = torch.full((*q.shape[:3], v.size(3)), math.nan, dtype=q.dtype, device=device)
        lse = torch.full(q.shape[:3] if module.has_lse else (0,), math.nan, dtype=torch.float32, device=device)
        run_into(module, q, k, v, captures, self.spec.scale_for(q.size(3)), out, lse, mode, seed)
        exact_out, exact_lse = self.exact
        lse_error, allowed = (0.0, LSE_ABSOLUTE) if exact_lse is None else lse_distance(lse.cpu(), exact_lse)
        return Errors(distance(out.cpu(), exact_out), self.out_torch, lse_error, allowed)


def distance(x: Tensor, exact: Tensor) -> float:
    """max |x - exact|, where equal infinities agree and NaN is infinitely wrong."""
    same = x.double() == exact
    gap = torch.where(same, 0.0, (x.double() - exact).abs()).nan_to_num(nan=math.inf)
    return float(gap.max()) if gap.numel() else 0.0


def lse_distance(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """(error, allowed): the element that is furthest beyond what is allowed for its size."""
    same = x.double() == exact
    gap = torch.where(same, 0.0, (x.double() - exact).abs()).nan_to_num(nan=math.inf).flatten()
    size = exact.abs().flatten()
    allowed = torch.where(size > LSE_LARGE, size * LSE_RELATIVE, LSE_ABSOLUTE).nan_to_num(posinf=LSE_ABSOLUTE)
    if not gap.numel():
        return 0.0, LSE_ABSOLUTE
    at = int((gap / allowed).argmax())
    return float(gap[at]), float(allowed[at])
