"""Trains a small causal language model twice from the same seed, with attngen and with torch's own attention.

    python examples/training.py              # on a GPU: 10M parameters, 200 steps
    python examples/training.py --steps 2    # without one: a toy, in the emulator

The text is made here: sums written out in digits, which a model can learn."""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import attngen

ALPHABET = "0123456789+= \n"


def text(length: int, seed: int) -> Tensor:
    """Lines such as `17 + 25 = 42`, as numbers of letters."""
    draw, lines = random.Random(seed), ""
    while len(lines) < length:
        a, b = draw.randrange(100), draw.randrange(100)
        lines += f"{a} + {b} = {a + b}\n"
    return torch.tensor([ALPHABET.index(c) for c in lines[:length]])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ours: bool) -> None:
        super().__init__()
        self.heads, self.ours = heads, ours
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        # [batch, length, 3, heads, head_dim], whose parts are read where they lie
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).to(torch.bfloat16).transpose(1, 3).unbind(2)
        if self.ours:
            y = attngen.attention(q, k, v, mask=attngen.causal())
            assert isinstance(y, Tensor)
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


def train(
    ours: bool, device: str, width: int, heads: int, layers: int, length: int, batch: int, steps: int
) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(len(ALPHABET), width), *(Block(width, heads, ours) for _ in range(layers)),
        nn.LayerNorm(width), nn.Linear(width, len(ALPHABET)),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    letters, losses = text(batch * steps * (length + 1), seed=0).to(device), []
    for step in letters.view(steps, batch, length + 1):
        loss = cross_entropy(model(step[:, :-1]).flatten(0, 1), step[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=200 if gpu else 2)
    steps = parser.parse_args().steps
    size = (384, 6, 6, 512, 16) if gpu else (32, 2, 1, 40, 2)
    device = "cuda" if gpu else "cpu"
    ours, theirs = (train(mine, device, *size, steps) for mine in (True, False))
    for n in sorted({0, *range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"step {n:4d}   loss with attngen {ours[n]:.4f}   with torch {theirs[n]:.4f}")
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"furthest apart: {apart:.4f}")
    assert apart < 0.1, "the two runs differ by more than rounding"


if __name__ == "__main__":
    main()
