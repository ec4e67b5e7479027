"""Backward kernels beside FlashAttention-2 and cuDNN: python benchmarks/backward.py [--json FILE] [--shapes N].

As benchmarks/forward.py, in one run, the backward pass alone; operations are 2.5 times those of the forward pass.
--shapes times the first N tile shapes in rank beside the chosen one."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from forward import Row, environment, inputs, measure, say
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attngen
from attngen import gradient
from attngen.backward_pipeline import Asked, choices
from attngen.config import Config
from attngen.errors import CompileError
from attngen.signature import signature_of
from attngen.target import SM80

Call = Callable[[], object]


def backward_of(out: Tensor, tensors: list[Tensor], dout: Tensor, same_bits: bool = False) -> Call:
    def call() -> object:
        torch.use_deterministic_algorithms(same_bits, warn_only=True)
        try:
            return torch.autograd.grad(out, tensors, dout, retain_graph=True)
        finally:
            torch.use_deterministic_algorithms(False)

    return call


def shapes(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, most: int) -> dict[str, Call]:
    """A call for each tile shape of the kernel that owns keys, which the build gate lets pass."""
    spec = attngen.Attention(mask=attngen.causal() if causal else None, return_lse=True)
    out, lse = attngen.attention(q, k, v, spec=spec)
    given = {"q": q, "k": k, "v": v, "out": out.detach(), "lse": lse.detach(), "dout": dout}
    asked, signature = Asked(frozenset("qkv"), dlse=False, same_bits=False), signature_of(q, k, v)
    found: dict[str, Call] = {}
    for config in _first(choices(spec.variant, signature, SM80, asked), most):
        kernel = gradient.backward_for(spec.variant, signature, SM80, asked, config)
        with contextlib.suppress(CompileError):
            kernel.artifact("sm_90" if torch.cuda.get_device_capability()[0] >= 9 else "sm_80")
            name = " ".join(str(c).replace(" ", ",") for c in config)
            found[name] = lambda kernel=kernel: gradient.run(kernel, given, {}, spec.scale_for(q.size(3)))
    return found


def _first(ranked: tuple[tuple[str, tuple[Config, ...]], ...], most: int) -> list[tuple[Config, ...]]:
    lists = [found for _, found in ranked]
    return [tuple(f[min(n, len(f) - 1)] for f in lists) for n in range(min(most, max(map(len, lists))))]


def peer(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows and the environment")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", type=int, default=0, metavar="N", help="also time the first N tile shapes")
    args = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for head_dim in args.head_dims:
        for seqlen in args.seqlens:
            for causal in (False, True):
                tensors = [t.detach().requires_grad_() for t in inputs(head_dim, seqlen)]
                dout = torch.randn_like(tensors[0])
                ours = attngen.attention(*tensors, mask=attngen.causal() if causal else None)
                assert isinstance(ours, Tensor)
                fa2 = peer(SDPBackend.FLASH_ATTENTION, *tensors, causal)
                calls = {
                    "attngen": backward_of(ours, tensors, dout),
                    "attngen same bits": backward_of(ours, tensors, dout, same_bits=True),
                    "FlashAttention-2": backward_of(fa2, tensors, dout),
                    "cuDNN": backward_of(peer(SDPBackend.CUDNN_ATTENTION, *tensors, causal), tensors, dout),
                }
                got, want = calls["attngen"](), calls["FlashAttention-2"]()
                apart = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))  # type: ignore
                if args.shapes:
                    calls |= shapes(*(t.detach() for t in tensors), dout, causal, args.shapes)
                count = 10 * tensors[0].size(0) * tensors[0].size(1) * seqlen**2 * head_dim / (2 if causal else 1)
                case = "causal" if causal else "full"
                measured = measure(calls, args.rounds).items()
                rows += [Row(case, head_dim, seqlen, name, ms, count / ms / 1e9) for name, ms in measured]
                say(rows[-len(calls) :])
                print(f"D={head_dim} S={seqlen} {case}: gradients {apart:.4f} from FlashAttention-2's", flush=True)
    print(table(rows))
    if args.json:
        text = json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows]}, indent=1)
        args.json.write_text(text + "\n")


def table(rows: list[Row]) -> str:
    """Markdown: TFLOP/s, and ratios to the peers."""
    lines = ["| D | S | case | attngen | same bits | FlashAttention-2 | ratio | cuDNN | ratio |", "|---" * 9 + "|"]
    cells: dict[tuple[int, int, str], dict[str, float]] = {}
    for r in rows:
        cells.setdefault((r.head_dim, r.seqlen, r.case), {})[r.name] = r.tflops
    for (head_dim, seqlen, case), c in cells.items():
        ours, fa2, cudnn = c["attngen"], c["FlashAttention-2"], c["cuDNN"]
        lines.append(
            f"| {head_dim} | {seqlen} | {case} | {ours:.0f} | {c['attngen same bits']:.0f} | {fa2:.0f} "
            f"| {ours / fa2:.2f} | {cudnn:.0f} | {ours / cudnn:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
