"""Masks as plain functions: what they may say, how they compose, and which tiles the kernel skips because of them."""

from __future__ import annotations

import torch

import attngen
from attngen import causal, document

BLOCK = 32


def same_or_earlier_block(b, h, i, j):
    """Full attention inside a block, causal between blocks. True: query i sees key j."""
    return (i // BLOCK) >= (j // BLOCK)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = 4096 if device == "cuda" else 160
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 64, dtype=torch.float16, device=device)
    ids = torch.arange(length, device=device, dtype=torch.int32) // 50

    for name, mask in {
        "a function": same_or_earlier_block,
        "causal inside documents": causal() & document(ids),
        "a function inside documents": document(ids) & same_or_earlier_block,
        "the first 8 keys always": causal() & document(ids) | (lambda b, h, i, j: j < 8),
    }.items():
        out = attngen.attention(q, k, v, mask=mask)

        i = torch.arange(length, device=device)[:, None]
        j = torch.arange(length, device=device)[None, :]
        seen = {
            "a function": i // BLOCK >= j // BLOCK,
            "causal inside documents": (j <= i) & (ids[i] == ids[j]),
            "a function inside documents": (ids[i] == ids[j]) & (i // BLOCK >= j // BLOCK),
            "the first 8 keys always": (j <= i) & (ids[i] == ids[j]) | (j < 8),
        }[name]
        s = (q.double() @ k.double().mT * 64**-0.5).masked_fill(~seen, float("-inf"))
        error = (out.double() - s.softmax(-1) @ v.double()).abs().max().item()

        kernel = attngen.compile(attngen.Attention(mask=mask), head_dim=64, dtype=torch.float16, target="sm80")
        (tiles,) = (fact.text for fact in kernel.schedule.facts if fact.subject == "ranges")
        print(f"{name}: error {error:.1e}\n  visited: {tiles}")
        assert error < 2e-3


if __name__ == "__main__":
    main()
