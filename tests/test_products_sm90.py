"""Warpgroup products of every width, against float64: both types, a from shared memory and from registers, b along k
and across, in each swizzle. In the emulator and on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulator_kernels import words
from hopper_kernels import Launch, emulated, matmul, on_device, operands

from attngen.layout import Swizzle

WIDTHS = range(8, 257, 8)
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SOURCES = ("ss", "rs")
PLACES = ["emulator", pytest.param("device", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[Swizzle.B128, Swizzle.B64, Swizzle.B32], ids=lambda s: s.value)
def swizzle(request: pytest.FixtureRequest) -> Swizzle:
    assert isinstance(request.param, Swizzle)
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["k-major", "mn-major"])
def transposed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def products(
    place: str, swizzle: Swizzle, transposed: bool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Launch]:
    """Every width, type and source, as kernels of one module."""
    texts = {
        f"product_{n}_{source}_{elem}": matmul(n, elem, source, transposed, swizzle)
        for n in WIDTHS for elem in TYPES for source in SOURCES
    }  # fmt: skip
    if place == "device":
        return on_device(texts)
    folder: Path = tmp_path_factory.getbasetemp() / "emulator"
    return emulated(texts, folder)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("elem", TYPES)
def test_every_width(
    products: dict[str, Launch], elem: str, source: str, swizzle: Swizzle, transposed: bool
) -> None:
    for n in WIDTHS:
        maps, x, product = operands(n, TYPES[elem], transposed, swizzle)
        y = words(64 * n)
        y.view(np.float32)[:] = np.nan
        products[f"product_{n}_{source}_{elem}"](y, maps=maps, x=x)
        got = torch.from_numpy(y.view(np.float32).copy()).view(64, n).double()
        assert (got - product).abs().max() < 1e-4, f"n={n}"
