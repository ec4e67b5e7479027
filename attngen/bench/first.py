"""How long the first call of a variant takes, in processes of their own: python -m attngen.bench.first VARIANT HEAD_DIM
prints the seconds of the first and of the second call, after torch and the device are up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from attngen import env
from attngen.api import attention
from attngen.bench.cases import Case, Pattern, make
from attngen.bench.record import FirstCall
from attngen.errors import CompileError

LENGTH, HEADS = 1024, 16
SAMPLES = tuple((p, d) for d in (64, 128) for p in (Pattern.CAUSAL, Pattern.TABLE, Pattern.DOCUMENT))


def seconds(pattern: Pattern, head_dim: int, device: torch.device) -> tuple[float, float]:
    """Of the first and of the second call in this process."""
    inputs = make(Case("first call", pattern, 1, HEADS, HEADS, LENGTH, LENGTH, head_dim, head_dim), device)
    (inputs.q @ inputs.k.transpose(2, 3)).sum().item()  # the device and its libraries are up
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        out = attention(inputs.q, inputs.k, inputs.v, spec=inputs.spec)
        assert isinstance(out, torch.Tensor)
        out.sum().item()
        taken.append(time.perf_counter() - start)
    return taken[0], taken[1]


def first_call(pattern: Pattern, head_dim: int) -> FirstCall:
    with tempfile.TemporaryDirectory() as folder:
        cold, cached = (_process(pattern, head_dim, folder) for _ in range(2))
    return FirstCall(pattern.value, head_dim, cold[0], cached[0], 1e3 * cached[1])


def _process(pattern: Pattern, head_dim: int, cache: str) -> tuple[float, float]:
    around = {**os.environ, env.CACHE_DIR.name: cache, env.PRECOMPILED.name: ""}
    run = [sys.executable, "-m", "attngen.bench.first", pattern.name, str(head_dim)]
    done = subprocess.run(run, env=around, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"the first call of {pattern.value}, head_dim {head_dim}, failed:\n{done.stderr}")
    first, second = json.loads(done.stdout.splitlines()[-1])
    return first, second


if __name__ == "__main__":
    print(json.dumps(seconds(Pattern[sys.argv[1]], int(sys.argv[2]), torch.device("cuda"))))
