"""What the emulator finds on Hopper: each kernel is wrong in one way."""

from __future__ import annotations

import pytest
import torch
from emulator_kernels import words
from hopper_kernels import (
    ORDER,
    REGISTERS,
    RING,
    STORES,
    TILES,
    Kernel,
    fails_everywhere,
    faulty,
    hopper_maker,
    matmul,
    operands,
    pipeline,
    ring_map,
    store_map,
)

from attngen.layout import Swizzle


@pytest.fixture
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    return hopper_maker(tmp_path_factory.getbasetemp() / "emulator")


# ---- rings

RELEASE = "      mbarrier_arrive(bar + 24 + 8 * slot);\n"
READ_SLOT = RING[RING.index("      sum +=") : RING.index(RELEASE)]
RACE = r"shared memory at base\+\d+ (while the copy issued at line 16 is in flight|by .* is not ordered after)"
RING_FAULTS = {
    "missing release": (
        RELEASE,
        "",
        r"deadlock: .* warp 0: 1 lanes in mbarrier_wait at line 14, 31 lanes exited; .* warp 7: 32 lanes "
        r"in mbarrier_wait at "
        r"line 22; mbarrier at base\+122880: phase 1 lacks 1 of 1 arrivals and 0 bytes; mbarrier at "
        r"base\+122904: phase 0 "
        r"lacks 128 of 128",
    ),
    "release before the read": (READ_SLOT + RELEASE, RELEASE + READ_SLOT, RACE),
    "wrong parity": (
        "round & 1)",
        "round & 1 ^ 1)",
        r"line 23: read of shared memory at base\+\d+ (that was never|while)",
    ),
    "parity that does not flip": (
        "round & 1)",
        "0)",
        r"mbarrier_wait for parity 0 at base\+122880: the next phase of this thread's own sequence is 1, "
        r"of parity 1",
    ),
    "missing expect": (
        "mbarrier_arrive_expect_tx(bar + 8 * slot, 1024)",
        "mbarrier_arrive(bar + 8 * slot)",
        RACE + "|that was never written|phases behind|gets 1024 bytes more",
    ),
    "more bytes expected": (
        "slot, 1024)",
        "slot, 1040)",
        r"deadlock: .*mbarrier at base\+122880: phase 0 lacks 0 of 1 arrivals and 16 bytes",
    ),
    "fewer bytes expected": (
        "slot, 1024)",
        "slot, 1008)",
        r"line 16: the mbarrier at base\+1228\d\d gets 16 bytes more than phase 0 was told to expect",
    ),
    "too many arrivals": (
        "round & 1 ^ 1);",
        "round & 1 ^ 1); mbarrier_arrive(bar + 8 * slot);",
        RACE + "|that was never written|phases behind|gets 1024 bytes more",
    ),
    "wrong count": (
        "mbarrier_init(bar + 24 + 8 * i, 128)",
        "mbarrier_init(bar + 24 + 8 * i, 64)",
        RACE + "|phases behind",
    ),
    "no wait for the slot": (
        "      mbarrier_wait(bar + 24 + 8 * slot, round & 1 ^ 1);\n",
        "",
        r"line 15: .* shared memory at base\+0 (while the copy issued at line 15|by the loads of the "
        r"mbarrier at base\+122880 is)|"
        r"line 14: .* more arrivals at the mbarrier at base\+122880 than the 1 of a phase",
    ),
    "unfenced mbarriers": (
        "    fence_mbarrier_init();\n",
        "",
        r"the mbarrier at base\+122880, initialised at line 5, is unknown to the copy engine \(missing "
        r"fence_mbarrier_init\)",
    ),
    "barrier missing after init": (
        "  cta_sync();\n",
        "",
        r"mbarrier_wait: the mbarrier at base\+122880 was initialised at line 5 by another thread "
        r"\(missing barrier\)|no mbarrier",
    ),
    "uninitialised": (
        "mbarrier_arrive(bar + 24",
        "mbarrier_arrive(bar + 48",
        r"line 24: mbarrier_arrive: no mbarrier was initialised at base\+122928",
    ),
    "mbarrier read": (
        "    u32 sum = 0;",
        "    u32 sum = ld_shared_u32(bar);",
        r"read of shared memory at base\+122880, which holds the mbarrier initialised at line 5",
    ),
    "misaligned destination": (
        "s + 1024 * slot, &p.a",
        "s + 512 + 1024 * slot, &p.a",
        r"destination of a tensor copy at base\+512 is not aligned to 1024 bytes",
    ),
    "rank": (
        "tma_load_4d(s + 1024 * slot, &p.a, bar + 8 * slot,",
        "tma_load_5d(s + 1024 * slot, &p.a, bar + 8 * slot, 0,",
        r"a copy of 5 coordinates with a tensor map of rank 4",
    ),
    "no tensor map": ("&p.a", "&p.b", r"this is no tensor map"),
    "load nobody waits for": (
        "u32 sum = 0;\n    for (int i = 0; i < p.n;",
        "u32 sum = 0;\n    for (int i = 0; i < p.n - 1;",
        r"line 16: kernel ends with a load in flight \(issued here; nobody waited for phase 7 of the "
        r"mbarrier at base\+122888",
    ),
}


@pytest.mark.parametrize("fault", RING_FAULTS)
def test_ring_fault(kernel: Kernel, fault: str) -> None:
    old, new, message = RING_FAULTS[fault]
    fails_everywhere(kernel(faulty(RING, old, new), 256), message, words(128), maps={"a": ring_map()}, n=TILES)


# ---- stores

STORE_FAULTS = {
    "missing bulk_wait_read": (
        "    if (t == 0) bulk_wait_read<0>();\n",
        "",
        r"line 5: race: write to .* by warp \d is not ordered after the read of the bulk stores of "
        r"thread 0 at line \d+",
    ),
    "missing barrier after bulk_wait_read": (
        "    cta_sync();\n",
        "",
        r"race: write to .* by warp \d is not ordered after the read of the bulk stores of thread 0",
    ),
    "missing proxy fence": (
        "    fence_proxy_async();\n",
        "",
        r"line 9: read of .* by the bulk stores of thread 0 does not see the write of warp \d at line 6 "
        r"\(missing fence_proxy",
    ),
    "proxy fence by the storing thread alone": (
        "    fence_proxy_async();\n",
        "    if (t == 0) fence_proxy_async();\n",
        r"by the bulk stores of thread 0 does not see the write of warp \d",
    ),
    "proxy fence after the barrier": (
        "    fence_proxy_async();\n    cta_sync();\n",
        "    cta_sync();\n    fence_proxy_async();\n",
        r"by the bulk stores of thread 0 does not see the write of warp \d at line 6",
    ),
    "missing barrier before the store": (
        "    cta_sync();\n    if (t == 0) {",
        "    if (t == 0) {",
        r"line 9: (race: )?read of shared memory at base\+\d+ (by the bulk stores of thread 0 (is|does) "
        r"not|that was never)",
    ),
    "missing commit": (
        "      bulk_commit();\n",
        "",
        r"not ordered after the read of the bulk stores of thread 0 at line \d+",
    ),
    "source read at the end": (
        "  if (t == 0) bulk_wait_read<0>();",
        "#",
        r"line 10: kernel ends while the source of a bulk store may still be read \(missing "
        r"bulk_wait_read\)",
    ),
}


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_store_fault(kernel: Kernel, fault: str) -> None:
    old, new, message = STORE_FAULTS[fault]
    text = STORES[: STORES.rindex("\n")] if new == "#" else faulty(STORES, old, new)
    fails_everywhere(kernel(text), message, words(1), maps={"c": store_map()}, n=3)


# ---- named barriers

ORDER_FAULTS = {
    "not armed": (
        "  if (w == 1) named_arrive(1, 256);\n",
        "",
        r"deadlock: .* warp 0: 32 lanes in named_sync at line 5; .*; named barrier 1: 128 of 256 threads "
        r"have arrived; named "
        r"barrier 2: 128 of 256",
    ),
    "grant left over": (
        "  if (w == 0) named_sync(1, 256);",
        "",
        r"line 9: kernel ends with named barrier 1 half full: 128 of 256 threads have arrived",
    ),
    "enter deleted": (
        "    named_sync(1 + w, 256);\n",
        "",
        r"line \d: (named barrier \d: warp \d arrives twice in one generation|race|read)",
    ),
    "other count": (
        "named_sync(1 + w, 256)",
        "named_sync(1 + w, 128 + 128 * w)",
        r"line [46]: named barrier 1: warp \d arrives for \d+ threads, others at line [46] for \d+",
    ),
    "count beyond the CTA": (
        "named_sync(1 + w, 256)",
        "named_sync(1 + w, 512)",
        r"named_sync for 512 threads: a multiple of 32",
    ),
    "barrier 0": ("named_sync(1 + w, 256)", "named_sync(w, 256)", r"named_sync at barrier 0: 1 to 15"),
}


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_order_fault(kernel: Kernel, fault: str) -> None:
    old, new, message = ORDER_FAULTS[fault]
    fails_everywhere(kernel(faulty(ORDER, old, new), 256), message, words(20), n=10)


# ---- registers

REGISTER_FAULTS = {
    "sum": (
        "dec<24>",
        "dec<40>",
        r"deadlock: .* warp \d+: 32 lanes in setmaxnreg_inc at line 4; .*setmaxnreg: \d+ registers are "
        r"free",
    ),
    "no dec": (
        "setmaxnreg_dec<24>()",
        "t",
        r"deadlock: .* warp 11: 32 lanes in setmaxnreg_inc at line 4; setmaxnreg: 0 registers",
    ),
    "inc downwards": ("inc<240>", "inc<160>", r"setmaxnreg_inc<160>: warp \d+ has 168 registers a thread"),
    "twice": (
        "dec<24>();",
        "dec<24>(), setmaxnreg_dec<24>();",
        r"line 3: setmaxnreg_dec<24>: warp \d has executed setmaxnreg at line 3",
    ),
    "one warp alone": (
        "t < 128",
        "t < 32",
        r"setmaxnreg_inc<240> in warp \d: warp \d of the same warpgroup has asked for 24|deadlock",
    ),
    "no multiple of 8": ("dec<24>", "dec<28>", r"setmaxnreg_dec<28>: a multiple of 8 from 24 to 256"),
    "a warp without it": (
        "if (t < 128)",
        "if (t < 32) return; else if (t < 128)",
        r"deadlock: .*setmaxnreg: \d+ registers are free|line 3: setmaxnreg is for whole warpgroups: "
        r"warp 1 executed",
    ),
}


@pytest.mark.parametrize("fault", REGISTER_FAULTS)
def test_register_fault(kernel: Kernel, fault: str) -> None:
    old, new, message = REGISTER_FAULTS[fault]
    fails_everywhere(kernel(faulty(REGISTERS, old, new), 384), message, words(1))


# ---- products

FENCE = "  wgmma_fence();\n"
LAST_WAIT = "  wgmma_wait<0>();\n  hold(e);\n"
EARLY = "  wgmma_wait<1>();\n  hold(d);\n"
USE = "  for (int j = 0; j < 32; j++) sum[j] += d[j];\n"
PIPELINE_FAULTS = {
    "missing fence": (FENCE, "", r"wgmma_ss without a wgmma_fence since the last wgmma_wait"),
    "missing commit": (
        "  wgmma_commit();  // e\n",
        "",
        r"wgmma_wait with products that were never committed \(the first at line \d+\)",
    ),
    "missing wait": (LAST_WAIT, "", r"use of an accumulator while a product in flight writes it"),
    "in flight at the end": (
        LAST_WAIT,
        "  if (i == 2) return;\n" + LAST_WAIT,
        r"kernel ends with a product in flight \(missing wgmma_wait\)",
    ),
    "accumulator written in flight": (
        LAST_WAIT,
        "  e[5] = 1.0f;\n" + LAST_WAIT,
        r"the accumulator was written while the product was in flight \(until line \d+\)",
    ),
    "accumulator read in flight": (
        EARLY + USE,
        USE + EARLY,
        r"use of an accumulator while a product in flight writes it \(missing wgmma_wait\)",
    ),
    "a written in flight": (
        LAST_WAIT,
        "  if (t == 77) a[6] += 1;\n" + LAST_WAIT,
        r"register 2 of a, thread 77, was written while the product was in flight",
    ),
    "a written after the fence": (
        FENCE,
        FENCE + "  a[3] += i;\n",
        r"a register of a was written since the last wgmma_fence",
    ),
    "accumulator written after the fence": (
        FENCE,
        FENCE + "  e[3] += 1.0f;\n",
        r"the accumulator was written since the last wgmma_fence",
    ),
    "source written in flight": (
        LAST_WAIT,
        "  st_shared_u32(s + 32768 + 4 * t, 0);\n" + LAST_WAIT,
        r"race: write to shared memory at base\+\d+ by warp \d .* after the read of the products of "
        r"warpgroup 0",
    ),
    "missing wait for the load": (
        "  mbarrier_wait(bar, 0);\n",
        "",
        r"read of shared memory at base\+\d+ (that was never written|while the copy issued|by the "
        r"products of warpgroup 0 is not)",
    ),
    "generic write without a proxy fence": (
        FENCE,
        "  st_shared_u32(s + 4 * t, 0); cta_sync();\n" + FENCE,
        r"by the products of warpgroup 0 does not see the write of warp \d .*\(missing fence_proxy_async "
        r"before the barrier\)",
    ),
    "proxy fence without a barrier": (
        FENCE,
        "  st_shared_u32(s + 4 * t, 0); fence_proxy_async(); cta_sync();\n"
        "  st_shared_u32(s + 4 * t, 0); fence_proxy_async(); if (t == 0) st_shared_u32(s, 0);\n" + FENCE,
        r"by the products of warpgroup 0 does not see the write of warp 0 lane 0",
    ),
    "a warp stays away": (
        FENCE,
        "  if (warp < 3) wgmma_fence();\n",
        r"warpgroup 0 diverged|deadlock: .* in wgmma_fence",
    ),
    "descriptors differ": (
        "(d, ((u64)(s + 0)",
        "(d, ((u64)(s + 1024 * (t / 127))",
        r"the descriptors or the predicate differ between",
    ),
}


@pytest.mark.parametrize("fault", PIPELINE_FAULTS)
def test_pipeline_fault(kernel: Kernel, fault: str) -> None:
    old, new, message = PIPELINE_FAULTS[fault]
    maps, x, _ = operands(64, torch.bfloat16, False, Swizzle.B128)
    fails_everywhere(kernel(faulty(pipeline(64), old, new)), message, words(64 * 64), maps=maps, x=x)


K_MAJOR, MN_MAJOR = "0x4000004000010000ull", "0x4000004002000000ull"
DESCRIPTOR_FAULTS = {
    "swizzle": (
        False,
        K_MAJOR,
        "0x8000004000010000ull",
        r"descriptor of a: a swizzle of 64 bytes; the copy engine wrote base\+0 with one of 128",
    ),
    "no swizzle": (
        False,
        K_MAJOR,
        "0x0000004000010000ull",
        r"descriptor of a: a swizzle of 0 bytes; the copy engine wrote base\+0 with one of 128",
    ),
    "stride": (
        False,
        K_MAJOR,
        "0x4000002000010000ull",
        r"descriptor of a: stride byte offset 512 is no multiple of 1024, the atom of its swizzle",
    ),
    "no stride": (
        False,
        K_MAJOR,
        "0x4000000000010000ull",
        r"descriptor of a: stride byte offset 0 is no multiple of 1024",
    ),
    "start": (
        False,
        "(s + 0)",
        "(s + 128)",
        r"descriptor of a: start address base\+128: 32 bytes of a row do not lie in the first row of a "
        r"128-byte swizzle atom "
        r"\(aligned to 1024\)",
    ),
    "base offset": (False, K_MAJOR, "0x4002004000010000ull", r"descriptor of a 0x4002004000010040: base offset 1"),
    "carry": (False, K_MAJOR, "0x4000004000014000ull", r"descriptor of a .*: reserved bits are set"),
    "bounds": (
        False,
        K_MAJOR,
        "0x4000004000012000ull",
        r"shared read by a product of 16 bytes at base\+131072 is out of bounds",
    ),
    "slab": (True, MN_MAJOR, "0x4000004000000000ull", r"descriptor of b: leading byte offset 0 is no multiple of 1024"),
    "k group": (
        True,
        MN_MAJOR,
        "0x4000004802000000ull",
        r"descriptor of b: stride byte offset 1152 is no multiple of 1024",
    ),
}


@pytest.mark.parametrize("fault", DESCRIPTOR_FAULTS)
def test_descriptor_fault(kernel: Kernel, fault: str) -> None:
    transposed, old, new, message = DESCRIPTOR_FAULTS[fault]
    maps, x, _ = operands(128, torch.bfloat16, transposed, Swizzle.B128)
    text = faulty(matmul(128, "bf16", "ss", transposed, Swizzle.B128), old, new)
    fails_everywhere(kernel(text), message, words(64 * 128), maps=maps, x=x)


def test_incomplete_warpgroup(kernel: Kernel) -> None:
    fails_everywhere(
        kernel("  wgmma_fence();", 64), r"wgmma_fence in an incomplete warpgroup: the CTA has 64 threads", words(1)
    )
