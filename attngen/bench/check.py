"""Whether a contender computes the case: some rows of its output against the formula in float64, before it is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attngen.bench.cases import Inputs
from attngen.bench.contenders import Call
from attngen.evaluate import evaluate
from attngen.trial import OUT_FACTOR, OUT_FLOOR, distance

SAMPLE = 48
EXACT_ROWS = 2048  # of scores in float64 at a time


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

    @property
    def sample(self) -> str:
        return f"{len(self.rows)} rows"

    @cached_property
    def exact(self) -> Tensor:
        return torch.stack([self._row(*at, torch.float64) for at in self.rows])

    @cached_property
    def allowed(self) -> float:
        """Twice the error of the same formula in the type of the inputs."""
        return OUT_FACTOR * distance(torch.stack([self._row(*at, self.inputs.q.dtype) for at in self.rows]),
                                     self.exact) + OUT_FLOOR  # fmt: skip

    def _row(self, b: int, h: int, i: int, dtype: torch.dtype) -> Tensor:
        q, at = self.inputs.q, torch.tensor([[i]], device=self.inputs.q.device)
        of = h // (q.size(1) // self.inputs.k.size(1))
        k, v = self.inputs.k[b, of].to(dtype), self.inputs.v[b, of].to(dtype)
        return formula(self.inputs, b, h, at, q[b, h, i : i + 1].to(dtype), k, v)[0]

    def check(self, call: Call) -> Verdict:
        """Runs it once into memory that held NaN."""
        b, h, s, _ = self.inputs.q.shape
        out_and_lse = [((b, h, s, self.inputs.v.size(3)), self.inputs.q.dtype), ((b, h, s), torch.float32)]
        at = poison(out_and_lse, self.inputs.q)
        out = call.output(call.run())
        b_, h_, i_ = (torch.tensor(x, device=out.device) for x in zip(*self.rows, strict=True))
        error = distance(out[b_, h_, i_], self.exact)
        return Verdict(error, self.allowed, out.data_ptr() in at)


def truth_of(inputs: Inputs) -> Truth | GradientTruth:
    return Truth(inputs) if inputs.dout is None else GradientTruth(inputs)


@dataclass(frozen=True)
class GradientTruth:
    """Whole gradients of the first and the last head of keys: of their queries, and of what tables have for these."""

    inputs: Inputs

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Of keys."""
        return tuple(dict.fromkeys((0, self.inputs.k.size(1) - 1)))

    @cached_property
    def of_queries(self) -> tuple[int, ...]:
        group = self.inputs.q.size(1) // self.inputs.k.size(1)
        return tuple(h * group + g for h in self.heads for g in range(group))

    @property
    def sample(self) -> str:
        return f"the gradients of {len(self.of_queries)} heads"

    def sampled(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """These heads of gradients in the order of `Inputs.leaves`: dq, dk, dv, then tables with heads in front."""
        dq, dk, dv, *tables = gradients
        own, of = list(self.heads), list(self.of_queries)
        return [dq[:, of], dk[:, own], dv[:, own], *(t[of] for t in tables)]

    @cached_property
    def exact(self) -> list[Tensor]:
        return self.gradients(torch.float64, EXACT_ROWS)

    @cached_property
    def allowed(self) -> list[float]:
        """By gradient: twice the error of the same formula in the type of the inputs."""
        plain = self.gradients(self.inputs.q.dtype, self.inputs.q.size(2))
        return [OUT_FACTOR * distance(x, e) + OUT_FLOOR for x, e in zip(plain, self.exact, strict=True)]

    def gradients(self, dtype: torch.dtype, most: int) -> list[Tensor]:
        """By torch, a batch and head at a time and `most` rows of it: rows depend on one another in sums alone."""
        inputs = self.inputs
        sums = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in self.sampled(inputs.leaves)]
        group = inputs.q.size(1) // inputs.k.size(1)
        for b in range(inputs.q.size(0)):
            for at, h in enumerate(self.of_queries):
                k, v = (t.detach()[b, h // group].to(dtype).requires_grad_() for t in (inputs.k, inputs.v))
                tables = inputs.leaves[3:]
                for rows in torch.arange(inputs.q.size(2), device=k.device).split(most):
                    q = inputs.q.detach()[b, h, rows].to(dtype).requires_grad_()
                    assert inputs.dout is not None
                    out = formula(inputs, b, h, rows[:, None], q, k, v)
                    found = torch.autograd.grad(out, [q, k, v, *tables], inputs.dout[b, h, rows].to(dtype))
                    sums[0][b, at, rows] = found[0].double()
                    for total, part in zip(sums[1:3], found[1:3], strict=True):
                        total[b, at // group] += part
                    for total, part in zip(sums[3:], found[3:], strict=True):
                        total[at] += part[h]
        return sums

    def check(self, call: Call) -> Verdict:
        """Runs it once into memory that held NaN; of the gradient that is furthest beyond what is allowed."""
        leaves = self.inputs.leaves
        at = poison([(tuple(t.shape), t.dtype) for t in leaves], self.inputs.q)
        got = call.output(call.run())
        errors = [distance(x, e) for x, e in zip(self.sampled(got), self.exact, strict=True)]
        worst = max(range(len(errors)), key=lambda n: errors[n] / self.allowed[n])
        return Verdict(errors[worst], self.allowed[worst], all(t.data_ptr() in at for t in got))


def formula(inputs: Inputs, b: int, h: int, i: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows `i` of one head. Contractions in the type of `q`; scores in it too, or in float32 if it is a 16-bit type."""
    spec, wide = inputs.spec, torch.float64 if q.dtype is torch.float64 else torch.float32
    where: dict[str, Tensor | int] = {
        "b": b, "h": h, "i": i, "j": torch.arange(k.size(0), device=k.device), "seqlen_q": inputs.q.size(2),
        "seqlen_k": k.size(0),
    }  # fmt: skip
    logits = ((q @ k.t()) * spec.scale_for(q.size(-1))).to(wide)
    score = evaluate(spec.variant.score, {**where, "score": logits}, spec.tensors, wide).expand(logits.shape)
    seen = evaluate(spec.variant.mask, where, spec.tensors).expand(logits.shape)
    some = seen.any(-1, keepdim=True)  # a softmax of -inf alone has no value
    weights = torch.softmax(torch.where(seen | ~some, score, -torch.inf), -1) * some
    return weights.to(q.dtype) @ v


def poison(made: Sequence[tuple[tuple[int, ...], torch.dtype]], like: Tensor) -> set[int]:
    """Fills memory for tensors of these shapes with NaN and hands it back to torch's allocator, which gives it to the
    next who asks for as much. The addresses."""
    filled = [like.detach().new_full(shape, torch.nan, dtype=dtype) for shape, dtype in made]
    return {t.data_ptr() for t in filled}
