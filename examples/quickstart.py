"""Sliding-window attention with capped logits, on the GPU if there is one, else in the emulator.

Prints the largest error against float64 beside that of torch in the same precision."""

from __future__ import annotations

import torch

import attngen
from attngen import causal, sliding_window, softcap

WINDOW, CAP = 64, 30.0


def in_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same attention in plain torch, in the precision of its inputs."""
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    s = q @ k.mT * q.size(-1) ** -0.5
    s = CAP * torch.tanh(s / CAP)
    i = torch.arange(q.size(2), device=q.device)[:, None]
    j = torch.arange(k.size(2), device=q.device)[None, :]
    return s.masked_fill((j > i) | (j < i - WINDOW + 1), float("-inf")).softmax(-1) @ v


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, length = (4, 2048) if device == "cuda" else (1, 192)
    torch.manual_seed(0)
    q = torch.randn(batch, 4, length, 64, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, batch, 2, length, 64, dtype=torch.bfloat16, device=device)

    out = attngen.attention(q, k, v, mask=causal() & sliding_window(WINDOW), score=softcap(CAP))

    exact = in_torch(q.double(), k.double(), v.double())
    ours = (out.double() - exact).abs().max().item()
    torchs = (in_torch(q, k, v).double() - exact).abs().max().item()
    where = torch.cuda.get_device_name() if device == "cuda" else "the emulator"
    print(f"out {list(out.shape)} from {where}")
    print(f"largest error against float64: attngen {ours:.2e}, torch eager in bfloat16 {torchs:.2e}")
    assert ours <= 2 * torchs + 1e-5


if __name__ == "__main__":
    main()
