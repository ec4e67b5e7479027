"""Whether a contender computes the case: some rows of its output against the formula in float64, before it is timed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attngen.bench.cases import Inputs
from attngen.bench.contenders import Call
from attngen.evaluate import evaluate
from attngen.trial import OUT_FACTOR, OUT_FLOOR, distance

SAMPLE = 48


@dataclass(frozen=True)
class Verdict:
    """The largest error over the sampled rows, and what is allowed. `poisoned`: the output lies where NaN was written
    before the call, so that every element of a sampled row has been computed by it."""

    error: float
    allowed: float
    poisoned: bool

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Truth:
    """Sampled rows of a case."""

    inputs: Inputs
    seed: int = 0

    @cached_property
    def rows(self) -> list[tuple[int, int, int]]:
        """(batch, head, query): first and last queries of the first and last head, and random ones."""
        b, h, s, _ = self.inputs.q.shape
        random = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randint(n, (SAMPLE,), generator=random).tolist() for n in (b, h, s)]
        corners = [(0, 0, 0), (0, 0, s - 1), (b - 1, h - 1, 0), (b - 1, h - 1, s - 1)]
        return [*corners, *zip(*drawn, strict=True)]

    @cached_property
    def exact(self) -> Tensor:
        return torch.stack([self._row(*at, torch.float64) for at in self.rows])

    @cached_property
    def allowed(self) -> float:
        """Twice the error of the same formula in the type of the inputs."""
        return OUT_FACTOR * distance(torch.stack([self._row(*at, self.inputs.q.dtype) for at in self.rows]),
                                     self.exact) + OUT_FLOOR  # fmt: skip

    def _row(self, b: int, h: int, i: int, dtype: torch.dtype) -> Tensor:
        """Contractions in `dtype`; scores in it too, or in float32 if it is a 16-bit type."""
        q, spec = self.inputs.q, self.inputs.spec
        of = h // (q.size(1) // self.inputs.k.size(1))
        k, v = self.inputs.k[b, of].to(dtype), self.inputs.v[b, of].to(dtype)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        where: dict[str, Tensor | int] = {
            "b": b, "h": h, "i": i, "j": torch.arange(k.size(0), device=q.device), "seqlen_q": q.size(2),
            "seqlen_k": k.size(0),
        }  # fmt: skip
        logits = ((k @ q[b, h, i].to(dtype)) * spec.scale_for(q.size(3))).to(wide)
        score = evaluate(spec.variant.score, {**where, "score": logits}, spec.tensors, wide).expand(logits.shape)
        seen = evaluate(spec.variant.mask, where, spec.tensors).expand(logits.shape)
        if not bool(seen.any()):
            return v.new_zeros(v.size(1))
        return torch.softmax(torch.where(seen, score, -torch.inf), 0).to(dtype) @ v

    def check(self, call: Call) -> Verdict:
        """Runs it once into memory that held NaN."""
        b, h, s, _ = self.inputs.q.shape
        at = poison((b, h, s, self.inputs.v.size(3)), (b, h, s), self.inputs.q)
        out = call.output(call.run())
        b_, h_, i_ = (torch.tensor(x, device=out.device) for x in zip(*self.rows, strict=True))
        error = distance(out[b_, h_, i_], self.exact)
        return Verdict(error, self.allowed, out.data_ptr() in at)


def poison(out: tuple[int, ...], lse: tuple[int, ...], like: Tensor) -> set[int]:
    """Fills memory for an output and an lse with NaN and hands it back to torch's allocator, which gives it to the next
    who asks for as much. The addresses."""
    made = [like.new_full(out, torch.nan), like.new_full(lse, torch.nan, dtype=torch.float32)]
    return {t.data_ptr() for t in made}
