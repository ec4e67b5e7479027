"""The parameter struct of a kernel: one description for the C declaration and for the bytes that are passed.

Pointers first, then 64-bit strides in elements, then 32-bit integers, then floats: every field is aligned as C lays
it out, without padding inside."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from attngen.errors import PassError
from attngen.expr import DType
from attngen.ir.ops import Ref, TmaLoad, TmaStore
from attngen.ir.schedule import PERSISTENT, Access, Elem, Kernel, TensorArg, ops_of
from attngen.layout import Swizzle

WARPGROUP_ROWS = 64


class Kind(Enum):
    """What a field is filled with."""

    MAP = "128s"
    POINTER = "P"
    STRIDE = "q"
    INT = "i"
    FLOAT = "f"


C_TYPE = {Elem.BF16: "u16", Elem.F16: "u16", Elem.F32: "float", Elem.I32: "int", Elem.I64: "i64", Elem.U8: "u8"}
_ORDER = (Kind.MAP, Kind.POINTER, Kind.STRIDE, Kind.INT, Kind.FLOAT)


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    declaration: str


def stride_count(t: TensorArg) -> int:
    """Strides that a kernel is given: a contiguous dimension has none."""
    return t.rank if t.strided else t.rank - 1


@dataclass(frozen=True)
class MapUse:
    """A tensor that the copy engine moves in boxes of `rows` x `columns` elements."""

    tensor: TensorArg
    rows: int
    columns: int
    swizzle: Swizzle


def map_uses(kernel: Kernel) -> dict[str, MapUse]:
    """Tensors behind tensor maps, by name. A store of a warpgroup's block of rows has a box of that block."""
    tensors = {t.name: t for t in kernel.tensors}
    result: dict[str, MapUse] = {}
    for _, op in ops_of(kernel):
        if isinstance(op, TmaLoad | TmaStore):
            name, tile = (op.src, op.dst) if isinstance(op, TmaLoad) else (op.dst, op.src)
            assert isinstance(name, str) and isinstance(tile, Ref)
            buffer = kernel.buffer(tile.name)
            assert buffer is not None
            blocks = len(tile.index) > (1 if buffer.slots > 1 else 0)
            rows = WARPGROUP_ROWS if blocks else buffer.layout.rows
            use = MapUse(tensors[name], rows, buffer.layout.pitch // buffer.layout.itemsize, buffer.layout.swizzle)
            if result.setdefault(name, use) != use:
                raise PassError(f"{kernel.name}: tensor {name} is moved in two shapes of boxes: {result[name]}, {use}")
    return result


def fields(kernel: Kernel) -> tuple[Field, ...]:
    result: list[Field] = []
    maps = map_uses(kernel)
    if kernel.work.source in PERSISTENT:
        result += [Field("work", Kind.POINTER, "const int* work"), Field("rounds", Kind.INT, "int rounds")]
    result += [Field(f"{name}_map", Kind.MAP, f"TensorMap {name}_map") for name in maps]
    for t in kernel.tensors:
        if t.name in maps:
            continue
        const = "" if t.access in (Access.OUT, Access.WORK) else "const "
        result.append(Field(t.name, Kind.POINTER, f"{const}{C_TYPE[t.elem]}* {t.name}"))
        strides = range(stride_count(t))
        result += [Field(f"{t.name}_s{k}", Kind.STRIDE, f"i64 {t.name}_s{k}") for k in strides]
        if t.access in (Access.CAPTURE, Access.WORK):
            result += [Field(f"{t.name}_n{k}", Kind.INT, f"int {t.name}_n{k}") for k in range(t.rank)]
    for s in kernel.scalars:
        kind = Kind.FLOAT if s.dtype is DType.F32 else Kind.INT
        result.append(Field(s.name, kind, f"{'float' if kind is Kind.FLOAT else 'int'} {s.name}"))
    return tuple(sorted(result, key=lambda f: _ORDER.index(f.kind)))


def packer(kernel: Kernel) -> tuple[struct.Struct, tuple[str, ...]]:
    """The binary layout and the names in its order; the size is rounded as C rounds it (tensor maps align to 64)."""
    listed = fields(kernel)
    code = "".join("Q" if f.kind is Kind.POINTER else f.kind.value for f in listed)
    size = struct.calcsize("=" + code)
    align = 64 if any(f.kind is Kind.MAP for f in listed) else 8
    return struct.Struct("=" + code + "x" * (-size % align)), tuple(f.name for f in listed)


def pack(kernel: Kernel, values: Mapping[str, int | float | bytes]) -> bytes:
    layout, names = packer(kernel)
    return layout.pack(*(values[n] for n in names))
