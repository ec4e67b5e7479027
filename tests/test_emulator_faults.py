"""What the emulator finds: each body is wrong in one way."""

from __future__ import annotations

import pytest
from emulator_kernels import KernelMaker, filled, kernel_maker, words

from attngen.emulator import Mode
from attngen.errors import EmulatorError


@pytest.fixture
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelMaker:
    return kernel_maker(tmp_path_factory.getbasetemp() / "emulator")


STAGE = "  cp_async_16(s + 16 * t, p.x + 4 * t, 16); cp_async_commit();\n"
FAULTS = {
    "missing cp_async_wait": (
        STAGE + "  cta_sync();\n  st_u32(p.y + t, ld_shared_u32(s + 16 * (t ^ 1)));",
        r"line 5 \(op5\): read of shared memory .* while the copy issued at line 3 \(op3\) is in flight",
    ),
    "wait for one group too few": (
        STAGE + "  cp_async_wait<1>(); cta_sync();\n  st_u32(p.y + t, ld_shared_u32(s + 16 * t));",
        r"line 5 \(op5\): read of shared memory .* in flight \(missing wait\)",
    ),
    "missing cta_sync, other warp": (
        STAGE + "  cp_async_wait<0>();\n  if (t >= 32) st_u32(p.y + t, ld_shared_u32(s + 16 * (t ^ 32)));",
        r"race: read of shared memory .* by warp 1 lane 0 is not ordered after the write of warp 0 lane 0 at",
    ),
    "missing cta_sync, same warp": (
        STAGE
        + "  cp_async_wait<0>();\n  warp_any(true);\n  st_u32(p.y + t, ld_shared_u32(s + 16 * (t ^ 1)));",
        r"line 6 \(op6\): race: read of shared memory .* after the write of warp 0 lane \d+ at line 3",
    ),
    "another lane's wait does not count": (
        "  if (t == 0) cp_async_16(s, p.x, 16);\n  cp_async_commit();\n  if (t != 0) cp_async_wait<0>();\n"
        "  cta_sync();\n  st_u32(p.y + t, ld_shared_u32(s));\n  cp_async_wait<0>();",
        r"line 7 \(op7\): read of shared memory .* while the copy issued at line 3 \(op3\) is in flight",
    ),
    "ldmatrix without cta_sync": (
        STAGE + "  cp_async_wait<0>();\n  u32 a, b, c, d;\n  ldmatrix_x4(a, b, c, d, s + 16 * t);",
        r"line 6 \(op6\): race: read of shared memory .* by warp 0 is not ordered after the write of warp 0",
    ),
    "write after read without barrier": (
        "  st_shared_u32(s + 4 * t, t);\n  cta_sync();\n  st_u32(p.y + t, ld_shared_u32(s + 4 * (t ^ 32)));\n"
        "  warp_any(true);\n  st_shared_u32(s + 4 * t, 1);",
        r"line 7 \(op7\): race: write to shared memory .* after the read of warp \d lane \d+ at line 5",
    ),
    "copy after read without barrier": (
        "  st_shared_v4(s + 16 * t, t, t, t, t);\n  cta_sync();\n  u32 a, b, c, d;\n"
        "  if (t < 32) ldmatrix_x4(a, b, c, d, s + 16 * (t ^ 32));\n  if (t < 32) return;\n"
        "  warp_any(true);\n" + STAGE,
        r"line 9 \(op9\): race: write to shared memory .* by warp 1 .* after the read of warp 0 at line 6",
    ),
    "write after write without barrier": (
        "  st_shared_u32(s, t);",
        r"race: write to shared memory at base\+0 by warp 0 lane 1 .* after the write of warp 0 lane 0",
    ),
    "write over a copy in flight": (
        STAGE + "  st_shared_u32(s + 16 * t, 1);\n  cp_async_wait<0>();",
        r"write to shared memory .* while the copy issued at line 3 \(op3\) is in flight",
    ),
    "copy over a copy in flight": (
        STAGE + STAGE + "  cp_async_wait<0>();",
        r"line 4 \(op4\): write to shared memory .* while the copy issued at line 3 \(op3\) is in flight",
    ),
    "never committed": (
        "  cp_async_16(s + 16 * t, p.x + 4 * t, 16);\n  cp_async_wait<0>();",
        r"line 3 \(op3\): kernel ends with cp.async in flight \(issued here, never committed\)",
    ),
    "in flight at exit": (
        STAGE,
        r"line 3 \(op3\): kernel ends with cp.async in flight \(issued here, never waited for\)",
    ),
    "unwritten shared memory": (
        "  st_shared_u32(s + 8 * t, 1);\n  st_u32(p.y + t, ld_shared_u32(s + 8 * t + 4));",
        r"line 4 \(op4\): read of shared memory at base\+4 that was never written",
    ),
    "global read out of bounds": (
        "  st_u32(p.y + t, ld_global_s32((const int*)p.x + 256 + t));",
        r"line 3 \(op3\): global read of 4 bytes at x\+1024 is out of bounds \(x has 1024 bytes\)",
    ),
    "global read before the start": (
        "  ld_f32((const float*)p.x - 1);",
        r"global read of 4 bytes at x-4 is out of bounds",
    ),
    "global copy out of bounds": (
        "  cp_async_16(s + 16 * t, p.x + 4 * (t + 1), 16); cp_async_commit(); cp_async_wait<0>();",
        r"line 3 \(op3\): global read of 16 bytes at x\+1024 is out of bounds",
    ),
    "global vector write across the end": (
        "  st_v4(p.y + 255, 0, 0, 0, 0);",
        r"write of 16 bytes at y\+1020 is out of bounds",
    ),
    "write to read-only memory": (
        "  st_u32((u32*)p.x + t, 0);",
        r"global write of 4 bytes at x\+0, which is read-only",
    ),
    "shared out of bounds": (
        "  st_shared_u32(s + 32768 + 4 * t, 0);",
        r"shared write of 4 bytes at base\+32768 is out of bounds \(the kernel has 32768 bytes\)",
    ),
    "shared before the start": (
        "  ld_shared_u32(4 * t);",
        r"shared read of 4 bytes at base-1024 is out of bounds",
    ),
    "misaligned global": (
        "  st_v4(p.y + 1, 0, 0, 0, 0);",
        r"line 3 \(op3\): global write of 16 bytes at y\+4 is misaligned",
    ),
    "misaligned copy source": (
        "  cp_async_16(s + 16 * t, p.x + 1, 16);",
        r"global read of 16 bytes at x\+4 is misaligned",
    ),
    "misaligned shared": (
        "  st_shared_v4(s + 8, 0, 0, 0, 0);",
        r"shared write of 16 bytes at base\+8 is misaligned",
    ),
    "misaligned matrix row": (
        "  u32 a, b, c, d;\n  ldmatrix_x4(a, b, c, d, s + 8);",
        r"line 4 \(op4\): shared read of 16 bytes at base\+8 is misaligned",
    ),
    "odd copy size": ("  cp_async_16(s + 16 * t, p.x + 4 * t, 8);", r"cp_async_16 with src_bytes 8: 0 or 16"),
    "divergent collective": (
        "  if (t % 32 < 20)\n    warp_any(true);\n  else\n    shfl_xor_f32(0.0f, 1);",
        r"line 6 \(op6\): warp 0 diverged: lane 20 is in shfl_xor, 20 lanes wait in vote at line 4 \(op4\)",
    ),
    "collective on two lines": (
        "  if (t % 2)\n    cta_sync();\n  else\n    cta_sync();",
        r"warp \d diverged: .* in cta_sync",
    ),
    "barrier not reached by a warp": (
        "  if (t < 32) cta_sync();",
        r"deadlock: .* warp 0: 32 lanes in cta_sync at line 3 \(op3\); warp 1: 32 lanes exited",
    ),
    "lanes exit before a collective": (
        "  if (t % 32 > 1) shfl_xor_f32(0.0f, 1);",
        r"deadlock: .* warp 0: 2 lanes exited, 30 lanes in shfl_xor at line 3 \(op3\); warp 1:",
    ),
    "trap": ("  if (t == 7) trap();", r"line 3 \(op3\): trap"),
    "register array": (
        "  int r[4] = {0, 1, 2, 3};\n  st_s32((int*)p.y, r[p.n + t]);",
        r"line 4 \(op4\): index 4 is outside",
    ),
    "division by zero": ("  st_s32((int*)p.y + t, 5 / p.n);", r"line 3 \(op3\): integer division by zero"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(kernel: KernelMaker, fault: str) -> None:
    """Found in every mode and order; in the fixed orders with this message."""
    statements, message = FAULTS[fault]
    x, y = filled(256), words(256)
    run = kernel(statements)
    names = {line: f"op{line}" for line in range(3, 12)}
    for mode in (Mode.EAGER, Mode.LATE):
        with pytest.raises(EmulatorError, match=message):
            run(x, y, mode=mode, line_names=names)
    for seed in range(5):
        with pytest.raises(EmulatorError):
            run(x, y, mode=Mode.RANDOM, seed=seed)
