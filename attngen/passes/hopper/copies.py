"""Who copies tiles into shared memory: the copy engine where it can read the rows, else the threads of the load role.

A tensor map asks for rows that start on 16 bytes. Other rows are copied by four warps: with cp.async in units of the
alignment, which needs 4 bytes at least, or through registers, element by element. The output is made by the caller of
the kernel with its rows one behind the other, so it leaves by the copy engine where its rows are whole multiples of 16
bytes."""

from __future__ import annotations

from enum import Enum

from attngen.signature import CP_ASYNC_BYTES, VECTOR_BYTES, Signature


class Copier(Enum):
    """How the load role moves a tile. A thread's part of a copy takes registers that one thread's commands do not."""

    ENGINE = "the copy engine"
    ASYNC = "cp.async"
    REGISTERS = "registers"

    @property
    def by_threads(self) -> bool:
        return self is not Copier.ENGINE


def copier(signature: Signature) -> Copier:
    if signature.alignment == VECTOR_BYTES:
        return Copier.ENGINE
    return Copier.ASYNC if signature.alignment >= CP_ASYNC_BYTES else Copier.REGISTERS
