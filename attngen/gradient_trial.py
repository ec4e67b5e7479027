"""One run of a derivative against float64, with the error of torch's own gradients beside it. For tests, `verify`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attngen import gradient
from attngen.backward_pipeline import gradient_names
from attngen.emulator import Mode
from attngen.gradient import BackwardKernel
from attngen.reference import reference
from attngen.spec import Attention
from attngen.trial import OUT_FACTOR, OUT_FLOOR, distance, eager


@dataclass(frozen=True)
class GradientError:
    """Largest distance of one gradient from float64, that of torch, and what is allowed."""

    name: str
    error: float
    torch: float

    @property
    def allowed(self) -> float:
        return OUT_FACTOR * self.torch + OUT_FLOOR

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class GradientTrial:
    """One set of inputs, with a random gradient of the output."""

    spec: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that may have a gradient."""
        floats = {n for n, t in self.spec.tensors.items() if t.is_floating_point()}
        return tuple(n for n in gradient_names(self.spec.variant) if n in ("q", "k", "v") or n in floats)

    @cached_property
    def dout(self) -> Tensor:
        g = torch.Generator().manual_seed(1000 + self.seed)
        return torch.randn(*self.q.shape[:3], self.v.size(3), generator=g).to(self.q.dtype)

    def leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """What is differentiated. Captured tensors are those of the description: it is read through them."""
        own = {n: t.detach().to(dtype).requires_grad_() for n, t in (("q", self.q), ("k", self.k), ("v", self.v))}
        return {n: own[n] if n in own else self.spec.tensors[n].requires_grad_() for n in self.names}

    @cached_property
    def forward(self) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
        """out, lse and what they were made from, in float64."""
        leaves = self.leaves(torch.float64)
        return *reference(self.spec, leaves["q"], leaves["k"], leaves["v"]), leaves

    @cached_property
    def exact(self) -> Mapping[str, Tensor]:
        out, _, leaves = self.forward
        return _grads(out, leaves, self.dout.double())

    @cached_property
    def torchs(self) -> Mapping[str, Tensor]:
        leaves = self.leaves(self.q.dtype)
        return _grads(eager(self.spec, leaves["q"], leaves["k"], leaves["v"]), leaves, self.dout)

    def run(
        self, kernel: BackwardKernel, mode: Mode = Mode.LATE, seed: int = 0, device: str = "cpu"
    ) -> tuple[GradientError, ...]:
        """How far each gradient is from float64."""
        got = self.gradients(kernel, mode, seed, device)
        return tuple(
            GradientError(n, distance(got[n].cpu(), self.exact[n].double()) if n in got else math.inf,
                          distance(self.torchs[n], self.exact[n].double()))
            for n in self.names if n in kernel.asked.wanted
        )  # fmt: skip

    def gradients(
        self, kernel: BackwardKernel, mode: Mode = Mode.LATE, seed: int = 0, device: str = "cpu"
    ) -> dict[str, Tensor]:
        """Runs the module of a derivative on the results of the forward pass, rounded as that stores them."""
        out, lse, _ = self.forward
        given = {"q": self.q, "k": self.k, "v": self.v, "out": out.detach().to(self.q.dtype), "dout": self.dout}
        given["lse"] = torch.zeros(0) if lse is None else lse.detach().float()
        captures = {n: t.detach().to(device) for n, t in self.spec.tensors.items()}
        moved = {n: t.to(device) for n, t in given.items()}
        return gradient.run(kernel, moved, captures, self.spec.scale_for(self.q.size(3)), mode, seed)


def _grads(out: Tensor, leaves: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    found: Sequence[Tensor | None] = torch.autograd.grad(
        out, list(leaves.values()), dout, allow_unused=True, retain_graph=True
    )
    return {
        n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)
    }  # fmt: skip
