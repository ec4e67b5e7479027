"""Where elements lie: swizzles are bijections, accesses of the generated kernels have no bank conflicts, and fragments
are those of the PTX figures."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from attngen.ir import ops as o
from attngen.ir.schedule import Kernel, ops_of
from attngen.kernel import kernel_for
from attngen.layout import BANKS, CHUNK, Fragment, SmemLayout, Swizzle, accumulator, conflicts
from attngen.signature import IoType, Signature
from attngen.spec import Attention
from attngen.target import target
from attngen.variants import causal

HEAD_DIMS = list(range(16, 257, 16))
ROW_COUNTS = [*range(1, 18), 32, 48, 64, 80, 96, 112, 128, 256]
SLABBED = [Swizzle.B128, Swizzle.B64, Swizzle.B32]


def offsets(layout: SmemLayout) -> list[int]:
    return [layout.offset(row, col) for row in range(layout.rows) for col in range(layout.cols)]


@pytest.mark.parametrize("cols", HEAD_DIMS)
@pytest.mark.parametrize("swizzle", [Swizzle.XOR, Swizzle.LINEAR])
def test_swizzles_are_bijections(swizzle: Swizzle, cols: int) -> None:
    """Every byte of the tile belongs to one element, for every number of rows: also where rows end inside a period."""
    for rows in ROW_COUNTS:
        layout = SmemLayout(rows, cols, 2, swizzle)
        assert layout.bytes == rows * cols * 2
        assert sorted(offsets(layout)) == list(range(0, layout.bytes, 2))


@pytest.mark.parametrize("cols", [64, 128, 192, 256])
@pytest.mark.parametrize("swizzle", SLABBED)
def test_slabbed_swizzles_are_bijections(swizzle: Swizzle, cols: int) -> None:
    for rows in (8, 64, 128):
        layout = SmemLayout(rows, cols, 2, swizzle)
        assert sorted(offsets(layout)) == list(range(0, layout.bytes, 2))


@pytest.mark.parametrize("swizzle", [Swizzle.XOR, *SLABBED])
def test_chunks_stay_whole(swizzle: Swizzle) -> None:
    """The eight elements of a 16-byte chunk lie side by side, at a multiple of 16 bytes: the unit of every copy."""
    layout = SmemLayout(64, 64, 2, swizzle)
    for row in range(64):
        for first in range(0, 64, 8):
            at = layout.offset(row, first)
            assert at % CHUNK == 0
            assert [layout.offset(row, first + e) for e in range(8)] == [at + 2 * e for e in range(8)]


def test_rows_of_odd_widths_are_padded_to_chunks() -> None:
    layout = SmemLayout(4, 20, 2, Swizzle.XOR)
    assert layout.chunks == 3
    assert layout.bytes == 4 * 48
    assert len(set(offsets(layout))) == 80


# ---- bank conflicts ------------------------------------------------------------------------------------------------


def test_conflicts_by_phases() -> None:
    """16 bytes a lane: four phases of eight lanes; 8 bytes: two of sixteen; 4 bytes: one. Equal words are broadcast."""
    for width in (4, 8, 16):
        assert conflicts([width * lane for lane in range(32)], width) == 0
        assert conflicts([0] * 32, width) == 0
        lanes = 128 // width
        period = 4 * BANKS  # bytes of all banks
        assert conflicts([period * lane for lane in range(32)], width) == 32 // lanes * (lanes - 1)
        # a collision between lanes of different phases costs nothing
        assert conflicts([width * (lane % lanes) + period * (lane // lanes) for lane in range(32)], width) == 0
    two_way = [16 * (lane % 4) + 128 * (lane // 4) for lane in range(32)]
    assert conflicts(two_way, 16) == 4  # in each phase, two lanes for each group of banks
    assert conflicts([8 * lane if lane % 2 else 8 * lane + 128 for lane in range(32)], 8) == 0


@functools.cache
def made(d: int, dv: int, alignment: int = 16) -> Kernel:
    spec = Attention(mask=causal())
    return kernel_for(spec.variant, Signature(IoType.BF16, d, dv, alignment), target("sm80")).schedule.kernels[0]


def layout_of(kernel: Kernel, name: str) -> SmemLayout:
    buffer = kernel.buffer(name)
    assert buffer is not None
    assert (buffer.offset or 0) % buffer.layout.align == 0  # so that conflicts do not depend on where the buffer lies
    return buffer.layout


def a_addresses(layout: SmemLayout, warp_rows: int, warps: int) -> Iterator[list[int]]:
    """ldmatrix.x4 of a 16 x 16 block of a: lanes 0..15 its rows, lanes 16..31 the same rows eight columns on."""
    for warp in range(warps):
        for row in range(warp * warp_rows, (warp + 1) * warp_rows, 16):
            for col in range(0, layout.cols, 16):
                yield [layout.offset(row + lane % 16, col + lane // 16 * 8) for lane in range(32)]


def b_addresses(layout: SmemLayout, transposed: bool) -> Iterator[list[int]]:
    """ldmatrix.x4 of 16 x 16 blocks of b. Rows of `b.T` are columns of the result: matrices 0, 1 are its first eight
    rows,
    2, 3 the next. Of a plain b: matrices 0, 1 are the sixteen rows of the first eight columns (ldmatrix.trans)."""
    for row in range(0, layout.rows, 16):
        for col in range(0, layout.cols, 16):
            if transposed:
                yield [layout.offset(row + lane % 8 + lane // 16 * 8, col + lane // 8 % 2 * 8) for lane in range(32)]
            else:
                yield [layout.offset(row + lane % 16, col + lane // 16 * 8) for lane in range(32)]


def copy_addresses(layout: SmemLayout, threads: int) -> Iterator[list[int]]:
    """16-byte accesses of a tile by all threads: thread c takes chunk c % block of row c / block, then every
    (threads / block)-th row, then the next block of columns."""
    block = 1 << layout.xor_bits
    for warp in range(threads // 32):
        for first in range(0, layout.rows, threads // block):
            for group in range(layout.chunks // block):
                lanes = [divmod(32 * warp + lane, block) for lane in range(32)]
                inside = [(first + r, 8 * (group * block + c)) for r, c in lanes if first + r < layout.rows]
                if inside:
                    yield [layout.offset(r, c) for r, c in inside]


def fragment_addresses(layout: SmemLayout, warp_rows: int, warps: int) -> Iterator[list[int]]:
    """st_frag: each lane writes two packed neighbours of the accumulator."""
    for warp in range(warps):
        for register in range(0, warp_rows * layout.cols // 32, 2):
            at = [accumulator(lane, register, layout.cols) for lane in range(32)]
            yield [layout.offset(warp * warp_rows + row, col) for row, col in at]


@pytest.mark.parametrize(("d", "dv"), [*((d, d) for d in (8, 40, *HEAD_DIMS)), (192, 128), (64, 128)])
def test_no_access_has_bank_conflicts(d: int, dv: int) -> None:
    kernel = made(d, dv)
    (role,) = kernel.roles
    rows = next(v.rows for v in role.values if v.fragment is Fragment.ACC)
    q, k, v, out = (layout_of(kernel, name) for name in ("sQ", "sK", "sV", "sO"))
    sixteen = [*a_addresses(q, rows, role.warps), *b_addresses(k, True), *b_addresses(v, False)]
    for layout in (q, k, v, out):
        sixteen += copy_addresses(layout, kernel.threads)
    assert sum(conflicts(lanes, 16) for lanes in sixteen) == 0
    assert sum(conflicts(lanes, 4) for lanes in fragment_addresses(out, rows, role.warps)) == 0


@pytest.mark.parametrize("cols", [d for d in HEAD_DIMS if d % 64 == 0])
def test_without_the_swizzle_there_would_be_conflicts(cols: int) -> None:
    """The counter sees what the swizzle is for: eight rows of 128 bytes start in one bank."""
    layout = SmemLayout(16, cols, 2, Swizzle.LINEAR)
    assert all(conflicts(lanes, 16) == 28 for lanes in b_addresses(layout, True))


@pytest.mark.parametrize("d", [8, 40, 64, 80, 128, 256])
def test_copies_cover_every_chunk_once(d: int) -> None:
    kernel = made(d, d)
    for name in ("sQ", "sK", "sV", "sO"):
        layout = layout_of(kernel, name)
        seen = Counter(a for lanes in copy_addresses(layout, kernel.threads) for a in lanes)
        assert seen == Counter(range(0, layout.bytes, CHUNK))


@pytest.mark.parametrize("d", [16, 48, 64, 128])
def test_the_text_computes_the_addresses_of_the_layout(d: int) -> None:
    """The macros write a lane's address as row * pitch + (chunk ^ term of the row) * 16; rows advance by multiples of
    8."""
    kernel = made(d, d)
    for name in ("sQ", "sK", "sV", "sO"):
        layout = layout_of(kernel, name)
        shift, mask = 3 - layout.xor_bits, (1 << layout.xor_bits) - 1
        for row in range(layout.rows):
            for chunk in range(layout.chunks):
                term = row % 8 >> shift & mask
                assert layout.offset(row, 8 * chunk) == row * layout.pitch + ((chunk ^ term) << 4)
    body = kernel_for(Attention(mask=causal()).variant, Signature(IoType.BF16, d, d), target("sm80")).source.body
    k = layout_of(kernel, "sK")
    assert f"br >> {3 - k.xor_bits} & {(1 << k.xor_bits) - 1}" in body
    assert f"br * {k.pitch}" in body


def test_kernels_use_the_accesses_counted_here() -> None:
    kinds = {type(op) for _, op in ops_of(made(64, 64))}
    touching = {o.CpAsync, o.MmaSync, o.StFrag, o.StTile}
    assert touching <= kinds
    assert kinds - touching <= {
        o.CpCommit,
        o.CpWait,
        o.CtaSync,
        o.Map,
        o.Reduce,
        o.Fill,
        o.StRows,
    }  # nothing else in shared memory


# ---- fragments -----------------------------------------------------------------------------------------------------


def test_accumulator_is_the_figure_of_mma_m16n8k16() -> None:
    """C fragment: c0, c1 in row lane / 4, c2, c3 eight rows below; columns 2 * (lane % 4) and the next."""
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        want = [(group, 2 * quad), (group, 2 * quad + 1), (group + 8, 2 * quad), (group + 8, 2 * quad + 1)]
        assert [accumulator(lane, c, 8) for c in range(4)] == want


@pytest.mark.parametrize(("rows", "cols"), [(16, 8), (16, 64), (32, 96), (64, 128)])
def test_accumulator_holds_each_element_once(rows: int, cols: int) -> None:
    registers = rows * cols // 32
    seen = {accumulator(lane, r, cols) for lane in range(32) for r in range(registers)}
    assert seen == {(row, col) for row in range(rows) for col in range(cols)}


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 64), (32, 96)])
def test_an_accumulator_is_the_next_a_operand(rows: int, cols: int) -> None:
    """A fragment of mma.m16n8k16: registers a0 (row g), a1 (row g + 8), a2 (row g, k + 8), a3 (row g + 8, k + 8),
    each two neighbours in k. The packed pairs of an accumulator are in just these registers."""
    tiles = cols // 8
    for lane in range(32):
        packed: dict[int, list[tuple[int, int]]] = {}
        for ri in range(rows // 8):
            for ci in range(tiles):
                pair = [accumulator(lane, (ri // 2 * tiles + ci) * 4 + ri % 2 * 2 + e, cols) for e in range(2)]
                packed[ri // 2 * 2 * tiles + 2 * ci + ri % 2] = pair
        group, quad = lane // 4, lane % 4
        for block in range(rows // 16):
            for kk in range(cols // 16):
                for a in range(4):
                    row, k = 16 * block + group + 8 * (a % 2), 16 * kk + 2 * quad + 8 * (a // 2)
                    assert packed[(block * (cols // 16) + kk) * 4 + a] == [(row, k), (row, k + 1)]


def test_accumulators_of_all_lanes_partition_a_tile() -> None:
    count = torch.zeros(32, 64, dtype=torch.int64)
    for lane in range(32):
        for register in range(64):
            count[accumulator(lane, register, 64)] += 1
    assert (count == 1).all()
