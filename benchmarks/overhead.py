"""What a warm call costs the CPU, beside torch's own attention: python benchmarks/overhead.py [--json FILE].

B1 S128 H16 D64 bf16 under no_grad: the kernels are short, so that the calls never wait for the GPU. Each figure is the
median time of a call until it is back; blocks of calls take turns in random order, and the GPU is idle at the start of
each. `sdpa_kernel` is entered once around a block, not in a call."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attngen
from attngen import ops
from attngen.prepare import prepare

SHAPE = (1, 16, 128, 64)
BLOCK = 50  # calls between two waits: fewer than the driver queues
PEERS = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
BARS = (("attention(spec=)", "sdpa cudnn", 1.2), ("attention(mask=causal())", "sdpa cudnn, causal", 1.2))

Call = Callable[[], object]


def block_us(call: Call, around: AbstractContextManager[object]) -> list[float]:
    """Microseconds of each of a block of calls."""
    times = []
    with around:
        call()
        torch.cuda.synchronize()
        for _ in range(BLOCK):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        torch.cuda.synchronize()
    return times


def calls_to_measure() -> dict[str, tuple[Call, SDPBackend | None]]:
    q, k, v = (torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    full, causal = attngen.Attention(), attngen.Attention(mask=attngen.causal())
    key, captures = prepare(full, None)
    scale = full.scale_for(q.size(3))
    attngen.attention(q, k, v, spec=full)
    planned = next(reversed(ops._plans.values()))
    given = [t.data_ptr() for t in (q, k, v)]
    slopes = torch.rand(SHAPE[1], device="cuda")
    measured: dict[str, tuple[Call, SDPBackend | None]] = {
        "attention(spec=)": (lambda: attngen.attention(q, k, v, spec=full), None),
        "attention(spec=), causal": (lambda: attngen.attention(q, k, v, spec=causal), None),
        "attention(mask=causal())": (lambda: attngen.attention(q, k, v, mask=attngen.causal()), None),
        "attention(mask=causal() & sliding_window(64))": (
            lambda: attngen.attention(q, k, v, mask=attngen.causal() & attngen.sliding_window(64)), None,
        ),
        "attention(mask=causal(), score=alibi(slopes))": (
            lambda: attngen.attention(q, k, v, mask=attngen.causal(), score=attngen.alibi(slopes)), None,
        ),
        "of it: outputs and launch": (lambda: planned.run(given), None),
        "the operator alone": (lambda: ops.forward(q, k, v, captures, key, scale), None),
        "torch.empty_like alone": (lambda: torch.empty_like(q), None),
    }  # fmt: skip
    for name, backend in PEERS.items():
        measured[name] = (lambda: scaled_dot_product_attention(q, k, v)), backend
        measured[f"{name}, causal"] = (lambda: scaled_dot_product_attention(q, k, v, is_causal=True)), backend
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kind")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    measured = calls_to_measure()
    samples: dict[str, list[float]] = {name: [] for name in measured}
    with torch.no_grad():
        for _ in range(max(1, -(-arguments.calls // BLOCK))):
            for name in random.sample(list(measured), len(measured)):
                call, backend = measured[name]
                samples[name] += block_us(call, nullcontext() if backend is None else sdpa_kernel(backend))
    medians = {name: statistics.median(times) for name, times in samples.items()}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {list(SHAPE)} bf16; microseconds a call, median")
    for name, median in medians.items():
        print(f"{median:8.1f}  {name}")
    for ours, peer, most in BARS:
        print(f"{ours} / {peer}: {medians[ours] / medians[peer]:.2f} (at most {most})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"shape": SHAPE, "microseconds": medians}, indent=2) + "\n")


if __name__ == "__main__":
    main()
