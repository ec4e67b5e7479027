"""The parameter struct of a kernel: one description for the C declaration and for the bytes that are passed.

Pointers first, then 64-bit strides in elements, then 32-bit integers, then floats: every field is aligned as C lays
it out, without padding inside."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from attngen.expr import DType
from attngen.ir.schedule import Access, Elem, Kernel


class Kind(Enum):
    """What a field is filled with."""

    POINTER = "P"
    STRIDE = "q"
    INT = "i"
    FLOAT = "f"


C_TYPE = {Elem.BF16: "u16", Elem.F16: "u16", Elem.F32: "float", Elem.I32: "int", Elem.I64: "i64", Elem.U8: "u8"}
_ORDER = (Kind.POINTER, Kind.STRIDE, Kind.INT, Kind.FLOAT)


@dataclass(frozen=True)
class Field:
    name: str
    kind: Kind
    declaration: str


def stride_count(access: Access, rank: int) -> int:
    """Inputs and outputs have a contiguous last dimension; captured tensors and workspaces any strides."""
    return rank - 1 if access in (Access.IN, Access.OUT) else rank


def fields(kernel: Kernel) -> tuple[Field, ...]:
    result: list[Field] = []
    for t in kernel.tensors:
        const = "" if t.access in (Access.OUT, Access.WORK) else "const "
        result.append(Field(t.name, Kind.POINTER, f"{const}{C_TYPE[t.elem]}* {t.name}"))
        strides = range(stride_count(t.access, t.rank))
        result += [Field(f"{t.name}_s{k}", Kind.STRIDE, f"i64 {t.name}_s{k}") for k in strides]
        if t.access in (Access.CAPTURE, Access.WORK):
            result += [Field(f"{t.name}_n{k}", Kind.INT, f"int {t.name}_n{k}") for k in range(t.rank)]
    for s in kernel.scalars:
        kind = Kind.FLOAT if s.dtype is DType.F32 else Kind.INT
        result.append(Field(s.name, kind, f"{'float' if kind is Kind.FLOAT else 'int'} {s.name}"))
    return tuple(sorted(result, key=lambda f: _ORDER.index(f.kind)))


def packer(kernel: Kernel) -> tuple[struct.Struct, tuple[str, ...]]:
    """The binary layout and the names in its order; the size is a multiple of 8 as C rounds it."""
    listed = fields(kernel)
    code = "".join("Q" if f.kind is Kind.POINTER else f.kind.value for f in listed)
    size = struct.calcsize("=" + code)
    return struct.Struct("=" + code + "x" * (-size % 8)), tuple(f.name for f in listed)


def pack(kernel: Kernel, values: Mapping[str, int | float]) -> bytes:
    layout, names = packer(kernel)
    return layout.pack(*(values[n] for n in names))
