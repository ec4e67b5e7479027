"""Loading and launching of compiled kernels. All but the tests marked `gpu` run on a machine without one."""

from __future__ import annotations

import ctypes
import dataclasses
import threading

import pytest
import torch
from runtime_kernels import ADD, REVERSE, AddParams, ReverseParams

from attngen import env
from attngen.errors import LaunchError, MissingToolError
from attngen.runtime import launch, load
from attngen.runtime.compile import compile_cuda


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


# load and launch, without a device


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_120", (12, 0), True),
    ],
)
def test_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert load.runs_on(arch, capability) is runs


def test_params_refer_to_the_structure() -> None:
    structure = AddParams(x=1, y=2, n=3)
    packed = launch.pack(structure)
    assert packed.size == ctypes.sizeof(AddParams) == 24
    assert ctypes.c_void_p.from_address(packed.address).value == ctypes.addressof(structure)
    copied = launch.pack(bytes(structure))
    assert bytes(copied.buffer) == bytes(structure)


@pytest.mark.parametrize(
    ("grid", "threads", "size", "message"),
    [
        (0, 32, 24, "a grid of 0 blocks"),
        (2**31, 32, 24, "a grid of 2147483648 blocks"),
        (1, 2048, 24, "2048 threads a block"),
        (1, 32, 8, "8 bytes of parameters; the kernel takes 24"),
    ],
)
def test_launch_checks_its_arguments(grid: int, threads: int, size: int, message: str) -> None:
    kernel = load.LoadedKernel("add", 0, 0, 24, None, None, 0, None)
    with pytest.raises(LaunchError, match=message):
        launch.launch(kernel, grid=grid, threads=threads, params=bytes(size), stream=0)


def test_missing_packages_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(load, "import_module", missing)
    with pytest.raises(MissingToolError, match=r"cuda-bindings[\s\S]*pip install attngen\[cuda13\]"):
        load.driver.__wrapped__()
    with pytest.raises(MissingToolError, match=r"CuPy[\s\S]*pip install attngen\[cuda13\]"):
        load._cupy_cuda()


# on a GPU

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU and a CUDA build of torch"
)


def _native_arch() -> str:
    major, minor = load.device_facts(0).capability
    return f"sm_{major}{minor}"


def _add_kernel(device_index: int = 0) -> load.LoadedKernel:
    artifact = compile_cuda(ADD, arch=_native_arch(), symbols=("add",))
    return load.load(artifact, "add", 0, device_index=device_index)


def _add(kernel: load.LoadedKernel, x: torch.Tensor, y: torch.Tensor) -> None:
    params = AddParams(x.data_ptr(), y.data_ptr(), x.numel())
    launch.launch(kernel, grid=-(-x.numel() // 128), threads=128, params=launch.pack(params))


@pytest.mark.gpu
@needs_gpu
def test_gpu_launch() -> None:
    kernel = _add_kernel()
    assert kernel.param_bytes == ctypes.sizeof(AddParams)
    assert _add_kernel() is kernel
    x, y = torch.randn(1000, device="cuda:0"), torch.randn(1000, device="cuda:0")
    expected = x + y
    _add(kernel, x, y)
    assert torch.equal(x, expected)


@pytest.mark.gpu
@needs_gpu
def test_gpu_launch_takes_the_current_stream() -> None:
    kernel = _add_kernel()
    x, y = torch.zeros(1000, device="cuda:0"), torch.ones(1000, device="cuda:0")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        assert launch.current_stream(0) == stream.cuda_stream
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        _add(kernel, x, y)
    assert not stream.query()  # the launch has not waited for the work before it
    stream.synchronize()
    assert torch.equal(x, y)


@pytest.mark.gpu
@needs_gpu
def test_gpu_launch_is_captured_into_a_graph() -> None:
    kernel = _add_kernel()
    x, y = torch.zeros(1000, device="cuda:0"), torch.ones(1000, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _add(kernel, x, y)
    assert x.sum().item() == 0
    for _ in range(3):
        graph.replay()
    assert torch.equal(x, 3 * y)


@pytest.mark.gpu
@needs_gpu
def test_gpu_launch_from_a_thread_without_a_context() -> None:
    kernel = _add_kernel()
    x, y = torch.zeros(1000, device="cuda:0"), torch.ones(1000, device="cuda:0")
    torch.cuda.synchronize()
    errors: list[Exception] = []

    def work() -> None:
        try:
            _add(kernel, x, y)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_gpu_launch_on_a_device_that_is_not_current() -> None:
    kernel = _add_kernel(device_index=1)
    x, y = torch.zeros(1000, device="cuda:1"), torch.ones(1000, device="cuda:1")
    with torch.cuda.device(0):
        _add(kernel, x, y)
        assert torch.cuda.current_device() == 0
    assert torch.equal(x, y)


@pytest.mark.gpu
@needs_gpu
def test_gpu_dynamic_shared_memory_beyond_48_kib() -> None:
    artifact = compile_cuda(REVERSE, arch=_native_arch(), symbols=("reverse",))
    count = 20_000
    kernel = load.load(artifact, "reverse", 4 * count, device_index=0)
    load.load(artifact, "reverse", 128, device_index=0)  # a smaller size must not take the larger one away
    x = torch.arange(count, dtype=torch.int32, device="cuda:0")
    launch.launch(kernel, grid=1, threads=256, params=bytes(ReverseParams(x.data_ptr(), count)))
    assert torch.equal(x, torch.arange(count, dtype=torch.int32, device="cuda:0").flip(0))
    with pytest.raises(LaunchError, match=r"a block on .* can have"):
        load.load(artifact, "reverse", 1 << 20, device_index=0)


@pytest.mark.gpu
@needs_gpu
def test_gpu_wrong_architecture_is_named() -> None:
    other = "sm_80" if load.device_facts(0).capability[0] != 8 else "sm_90"
    artifact = compile_cuda(ADD, arch=other, symbols=("add",))
    with pytest.raises(LaunchError, match=f"compiled for {other} and does not run"):
        load.load(artifact, "add", 0, device_index=0)


@pytest.mark.gpu
@needs_gpu
def test_gpu_refused_binary_and_refused_launch_are_named() -> None:
    broken = dataclasses.replace(
        compile_cuda(ADD, arch=_native_arch(), symbols=("add",)), cubin=b"not a binary\0"
    )
    with pytest.raises(LaunchError, match="the driver refused a binary"):
        load.load(broken, "add", 0, device_index=0)
    too_much = dataclasses.replace(_add_kernel(), smem_bytes=1 << 20)
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        launch.launch(too_much, grid=1, threads=32, params=bytes(24))


@pytest.mark.gpu
@needs_gpu
def test_gpu_facts() -> None:
    facts, properties = load.device_facts(0), torch.cuda.get_device_properties(0)
    assert facts.name == properties.name
    assert facts.capability == (properties.major, properties.minor)
    assert facts.sm_count == properties.multi_processor_count
    assert facts.smem_per_block >= 48 * 1024
