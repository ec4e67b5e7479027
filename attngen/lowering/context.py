"""What the lowering of an op needs to know: the kernel, the role, how names are spelled, where buffers lie."""

from __future__ import annotations

from attngen.cprint import Printer
from attngen.errors import PassError
from attngen.expr import Expr
from attngen.ir.ops import CopyTile, CpAsync, Heads, Ref
from attngen.ir.schedule import Buffer, Kernel, Role, Schedule, Value
from attngen.layout import CHUNK, SLAB_BYTES, Fragment, SmemLayout
from attngen.params import fields
from attngen.render import Argument


class RoleContext:
    """One role of one kernel of a schedule."""

    def __init__(self, schedule: Schedule, kernel: Kernel, role: Role) -> None:
        self.schedule, self.kernel, self.role = schedule, kernel, role
        self.values: dict[str, Value] = {v.name: v for v in role.values}
        self.elems = {t.name: t.elem for t in kernel.tensors}
        self.dense = frozenset(t.name for t in kernel.tensors if not t.strided)
        self.parameters = {f.name for f in fields(kernel)}

    @property
    def target(self) -> str:
        return self.schedule.target

    def spell(self, v: Expr) -> str:
        """A variable in C: kernel parameters are members of `p`."""
        return f"p.{v.name}" if v.name in self.parameters and v.name not in self.values else v.name

    def expr(self, e: Expr) -> str:
        return Printer(self.spell, self.elems, self.dense)(e)

    def buffer(self, ref: Ref) -> Buffer:
        buffer = self.kernel.buffer(ref.name)
        if buffer is None:
            raise PassError(f"lower: {ref.name} is not a buffer of {self.kernel.name}")
        return buffer

    def address(self, ref: Ref) -> str:
        """Shared-memory address of a buffer, or of the slot that the first index names."""
        buffer = self.buffer(ref)
        text = f"smem + {buffer.offset}"
        if ref.index:
            text += f" + {self.expr(ref.index[0])} * {buffer.layout.bytes}"
        return f"({text})"

    @property
    def threads(self) -> int:
        """Threads that share a cooperative copy: of the role, or of one of its parts."""
        return 32 * self.role.warps // self.role.split

    def tile_rows(self, ref: Ref) -> int:
        """Rows that a reference to a buffer means."""
        return self.buffer(ref).layout.rows

    @property
    def warp_rows(self) -> int:
        """Rows of the tile that one warp owns."""
        return next(v.rows for v in self.role.values if v.fragment is Fragment.ACC)

    def row0(self, tile: str = "m") -> str:
        """First query row of a thread; it also owns every eighth row after it. tile: the name of the row tile."""
        return f"{tile} * {self.kernel.work.block_m} + {self.tile_row0}"

    @property
    def tile_row0(self) -> str:
        """The same within the tile."""
        return f"warp * {self.warp_rows} + lane / 4"

    def key0(self, tile: str = "n") -> str:
        """The same of a kernel whose rows are keys."""
        return f"{tile} * {self.kernel.work.block_m} + warp * {self.warp_rows} + lane / 4"

    def row_of(self, tensor: str, keys: bool = False) -> str:
        """Offset of this item's row in a table [batch or 1, heads or 1, row tiles, ...]."""
        if keys:  # one list for all heads
            return f"(i64)b * p.{tensor}_s0 + (i64)n * p.{tensor}_s2"
        return f"{self.list_of(tensor)} + (i64)m * p.{tensor}_s2"

    def list_of(self, tensor: str) -> str:
        """Offset of this item's batch and head there."""
        return f"(i64)b * p.{tensor}_s0 + (i64)h * p.{tensor}_s1"

    def head(self, tensor: str, heads: Heads, head: Expr | None) -> str:
        """Where the batch and head of an op start in a tensor: what `bases` declares, or what the op computes."""
        if head is None:
            return f"{tensor}_bh"
        return f"(p.{tensor} + (i64)b * p.{tensor}_s0 + (i64)({self.expr(head)}) * p.{tensor}_s1)"

    def inside(self, op: CpAsync | CopyTile) -> str:
        """Row `row0 + r` is one of those that are copied."""
        text = f"row0 + r < {self.expr(op.limit)}"
        return text if op.first is None else f"{text} && row0 + r >= {self.expr(op.first)}"

    def chunks(self, ref: Ref, tensor: str, unit: int = CHUNK, column: int = 0) -> dict[str, Argument]:
        """How the threads share the 16-byte chunks of a tile, or `unit` bytes of them: blocks of 2^a columns (a of the
        swizzle), whole rows of blocks a pass. Blocks lie side by side in a row, or in slabs. The tile starts at a
        `column` of the tensor. Conditions that always hold are written as `true`."""
        layout, tile_rows = self.buffer(ref).layout, self.tile_rows(ref)
        block = 1 << layout.xor_bits
        slabbed = layout.swizzle in SLAB_BYTES
        groups = layout.slabs if slabbed else layout.chunks // block
        units = block * CHUNK // unit
        rows, columns = self.threads // units, (self.schedule.head_dim(tensor) - column) * layout.itemsize // unit
        in_tile = "true" if tile_rows % rows == 0 else f"(int)r0 + r < {tile_rows}"
        at = "ch" if unit == CHUNK else "unit"
        in_head = "true" if columns >= groups * units else f"group * {units} + (int){at} < {columns}"
        return {"block": block, "groups": groups, "passes": -(-tile_rows // rows), "pass_rows": rows,
                "group_bytes": f"{layout.rows} * {layout.pitch}" if slabbed else f"{block} * 16",
                "in_tile": in_tile, "in_head": in_head, **swizzle(layout)}  # fmt: skip


def swizzle(layout: SmemLayout) -> dict[str, Argument]:
    return {"pitch": layout.pitch, "shift": 3 - layout.xor_bits, "mask": (1 << layout.xor_bits) - 1}
