"""Score functions: captured tensors, a learned scalar, Python constants, and torch functions on traced values."""

from __future__ import annotations

import torch

import attngen
from attngen import causal, softcap

MAX_DISTANCE = 64


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length, heads = (2048, 4) if device == "cuda" else (144, 2)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, 64, dtype=torch.bfloat16, device=device)
    table = torch.randn(heads, MAX_DISTANCE + 1, device=device)
    temperature = torch.tensor(
        0.7, device=device
    )  # a 0-dim tensor is an argument of the kernel: no compile for a new value

    def relative_bias(s, b, h, i, j):
        distance = attngen.minimum(attngen.abs(i - j), MAX_DISTANCE)  # MAX_DISTANCE is a constant of the kernel
        return s * temperature + table[h, distance]

    out, lse = attngen.attention(q, k, v, mask=causal(), score=[softcap(20.0), relative_bias], return_lse=True)

    i = torch.arange(length, device=device)[:, None]
    j = torch.arange(length, device=device)[None, :]
    s = q.double() @ k.double().mT * 64**-0.5
    s = 20.0 * torch.tanh(s / 20.0)  # scores apply in the order of the list
    s = s * temperature.double() + table.double()[:, (i - j).abs().clamp(max=MAX_DISTANCE)]
    s = s.masked_fill(j > i, float("-inf"))
    error = (out.double() - s.softmax(-1) @ v.double()).abs().max().item()
    lse_error = (lse.double() - s.logsumexp(-1)).abs().max().item()
    print(f"largest error against float64: out {error:.1e}, lse {lse_error:.1e}")
    assert error < 2e-2
    assert lse_error < 1e-3

    # what cannot be traced says where, why, and what to write instead
    def branches(s, b, h, i, j):
        return s if i > j else s - 1.0

    try:
        attngen.attention(q, k, v, score=branches)
    except attngen.errors.TraceError as error:
        print(error)


if __name__ == "__main__":
    main()
