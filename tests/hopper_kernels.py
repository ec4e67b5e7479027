"""Hopper kernels for tests: how they are built and launched in the emulator, and right ones to start from."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator_kernels import Words, region, words
from torch import Tensor

from attngen import emulator
from attngen.emulator import KernelEntry, Mode, Region
from attngen.errors import EmulatorError
from attngen.ir.schedule import Elem
from attngen.layout import SLAB_BYTES, Swizzle
from attngen.render import select_prelude
from attngen.runtime.cache import compile_cached
from attngen.runtime.gate import LOG_WORDS
from attngen.runtime.launch import launch as run_on_device
from attngen.runtime.load import load, runs_on
from attngen.tensormap import TensorMap, encode_driver, encode_emulator, map_of

SMEM = 128 * 1024
BAR = 120 * 1024  # of shared memory: where kernels keep their mbarriers
ELEMS = {torch.bfloat16: Elem.BF16, torch.float16: Elem.F16, torch.float32: Elem.F32}
Launch = Callable[..., None]
Kernel = Callable[..., Launch]
Maps = dict[str, tuple[Tensor, TensorMap]]


def kernel_text(name: str, statements: str, threads: int) -> str:
    return (
        f"struct {name}_params {{ TensorMap a, b, c; const u32* x; u32* y; int n; }};\n"
        f'extern "C" __global__ void __launch_bounds__({threads}, 1) '
        f"{name}(const __grid_constant__ {name}_params p) {{ "
        f"const int t = thread_id(), warp = t / 32, lane = t % 32; const u32 s = smem_base(), bar = s + {BAR};\n"
        f"{statements}\n}}\n"
    )


def packed(encoded: Callable[[TensorMap], bytes], maps: Maps, x: int, y: int, n: int) -> bytes:
    """The parameters of a kernel: maps, addresses of words, a number."""
    front = b"".join(encoded(maps[m][1]) if m in maps else bytes(128) for m in "abc")
    return (front + struct.pack("<QQi", x, y, n)).ljust(448, b"\0")


def hopper_maker(cache_dir: Path) -> Kernel:
    """A function that compiles a kernel from statements.

    They see `t`, `warp`, `lane`, `s` (shared base), `bar` (s + BAR), the maps `p.a`, `p.b` and `p.c`, `p.x` (read-only
    words), `p.y` (words) and `p.n`. The first is on line 3."""
    return lambda statements, threads=128: emulated({"k": statements}, cache_dir, threads)["k"]


def emulated(kernels: Mapping[str, str], cache_dir: Path, threads: int = 128) -> dict[str, Launch]:
    """Several kernels by name, built at once."""
    body = "".join(kernel_text(name, text, threads) for name, text in kernels.items())
    built = emulator.build(body, tuple(KernelEntry(name, threads, SMEM) for name in kernels), cache_dir)

    def launch(
        name: str, y: Words, maps: Maps | None = None, x: Words | None = None, n: int = 0, mode: Mode = Mode.LATE,
        seed: int = 0,
    ) -> None:  # fmt: skip
        maps, x = maps or {}, words(1) if x is None else x
        regions = [region("x", x, False), region("y", y, True)]
        for m, (t, _) in maps.items():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            regions.append(Region(m, t.data_ptr(), extent * t.element_size(), m == "c"))
        params = packed(encode_emulator, maps, x.ctypes.data, y.ctypes.data, n)
        built.run(name, 1, params, regions, mode, seed)

    return {name: partial(launch, name) for name in kernels}


def device_maker() -> Kernel:
    """As hopper_maker, for the GPU: a launch copies words and tensors there and back. It knows no modes."""
    return lambda statements, threads=128: on_device({"k": statements}, threads)["k"]


def on_device(kernels: Mapping[str, str], threads: int = 128) -> dict[str, Launch]:
    """Several kernels by name, compiled at once."""
    if not runs_on("sm_90a", torch.cuda.get_device_capability()):
        pytest.skip("needs a Hopper GPU")
    body = "".join(kernel_text(name, text, threads) for name, text in kernels.items())
    artifact = compile_cached(select_prelude("sm90", body) + body, arch="sm_90a", symbols=tuple(kernels))
    assert not any(word in artifact.log for word in LOG_WORDS), artifact.log

    def launch(
        name: str, y: Words, maps: Maps | None = None, x: Words | None = None, n: int = 0, mode: Mode = Mode.LATE,
        seed: int = 0,
    ) -> None:  # fmt: skip
        there: dict[str, tuple[Tensor, Tensor]] = {}  # whole storages: here, and on the device
        moved: Maps = {}
        for m, (t, described) in (maps or {}).items():
            here = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
            there[m] = here, here.cuda()
            at = there[m][1].data_ptr() + t.data_ptr() - here.data_ptr()
            moved[m] = t, replace(described, pointer=at)
        xs, ys = (torch.from_numpy(w.view(np.int32)).cuda() for w in (words(1) if x is None else x, y))
        index = torch.cuda.current_device()
        params = packed(lambda m: encode_driver(m, index), moved, xs.data_ptr(), ys.data_ptr(), n)
        loaded = load(artifact, name, SMEM, device_index=index)
        run_on_device(loaded, grid=1, threads=threads, params=params)
        y.view(np.int32)[:] = ys.cpu().numpy()
        if "c" in there:
            there["c"][0].copy_(there["c"][1])

    return {name: partial(launch, name) for name in kernels}


def described(t: Tensor, rows: int, columns: int, swizzle: Swizzle = Swizzle.B128) -> tuple[Tensor, TensorMap]:
    """A matrix and its map, moved in boxes of rows x columns."""
    shape, strides = (1, 1, *t.shape), (0, 0, *t.stride())
    return t, map_of(ELEMS[t.dtype], t.data_ptr(), shape, strides, rows, columns, swizzle)


def aligned(rows: int, columns: int, dtype: torch.dtype, value: float | None = None) -> Tensor:
    """Random, or all of one value; the rows are 16 bytes apart or more, in a multiple of 16."""
    pitch = -(-columns // 8) * 8
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    whole = torch.randn(rows, pitch, generator=generator) if value is None else torch.full((rows, pitch), value)
    return whole.to(dtype)[:, :columns]


def everywhere(launch: Launch, check: Callable[[], None], y: Words, **options: object) -> None:
    """In every mode, and under several seeds."""
    for mode, seeds in ((Mode.EAGER, 1), (Mode.LATE, 1), (Mode.RANDOM, 4)):
        for seed in range(seeds):
            y[:] = 0
            launch(y, mode=mode, seed=seed, **options)
            check()


def faulty(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


def fails_everywhere(launch: Launch, message: str, y: Words, **options: object) -> None:
    for mode, seeds in ((Mode.EAGER, 1), (Mode.LATE, 1), (Mode.RANDOM, 3)):
        for seed in range(seeds):
            with pytest.raises(EmulatorError, match=message):
                launch(y, mode=mode, seed=seed, **options)


# ---- texts

LOAD = """\
  if (t == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
  }
  cta_sync();
  if (t == 0) {
    mbarrier_arrive_expect_tx(bar, BYTES);
    tma_load_4d(s, &p.a, bar, C0, C1, 0, 0);
  }
  mbarrier_wait(bar, 0);
  for (int i = t; i < BYTES / 4; i += 128) st_u32(p.y + i, ld_shared_u32(s + 4 * i));
"""
STORE = """\
  if (t == 0) {
    tma_store_4d(&p.c, s, C0, C1, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
"""

# Warpgroup 0 loads tiles of 8 x 64 into three slots, warpgroup 1 adds their words up.
RING = """\
  if (t == 0) {
    for (int i = 0; i < 3; i++) {
      mbarrier_init(bar + 8 * i, 1);
      mbarrier_init(bar + 24 + 8 * i, 128);
    }
    fence_mbarrier_init();
  }
  cta_sync();
  if (t == 0) {
    for (int i = 0; i < p.n; i++) {
      const int slot = i % 3, round = i / 3;
      mbarrier_wait(bar + 24 + 8 * slot, round & 1 ^ 1);
      mbarrier_arrive_expect_tx(bar + 8 * slot, 1024);
      tma_load_4d(s + 1024 * slot, &p.a, bar + 8 * slot, 0, 8 * i, 0, 0);
    }
  } else if (t >= 128) {
    u32 sum = 0;
    for (int i = 0; i < p.n; i++) {
      const int slot = i % 3, round = i / 3;
      mbarrier_wait(bar + 8 * slot, round & 1);
      sum += ld_shared_u32(s + 1024 * slot + 4 * (t - 128)) + ld_shared_u32(s + 1024 * slot + 512 + 4 * (t - 128));
      mbarrier_arrive(bar + 24 + 8 * slot);
    }
    st_u32(p.y + t - 128, sum);
  }"""
TILES = 23


def ring_map() -> tuple[Tensor, TensorMap]:
    values = torch.arange(TILES * 8 * 64, dtype=torch.int32).to(torch.int16)
    return described(values.view(torch.bfloat16).view(-1, 64), 8, 64)


# A tile is written, stored, and written again.
STORES = """\
  for (int i = 0; i < p.n; i++) {
    if (t == 0) bulk_wait_read<0>();
    cta_sync();
    stmatrix_x4(s + 512 * warp + 16 * lane, i, i, i, i);
    fence_proxy_async();
    cta_sync();
    if (t == 0) {
      tma_store_4d(&p.c, s, 0, 8 * i, 0, 0);
      bulk_commit();
    }
  }
  if (t == 0) bulk_wait_read<0>();"""

# Two warpgroups take turns, each its own number of a ring of two.
ORDER = """\
  const int w = uniform(t / 128);
  if (w == 1) named_arrive(1, 256);
  for (int i = 0; i < p.n; i++) {
    named_sync(1 + w, 256);
    if (t % 128 == 0) st_u32(p.y + 2 * i + w, (2 * i + w ? ld_shared_u32(s + 4 * (2 * i + w - 1)) : 0) + 1 + w);
    if (t % 128 == 0) st_shared_u32(s + 4 * (2 * i + w), 2 * i + w);
    named_arrive(2 - w, 256);
  }
  if (w == 0) named_sync(1, 256);"""

REGISTERS = "  if (t < 128) setmaxnreg_dec<24>();\n  else setmaxnreg_inc<240>();"


def store_map() -> tuple[Tensor, TensorMap]:
    return described(torch.zeros(24, 128).bfloat16(), 8, 128, Swizzle.LINEAR)


# ---- products


def descriptor(start: str, leading: int, stride: int, swizzle: Swizzle) -> str:
    mode = {Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}.get(swizzle, 0)
    fields = leading >> 4 << 16 | stride >> 4 << 32 | mode << 62
    return f"((u64)({start}) >> 4 | {fields:#x}ull)"


def k_major(start: str, rows: int, step: int, swizzle: Swizzle) -> str:
    """Columns 16 step .. of a tile in slabs of the swizzle's width."""
    span = SLAB_BYTES.get(swizzle, 16)
    slab, inside = divmod(32 * step, span)
    return descriptor(f"{start} + {slab * rows * span + inside}", rows * span if span == 16 else 16, 8 * span, swizzle)


def mn_major(start: str, rows: int, step: int, swizzle: Swizzle) -> str:
    """Rows 16 step .. of a tile in slabs of the swizzle's width."""
    span = SLAB_BYTES.get(swizzle, 16)
    leading, stride = (8 * span, rows * span) if span == 16 else (rows * span, 8 * span)
    return descriptor(f"{start} + {16 * step * span}", leading, stride, swizzle)


K, B_AT = 64, 32768  # the contracted axis; where b lies


def product_text(
    n: int, elem: str, source: str, transposed: bool, swizzle: Swizzle, d: str = "d", first: int = 0
) -> str:
    """The instructions of d = a b, or with `first` of d += a b."""
    lines = []
    for step in range(K // 16):
        b = (mn_major if transposed else k_major)(f"s + {B_AT}", K if transposed else n, step, swizzle)
        a = k_major("s", 64, step, swizzle) if source == "ss" else ", ".join(f"a[{4 * step + r}]" for r in range(4))
        ways = ("0, " if source == "ss" else "") + str(int(transposed))
        lines.append(f"  wgmma_m64n{n}k16_{source}_{elem}<{ways}>({d}, {a}, {b}, {1 if step else first});")
    return "\n".join(lines)


def boxes(slabs_a: int, slabs_b: int, rows_b: int, span: int) -> str:
    """Loads all slabs of a and b."""
    loads = [f"    tma_load_4d(s + {64 * span * i}, &p.a, bar, {span // 2 * i}, 0, 0, 0);" for i in range(slabs_a)]
    b_at = [B_AT + rows_b * span * i for i in range(slabs_b)]
    loads += [f"    tma_load_4d(s + {at}, &p.b, bar, {span // 2 * i}, 0, 0, 0);" for i, at in enumerate(b_at)]
    total = span * (64 * slabs_a + rows_b * slabs_b)
    return (
        "  if (t == 0) {\n    mbarrier_init(bar, 1);\n    fence_mbarrier_init();\n  }\n  cta_sync();\n  if (t == 0) {\n"
        f"    mbarrier_arrive_expect_tx(bar, {total});\n" + "\n".join(loads) + "\n  }\n  mbarrier_wait(bar, 0);"
    )


STORE_D = """\
  for (int i = 0; i < N / 2; i++)
    st_f32((float*)p.y + (16 * warp + lane / 4 + i % 4 / 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2, d[i]);"""
LOAD_A = """\
  u32 a[16];
  for (int k = 0; k < 4; k++) for (int r = 0; r < 4; r++)
    a[4 * k + r] = ld_s32((const int*)p.x + (16 * warp + lane / 4 + r % 2 * 8) * 32 + 8 * k + lane % 4 + r / 2 * 4);"""


def matmul(n: int, elem: str, source: str, transposed: bool, swizzle: Swizzle) -> str:
    span = SLAB_BYTES.get(swizzle, 16)
    width = n if transposed else K
    rows_b = K if transposed else n
    return (
        "\n".join(
            [
                boxes(K * 2 // span, -(-width * 2 // span), rows_b, span),
                LOAD_A if source == "rs" else "",
                "  float d[N / 2];",
                "  hold(d);\n  wgmma_fence();",
                product_text(n, elem, source, transposed, swizzle),
                "  wgmma_commit();\n  wgmma_wait<0>();\n  hold(d);",
                STORE_D,
            ]
        )
        .replace("N / 2", f"{n // 2}")
        .replace("* N +", f"* {n} +")
    )


def operands(n: int, dtype: torch.dtype, transposed: bool, swizzle: Swizzle) -> tuple[Maps, Words, Tensor]:
    """Maps of a and b, a's words, a b in float64."""
    columns = SLAB_BYTES.get(swizzle, 16) // 2
    rows, cols = (K, n) if transposed else (n, K)
    a, b = aligned(64, K, dtype), aligned(rows, cols, dtype)
    x = words(64 * K // 2)
    x[:] = a.view(torch.int32).numpy().view(np.uint32).ravel()
    product = a.double() @ (b.double() if transposed else b.double().T)
    return {"a": described(a, 64, columns, swizzle), "b": described(b, rows, columns, swizzle)}, x, product


def pipeline(n: int) -> str:
    """Three times two groups in flight: d = a b from shared memory, e += a b with a in registers. Stores the sum."""
    loads = matmul(n, "bf16", "rs", False, Swizzle.B128)
    return "\n".join(
        [
            loads[: loads.index("  hold(d)")],
            f"  float e[{n // 2}], sum[{n // 2}];",
            f"  for (int i = 0; i < {n // 2}; i++) e[i] = sum[i] = 0.0f;",
            "  for (int i = 0; i < 3; i++) {",
            "  hold(e);",
            "  hold(a);\n  wgmma_fence();",
            product_text(n, "bf16", "ss", False, Swizzle.B128),
            "  wgmma_commit();  // d",
            product_text(n, "bf16", "rs", False, Swizzle.B128, "e", 1),
            "  wgmma_commit();  // e",
            "  wgmma_wait<1>();\n  hold(d);",
            f"  for (int j = 0; j < {n // 2}; j++) sum[j] += d[j];",
            "  wgmma_wait<0>();\n  hold(e);\n  }",
            f"  for (int i = 0; i < {n // 2}; i++) d[i] = e[i] + sum[i];",
            loads[loads.index("  for (int i = 0; i < " + str(n // 2)) :],
        ]
    )
