"""Hopper's copy engine, mbarriers, named barriers and warpgroup products: in the emulator, and on a GPU that it stands
for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from emulator_kernels import filled, words
from hopper_kernels import (
    LOAD,
    ORDER,
    REGISTERS,
    RING,
    STORE,
    STORES,
    TILES,
    Kernel,
    aligned,
    described,
    device_maker,
    everywhere,
    hopper_maker,
    matmul,
    operands,
    pipeline,
    ring_map,
    store_map,
)

from attngen.ir.schedule import Elem
from attngen.layout import SLAB_BYTES, SmemLayout, Swizzle
from attngen.tensormap import TensorMap


@pytest.fixture(params=["emulator", pytest.param("device", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if request.param == "device":
        return device_maker()
    return hopper_maker(tmp_path_factory.getbasetemp() / "emulator")


@pytest.mark.parametrize(("c0", "c1"), [(0, 0), (64, 8), (-16, -3), (32, 32), (0, 50), (96, 0)])
@pytest.mark.parametrize("swizzle", [Swizzle.B128, Swizzle.B64, Swizzle.B32, Swizzle.LINEAR])
def test_tensor_copies(
    kernel: Kernel, swizzle: Swizzle, c0: int, c1: int, request: pytest.FixtureRequest
) -> None:
    """A box to shared memory and back: swizzled as layouts say, zeros outside the tensor, nothing stored there."""
    if min(c0, c1) < 0 and request.node.callspec.params["kernel"] == "device":
        pytest.skip("an H200 takes a store that starts before the tensor for an illegal instruction; kernels make none")
    rows, columns, box, cols = 50, 90, 16, SLAB_BYTES.get(swizzle, 96) // 2
    a, c = aligned(rows, columns, torch.float16), aligned(rows, columns, torch.float16, 7)
    size = box * cols * 2
    text = (LOAD + STORE).replace("BYTES", str(size)).replace("C0", str(c0)).replace("C1", str(c1))
    y = words(size // 4)
    layout = SmemLayout(box, cols, 2, swizzle)
    padded = torch.zeros(box, cols, dtype=a.dtype)
    inside = [(i, j) for i in range(box) for j in range(cols) if 0 <= c1 + i < rows and 0 <= c0 + j < columns]
    want = torch.full_like(c, 7)
    for i, j in inside:
        padded[i, j] = want[c1 + i, c0 + j] = a[c1 + i, c0 + j]

    def check() -> None:
        got = torch.from_numpy(y.view(np.uint8).copy()).view(torch.float16)
        assert all(got[layout.offset(i, j) // 2] == padded[i, j] for i in range(box) for j in range(cols))
        assert torch.equal(c, want)
        c.fill_(7)

    maps = {"a": described(a, box, cols, swizzle), "c": described(c, box, cols, swizzle)}
    everywhere(kernel(text), check, y, maps=maps)


def test_slabs_ranges_and_sums(kernel: Kernel) -> None:
    """Two slabs of columns by one instruction of five coordinates; a plain range; a sum into a tensor of f32."""
    text = """\
  if (t == 0) {
    mbarrier_init(bar, 1);
    fence_proxy_async();
  }
  cta_sync();
  if (t == 0) {
    mbarrier_arrive_expect_tx(bar, 2048 + 256);
    tma_load_5d(s, &p.a, bar, 0, 2, 0, 0, 0);
    bulk_load(s + 2048, p.x, 256, bar);
  }
  mbarrier_wait(bar, 0);
  st_u32(p.y + t, ld_shared_u32(s + 4 * (t % 64) + 1024 * (t / 64)));
  st_u32(p.y + 128 + t, ld_shared_u32(s + 2048 + 4 * (t % 64)));
  st_shared_u32(s + 4096 + 4 * t, 0x3f800000 + t / 4);
  fence_proxy_async();
  cta_sync();
  if (t == 0) tma_reduce_add_4d(&p.c, s + 4096, 0, 0, 0, 0);
  if (t == 0) bulk_commit();
  if (t == 0) bulk_wait<0>();"""
    a, c = torch.randn(10, 128).bfloat16(), torch.full((32, 4), 2.0)
    slabs = TensorMap(Elem.BF16, (64, 10, 2, 1, 1), (256, 128, 16, 16), (64, 8, 2, 1, 1), Swizzle.B128, a.data_ptr())
    x, y = filled(64), words(256)
    sums = (np.arange(128) // 4 + 0x3F800000).astype(np.uint32).view(np.float32).reshape(32, 4) + 2

    def check() -> None:
        got = torch.from_numpy(y[:128].view(np.uint8).copy()).view(torch.bfloat16)
        for i in range(256):  # the first 256 bytes of either slab: rows 2 and 3
            slab, row, at = i // 128, i // 64 % 2, i % 64
            column = at ^ row * 8
            assert got[i] == a[2 + row, slab * 64 + column]
        assert (y[128:192] == x).all() and (y[192:] == x).all()
        assert (c.numpy() == sums).all()
        c.fill_(2)

    maps = {"a": (a, slabs), "c": described(c, 32, 4, Swizzle.LINEAR)}
    everywhere(kernel(text), check, y, maps=maps, x=x)


def test_five_coordinates_back(kernel: Kernel) -> None:
    """Two slabs by one store; a row beyond the tensor is dropped."""
    text = """\
  for (int i = t; i < 512; i += 128) st_shared_u32(s + 4 * i, i);
  fence_proxy_async();
  cta_sync();
  if (t == 0) {
    tma_store_5d(&p.c, s, 0, 3, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
  }"""
    c = torch.zeros(10, 128, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    slabs = TensorMap(Elem.BF16, (64, 10, 2, 1, 1), (256, 128, 16, 16), (64, 8, 2, 1, 1), Swizzle.B128, c.data_ptr())

    def check() -> None:
        stored = c.view(torch.int32)
        assert (stored[:3] == 0).all()
        for row in range(7):
            for word in range(64):
                slab, at = divmod(word, 32)
                assert stored[3 + row, word] == 256 * slab + 32 * row + (at ^ row * 4)
        c.zero_()

    everywhere(kernel(text), check, words(1), maps={"c": (c, slabs)})


@pytest.mark.parametrize("trans", ["", "_trans"])
def test_matrix_stores_mirror_matrix_loads(kernel: Kernel, trans: str) -> None:
    text = f"""\
  stmatrix_x4{trans}(s + 512 * warp + 16 * lane, 4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3);
  cta_sync();
  u32 a, b, c, d;
  ldmatrix_x4{trans}(a, b, c, d, s + 512 * warp + 16 * lane);
  st_v4(p.y + 4 * t, a, b, c, d);
  red_add_f32((float*)p.y + 512 + t % 2, 0.5f);"""
    y = words(516)

    def check() -> None:
        assert (y[:512] == np.arange(512)).all()
        assert (y[512:514].view(np.float32) == 32).all()

    everywhere(kernel(text), check, y)


def test_ring(kernel: Kernel) -> None:
    a = ring_map()
    y = words(128)
    total = int(a[0].view(torch.int32).numpy().astype(np.uint32).sum(dtype=np.uint64)) % 2**32

    def check() -> None:
        assert int(y.sum(dtype=np.uint64)) % 2**32 == total

    everywhere(kernel(RING, 256), check, y, maps={"a": a}, n=TILES)


def test_stores(kernel: Kernel) -> None:
    c = store_map()

    def check() -> None:
        rows = c[0].view(torch.int16).view(3, 8, 128)
        assert all((rows[i, :, ::2] == i).all() for i in range(3))
        c[0].zero_()

    everywhere(kernel(STORES), check, words(1), maps={"c": c}, n=3)


def test_order(kernel: Kernel) -> None:
    y = words(20)

    def check() -> None:
        assert list(y) == [max(i - 1, 0) + 1 + i % 2 for i in range(20)]

    everywhere(kernel(ORDER, 256), check, y, n=10)


def test_registers(kernel: Kernel) -> None:
    everywhere(kernel(REGISTERS, 384), lambda: None, words(1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("source", ["ss", "rs"])
@pytest.mark.parametrize(
    ("n", "elem", "swizzle"),
    [
        (8, "bf16", Swizzle.B128),
        (64, "f16", Swizzle.B128),
        (96, "bf16", Swizzle.B128),
        (128, "bf16", Swizzle.B128),
        (256, "f16", Swizzle.B128),
        (64, "bf16", Swizzle.B64),
        (48, "f16", Swizzle.B32),
        (40, "bf16", Swizzle.LINEAR),
    ],
)
def test_product(kernel: Kernel, n: int, elem: str, swizzle: Swizzle, source: str, transposed: bool) -> None:
    maps, x, product = operands(n, torch.bfloat16 if elem == "bf16" else torch.float16, transposed, swizzle)
    y = words(64 * n)

    def check() -> None:
        got = torch.from_numpy(y.view(np.float32).copy()).view(64, n).double()
        assert (got - product).abs().max() < 1e-4

    everywhere(kernel(matmul(n, elem, source, transposed, swizzle)), check, y, maps=maps, x=x)


def test_two_groups_in_flight(kernel: Kernel) -> None:
    maps, x, product = operands(64, torch.bfloat16, False, Swizzle.B128)
    y = words(64 * 64)

    def check() -> None:
        got = torch.from_numpy(y.view(np.float32).copy()).view(64, 64).double()
        assert (got - 6 * product).abs().max() < 1e-3

    everywhere(kernel(pipeline(64)), check, y, maps=maps, x=x)
