"""Configurations of kernels of gradients, in turn on one GPU: python benchmarks/backward.py [--target sm90] [--first N]
[--config TEXT ...].

Times the first N configurations in rank of every kernel, and those that are given: as `kernel.backward().explain()`
prints them, joined by + where a module has several kernels that own an axis ('m128n64g2 s3 split turns merged';
'm128n80g2 s2 joint short + m128n48g2 s2 split short + m128n48g2 s2 split short'). Blocks of launches take turns in a
random order, the GPU resting before each, beside the peers that this machine has. --kernels: what each kernel of a
module takes, too. The backward pass as users call it: `attngen bench --backward`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch

import attngen
from attngen import gradient
from attngen.backward_pipeline import Asked, choices
from attngen.bench.cases import TOKENS, WIDTH, Case, Direction, Pattern, make
from attngen.bench.contenders import PEERS
from attngen.bench.timing import Launch, Mode, Settings, measure
from attngen.config import SumsConfig
from attngen.configtext import parse_sums
from attngen.errors import AttngenError
from attngen.execute import device_arch
from attngen.signature import signature_of
from attngen.target import TARGETS, Target

Configs = tuple[SumsConfig, ...]


def configs(text: str) -> Configs:
    return tuple(parse_sums(part.strip()) for part in text.split("+"))


def launches(case: Case, target: Target, asked: Asked, given: list[Configs], first: int) -> dict[str, Launch]:
    """By configuration; those that are refused say why."""
    inputs = make(case, torch.device("cuda", torch.cuda.current_device()))
    q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))
    spec = attngen.Attention(inputs.spec.mask, list(inputs.spec.scores), return_lse=True)
    out, lse = attngen.attention(q, k, v, spec=spec)
    assert inputs.dout is not None
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": inputs.dout}
    captures = {n: t.detach() for n, t in spec.tensors.items()}
    signature = signature_of(q, k, v)
    ranked = choices(spec.variant, signature, target, asked)
    found: dict[str, Launch] = {}
    for chosen in (*given, *(tuple(r[min(n, len(r) - 1)] for _, r in ranked) for n in range(first))):
        name = " + ".join(map(str, chosen))
        try:
            kernel = gradient.backward_for(spec.variant, signature, target, asked, chosen)
            kernel.artifact(device_arch(target, q.device.index))
            plan = gradient.plan(kernel, tensors, captures, spec.scale_for(q.size(3)))
            plan.run(tensors, captures)
            found[name] = partial(plan.run, tensors, captures)
        except AttngenError as error:
            print(f"{case}: {name}: {str(error).splitlines()[0]}", flush=True)
    for peer in (p for p in PEERS if p.missing() is None):
        try:
            found[peer.name] = peer.call(inputs).run
            found[peer.name]()
        except Exception as error:  # a peer may fail in any of its layers
            found.pop(peer.name, None)
            print(f"{case}: {peer.name}: {str(error).splitlines()[0]}", flush=True)
    return found


def kernels(launch: Launch) -> str:
    """Microseconds of each kernel of a launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        torch.cuda.synchronize()
    return ", ".join(f"{e.key[:40]} {e.device_time:.0f}" for e in profile.key_averages() if e.device_time > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="sm90", choices=sorted(TARGETS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096])
    parser.add_argument("--patterns", nargs="+", default=["FULL", "CAUSAL"], choices=[p.name for p in Pattern])
    parser.add_argument("--first", type=int, default=2, metavar="N")
    parser.add_argument("--config", type=configs, nargs="*", default=[], metavar="TEXT")
    parser.add_argument("--same-bits", action="store_true", help="gradients that are the same bits in every run")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    asked = Asked(frozenset("qkv"), dlse=False, same_bits=args.same_bits)
    cases = [
        replace(Case("shapes", Pattern[p], max(TOKENS // s, 1), WIDTH // d, WIDTH // d, s, s, d, d),
                direction=Direction.BACKWARD)
        for d in args.head_dims for s in args.seqlens for p in args.patterns
    ]  # fmt: skip
    for case in cases:
        found = launches(case, TARGETS[args.target], asked, args.config, args.first)
        for name, time in measure(found, Mode.GAPS, Settings(rounds=args.rounds)).items():
            parts = f" ({kernels(found[name])} us)" if args.kernels else ""
            print(f"{case}: {name}: {time.ms:.3f} ms{parts}", flush=True)


if __name__ == "__main__":
    main()
