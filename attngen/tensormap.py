"""Tensor maps: how the copy engine sees a tensor. One typed description, checked by the driver's rules.

Rules: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, tensor maps."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from attngen.errors import SignatureError
from attngen.ir.schedule import Elem
from attngen.layout import SLAB_BYTES, Swizzle

MAX_RANK, MAX_DIM, MAX_BOX, MAX_STRIDE, ALIGN = 5, 2**32, 256, 2**40, 16
BYTES = 128  # of an encoded map
EMULATOR_MARK = int.from_bytes(b"TMAP", "little")


@dataclass(frozen=True)
class TensorMap:
    """`dims`, innermost first, in elements; `strides_bytes` of all but the innermost; `box`: what one copy moves."""

    elem: Elem
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle
    pointer: int

    def __post_init__(self) -> None:
        rank = len(self.dims)
        self._demand(1 <= rank <= MAX_RANK, f"rank {rank}", f"1 to {MAX_RANK} dimensions")
        self._demand(len(self.box) == rank, f"{len(self.box)} box sizes", f"{rank}, one a dimension")
        strides = len(self.strides_bytes)
        self._demand(strides == rank - 1, f"{strides} strides", f"{rank - 1}, of all but the innermost")
        inner, span = self.box[0] * self.elem.bytes, SLAB_BYTES.get(self.swizzle)
        rules = (
            (self.swizzle is not Swizzle.XOR, f"swizzle {self.swizzle.value}", "b128, b64, b32, linear"),
            (all(1 <= d <= MAX_DIM for d in self.dims), f"dims {self.dims}", "1 to 2^32 each"),
            (all(1 <= b <= MAX_BOX for b in self.box), f"box {self.box}", f"1 to {MAX_BOX} each"),
            (self.pointer % ALIGN == 0, f"pointer {self.pointer:#x}", f"a multiple of {ALIGN}"),
            (all(s % ALIGN == 0 and 0 <= s < MAX_STRIDE for s in self.strides_bytes), f"strides {self.strides_bytes}",
             f"multiples of {ALIGN} bytes below 2^40"),
            (inner % ALIGN == 0, f"an inner box of {inner} bytes", f"a multiple of {ALIGN}"),
            (span is None or inner <= span, f"an inner box of {inner} bytes", f"at most the swizzle's {span}"),
        )  # fmt: skip
        for holds, value, allowed in rules:
            self._demand(holds, value, allowed)

    @staticmethod
    def _demand(holds: bool, value: str, allowed: str) -> None:
        if not holds:
            raise SignatureError(f"tensor map: {value}. Allowed: {allowed}. Use target='sm80' for such tensors")


def map_of(
    elem: Elem, pointer: int, shape: Sequence[int], strides: Sequence[int], rows: int, columns: int, swizzle: Swizzle
) -> TensorMap:
    """The map of a tensor [batch, heads, seq, head_dim] moved in boxes of rows x columns of one head."""
    batch, heads, seq, head_dim = shape
    # the stride of a dimension of size 1 is never used, and may be anything
    outer = ((seq, strides[2]), (heads, strides[1]), (batch, strides[0]))
    used = [s * elem.bytes if n > 1 else ALIGN for n, s in outer]
    return TensorMap(elem, (head_dim, seq, heads, batch), tuple(used), (columns, rows, 1, 1), swizzle, pointer)


def encode_driver(described: TensorMap, device_index: int) -> bytes:
    """The 128 bytes of a CUtensorMap. LaunchError where the driver refuses it."""
    from attngen.runtime.load import current, primary_context

    with current(primary_context(device_index)):  # the driver asks for one, and a new thread has none
        return _encode(described)


def _encode(described: TensorMap) -> bytes:
    from attngen.runtime.load import call, driver

    d = driver()
    kinds = {Elem.BF16: "BFLOAT16", Elem.F16: "FLOAT16", Elem.F32: "FLOAT32"}
    swizzles = {Swizzle.B128: "128B", Swizzle.B64: "64B", Swizzle.B32: "32B", Swizzle.LINEAR: "NONE"}
    made = call(
        "cuTensorMapEncodeTiled",
        getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kinds[described.elem]}"),
        len(described.dims),
        described.pointer,
        [d.cuuint64_t(n) for n in described.dims],
        [d.cuuint64_t(n) for n in described.strides_bytes],
        [d.cuuint32_t(n) for n in described.box],
        [d.cuuint32_t(1)] * len(described.dims),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzles[described.swizzle]}"),
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(int(made.getPtr()), BYTES)


def encode_emulator(described: TensorMap) -> bytes:
    """The emulator's own 128 bytes, `struct Map` of templates/emulator/tma.hpp."""
    rank, span = len(described.dims), SLAB_BYTES.get(described.swizzle, 0)
    dims, box = (t + (1,) * (MAX_RANK - rank) for t in (described.dims, described.box))
    strides = described.strides_bytes + (0,) * (MAX_RANK - rank)
    head = (described.pointer, rank, described.elem.bytes, span, EMULATOR_MARK)
    return struct.pack("<QiiiI5Q4Q5I", *head, *dims, *strides[:4], *box).ljust(BYTES, b"\0")
