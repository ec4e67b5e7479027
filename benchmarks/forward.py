"""Forward kernels beside cuDNN, FlashAttention-2 and, where a module `fa3` gives it, FlashAttention-3, in one run:
python benchmarks/forward.py [--json FILE].

bf16, random normal inputs, [B, S, H, D] views, B*S = 16384, H*D = 2048. Each figure is the median over rounds in random
order; in a round a block of launches is timed with CUDA events, after a pause (the power limit moves with load, so only
ratios of one run mean anything). Operations: 4*B*H*S*S*D, half of it if causal."""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attngen

try:
    import fa3  # forward(q, k, v, causal=...) on [batch, seq, heads, head_dim]
except ImportError:
    fa3 = None

PAUSE_SECONDS, BLOCK_SECONDS = 0.15, 0.03


@dataclass(frozen=True)
class Row:
    """One measured call: `tflops` by the count above; `ms` a call."""

    case: str
    head_dim: int
    seqlen: int
    name: str
    ms: float
    tflops: float


def block_ms(call: Callable[[], object], launches: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / launches


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds a call, by name."""
    launches = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        launches[name] = max(2, min(200, int(1e3 * BLOCK_SECONDS / block_ms(call, 2))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            time.sleep(PAUSE_SECONDS)
            samples[name].append(block_ms(calls[name], launches[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def sdpa(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], object]:
    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def inputs(head_dim: int, seqlen: int, growing: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k, v. `growing`: keys grow towards the first, so that the maximum of a row moves at nearly every tile."""
    batch, heads = 16384 // seqlen, 2048 // head_dim
    shape = (batch, seqlen, heads, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    if growing:
        k *= 1 + torch.arange(seqlen, 0, -1, device="cuda")[:, None, None] / 200
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def grid(head_dims: list[int], seqlens: list[int], rounds: int, growing: bool) -> list[Row]:
    rows = []
    for head_dim in head_dims:
        for seqlen in seqlens:
            q, k, v = inputs(head_dim, seqlen, growing)
            for causal in (False, True):
                mask = attngen.causal() if causal else None
                calls = {
                    "attngen": lambda q=q, k=k, v=v, mask=mask: attngen.attention(q, k, v, mask=mask),
                    "attngen sm80": lambda q=q, k=k, v=v, mask=mask: attngen.attention(
                        q, k, v, mask=mask, target="sm80"
                    ),
                    "FlashAttention-2": sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
                    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
                }
                if fa3 is not None:
                    flat = [t.transpose(1, 2) for t in (q, k, v)]
                    calls["FlashAttention-3"] = lambda flat=flat, causal=causal: fa3.forward(*flat, causal=causal)
                operations = 4 * q.size(0) * q.size(1) * seqlen * seqlen * head_dim / (2 if causal else 1)
                for name, ms in measure(calls, rounds).items():
                    rows.append(Row("causal" if causal else "full", head_dim, seqlen, name, ms, operations / ms / 1e9))
                say(rows[-len(calls) :])
    return rows


def skipping(rounds: int) -> list[Row]:
    """Masks that leave most tiles out, at S = 16384, D = 128; `tflops` counts a full matrix, so it exceeds the chip."""
    q, k, v = inputs(128, 16384)
    eight = attngen.document(torch.arange(16384, device="cuda") // 2048)
    specs = {"full": None, "causal": attngen.causal(), "window 1024": attngen.causal() & attngen.sliding_window(1024),
             "8 documents": eight}  # fmt: skip
    calls = {n: lambda m=m: attngen.attention(q, k, v, mask=m, target="sm80") for n, m in specs.items()}
    operations = 4 * q.size(0) * q.size(1) * 16384**2 * 128
    measured = measure(calls, rounds).items()
    rows = [Row(f"skipping: {n}", 128, 16384, "attngen sm80", ms, operations / ms / 1e9) for n, ms in measured]
    say(rows)
    return rows


def say(rows: list[Row]) -> None:
    text = "  ".join(f"{r.name} {r.case}: {r.ms:.3f} ms {r.tflops:.0f}" for r in rows)
    print(f"D={rows[0].head_dim} S={rows[0].seqlen}  {text}", file=sys.stderr, flush=True)


def environment() -> dict[str, str]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name, "torch": torch.__version__, "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()), "attngen": attngen.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


PEERS = ("cuDNN", "FlashAttention-3", "FlashAttention-2")


def table(rows: list[Row]) -> str:
    """Markdown: TFLOP/s; `attngen` is the schedule it chooses for the device, with its ratio to each peer."""
    peers = " | ".join(f"{p} | ratio" for p in PEERS)
    lines = [f"| D | S | case | attngen | attngen sm80 | {peers} | sm80 / FA-2 |"]
    lines.append("|---" * (6 + 2 * len(PEERS)) + "|")
    cells: dict[tuple[int, int, str], dict[str, float]] = {}
    for r in rows:
        cells.setdefault((r.head_dim, r.seqlen, r.case), {})[r.name] = r.tflops
    for (head_dim, seqlen, case), c in cells.items():
        if "attngen" not in c:
            continue
        beside = [f"{c[p]:.0f} | {c['attngen'] / c[p]:.2f}" if p in c else "- | -" for p in PEERS]
        sm80 = c["attngen sm80"]
        lines.append(
            f"| {head_dim} | {seqlen} | {case} | {c['attngen']:.0f} | {sm80:.0f} | " + " | ".join(beside)
            + f" | {sm80 / c['FlashAttention-2']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows and the environment")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growing", action="store_true", help="keys that grow towards the first instead")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = grid(args.head_dims, args.seqlens, args.rounds, args.growing)
    extra = skipping(args.rounds)
    print(table(rows))
    base = {r.case.removeprefix("skipping: "): r.ms for r in extra}
    print(f"\nwindow 1024: {base['causal'] / base['window 1024']:.1f}x faster than causal; "
          f"8 documents: {base['full'] / base['8 documents']:.1f}x faster than full (S=16384, D=128)")  # fmt: skip
    if args.json:
        args.json.write_text(
            json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows + extra]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
