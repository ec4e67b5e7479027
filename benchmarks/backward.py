"""Tile shapes of kernels of gradients, in turn on one GPU: python benchmarks/backward.py [--first N | --config TEXT].

Times the first N shapes in rank of the kernel that owns keys, or those that are given (`m128n64w8 s2 ctas1`), as
`attngen bench` does. Beside other libraries: `attngen bench --backward`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch

import attngen
from attngen import gradient
from attngen.backward_pipeline import Asked, choices
from attngen.bench.cases import TOKENS, WIDTH, Case, Direction, Pattern, make
from attngen.bench.timing import Launch, Mode, Settings, measure
from attngen.configtext import parse_config
from attngen.errors import AttngenError
from attngen.execute import device_arch
from attngen.signature import signature_of
from attngen.target import SM80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096])
    parser.add_argument("--patterns", nargs="+", default=["FULL", "CAUSAL"], choices=[p.name for p in Pattern])
    parser.add_argument("--first", type=int, default=4, metavar="N")
    parser.add_argument("--config", type=parse_config, nargs="*", default=[], metavar="TEXT")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = [
        replace(Case("shapes", Pattern[p], max(TOKENS // s, 1), WIDTH // d, WIDTH // d, s, s, d, d),
                direction=Direction.BACKWARD)
        for d in args.head_dims for s in args.seqlens for p in args.patterns
    ]  # fmt: skip
    for case in cases:
        inputs = make(case, torch.device("cuda", torch.cuda.current_device()))
        q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))
        whole = inputs.spec
        spec = attngen.Attention(whole.mask, list(whole.scores), return_lse=True)
        out, lse = attngen.attention(q, k, v, spec=spec)
        assert inputs.dout is not None
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": inputs.dout}
        captures = {n: t.detach() for n, t in spec.tensors.items()}
        asked, signature = Asked(frozenset("qkv"), dlse=False, same_bits=False), signature_of(q, k, v)
        (name, ranked), *others = choices(spec.variant, signature, SM80, asked)
        launches: dict[str, Launch] = {}
        for config in args.config or ranked[: args.first]:
            try:
                configs = (config, *(found[0] for _, found in others))
                kernel = gradient.backward_for(spec.variant, signature, SM80, asked, configs)
                kernel.artifact(device_arch(SM80, q.device.index))
                plan = gradient.plan(kernel, given, captures, spec.scale_for(q.size(3)))
                plan.run(given, captures)
                launches[str(config)] = partial(plan.run, given, captures)
            except AttngenError as error:
                print(f"{case}: {config}: {str(error).splitlines()[0]}", flush=True)
        for text, time in measure(launches, Mode.GAPS, Settings(rounds=args.rounds)).items():
            tflops = inputs.operations / time.ms / 1e9
            print(f"{case}: {name} {text}: {time.ms:.3f} ms, {tflops:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
