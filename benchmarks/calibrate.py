"""Measures the rates of a Hopper GPU that the machine model is made of, and writes its table:
python benchmarks/calibrate.py [--out attngen/model/h200.json].

Every kernel runs on all SMs, one CTA each, and reads the SM's clock; a cost is the difference of two lengths of a loop.
Values outside of what a Hopper can do are an error: a kernel that does not measure what it should writes no table.
Numbers that are not measured here keep their place in the table, with their source."""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attngen.errors import AttngenError
from attngen.model.actions import burst_of
from attngen.model.cost import Work
from attngen.model.rates import Instr, load_rates
from attngen.render import select_prelude
from attngen.runtime.compile import Artifact, compile_cuda
from attngen.runtime.gate import LOG_WORDS
from attngen.runtime.launch import launch
from attngen.runtime.load import LoadedKernel, device_facts, load

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "attngen" / "model" / "h200.json"
SMEM = 208 * 1024  # one CTA an SM
BARRIERS = 200 * 1024  # of shared memory: where kernels keep their mbarriers
SLOTS = 8  # numbers that a CTA writes
# Widths of products, and for how many warpgroups their accumulators leave room.
WIDTHS = {48: 4, 64: 4, 80: 4, 96: 4, 128: 3, 192: 2, 256: 2}
STEPS = 32  # products between two waits
TURNS = 8  # times that the registers of an instruction test are gone through in an iteration
# Beside products a loop branches after each turn, as loops of kernels do: two warpgroups that issue FFMA in every cycle
# leave the warps of the products one batch in 265,000 cycles (measured on an H200).
TURNS_BESIDE = 1
REGISTERS = 16
LONGEST = 1 << 20  # iterations that one side may need to outlast the other

def inline(ptx: str, *inputs: str) -> str:
    """PTX on register x[i] (%0), a float that is read and written, and inputs (%1 ..)."""
    text = "{\\n" + ptx + "\\n}"
    return f'asm volatile("{text}" : "+f"(x[i]) : {", ".join(f"""{chr(34)}f{chr(34)}({x})""" for x in inputs)});'


# What is done to register x[i] with the constant c.
INSTRUCTIONS = {
    "ffma": inline("fma.rn.ftz.f32 %0, %0, %1, %1;", "c"),
    "fadd": inline("add.rn.ftz.f32 %0, %0, %1;", "c"),
    "fmul": inline("mul.rn.ftz.f32 %0, %0, %1;", "c"),
    "fmnmx": inline("max.ftz.f32 %0, %0, %1;", "c"),
    "pack": inline(".reg .b32 t; cvt.rn.bf16x2.f32 t, %0, %1; mov.b32 %0, t;", "c"),
    "select": inline(".reg .pred p; setp.lt.f32 p, %0, %1; selp.f32 %0, %0, %1, p;", "c"),
    "ex2": inline("ex2.approx.ftz.f32 %0, %0;"),
    "i2f": inline(".reg .b32 t; mov.b32 t, %0; cvt.rn.f32.s32 %0, t;"),
    "shuffle": inline("shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;"),
}
COUNTED = {"select": 2}  # instructions a line, where not one
MIX = (  # an element of softmax: a multiply-add, ex2, a sum, half of a pack; each reads what the last one made
    inline("fma.rn.ftz.f32 %0, %0, %1, %1;", "c")
    + inline("ex2.approx.ftz.f32 %0, %0;")
    + ' asm volatile("add.rn.ftz.f32 %0, %0, %1;" : "+f"(sum[i % 8]) : "f"(x[i]));'
    + " if (i % 2) packed[i / 2] ^= pack_bf16x2(x[i - 1], x[i]);"
)
# An exclusive or of three keeps two packs alive.
MIX_COUNTS = {Instr.FMA: 2.0, Instr.MUFU: 1.0, Instr.ALU: 0.75}

# name: least, most
PLAUSIBLE = {
    "tensor_flops": (3800, 4200), "fma.throughput": (0.95, 2.2), "alu.throughput": (1.8, 3.2),
    "mufu.throughput": (7.5, 9.5), "convert.throughput": (1.8, 17.0), "shuffle.throughput": (1.8, 5.0),
    "fma.beside": (1.0, 8.0), "alu.beside": (1.8, 9.0), "mufu.beside": (7.5, 16.0), "convert.beside": (1.8, 24.0),
    "shuffle.beside": (1.8, 12.0), "fma.latency": (3.5, 8.0), "alu.latency": (3.5, 10.0), "mufu.latency": (10.0, 60.0),
    "convert.latency": (3.5, 60.0), "shuffle.latency": (15.0, 40.0), "slowed_by_one": (0.98, 2.5),
    "slowed_by_two": (0.98, 4.0), "product_latency": (15, 150), "product_queue": (0, 16), "handover": (10, 80),
    "barrier": (8, 80), "arrive": (4, 150), "wait": (5, 90), "branch": (8, 80), "copy_latency": (200, 1200),
    "copy_bytes": (30, 300), "copy_bandwidth": (20, 90), "port": (0.95, 2.2),
}  # fmt: skip


@dataclass(frozen=True)
class Test:
    """A kernel: `groups` warpgroups at most, and its statements; `t0` and `t1` bound what is measured."""

    name: str
    groups: int
    body: str

    @property
    def text(self) -> str:
        return (
            f'extern "C" __global__ void __launch_bounds__({128 * self.groups}, 1) {self.name}'
            f"(const __grid_constant__ calibrate_params p) {{\n"
            f"  const u32 s = smem_base(); const int w = uniform(thread_id() / 128);\n"
            f"  float keep = 0.0f; (void)s; (void)w;\n"
            f"  for (int k = thread_id(); k < 48 * 1024; k += blockDim.x) st_shared_u32(s + 4 * k, 0x3c003c00u);\n"
            f"  fence_proxy_async();\n"
            f"{self.body}\n"
            f"  if (keep == 123.456f) p.out[0] = 1;\n}}\n"
        )


HEAD = """
struct calibrate_params { u64* out; const u8* src; int n; int m; float seed; int depth; };
DI u64 ticks() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
DI u64 matrix(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); }
// a wait that ends the grid with an error instead of hanging
DI void bounded_wait(u32 bar, int parity) {
  for (int k = 0; k < (1 << 20); ++k) {
    u32 done;
    asm volatile("{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\\nselp.u32 %0, 1, 0, p;\\n}"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
    if (done) return;
  }
  trap();
}
"""
FIRST = f"p.out[cta_id() * {SLOTS}] = ticks() - t0;"  # what a kernel writes first


def whole(loop: str) -> str:
    """A loop of all warps, and what it took."""
    return f"  cta_sync(); const u64 t0 = ticks();\n{loop}\n  cta_sync(); if (thread_id() == 0) {FIRST}"


# ---- products ----------------------------------------------------------------------------------------------------


def accumulators(n: int) -> str:
    return (
        f"  float d[{n // 2}]; u32 a0 = 0x3c003c00u, a1 = a0, a2 = a0, a3 = a0; (void)a1; (void)a2; (void)a3;\n"
        f"  _Pragma(\"unroll\") for (int i = 0; i < {n // 2}; ++i) d[i] = p.seed;\n"
        f"  const u64 ad = matrix(s + (w % 4) * 8192), bd = matrix(s + 32768); (void)ad;\n"
    )


def product(n: int, kind: str, step: int) -> str:
    b = f"bd + {2 * (step % 4)}"
    a = f"ad + {2 * (step % 4)}" if kind == "ss" else "a0, a1, a2, a3"
    stored = "<0, 0>" if kind == "ss" else "<0>"  # no operand with its rows along k
    return f"wgmma_m64n{n}k16_{kind}_bf16{stored}(d, {a}, {b}, 1);"


def batch(n: int, kind: str, steps: int) -> str:
    """So many products, and the wait for them."""
    lines = "\n".join(f"      {product(n, kind, k)}" for k in range(steps))
    return f"      hold(d); wgmma_fence();\n{lines}\n      wgmma_commit(); wgmma_wait<0>(); hold(d);"


def total(n: int) -> str:
    return f"\n  _Pragma(\"unroll\") for (int i = 0; i < {n // 2}; ++i) keep += d[i];"


def product_tests() -> list[Test]:
    tests = []
    for n, groups in WIDTHS.items():
        for kind in ("ss", "rs"):
            loop = f'  _Pragma("unroll 1") for (int k = 0; k < p.n; ++k) {{\n{batch(n, kind, 8)}\n  }}'
            tests.append(Test(f"product_{kind}_{n}", groups, accumulators(n) + whole(loop) + total(n)))
    # how long the issue of a batch holds the warp: with an empty queue, so each iteration waits at its end
    lines = "\n".join(f"      {product(128, 'ss', k)}" for k in range(16))
    loop = (
        f'  u64 issue = 0; cta_sync(); const u64 t0 = ticks(); _Pragma("unroll 1") for (int k = 0; k < p.n; ++k) {{\n'
        f"      hold(d); wgmma_fence(); const u64 u = ticks();\n{lines}\n      wgmma_commit(); issue += ticks() - u;\n"
        f"      wgmma_wait<0>(); hold(d);\n  }}\n"
        f"  if (thread_id() == 0) {{ {FIRST} p.out[cta_id() * {SLOTS} + 1] = issue; }}"
    )
    tests.append(Test("product_issue", 1, accumulators(128) + loop + total(128)))
    return tests


# ---- instructions --------------------------------------------------------------------------------------------------


def registers() -> str:
    return (
        f"  float x[{REGISTERS}], c = p.seed, sum[8] = {{}}, last = 0.0f; u32 packed[{REGISTERS // 2}] = {{}};\n"
        f"  (void)sum; (void)packed; (void)last;\n"
        f'  _Pragma("unroll") for (int i = 0; i < {REGISTERS}; ++i) x[i] = p.seed * (i + thread_id());\n'
    )


def instruction_loop(line: str, turns: int = TURNS, registers: int = REGISTERS) -> str:
    return (
        f'  _Pragma("unroll 1") for (int k = 0; k < p.n; ++k) {{\n'
        f'    _Pragma("unroll") for (int r = 0; r < {turns}; ++r) {{\n'
        f'      _Pragma("unroll") for (int i = 0; i < {registers}; ++i) {{ {line} }}\n'
        f"    }}\n  }}"
    )


def used() -> str:
    return (
        f'\n  _Pragma("unroll") for (int i = 0; i < {REGISTERS}; ++i) keep += x[i] + sum[i % 8] + last + '
        f"__uint_as_float(packed[i / 2]);"
    )


def beside(work: str) -> str:
    """Warpgroup 0 does p.m batches of products, the others their `work`; each writes what it took."""
    return (
        f"  cta_sync(); const u64 t0 = ticks();\n"
        f"  if (w == 0) {{\n{accumulators(128)}"
        f'    _Pragma("unroll 1") for (int k = 0; k < p.m; ++k) {{\n{batch(128, "ss", STEPS)}\n    }}{total(128)}\n'
        f"    if (thread_id() == 0) {FIRST}\n"
        f"  }} else {{\n{work}\n    const u64 took = ticks() - t0;{used()}\n"
        f"    if (thread_id() == 128) p.out[cta_id() * {SLOTS} + 1] = took;\n  }}"
    )


def instruction_tests() -> list[Test]:
    idle = registers() + '  _Pragma("unroll 1") for (int k = 0; k < p.n; ++k) __nanosleep(200);'
    tests = [Test("beside_nothing", 4, beside(idle))]
    for name, line in {**INSTRUCTIONS, "mix": MIX}.items():
        tests.append(Test(f"alone_{name}", 4, registers() + whole(instruction_loop(line)) + used()))
        tests.append(Test(f"beside_{name}", 4, beside(registers() + instruction_loop(line, TURNS_BESIDE))))
        if name != "mix":  # one register: each instruction waits for the one before
            chain = instruction_loop(line, registers=1)
            tests.append(Test(f"chain_{name}", 1, registers() + whole(chain) + used()))
    return tests


# ---- order and copies ------------------------------------------------------------------------------------------------


def order_tests() -> list[Test]:
    bar = f"s + {BARRIERS}"
    one = '_Pragma("unroll 1") for (int k = 0; k < p.n; ++k)'
    setup = (
        f"  if (thread_id() == 0) {{ for (int k = 0; k < 8; ++k) mbarrier_init({bar} + 8 * k, 1);"
        f" fence_mbarrier_init(); }}\n  cta_sync();\n"
    )
    turns = (
        f"  if (w == 1) named_arrive(1, 256);\n  {one} {{ named_sync(1 + w, 256); named_arrive(2 - w, 256); }}\n"
        f"  if (w == 0) named_sync(1, 256);"
    )
    arrive_wait = (
        f"  if (thread_id() < 32) {one} {{\n    if (thread_id() == 0) mbarrier_arrive({bar});\n"
        f"    bounded_wait({bar}, k & 1);\n  }}"
    )
    # phase 0 completes once: each wait for it passes, as nothing completes the next
    complete = f"  if (thread_id() == 0) mbarrier_arrive({bar});\n  bounded_wait({bar}, 0);\n"
    branch = f"  {one} {{ x = x * 0.5f; if (warp_any(!(x <= 1024.0f))) {{ trap(); }} }}\n  keep = x;"
    copy = (
        f"  if (thread_id() == 0) for (int k = 0; k < p.n + p.depth; ++k) {{\n"
        f"    const u32 b = {bar} + 8 * (k % p.depth); const i64 tile = (cta_id() * 7 + k) % 256;\n"
        f"    if (k >= p.depth) bounded_wait(b, (k / p.depth - 1) & 1);\n"
        f"    if (k < p.n) {{ mbarrier_arrive_expect_tx(b, p.m);"
        f" bulk_load(s + (k % p.depth) * p.m, p.src + tile * p.m, p.m, b); }}\n  }}"
    )
    return [
        Test("turns", 2, whole(turns)),
        Test("barrier", 1, whole(f"  {one} named_sync(1, 128);")),
        Test("arrive_wait", 1, setup + whole(arrive_wait)),
        Test("wait", 1, setup + complete + whole(f"  {one} bounded_wait({bar}, 0);")),
        Test("branch", 1, "  float x = p.seed;\n" + whole(branch)),
        Test("copy", 1, setup + whole(copy)),
    ]


def source(tests: Sequence[Test]) -> str:
    body = HEAD + "\n".join(t.text for t in tests)
    return select_prelude("sm90", body + " TensorMap") + body


def build(tests: Sequence[Test]) -> Artifact:
    symbols = tuple(t.name for t in tests)
    artifact = compile_cuda(source(tests), arch="sm_90a", symbols=symbols)
    said = [word for word in LOG_WORDS if word in artifact.log]
    if said:
        raise AttngenError(f"calibrate: the assembler says {', '.join(said)}; its products are not what is measured")
    spilled = [name for name in symbols if artifact.resources[name].spill_load_bytes]
    if spilled:
        raise AttngenError(f"calibrate: {', '.join(spilled)} spill registers")
    return artifact


def all_tests() -> list[Test]:
    return [*product_tests(), *instruction_tests(), *order_tests()]


# ---- running ---------------------------------------------------------------------------------------------------------


class Device:
    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.index = artifact, torch.cuda.current_device()
        self.facts = device_facts(self.index)
        self.out = torch.zeros(self.facts.sm_count * SLOTS, dtype=torch.int64, device="cuda")
        self.src = torch.zeros(256 * 32768, dtype=torch.uint8, device="cuda")

    def kernel(self, name: str) -> LoadedKernel:
        return load(self.artifact, name, SMEM, device_index=self.index)

    def run(self, name: str, groups: int, n: int, m: int = 0, depth: int = 1, ctas: int | None = None) -> list[float]:
        """The medians over the CTAs of what they write, of the fastest of three launches."""
        ctas = ctas or self.facts.sm_count
        params = struct.pack("<QQiifi", self.out.data_ptr(), self.src.data_ptr(), n, m, 0.01, depth)
        found = []
        for _ in range(3):
            self.out.zero_()
            launch(self.kernel(name), grid=ctas, threads=128 * groups, params=params)
            torch.cuda.synchronize()
            found.append(self.out.view(-1, SLOTS)[:ctas].double().median(0).values.tolist())
        return min(found)

    def each(self, name: str, groups: int, n: int, **more: int) -> float:
        """Cycles of an iteration."""
        short, long = (self.run(name, groups, k * n, **more)[0] for k in (1, 2))
        return (long - short) / n

    def beside(self, name: str, groups: int, batches: int, n: int) -> tuple[float, float]:
        """Cycles of a batch of products, and of an iteration of the `groups` beside it: each while the other side is
        still at work."""

        def run(batches: int, n: int) -> list[float]:
            return self.run(f"beside_{name}", 1 + groups, n, m=batches)[:2]

        return outlasted(run, batches), outlasted(lambda n, batches: run(batches, n)[::-1], n)


def outlasted(run: Callable[[int, int], list[float]], count: int) -> float:
    """Cycles of an iteration of one side of `run`, which takes the iterations of this side and of the other and gives
    what each took: the other gets as many as it needs to end last."""
    took, others = list[float](), count
    for mine in (count, 2 * count):
        while (times := run(mine, others))[1] < times[0]:
            others *= 2
            if others > LONGEST:
                raise AttngenError(f"calibrate: {mine} iterations, {times[0]:.0f} cycles, outlast {others // 2} beside")
        took.append(times[0])
    return (took[1] - took[0]) / count


def measure(device: Device) -> tuple[dict[str, float], dict[str, float]]:
    """The values of the table, those of instructions as `kind.column`; and figures for a reader."""
    v: dict[str, float] = {}
    notes: dict[str, float] = {}
    for n, most in WIDTHS.items():
        for kind in ("ss", "rs"):
            for groups in range(1, most + 1):
                notes[f"product {kind} n{n} x{groups}"] = device.each(f"product_{kind}_{n}", groups, 200) / 8 / groups
    v["tensor_flops"] = 2 * 64 * 128 * 16 / notes["product ss n128 x3"]
    # the wait at the end of each batch of 8, which two other warpgroups hide
    v["product_latency"] = 8 * (notes["product ss n128 x1"] - notes["product ss n128 x3"])
    took, issue, *_ = (x / 200 for x in device.run("product_issue", 1, 200))
    notes["issue of 16 products n128"], notes["and the wait for them"] = issue, took
    v["product_queue"] = max(0.0, round(16 - issue / notes["product ss n128 x3"], 1))

    batch_alone = device.beside("nothing", 1, 100, 200)[0]
    for name in (*INSTRUCTIONS, "mix"):
        turn = REGISTERS * COUNTED.get(name, 1)
        for groups in (1, 2, 3, 4):
            notes[f"{name} x{groups}"] = device.each(f"alone_{name}", groups, 50) / (turn * TURNS) / groups
        for groups in (1, 2, 3):
            batch_took, took = device.beside(name, groups, 100, 800)
            notes[f"{name} beside x{groups}"] = took / (turn * TURNS_BESIDE) / groups
            notes[f"products beside {name} x{groups}"] = batch_took / batch_alone
        if name != "mix":
            notes[f"{name} chain"] = device.each(f"chain_{name}", 1, 50) / TURNS / COUNTED.get(name, 1)

    kinds = {"fma": ("ffma",), "alu": ("fmnmx", "pack"), "mufu": ("ex2",), "convert": ("i2f",), "shuffle": ("shuffle",)}
    for kind, names in kinds.items():
        v[f"{kind}.throughput"] = statistics.fmean(min(notes[f"{x} x{g}"] for g in (2, 3, 4)) for x in names)
        v[f"{kind}.stream"] = statistics.fmean(notes[f"{x} x1"] for x in names)
        v[f"{kind}.beside"] = statistics.fmean(notes[f"{x} beside x1"] for x in names)
        v[f"{kind}.latency"] = statistics.fmean(notes[f"{x} chain"] for x in names)
    v["port"] = v["fma.throughput"]
    v["slowed_by_one"] = max(1.0, notes["products beside ffma x1"])
    v["slowed_by_two"] = max(v["slowed_by_one"], notes["products beside ffma x2"])

    v["handover"] = device.each("turns", 2, 500) / 2
    v["barrier"] = device.each("barrier", 1, 500)
    v["wait"] = device.each("wait", 1, 500)
    v["arrive"] = max(1.0, device.each("arrive_wait", 1, 500) - v["wait"])
    v["branch"] = device.each("branch", 1, 500)
    small, large = (device.each("copy", 1, 100, m=size, ctas=1) for size in (16384, 32768))
    v["copy_bytes"] = 16384 / (large - small)
    v["copy_latency"] = small - 16384 / v["copy_bytes"] - v["wait"]
    v["copy_bandwidth"] = 32768 / device.each("copy", 1, 100, m=32768, depth=4)
    return v, notes


def check(values: dict[str, float]) -> None:
    wrong = [
        f"{name} = {values[name]:.2f}, plausible are {low} to {high}"
        for name, (low, high) in PLAUSIBLE.items()
        if not low <= values[name] <= high
    ]
    if wrong:
        raise AttngenError("calibrate: nothing is written, as this cannot be a Hopper:\n  " + "\n  ".join(wrong))


def table(values: dict[str, float], device: str) -> dict[str, Any]:
    """The shipped table with the measured numbers in it."""
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    data["device"] = device
    for name, value in values.items():
        kind, _, column = name.partition(".")
        if column:
            data["instructions"][kind][column] = round(value, 2)
            data["instructions"][kind]["source"] = "measured by benchmarks/calibrate.py"
        else:
            data["values"][name] = {"value": round(value, 3), "source": "measured by benchmarks/calibrate.py"}
    return data


def modelled(text: str) -> dict[str, float]:
    """What the model makes of the table: the same element of softmax that was measured as `mix`, one warpgroup."""
    work = Work(MIX_COUNTS)
    burst = burst_of(work, load_rates(text))
    return {"mix x1 by the model": burst.alone, "mix beside x1 by the model": burst.beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--compile", action="store_true", help="only compile the kernels (needs no GPU)")
    arguments = parser.parse_args()
    artifact = build(all_tests())
    print(f"compiled in {artifact.seconds:.1f} s with {artifact.compiler}", file=sys.stderr)
    if arguments.compile:
        return
    device = Device(artifact)
    values, notes = measure(device)
    text = json.dumps(table(values, device.facts.name), indent=2) + "\n"
    for name, value in {**notes, **modelled(text), **values}.items():
        print(f"{name:40} {value:10.2f}", file=sys.stderr)
    check(values)
    arguments.out.write_text(text, encoding="utf-8")
    print(f"wrote {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
