"""The primitives: the values that the emulator gives, and the PTX prelude that it stands for."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator_kernels import KernelMaker, Words, kernel_maker, words

from attngen.render import prelude_of, select_prelude
from attngen.resources import templates_dir
from attngen.runtime.gate import LOG_WORDS


@pytest.fixture
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelMaker:
    return kernel_maker(tmp_path_factory.getbasetemp() / "emulator")


def _map_words(kernel: KernelMaker, expression: str, data: Words, count: int) -> Words:
    """`expression` of index i, stored as the bits of a word, for i in 0 .. count - 1."""
    run = kernel(f"  for (int i = t; i < p.n; i += 256) {{ {expression} }}", threads=256)
    y = words(count)
    run(data, y, n=count)
    return y


@pytest.mark.parametrize(("load", "dtype"), [("ld_bf16", torch.bfloat16), ("ld_f16", torch.float16)])
def test_widening_is_exact(kernel: KernelMaker, load: str, dtype: torch.dtype) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    data = words(32768)
    data.view(np.uint16)[:] = patterns.numpy()
    got = _map_words(kernel, f"st_f32((float*)p.y + i, {load}((const u16*)p.x + i));", data, 65536)
    want = patterns.view(dtype).float().numpy()
    nan = np.isnan(want)
    assert (np.isnan(got.view(np.float32)) == nan).all()
    assert (got[~nan] == want.view(np.uint32)[~nan]).all()


@pytest.mark.parametrize(("pack", "dtype"), [("pack_bf16x2", torch.bfloat16), ("pack_f16x2", torch.float16)])
def test_narrowing_is_exact(kernel: KernelMaker, pack: str, dtype: torch.dtype) -> None:
    """Every upper half of an f32, with lower halves below, at and above halfway, and every 16-bit value and
    the halfway points between neighbours."""
    upper = np.arange(65536, dtype=np.uint32) << 16
    floats = [upper, upper | 0x7FFF, upper | 0x8000, upper | 0x8001, upper | 0x1000, upper | 0x3000]
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    halfway = (values[:-1] + values[1:]) / 2
    bits = np.concatenate([*floats, values.numpy().view(np.uint32), halfway.numpy().view(np.uint32)])
    data = words(len(bits))
    data[:] = bits
    load = "ld_f32((const float*)p.x + i)"
    got = _map_words(kernel, f"st_u32(p.y + i, {pack}({load}, -{load}));", data, len(bits))
    want = torch.from_numpy(data.view(np.float32).copy())
    nan = want.isnan().numpy()
    for sign, half in ((1, got & 0xFFFF), (-1, got >> 16)):
        expected = (sign * want).to(dtype).view(torch.uint16).numpy()
        assert (half[~nan] == expected[~nan]).all()
        assert (half[nan] == 0x7FFF).all()


def test_integer_division_is_pythons(kernel: KernelMaker) -> None:
    low, high = -(2**31), 2**31 - 1
    sides = [low, low + 1, -7, -2, -1, 0, 1, 2, 3, 7, 100, high]
    pairs = [(a, b) for a in sides for b in sides]
    data = words(2 * len(pairs))
    data.view(np.int32)[:] = np.array(pairs).ravel()
    a, b = "ld_s32((const int*)p.x + 2 * i)", "ld_s32((const int*)p.x + 2 * i + 1)"
    for function, python in (("floordiv_s32", int.__floordiv__), ("mod_s32", int.__mod__)):
        got = _map_words(kernel, f"st_s32((int*)p.y + i, {function}({a}, {b}));", data, len(pairs)).view(
            np.int32
        )
        want = [0 if d == 0 else python(n, d) for n, d in pairs]
        assert [int(g) for g in got] == [(w - low) % 2**32 + low for w in want]


def test_float_functions(kernel: KernelMaker) -> None:
    """Special values: flushing to zero, infinities, NaN dropped by max and min, clamped conversion to int."""
    inf, nan, tiny = np.inf, np.nan, 1e-39
    cases: list[tuple[str, float]] = [
        ("exp2_approx(-INF)", 0),
        ("exp2_approx(INF)", inf),
        ("exp2_approx(-3.0f)", 0.125),
        ("exp2_approx(-127.0f)", 0),
        ("log2_approx(0.0f)", -inf),
        (f"log2_approx({tiny}f)", -inf),
        ("log2_approx(8.0f)", 3),
        ("log2_approx(-1.0f)", nan),
        (f"rcp_approx({tiny}f)", inf),
        ("rcp_approx(-4.0f)", -0.25),
        ("rcp_approx(-INF)", -0.0),
        ("tanh_approx(-INF)", -1),
        ("tanh_approx(0.0f)", 0),
        ("sqrt_f32(9.0f)", 3),
        ("div_f32(1.0f, 0.0f)", inf),
        ("fma_f32(3.0f, 5.0f, -1.0f)", 14),
        ("max_f32(INF - INF, 2.0f)", 2),
        ("max_f32(2.0f, INF - INF)", 2),
        ("max_f32(-0.0f, 0.0f)", 0.0),
        ("max_f32(0.0f, -0.0f)", 0.0),
        ("min_f32(0.0f, -0.0f)", -0.0),
        ("min_f32(INF - INF, -INF)", -inf),
        ("abs_f32(-0.0f)", 0.0),
        ("floor_f32(-1.5f)", -2),
        ("f32_of_s32(-16777217)", -16777216),
        ("f32_of_s32(s32_of_f32(-1.9f))", -1),
        ("f32_of_s32(s32_of_f32(1e20f))", 2.0**31),
        ("f32_of_s32(s32_of_f32(-1e20f))", -(2.0**31)),
        ("f32_of_s32(s32_of_f32(INF - INF))", 0),
        ("f32_of_s32(abs_s32(-5) + max_s32(1, 2) * min_s32(10, 20))", 25),
    ]
    run = kernel(
        "\n".join(f"  st_f32((float*)p.y + {i}, {text});" for i, (text, _) in enumerate(cases)), threads=32
    )
    y = words(len(cases))
    run(words(1), y)
    got = y.view(np.float32)
    for (text, want), value in zip(cases, got, strict=True):
        same = (
            np.isnan(value)
            if np.isnan(want)
            else value == want and np.signbit(value) == np.signbit(np.float32(want))
        )
        assert same, f"{text} is {value}, not {want}"


def test_wide_integers_are_clamped(kernel: KernelMaker) -> None:
    values = np.array([0, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**62], np.int64)
    data = words(2 * len(values))
    data.view(np.int64)[:] = values
    got = _map_words(kernel, "st_s32((int*)p.y + i, ld_s64((const i64*)p.x + i));", data, len(values))
    assert (got.view(np.int32) == np.clip(values, -(2**31), 2**31 - 1)).all()


PRELUDES = ("common", "sm80", "sm90")
ARCHITECTURES = {"sm_80": PRELUDES[:2], "sm_90": PRELUDES[:2], "sm_90a": PRELUDES}
SIGNATURE = re.compile(r"^(template <int \w+> )?DI ([\w ]+?) (\w+)\(((?:\(&\w+\)|[^()])*)\)", re.MULTILINE)
PRODUCTS = [(n, a, elem) for elem in ("bf16", "f16") for a in ("ss", "rs") for n in range(8, 257, 8)]


def _signatures(text: str) -> list[tuple[str, str, str, str]]:
    """Template head, result, name, parameters, without the emulator's line, in order."""
    found = SIGNATURE.findall(re.sub(r",\s+", ", ", text))
    return [(head, result, name, re.sub(r"(, )?LINE$", "", parameters)) for head, result, name, parameters in found]


def _blocks(name: str) -> tuple[str, list[str]]:
    """The part of a prelude that is always emitted, and its functions and structs, one a block."""
    text = (templates_dir() / "prelude" / f"{name}.cuh").read_text()
    head, functions = text.split("// ---- primitives\n")
    return head, [block for block in functions.strip().split("\n\n") if block]


@pytest.mark.parametrize("name", PRELUDES)
def test_emulator_has_the_primitives_of_the_prelude(name: str) -> None:
    emulated = (templates_dir() / "emulator" / f"{name}.hpp").read_text().split("#define PRODUCT(")[0]
    prelude = (templates_dir() / "prelude" / f"{name}.cuh").read_text()
    assert sorted(_signatures(emulated)) == sorted(_signatures(prelude))
    assert re.findall(r"^struct .*", emulated, re.MULTILINE) == re.findall(r"^struct .*", prelude, re.MULTILINE)


def test_emulator_has_every_product() -> None:
    """Whatever width, element and source a body uses; registers of a by reference, for the emulator to watch them."""
    emulated = (templates_dir() / "emulator" / "sm90.hpp").read_text()
    assert re.findall(r"PRODUCTS\((\d+)\)", emulated) == [str(n) for n in range(8, 257, 8)]
    text = emulated[emulated.index("#define PRODUCT(") : emulated.index("#define PRODUCTS(")]
    macro = re.sub(r"\s*\\\n\s*", " ", text)
    head = r"(template <(?:int TA, )?int TB>) DI void (\S+?)\(float \(&d\)"
    declared = re.findall(head + r"\[N / 2\], (.*?), LINE\)", macro)
    for n, a, elem in PRODUCTS:
        text = select_prelude("sm90", f"wgmma_m64n{n}k16_{a}_{elem}")
        (found,) = re.findall(head + r"\[(\d+)\], (.*?)\) {", text)
        assert int(found[2]) == n // 2
        named = {d[1].replace("##N##", str(n)).replace("##ELEMENT", elem): d for d in declared}
        kind, _, parameters = named[found[1]]
        assert (found[0], found[3]) == (kind, parameters.replace("&", ""))


@pytest.mark.parametrize("name", PRELUDES)
def test_prelude_blocks(name: str) -> None:
    """A block is a comment and one function that calls no other primitive, or one struct; no header is included."""
    head, blocks = _blocks(name)
    primitives = {found[2] for prelude in PRELUDES for found in _signatures("\n".join(_blocks(prelude)[1]))}
    assert "#include" not in head + "".join(blocks)
    for block in blocks:
        if re.match(r"// .+\nstruct ", block):
            continue
        assert re.match(r"// .+\n(template <int N> )?DI ", block), block
        assert len(_signatures(block)) == 1 and len(re.findall(r"\basm\b", block)) <= 1, block
        assert len(set(re.findall(r"(\w+)\(", block)) & primitives) == 1, block


def test_a_body_gets_what_it_calls() -> None:
    """One function, and the struct of tensor maps where that needs it."""
    for name, text in prelude_of("sm90").functions:
        if "struct " in text:
            continue
        emitted = select_prelude("sm90", f"{name}(")
        assert {found[2] for found in _signatures(emitted)} == {name}
        assert ("struct alignas(64) TensorMap" in emitted) == ("TensorMap" in text)


def _call(template: str, result: str, name: str, parameters: str) -> str:
    """A kernel that calls one function with its own parameters and keeps what it gives."""
    if "(&" in parameters:  # an array of registers
        elem = parameters.split(" ", 1)[0]
        return (
            f'extern "C" __global__ void __launch_bounds__(128, 1) call_{name}_{elem}({elem}* p) '
            f"{{ {elem} x[2] = {{p[0], p[1]}}; {name}(x); p[2] = x[0]; }}\n"
        )
    declared = [p.rsplit(" ", 1) for p in parameters.split(", ") if p]
    outs = [(t[:-1], n) for t, n in declared if t.endswith("&")]
    takes = ", ".join([f"{t.rstrip('&')} {n}" for t, n in declared] + ["void** sink"])
    argument = "" if not template else "<24>" if name.startswith("setmaxnreg") else "<1>"
    called = f"{name}{argument}({', '.join(n for _, n in declared)})"
    stores = "".join(f" *({t}*)sink[{i}] = {n};" for i, (t, n) in enumerate(outs, 1))
    kept = f"{called};" if result == "void" else f"*({result}*)sink[0] = {called};"
    return f'extern "C" __global__ void __launch_bounds__(128, 1) call_{name}({takes}) {{ {kept}{stores} }}\n'


def _alone(preludes: tuple[str, ...]) -> str:
    """A program in which each function of the preludes is called once, from a kernel of its own."""
    heads, functions = "", ""
    for prelude in preludes:
        head, blocks = _blocks(prelude)
        heads += head
        functions += "\n".join(blocks) + "\n"
    return heads + functions + "".join(_call(*signature) for signature in _signatures(functions))


def _products(products: list[tuple[int, str, str]]) -> str:
    """A program that issues each product once, in both directions of what lies in shared memory."""
    kernels = ""
    for n, a, elem in products:
        source = "a" if a == "ss" else "(u32)a, (u32)b, (u32)a, (u32)b"
        ways = ("0, 0", "0, 1", "1, 0", "1, 1") if a == "ss" else ("0", "1")
        calls = "".join(f"wgmma_m64n{n}k16_{a}_{elem}<{way}>(d, {source}, b + {k}, {min(k, 1)}); "
                        for k, way in enumerate(ways))  # fmt: skip
        kernels += (
            f'extern "C" __global__ void __launch_bounds__(128, 1) product_{n}_{a}_{elem}(float* p, u64 a, u64 b) {{\n'
            f"  float d[{n // 2}];\n"
            f'  _Pragma("unroll") for (int i = 0; i < {n // 2}; ++i) d[i] = p[128 * i + thread_id()];\n'
            f"  hold(d); wgmma_fence(); {calls}wgmma_commit(); wgmma_wait<0>(); hold(d);\n"
            f'  _Pragma("unroll") for (int i = 0; i < {n // 2}; ++i) p[128 * i + thread_id()] = d[i];\n}}\n'
        )
    return select_prelude("sm90", kernels) + kernels


def _nvcc(source: str, arch: str, tmp_path: Path) -> str:
    """The log of a compile that must work."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    file = tmp_path / "prelude.cu"
    file.write_text(source)
    command = [nvcc, "-std=c++17", f"-arch={arch}", "-cubin", "-o", str(tmp_path / "out.cubin"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    return done.stderr


def _nvrtc(source: str, arch: str) -> str:
    """The log. Without a header, to a cubin: no include path is given."""
    nvidia = pytest.importorskip("nvidia", reason="nvidia-cuda-nvrtc is not installed")
    found = [lib for root in nvidia.__path__ for lib in sorted(Path(root).rglob("libnvrtc.so.*"))]
    if not found:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    nvrtc = ctypes.CDLL(str(found[0]))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"prelude.cu", 0, None, None)
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0 and b"warning" not in log.value, log.value.decode()
    return log.value.decode()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prelude_compiles_with_nvcc(arch: str, tmp_path: Path) -> None:
    _nvcc(_alone(ARCHITECTURES[arch]), arch, tmp_path)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_prelude_compiles_with_nvrtc(arch: str) -> None:
    _nvrtc(_alone(ARCHITECTURES[arch]), arch)


@pytest.mark.parametrize("a", ["ss", "rs"])
def test_products_compile(a: str, tmp_path: Path) -> None:
    """Every width and element; the assembler adds no fence and serialises nothing."""
    source = _products([p for p in PRODUCTS if p[1] == a])
    for log in (_nvrtc(source, "sm_90a"), _nvcc(source, "sm_90a", tmp_path)):
        assert not any(word in log for word in LOG_WORDS), log
