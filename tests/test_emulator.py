"""The emulator: kernels that are right, how they are built and launched."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator_kernels import SMEM, KernelMaker, filled, kernel_maker, region, words

from attngen import emulator
from attngen.emulator import Built, KernelEntry, Mode, Region
from attngen.errors import CompileError, EmulatorError, LaunchError, MissingToolError


@pytest.fixture
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "emulator"


@pytest.fixture
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelMaker:
    return kernel_maker(tmp_path_factory.getbasetemp() / "emulator")


COPY = """\
  const int i = cta_id() * 64 + t;
  cp_async_16(s + 16 * t, p.x + 4 * i, i < p.n ? 16 : 0);
  cp_async_commit();
  cp_async_wait<0>();
  cta_sync();
  u32 a, b, c, d;
  ld_shared_v4(a, b, c, d, s + 16 * (t ^ 63));
  st_v4(p.y + 4 * (i ^ 63), a, b, c, d);"""


WORDS = """\
  const int i = cta_id() * 64 + t;
  cp_async_4(s + 4 * t, p.x + i, i < p.n ? 4 : 0);
  cp_async_commit();
  cp_async_wait<0>();
  cta_sync();
  float a, b;
  ld_shared_v2_f32(a, b, s + 8 * (t % 32));
  if (t >= 32) return;
  float* y = (float*)p.y + cta_id() * 64 + 2 * t;
  st_f32(y, a);
  st_f32(y + 1, b);"""


@pytest.mark.parametrize("mode", list(Mode))
def test_copy_of_words(kernel: KernelMaker, mode: Mode) -> None:
    """Words through cp.async, read in pairs; beyond n zeros are written and x is not read."""
    x, y = np.arange(1, 101, dtype=np.float32).view(np.uint32), words(128)
    kernel(WORDS)(x, y, n=100, grid=2, mode=mode, seed=3)
    assert (y[:100] == x).all() and (y[100:] == 0).all()


@pytest.mark.parametrize("mode", list(Mode))
def test_copy(kernel: KernelMaker, mode: Mode) -> None:
    """A copy through cp.async, reversed and back; beyond n it writes zeros and does not touch x."""
    x, y = filled(4 * 100), words(4 * 128)
    y[:] = 7
    kernel(COPY)(x, y, n=100, grid=2, mode=mode, seed=3)
    assert (y[:400] == x).all() and (y[400:] == 0).all()


MATMUL = """\
struct matmul_params {{ const u16* a; const u16* b; float* c; }};
extern "C" __global__ void __launch_bounds__(128) matmul(const __grid_constant__ matmul_params p) {{
  const int t = thread_id(), warp = t / 32, lane = t % 32;
  const u32 sA = smem_base(), sB = sA + 64 * 144;
  for (int i = t; i < 512; i += 128) {{
    cp_async_16(sA + i / 8 * 144 + i % 8 * 16, p.a + i * 8, 16);
    cp_async_16(sB + i / 8 * 144 + i % 8 * 16, p.b + i * 8, 16);
  }}
  cp_async_commit();
  cp_async_wait<0>();
  cta_sync();
  float acc[32];
  _Pragma("unroll") for (int i = 0; i < 32; i++) acc[i] = 0.0f;
  _Pragma("unroll") for (int k = 0; k < 4; k++) {{
    u32 a[4];
    ldmatrix_x4(a[0], a[1], a[2], a[3], sA + (16 * warp + lane % 16) * 144 + 32 * k + lane / 16 * 16);
    _Pragma("unroll") for (int n = 0; n < 4; n++) {{
      u32 b[4];
      {load}
      float* c = acc + 8 * n;
      mma_m16n8k16_{dtype}(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_m16n8k16_{dtype}(c[4], c[5], c[6], c[7], a[0], a[1], a[2], a[3], b[2], b[3]);
    }}
  }}
  _Pragma("unroll") for (int i = 0; i < 32; i++)
    st_f32(p.c + (16 * warp + lane / 4 + i % 4 / 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2, acc[i]);
}}
"""
# B as rows of n (K of attention) or as rows of k (V of attention).
LOAD_ROWS_N = """\
const int row = 16 * n + lane / 16 * 8 + lane % 8;
      ldmatrix_x4(b[0], b[1], b[2], b[3], sB + row * 144 + 32 * k + lane / 8 % 2 * 16);"""
LOAD_ROWS_K = (
    "ldmatrix_x4_trans(b[0], b[1], b[2], b[3], sB + (16 * k + lane % 16) * 144 + 32 * n + lane / 16 * 16);"
)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("rows", ["n", "k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmul(cache_dir: Path, dtype: torch.dtype, rows: str, mode: Mode) -> None:
    name = "bf16" if dtype == torch.bfloat16 else "f16"
    body = MATMUL.format(dtype=name, load=LOAD_ROWS_N if rows == "n" else LOAD_ROWS_K)
    built = emulator.build(body, (KernelEntry("matmul", 128, SMEM),), cache_dir)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(2))
    c = torch.full((64, 64), float("nan"))
    tensors = {"a": a, "b": b, "c": c}
    regions = [Region(n, x.data_ptr(), x.nbytes, n == "c") for n, x in tensors.items()]
    params = struct.pack("<QQQ", *(x.data_ptr() for x in tensors.values()))
    stats = built.run("matmul", 1, params, regions, mode)
    expected = a.double() @ (b.double().T if rows == "n" else b.double())
    assert (c.double() - expected).abs().max() < 1e-4
    assert stats.collectives == 4 * 4 * (1 + 4 * 3) + 1 and stats.switches > 0


def test_seeds_are_deterministic(kernel: KernelMaker) -> None:
    """What one seed does, it does again; another does something else."""
    run = kernel("  if (t % 32 == 0) st_u32(p.y, ld_global_s32((const int*)p.y) * 3 + t);", threads=256)

    def outcome(seed: int) -> int:
        y = words(1)
        run(words(1), y, mode=Mode.RANDOM, seed=seed)
        return int(y[0])

    outcomes = [outcome(seed) for seed in range(8)]
    assert outcomes == [outcome(seed) for seed in range(8)]
    assert len(set(outcomes)) > 1


def test_warp_primitives(kernel: KernelMaker) -> None:
    run = kernel("""\
  st_u32(p.y + t, (u32)shfl_xor_f32((float)t, 5));
  const u32 b = warp_ballot(t % 3 == 0);
  st_u32(p.y + 64 + t, b);
  st_u32(p.y + 128 + t, popc(b) + 100 * warp_any(t == 40) + 1000 * warp_all(t < 32));
  st_s32((int*)p.y + 192 + t, uniform(t));""")
    y = words(256)
    run(words(1), y)
    t = np.arange(64)
    ballots = [sum(1 << i for i in range(32) if (w * 32 + i) % 3 == 0) for w in range(2)]
    assert (y[:64] == (t ^ 5)).all()
    assert (y[64:128] == np.repeat(ballots, 32)).all()
    counts = [bin(b).count("1") for b in ballots]
    assert (y[128:192] == np.repeat([counts[0] + 1000, counts[1] + 100], 32)).all()
    assert (y[192:] == t // 32 * 32).all()


def test_shared_memory_is_fresh_for_each_cta(kernel: KernelMaker) -> None:
    run = kernel(
        "  if (cta_id() == 0) st_shared_u32(s + 4 * t, 1); else st_u32(p.y, ld_shared_u32(s + 4 * t));"
    )
    with pytest.raises(EmulatorError, match="CTA 1, line 3: read of shared memory"):
        run(words(1), words(1), grid=2)


def test_registers_start_as_garbage(kernel: KernelMaker) -> None:
    """An accumulator that is never set must not be zero by luck."""
    y = words(64)
    kernel("  u32 r[4];\n  st_u32(p.y + t, r[p.n]);")(words(1), y, n=2)
    assert (y != 0).all()


def test_a_failed_run_leaves_no_trace(kernel: KernelMaker) -> None:
    """A kernel that fails for some arguments works for others afterwards, in the same library."""
    run = kernel(
        "  cta_sync();\n  if (t >= p.n) trap();\n  cta_sync();\n"
        "  st_u32(p.y + t, ld_s32((const int*)p.x + t));"
    )
    x, y = filled(64), words(64)
    for _ in range(3):
        with pytest.raises(EmulatorError, match="trap"):
            run(x, y, n=10)
        run(x, y, n=64)
        assert (x == y).all()
        y[:] = 0


def _build(body: str, cache_dir: Path, *names: str) -> Built:
    return emulator.build(body, tuple(KernelEntry(name, 32, 0) for name in names), cache_dir)


TWO = """\
struct one_params { u32* y; };
struct two_params { u32* y; u32 v; };
extern "C" __global__ void __launch_bounds__(32) one(const __grid_constant__ one_params p) {
  if (thread_id() == 0) st_u32(p.y + cta_id(), grid_size());
}
extern "C" __global__ void __launch_bounds__(32) two(const __grid_constant__ two_params p) {
  if (thread_id() == 0) st_u32(p.y + cta_id(), p.v);
}"""


def test_several_kernels_and_libraries(cache_dir: Path) -> None:
    first, second = (
        _build(TWO, cache_dir, "one", "two"),
        _build(TWO.replace("p.v", "p.v + 1"), cache_dir, "one", "two"),
    )
    y = words(4)
    regions = [region("y", y, True)]
    first.run("one", 4, struct.pack("<Q", y.ctypes.data), regions)
    assert (y == 4).all()
    for built, want in ((first, 9), (second, 10)):
        built.run("two", 4, struct.pack("<QI4x", y.ctypes.data, 9), regions)
        assert (y == want).all()


def test_wrong_launches(cache_dir: Path) -> None:
    built = _build(TWO, cache_dir, "one", "two")
    with pytest.raises(LaunchError, match="this body has the kernels one, two"):
        built.run("three", 1, b"", [])
    with pytest.raises(LaunchError, match="params has 3 bytes, two_params has 16"):
        built.run("two", 1, b"abc", [])
    with pytest.raises(EmulatorError, match="no memory is registered"):
        built.run("one", 1, struct.pack("<Q", 4096), [])


def test_results_are_cached(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = _build(TWO, cache_dir, "one", "two")
    module = sys.modules["attngen.emulator.build"]  # the package's attribute of this name is the function
    monkeypatch.setattr(module, "_run_compiler", lambda *_: pytest.fail("compiled again"))
    assert _build(TWO, cache_dir, "one", "two").library == built.library


def test_invalid_body(cache_dir: Path) -> None:
    with pytest.raises(CompileError, match=r"body:2:.*nonsense"):
        _build("struct k_params { int n; };\nnonsense", cache_dir, "k")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingToolError, match="apt install g"):
        emulator.find_compiler()


@pytest.mark.parametrize(
    "entry", [("k k", 32, 0), ("k", 48, 0), ("k", 2048, 0), ("k", 32, -1), ("k", 32, 1 << 20)]
)
def test_invalid_entries(entry: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        KernelEntry(*entry)
