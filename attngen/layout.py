"""Where an element of a tile lies: shared-memory swizzles and the register fragments of the MMA instructions.

Pure integers. Sources: PTX ISA, `mma.m16n8k16` and `wgmma` fragment figures, `ldmatrix`, and the 128/64/32-byte
swizzle modes of tensor maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

CHUNK = 16  # bytes moved by one cp.async, one row of an ldmatrix 8x8 matrix, the unit of every swizzle
BANKS, BANK_BYTES = 32, 4
WIDEST_BLOCK = 64  # columns that are added up in memory at once: an accumulator of 32 registers


class Swizzle(Enum):
    """How the 16-byte chunks of a row are permuted.

    XOR   chunk ^= (row >> (3 - a)) % 2^a with 2^a the largest power of two, at most 8, dividing the chunks of a row.
          Eight consecutive rows of one chunk column then fall into eight different 16-byte bank groups, whatever the
          row width: rows whose start collides differ in row >> (3 - a).
    B128, B64, B32   the swizzle modes of tensor maps and wgmma descriptors: slabs of 64, 32 or 16 columns, one after
          the other; inside a slab chunk ^= address bits 7 and up.
    LINEAR no permutation (one-dimensional vectors)."""

    XOR = "xor"
    B128 = "b128"
    B64 = "b64"
    B32 = "b32"
    LINEAR = "linear"


SLAB_BYTES = {Swizzle.B128: 128, Swizzle.B64: 64, Swizzle.B32: 32}


@dataclass(frozen=True)
class SmemLayout:
    """A rows x cols tile of `itemsize`-byte elements in shared memory; rows are padded to whole chunks."""

    rows: int
    cols: int
    itemsize: int
    swizzle: Swizzle

    @property
    def chunks(self) -> int:
        """16-byte chunks a row."""
        return -(-self.cols * self.itemsize // CHUNK)

    @property
    def xor_bits(self) -> int:
        """a of the XOR swizzle: log2 of the largest power of two <= 8 that divides the chunks of a row; of the slabbed
        modes, whose permutation inside a slab is the same formula: log2 of the chunks of a slab's row."""
        chunks = self.pitch // CHUNK
        return min(3, (chunks & -chunks).bit_length() - 1)

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next (inside a slab, for the slabbed modes)."""
        return SLAB_BYTES.get(self.swizzle, self.chunks * CHUNK)

    @property
    def slabs(self) -> int:
        """Blocks of columns that lie one after the other, each with all rows: 1 for the modes without slabs."""
        return -(-self.cols * self.itemsize // self.pitch)

    @property
    def bytes(self) -> int:
        return self.slabs * self.rows * self.pitch

    @property
    def align(self) -> int:
        """Alignment of the buffer's start: the swizzle atom of the slabbed modes, else one line of all banks."""
        return self.pitch * 8 if self.swizzle in SLAB_BYTES else BANKS * BANK_BYTES

    def offset(self, row: int, col: int) -> int:
        """Byte offset of element (row, col) from the (aligned) start of the tile."""
        byte = col * self.itemsize
        if self.swizzle in SLAB_BYTES:
            slab, within = divmod(byte, self.pitch)
            address = slab * self.rows * self.pitch + row * self.pitch + within
            width = {128: 7, 64: 3, 32: 1}[self.pitch]
            return address ^ (((address >> 7) & width) << 4)
        chunk, within = divmod(byte, CHUNK)
        if self.swizzle is Swizzle.XOR:
            chunk ^= (row >> (3 - self.xor_bits)) & ((1 << self.xor_bits) - 1)
        return row * self.pitch + chunk * CHUNK + within


def conflicts(addresses: list[int], width: int) -> int:
    """Extra cycles of one shared-memory access: lanes' byte addresses, `width` bytes a lane (4, 8 or 16).

    A 16-byte access is served in four phases of eight lanes, an 8-byte access in two of sixteen; within a phase each
    bank gives one word a cycle, and equal words are broadcast."""
    lanes = 32 * 4 // width if width > 4 else 32
    extra = 0
    for start in range(0, len(addresses), lanes):
        words: dict[int, set[int]] = {}
        for address in addresses[start : start + lanes]:
            for word in range(address // BANK_BYTES, (address + width) // BANK_BYTES):
                words.setdefault(word % BANKS, set()).add(word)
        extra += max(len(w) for w in words.values()) - 1
    return extra


def blocks(cols: int) -> Iterator[tuple[int, int]]:
    """(first column, width) of the blocks in which a tile of 64 rows is added up in memory: powers of two up to 64, so
    that a block starts at a multiple of its width. A block is 64 x width numbers in the order of a warpgroup's
    accumulator (`block_offset`), behind the blocks of the columns before it."""
    column = 0
    while column < cols:
        width = min(WIDEST_BLOCK, 1 << ((cols - column).bit_length() - 1))
        yield column, width
        column += width


def block_offset(row: int, column: int, rows: int = 64) -> int:
    """Where element (row, column) of a block of `rows` rows, 64 at most, lies: registers 4c to 4c + 3 of the threads
    that hold the rows, two each, for its columns 8c to 8c + 7."""
    warp, rest = divmod(row, 16)
    c, inside = divmod(column, 8)
    thread = warp * 32 + rest % 8 * 4 + inside // 2
    return c * 8 * rows + thread * 4 + rest // 8 * 2 + inside % 2


class Fragment(Enum):
    """Register layouts of a role's values. `rows` is the axis whose index a thread holds for two rows of each 16.

    ACC  f32 accumulator: row 8*r + lane/4, column 8*c + 2*(lane%4) + e, register (r/2*cols/8 + c)*4 + (r%2)*2 + e.
    OPA  packed pairs, the A operand of the next contraction: exactly the accumulator's elements, two a register.
    ROW  one scalar a row, replicated over the four lanes of a quad: r registers.
    COL  one scalar a column of the accumulator: two registers for each 8 columns.
    UNI  one scalar a warp."""

    ACC = "acc"
    OPA = "opA"
    ROW = "row"
    COL = "col"
    UNI = "uni"


def accumulator(lane: int, register: int, cols: int) -> tuple[int, int]:
    """(row, column) of an element of an ACC fragment of `cols` columns (one warp; rows in blocks of 16)."""
    block, within = divmod(register, cols // 8 * 4)
    c, rest = divmod(within, 4)
    return 16 * block + 8 * (rest // 2) + lane // 4, 8 * c + 2 * (lane % 4) + rest % 2
