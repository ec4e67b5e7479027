"""From the formula to the kernel: every level that a description goes through, printed. Needs no GPU."""

from __future__ import annotations

import torch

import attngen
from attngen import alibi, causal
from attngen.errors import MissingToolError


def main() -> None:
    spec = attngen.Attention(mask=causal(), score=alibi(torch.tensor([0.5, 0.25])), return_lse=True)
    kernel = attngen.compile(spec, head_dim=64, dtype=torch.bfloat16, target="sm80")

    print("---- graph: the formula, its softmax turned into one fold over the keys\n")
    print(kernel.graph)
    print("---- program: the fold on tiles of queries and keys\n")
    print(kernel.program)
    print("---- schedule: the order in time, copies, barriers, shared memory; each line with an id is one op\n")
    print(kernel.schedule)
    print("---- source: each op under a comment with its line of the schedule (the first ops of the loop)\n")
    lines = kernel.source.body.splitlines()
    start = next(at for at, line in enumerate(lines) if "// range" in line)
    print("\n".join(lines[start : start + 12]))
    print("\n---- resources\n")
    try:
        for symbol, resources in kernel.resources.items():
            print(f"{symbol}: {resources}")
    except MissingToolError as missing:
        print(missing)


if __name__ == "__main__":
    main()
