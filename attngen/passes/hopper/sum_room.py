"""What the tiles and the roles of a kernel of plain sums have: shared memory for outputs, registers for roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attngen.errors import SignatureError
from attngen.layout import SmemLayout, Swizzle
from attngen.passes.hopper.stage import GROUP_THREADS
from attngen.passes.visits import ROWS_A_GROUP
from attngen.target import Target

MORE_ADDRESSES = 8  # of the role of parts, where it works out those of copies, too
LEAST_REGS = 32  # of the load role, which works out where each tile is
ADDRESSES = 24  # registers below the first accumulator (attngen.ir.rules.registers)
BARRIERS = 1024  # bytes kept for barriers
SLAB = 64  # columns that lie side by side in shared memory
HALF = SLAB // 2
ITEMSIZE = 2
STAGED = 2  # slots of a tile that crosses the warps: one is read while the next is written; 1 where memory has no more


def pieces(widths: Sequence[int]) -> Iterator[int]:
    """Columns of outputs that can leave at once, most first: all of the widest, whole slabs that every output divides
    into, half of one."""
    if widths:
        yield max(widths)
        yield from (n for n in (*range(max(widths) // SLAB * SLAB, 0, -SLAB), HALF) if all(w % n == 0 for w in widths))


def staging(rows: int, cols: int) -> SmemLayout:
    """Where an output lies before it leaves."""
    return SmemLayout(rows, cols, ITEMSIZE, Swizzle.B64 if cols == HALF else Swizzle.B128)


def least_staging(rows: int, widths: Sequence[int]) -> int:
    """Bytes of the smallest place that outputs can leave through."""
    return min((staging(rows, n).bytes for n in pieces(widths)), default=0)


def part_rows(block_n: int) -> int:
    """Rows of a part. Where a tile has fewer than a product, those beyond it are padding that is added nowhere."""
    return min(block_n, ROWS_A_GROUP)


def shared_accumulators(widths: Sequence[int]) -> list[str]:
    """A suffix for each block: those of one width share an accumulator."""
    return ["" if width == max(widths) else f"_{width}" for width in widths]


def role_registers(warpgroups: int, held: int | None, target: Target, merged: bool = False) -> tuple[int, int, int]:
    """Registers a thread of the load, shed and math roles: the accumulators of a part (`held` registers; None: no such
    role) decide, math takes what is left, and what does not divide goes to the load role, or to that of parts where
    there is none."""
    if merged:
        if held is None:
            raise SignatureError(
                "merged=True for a kernel that adds nothing up in memory: no role is there to issue the copies. "
                "Allowed: merged=False; gradients that are the same bits in every run have no such role"
            )
        launch = min(target.regs_per_sm // (GROUP_THREADS * (warpgroups + 1)), 255) // 8 * 8 * (warpgroups + 1)
        math = min(240, (launch - (ADDRESSES + held) // 8 * 8 - MORE_ADDRESSES) // warpgroups // 8 * 8)
        return 0, min(240, launch - math * warpgroups), math
    groups = warpgroups + (1 if held is None else 2)
    launch = min(target.regs_per_sm // (GROUP_THREADS * groups), 255) // 8 * 8
    shed = 0 if held is None else (ADDRESSES + held) // 8 * 8 + 8
    math = min(240, (launch * groups - LEAST_REGS - shed) // warpgroups // 8 * 8)
    return min(56, launch * groups - shed - math * warpgroups), shed, math
