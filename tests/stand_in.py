"""A device that is not there: the driver calls of a launch are taken down instead."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from attngen import gradient, kernel, ops, plan
from attngen.params import packer
from attngen.runtime import launch
from attngen.runtime.load import LoadedKernel

CONTEXT, STREAM = 11, 7


@dataclass
class Driver:
    """In place of libcuda. `during`: called in every launch, before the parameters are read."""

    status: int = 0
    context: int = CONTEXT
    during: Callable[[], object] = lambda: None
    sizes: dict[int, int] = field(default_factory=dict)  # parameter bytes by function
    launched: list[tuple[int, int, bytes]] = field(default_factory=list)  # grid, threads, parameters
    streams: list[int] = field(default_factory=list)

    def loaded(self, symbol: str, smem_bytes: int, param_bytes: int) -> LoadedKernel:
        function = 100 + len(self.sizes)
        self.sizes[function] = param_bytes
        return LoadedKernel(symbol, 0, smem_bytes, param_bytes, function, "context", CONTEXT, None)

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:  # noqa: N802
        grid, _, _, threads, _, _, _, stream, params, _ = rest
        self.during()
        at = ctypes.c_void_p.from_address(params.value).value
        assert at is not None
        self.launched.append((grid.value, threads.value, ctypes.string_at(at, self.sizes[function.value])))
        self.streams.append(stream.value)
        return self.status

    def cuCtxGetCurrent(self, at: Any) -> int:  # noqa: N802
        at._obj.value = self.context
        return 0


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Plans made for CPU tensors, as for a GPU's, launch into the driver that this gives."""
    driver = Driver()

    def load(module: kernel.Generated, symbol: str, smem_bytes: int, device_index: int | None) -> LoadedKernel:
        text = next(k for k in module.schedule.kernels if k.name == symbol)
        return driver.loaded(symbol, smem_bytes, packer(text)[0].size)

    monkeypatch.setattr(launch, "library", lambda: driver)
    monkeypatch.setattr(launch, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(plan, "device_facts", lambda index: SimpleNamespace(sm_count=132))
    monkeypatch.setattr(plan, "device_arch", lambda target, index: "sm_80")
    monkeypatch.setattr(plan, "settled", lambda module, arch: module)
    monkeypatch.setattr(plan, "load", load)
    monkeypatch.setattr(gradient, "device_arch", lambda target, index: "sm_80")
    monkeypatch.setattr(gradient, "settled", lambda module, arch: module)
    monkeypatch.setattr(kernel.Generated, "artifact", lambda self, arch: self)
    monkeypatch.setattr(ops, "_plans", {})
    monkeypatch.setattr(ops, "_gradient_plans", {})
    return driver
