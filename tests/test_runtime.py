"""The path from text to a compiled kernel: compiler, build gate, machine code, cache."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import shutil
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from runtime_kernels import ADD

from attngen import env
from attngen.errors import CompileError, MissingToolError
from attngen.runtime import cache, gate, nvrtc, sass
from attngen.runtime.compile import Artifact, compile_cuda, flags_for, parse_resources

# 128 live values a thread, and 64 registers for them: the loop has to spill.
SPILL = """struct spill_params { float* x; int n; };
extern "C" __global__ void __launch_bounds__(1024) spill(const __grid_constant__ spill_params p) {
  float a[128];
  #pragma unroll
  for (int i = 0; i < 128; i++) a[i] = p.x[i * threadIdx.x];
  for (int t = 0; t < p.n; t++) {
    #pragma unroll
    for (int i = 0; i < 128; i++) a[i] = a[i] * a[(i + 7) & 127] + p.x[i];
  }
  #pragma unroll
  for (int i = 0; i < 128; i++) p.x[i * threadIdx.x + blockIdx.x] = a[i];
}
"""


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture(scope="module")
def added() -> Artifact:
    return compile_cuda(ADD, arch="sm_80", symbols=("add",))


@pytest.fixture(scope="module")
def spilled() -> Artifact:
    return compile_cuda(SPILL, arch="sm_80", symbols=("spill",))


def _no_compiler() -> nvrtc.Nvrtc:
    raise MissingToolError("no compiler here")


# compile


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_compile_reports_resources(arch: str) -> None:
    artifact = compile_cuda(ADD, arch=arch, symbols=("add",))
    assert artifact.cubin.startswith(b"\x7fELF")
    assert artifact.arch == arch
    assert artifact.compiler.startswith("nvrtc ")
    used = artifact.resources["add"]
    assert 0 < used.registers <= 32
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes, used.static_smem_bytes) == (
        0,
        0,
        0,
        0,
    )


def test_equal_source_gives_equal_binary(
    added: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compile_cuda(ADD, arch="sm_80", symbols=("add",)).digest == added.digest


def test_compile_error_shows_the_line() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cuda(ADD.replace("p.y[i]", "p.z[i]"), arch="sm_80", symbols=("add",))
    assert "kernel.cu:4:" in str(caught.value)
    assert "if (i < p.n) p.x[i] += p.z[i];" in str(caught.value)


def test_assembler_error_is_led_back_to_the_source() -> None:
    source = """__device__ inline void wrapper(float x) {
  asm volatile("bogus.f32 %0;" :: "f"(x));
}
extern "C" __global__ void k(float* x) {
  wrapper(x[0]);
}
"""
    with pytest.raises(CompileError) as caught:
        compile_cuda(source, arch="sm_90a", symbols=("k",))
    assert "kernel.cu:2:" in str(caught.value)
    assert "called at line 5" in str(caught.value)
    assert "bogus.f32 %f" in str(caught.value)


def test_unknown_architecture_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_cuda(ADD, arch="sm_1", symbols=("add",))


def test_missing_symbol_is_named() -> None:
    with pytest.raises(CompileError, match=r"does not define extern \"C\" subtract; it defines add"):
        compile_cuda(ADD, arch="sm_80", symbols=("subtract",))


def test_resources_are_read_per_kernel() -> None:
    log = """ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     440 bytes stack frame, 912 bytes spill stores, 928 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 440 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 360 bytes cmem[0]
"""
    found = parse_resources(log)
    assert dataclasses.astuple(found["a"]) == (64, 912, 928, 440, 256)
    assert dataclasses.astuple(found["b"]) == (8, 0, 0, 0, 0)


def test_built_ins_are_loaded_before_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler asks for them by their bare name, which a wheel outside the loader's paths does not answer."""
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (tmp_path / name).touch()
    opened = []

    def library(path: str) -> MagicMock:
        opened.append(Path(path).name)
        return MagicMock()

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", library)
    nvrtc._open(str(tmp_path / "libnvrtc.so.13"))
    assert opened == ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]


def test_missing_nvrtc_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "candidates", lambda: iter(("/nowhere/libnvrtc.so",)))
    with pytest.raises(MissingToolError, match=r"pip install nvidia-cuda-nvrtc[\s\S]*/nowhere/libnvrtc.so"):
        nvrtc.find_nvrtc()


# gate


def test_gate_passes_a_clean_kernel(added: Artifact) -> None:
    report = gate.check(added)
    assert report.ok
    assert report.sass_checked
    assert report.findings == ()


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "ptxas info    : (C7519) Potential Performance Loss: wgmma.fence is injected in around line 10",
        "ptxas info    : setmaxnreg ignored to maintain minimum register requirements",
    ],
)
def test_gate_refuses_each_word(added: Artifact, line: str) -> None:
    report = gate.check(dataclasses.replace(added, log=f"{added.log}{line}\n"))
    assert not report.ok
    assert [finding.rule for finding in report.findings] == [gate.Rule.LOG]
    assert line in str(report)


def test_gate_refuses_a_spill(spilled: Artifact) -> None:
    used = spilled.resources["spill"]
    assert used.spill_store_bytes > 0
    assert used.spill_load_bytes > 0
    report = gate.check(spilled)
    assert not report.ok
    assert {finding.rule for finding in report.findings} == {gate.Rule.SPILL, gate.Rule.LOOP_SPILL}


def test_only_a_spill_in_a_loop_is_fatal(spilled: Artifact) -> None:
    fatal = [finding.rule for finding in gate.check(spilled).findings if finding.fatal]
    assert fatal == [gate.Rule.LOOP_SPILL]


def test_a_share_of_a_loop_may_touch_local_memory(spilled: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 0x10 to 0xa0, ten instructions, two."""
    loop = tuple(sass.LoopSpill(at, "LDL", 0x10, 0xA0, hot=True) for at in (0x30, 0x40))
    monkeypatch.setattr(gate, "spills_in_loops", lambda cubin, symbol: loop)
    assert not gate.check(spilled, spilled=0.19).ok
    report = gate.check(spilled, spilled=0.2)
    assert report.ok and "2 local-memory accesses in a hot loop" in str(report)


def test_gate_says_when_the_machine_code_was_not_read(
    spilled: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(cubin: bytes, symbol: str) -> tuple[sass.LoopSpill, ...]:
        raise MissingToolError("nvdisasm was not found")

    monkeypatch.setattr(gate, "spills_in_loops", missing)
    report = gate.check(spilled)
    assert [finding.rule for finding in report.findings if finding.fatal] == [gate.Rule.SPILL]
    assert not report.sass_checked
    assert "the loops were not checked" in str(report)


# machine code


def test_sass_counts(added: Artifact) -> None:
    counts = sass.sass_counts(added.cubin, "add")
    assert counts["LDG"] == 2
    assert counts["STG"] == 1
    assert "STL" not in counts


def test_spills_in_loops_of_a_real_kernel(spilled: Artifact) -> None:
    spills = sass.spills_in_loops(spilled.cubin, "spill")
    assert {spill.opcode.split(".")[0] for spill in spills} == {"STL", "LDL"}
    assert all(spill.hot and spill.loop_start <= spill.address <= spill.loop_end for spill in spills)
    everywhere = sass.sass_counts(spilled.cubin, "spill")
    assert len(spills) < everywhere["STL"] + everywhere["LDL"]  # the spills before the loop are not in it


def test_unknown_kernel_is_named(added: Artifact) -> None:
    with pytest.raises(CompileError, match="no kernel other; it has add"):
        sass.disassemble(added.cubin, "other")


# A persistent kernel: a loop over work, in it a loop over tiles with an MMA. A slow path lies behind the end
# and jumps back into the loop over tiles; its jump back from 00c0 to 0090 is no loop.
LISTING = """
//--------------------- .text.k                   --------------------------
        .section        .text.k,"ax",@progbits
.text.k:
        /*0000*/                   STL [R1], R0 ;
.L_x_work:
        /*0010*/                   STL [R1+0x4], R0 (*"SpillRefill"*);
.L_x_tile:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   LDL R3, [R1+0x4] ;
        /*0040*/              @!P0 BRA `(.L_x_slow) ;
.L_x_back:
        /*0050*/                   BRA.U UP0, `(.L_x_tile) ;
        /*0060*/               @P1 BRA `(.L_x_work) ;
        /*0070*/                   BRA `(.L_x_out) ;
.L_x_other:
        /*0080*/                   NOP ;
.L_x_out:
        /*0090*/                   STL [R1+0x8], R0 ;
        /*00a0*/                   EXIT ;
.L_x_slow:
        /*00b0*/               @P2 BRA `(.L_x_back) ;
        /*00c0*/                   BRA `(.L_x_out) ;
.L_x_end:
"""


def test_hot_loops_and_outer_loops_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "_listing", lambda cubin: LISTING)
    assert sass.spills_in_loops(b"", "k") == (
        sass.LoopSpill(0x10, "STL", 0x10, 0xB0, hot=False),
        sass.LoopSpill(0x30, "LDL", 0x20, 0xB0, hot=True),
    )


# cache


def test_second_compile_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.perf_counter()
    first = cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path)
    cold = time.perf_counter() - start
    monkeypatch.setattr(cache, "compile_cuda", None)
    second = cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path)
    assert dataclasses.replace(second, seconds=0) == dataclasses.replace(first, seconds=0)
    assert cold < 10
    (manifest,) = tmp_path.glob("*/manifest.json")
    names = {path.name for path in manifest.parent.iterdir()}
    assert names == {"kernel.cu", "kernel.cubin", "build.log", "manifest.json"}
    assert (manifest.parent / "kernel.cu").read_text() == ADD
    assert str(tmp_path) not in manifest.read_text()


def test_everything_that_decides_the_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        cache.entry_key(ADD, "sm_80", "nvrtc 13.0.1"),
        cache.entry_key(ADD + "\n", "sm_80", "nvrtc 13.0.1"),
        cache.entry_key(ADD, "sm_90", "nvrtc 13.0.1"),
        cache.entry_key(ADD, "sm_80", "nvrtc 13.0.2"),
    }
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    keys.add(cache.entry_key(ADD, "sm_80", "nvrtc 13.0.1"))
    monkeypatch.setattr(cache, "flags_for", lambda arch: (*flags_for(arch), "--use_fast_math"))
    keys.add(cache.entry_key(ADD, "sm_80", "nvrtc 13.0.1"))
    assert len(keys) == 6


def _compile_and_mark(directory: str, marks: str, barrier: Barrier) -> None:
    def marked(
        source: str, *, arch: str, symbols: tuple[str, ...], lib: nvrtc.Nvrtc | None = None
    ) -> Artifact:
        artifact = compile_cuda(source, arch=arch, symbols=symbols, lib=lib)
        Path(marks, str(multiprocessing.current_process().pid)).touch()
        return artifact

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "compile_cuda", marked)
        barrier.wait()
        cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=Path(directory))


def test_eight_processes_compile_once(tmp_path: Path) -> None:
    directory, marks = tmp_path / "cache", tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    arguments = (str(directory), str(marks), barrier)
    workers = [context.Process(target=_compile_and_mark, args=arguments) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(list(marks.iterdir())) == 1
    assert len(list(directory.glob("*/manifest.json"))) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "no cubin", "no manifest", "bad manifest", "empty"])
def test_damaged_entry_is_rebuilt(damage: str, tmp_path: Path) -> None:
    first = cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path)
    (entry,) = (path for path in tmp_path.iterdir() if path.is_dir())
    cubin, manifest = entry / "kernel.cubin", entry / "manifest.json"
    if damage == "flip":
        cubin.write_bytes(cubin.read_bytes()[:-1] + b"\xff")
    elif damage == "truncate":
        cubin.write_bytes(cubin.read_bytes()[:100])
    elif damage == "no cubin":
        cubin.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text(json.dumps({"arch": 1, "resources": []}))
    else:
        shutil.rmtree(entry)
        entry.mkdir()
    assert cache.read_entry(entry) is None
    assert (
        cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path).digest == first.digest
    )
    assert cache.read_entry(entry) is not None


def test_failed_compile_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompileError):
        cache.compile_cached("no CUDA", arch="sm_80", symbols=("add",), cache_dir=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_directory_is_argument_then_environment_then_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.cache_directory().name == "attngen"
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path / "environment"))
    assert cache.cache_directory() == tmp_path / "environment"
    assert cache.cache_directory(tmp_path / "argument") == tmp_path / "argument"


def test_precompiled_folder_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = cache.precompile_into(tmp_path / "made", [cache.Unit(ADD, "sm_90a", ("add",))])
    moved = (tmp_path / "made").rename(tmp_path / "moved")
    monkeypatch.setattr(cache, "find_nvrtc", _no_compiler)
    monkeypatch.setenv("ATTNGEN_PRECOMPILED", f"{tmp_path / 'absent'}:{moved}")
    artifact = cache.compile_cached(ADD, arch="sm_90a", symbols=("add",), cache_dir=tmp_path / "cache")
    assert artifact.resources["add"].registers > 0
    assert not (tmp_path / "cache").exists()
    with pytest.raises(CompileError, match="does not define"):
        cache.compile_cached(ADD, arch="sm_90a", symbols=("other",), cache_dir=tmp_path)
    with pytest.raises(MissingToolError, match="no compiler here"):
        cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path)
    assert (moved / entry.name / "kernel.cu").read_text() == ADD


def test_damaged_precompiled_entry_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = cache.precompile_into(tmp_path / "made", [cache.Unit(ADD, "sm_80", ("add",))])
    (entry / "kernel.cubin").write_bytes(b"")
    monkeypatch.setenv("ATTNGEN_PRECOMPILED", str(tmp_path / "made"))
    artifact = cache.compile_cached(ADD, arch="sm_80", symbols=("add",), cache_dir=tmp_path / "cache")
    assert artifact.cubin
