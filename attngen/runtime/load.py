"""Loads a compiled kernel onto a device, and the few facts about devices that loading and launching need."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from attngen.errors import LaunchError, MissingToolError
from attngen.runtime.compile import Artifact

_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")
_lock = threading.Lock()
_modules: dict[tuple[int, str], Any] = {}
_kernels: dict[tuple[int, str, str, int], LoadedKernel] = {}


@dataclass(frozen=True)
class DeviceFacts:
    """What the driver says about one device. Shared memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block: int
    smem_per_sm: int


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device, ready to launch. Holds its module, so that the code stays loaded."""

    symbol: str
    device_index: int
    smem_bytes: int
    param_bytes: int
    function: Any = field(repr=False)
    context: Any = field(repr=False)
    context_address: int = field(repr=False)
    module: Any = field(repr=False)


def load(artifact: Artifact, symbol: str, smem_bytes: int, *, device_index: int) -> LoadedKernel:
    """The kernel on this device; the same object for the same arguments. `smem_bytes` is the dynamic shared
    memory.

    The first load of a kernel must come before a CUDA graph capture, as every allocation must."""
    key = (device_index, artifact.digest, symbol, smem_bytes)
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _kernels:
            _kernels[key] = _load(artifact, symbol, smem_bytes, device_index)
        return _kernels[key]


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a binary for `arch` runs on a device. Binaries run on later minor versions, sm_90a on 9.0
    alone."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise LaunchError(f"{arch} is not an architecture; expected a name such as sm_80 or sm_90a")
    major, minor = int(match.group(1)), int(match.group(2))
    if match.group(3) == "a":
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


@cache
def device_facts(device_index: int) -> DeviceFacts:
    """Facts about a device, asked once. The index is torch's, which is also the driver's."""
    device = call("cuDeviceGet", device_index)
    names = driver().CUdevice_attribute

    def attribute(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), device))

    return DeviceFacts(
        index=device_index,
        name=call("cuDeviceGetName", 128, device).split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        smem_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
    )


@cache
def driver() -> ModuleType:
    """The CUDA driver API, initialised. Raises MissingToolError when the binding or the driver is missing."""
    try:
        module = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise MissingToolError(
            f"launching needs cuda-bindings ({error}). Install it with `pip install attngen[cuda13]`."
        ) from error
    try:
        (status,) = module.cuInit(0)
    except RuntimeError as error:
        raise MissingToolError(f"the NVIDIA driver (libcuda) was not found: {error}") from error
    if status != 0:
        raise MissingToolError(f"the NVIDIA driver does not start: {_error_name(status)}")
    return module


@cache
def library() -> ctypes.CDLL:
    """The driver without the binding, for the calls of every launch: with arguments that are converted once, a call
    takes a fraction of a microsecond."""
    driver()  # says what is missing
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def call(name: str, *arguments: object) -> Any:
    """Calls a driver function by name and returns its value. Raises LaunchError with CUDA's name of the
    error."""
    status, *values = getattr(driver(), name)(*arguments)
    if status != 0:
        raise LaunchError(f"{name} failed: {_error_name(status)}")
    return values[0] if len(values) == 1 else tuple(values)


@contextmanager
def current(context: object) -> Iterator[None]:
    """Makes a context the calling thread's current one for the time of a block."""
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@cache
def primary_context(device_index: int) -> Any:
    """The context that torch and CuPy use on a device. Held for the life of the process, as theirs is."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device_index))


def _load(artifact: Artifact, symbol: str, smem_bytes: int, device_index: int) -> LoadedKernel:
    facts = device_facts(device_index)
    if not runs_on(artifact.arch, facts.capability):
        raise LaunchError(
            f"{symbol} is compiled for {artifact.arch} and does not run on device {device_index} "
            f"({facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]})"
        )
    static = artifact.resources[symbol].static_smem_bytes
    if smem_bytes + static > facts.smem_per_block:
        raise LaunchError(
            f"{symbol} needs {smem_bytes} bytes of dynamic and {static} of static shared memory; "
            f"a block on {facts.name} can have {facts.smem_per_block}"
        )
    context = primary_context(device_index)
    with current(context):
        module = _module(artifact, device_index)
        function = driver().CUfunction(module.get_function(symbol).ptr)
        attribute = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # Only ever raised: the kernel may be loaded with another size, and that one must stay launchable.
        if smem_bytes > call("cuFuncGetAttribute", attribute, function):
            call("cuFuncSetAttribute", function, attribute, smem_bytes)
        _, param_bytes = call("cuFuncGetParamInfo", function, 0)
    return LoadedKernel(
        symbol, device_index, smem_bytes, int(param_bytes), function, context, int(context), module
    )


def _module(artifact: Artifact, device_index: int) -> Any:
    key = (device_index, artifact.digest)
    if key not in _modules:
        cuda = _cupy_cuda()
        module = cuda.Module()
        try:
            module.load(artifact.cubin)
        except cuda.driver.CUDADriverError as error:
            raise LaunchError(
                f"the driver refused a binary made by {artifact.compiler} for {artifact.arch}: {error}. "
                f"The driver supports CUDA {driver_cuda_version()}; a newer compiler needs a newer driver."
            ) from error
        _modules[key] = module
    return _modules[key]


def driver_cuda_version() -> str:
    """The newest CUDA version the driver supports, as major.minor."""
    version = int(call("cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


def _cupy_cuda() -> Any:
    try:
        return import_module("cupy").cuda
    except ImportError as error:
        raise MissingToolError(
            f"loading a kernel needs CuPy ({error}). Install it with `pip install attngen[cuda13]`."
        ) from error


def _error_name(status: object) -> str:
    return str(getattr(status, "name", status))
