"""Op -> macro calls on Hopper: copy engine, mbarriers, order rings, wgmma."""

from __future__ import annotations

from attngen.cprint import Printer
from attngen.errors import PassError
from attngen.expr import Expr
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Completion, Heads, Op, Ref, kind_of
from attngen.ir.schedule import Buffer, Guard, Kernel, Ring, Role, Schedule, Value, steps_of
from attngen.layout import Fragment, Swizzle
from attngen.lowering.context import RoleContext
from attngen.render import Argument, call

BASE = 1024  # where dynamic shared memory starts; the kernel checks it, so that addresses can be immediates
WARPGROUP_ROWS = 64
# what the chunks of row r are exchanged by (SmemLayout.offset)
TURNS = {Swizzle.B128: "r & 7", Swizzle.B64: "r / 2 & 3"}
SWIZZLE_128 = 1 << 62
SLAB_COLUMNS = 64
PAIRS = 8  # of neighbouring elements that a thread has in flight when it copies element by element


class HopperContext(RoleContext):
    """A role of warps or warpgroups: barrier addresses and parity bits, descriptors, groups in flight."""

    def __init__(self, schedule: Schedule, kernel: Kernel, role: Role) -> None:
        super().__init__(schedule, kernel, role)
        self.flying: list[str] = []  # committed wgmma groups, oldest first
        self.held: dict[str, list[str]] = {}  # registers that a group writes or reads
        self.bits = _parity_bits(kernel, role)

    @property
    def tile_row0(self) -> str:
        return f"w * {WARPGROUP_ROWS} + warp * 16 + lane / 4"

    def key0(self, tile: str = "n") -> str:
        return f"{tile} * {self.kernel.work.block_m} + w * {WARPGROUP_ROWS} + warp * 16 + lane / 4"

    def tile_rows(self, ref: Ref) -> int:
        """A reference with one index more than slots need means the rows of one warpgroup."""
        return WARPGROUP_ROWS if len(ref.index) > (self.buffer(ref).slots > 1) else super().tile_rows(ref)

    # ---- values --------------------------------------------------------------------------------------------------

    def value_of(self, ref: Ref) -> Value:
        return self.values[ref.name]

    def c_name(self, ref: Ref) -> str:
        """`rP0` for copy 0 of a value with copies, else the name."""
        if self.values[ref.name].copies == 1:
            return ref.name
        (copy,) = ref.index
        return f"{ref.name}{number(copy)}"

    # ---- shared memory -------------------------------------------------------------------------------------------

    def address(self, ref: Ref) -> str:
        """Start of the slot that a reference means, a number where the slot is one."""
        buffer = self.buffer(ref)
        assert buffer.offset is not None
        index = list(ref.index)
        slot = index.pop(0) if buffer.slots > 1 else None
        start = BASE + buffer.offset
        text = f"{start}u"
        if slot is not None:
            text = f"{start + number(slot) * buffer.layout.bytes}u" if slot.op is ExprOp.CONST else (
                f"{start}u + {self.expr(slot)} * {buffer.layout.bytes}"
            )
        if index:
            text += f" + {self.expr(index[0])} * {WARPGROUP_ROWS * buffer.layout.pitch}"
        return text

    def ring_of(self, bar: Ref) -> tuple[Ring, str]:
        name, _, side = bar.name.partition(".")
        ring = next((r for r in self.kernel.rings if r.name == name), None)
        if ring is None or side not in ("full", "free"):
            raise PassError(f"lower: {bar.name} is not a barrier of a ring of {self.kernel.name}")
        return ring, side

    def barrier(self, bar: Ref) -> str:
        ring, side = self.ring_of(bar)
        assert ring.offset is not None
        start = BASE + ring.offset + (8 * ring.slots if side == "free" else 0)
        if not bar.index or bar.index[0].op is ExprOp.CONST:
            return f"{start + 8 * (number(bar.index[0]) if bar.index else 0)}u"
        return f"{start}u + 8 * {self.expr(bar.index[0])}"

    def parity(self, bar: Ref) -> tuple[str, str]:
        """(expected parity, bit to flip) of a wait; the first wait for a free slot passes at once."""
        _, side = self.ring_of(bar)
        first = self.bits[bar.name]
        known = not bar.index or bar.index[0].op is ExprOp.CONST
        bit = (
            str(first + (number(bar.index[0]) if bar.index else 0))
            if known
            else f"({first} + {self.expr(bar.index[0])})"
        )
        flip = f"{1 << int(bit)}u" if known else f"1u << {bit}"
        text = f"(phase >> {bit} & 1)"
        return (f"{text} ^ 1" if side == "free" else text), flip


def number(e: Expr) -> int:
    if e.op is not ExprOp.CONST or not isinstance(e.value, int):
        raise PassError(f"lower: {e!r} has to be a number here; give the loop a phase variable")
    return e.value


def _parity_bits(kernel: Kernel, role: Role) -> dict[str, int]:
    """First bit in `phase` of each barrier set that the role waits on, one bit a slot."""
    bits: dict[str, int] = {}
    used = 0
    steps = [*steps_of(role), *role.exit]
    waits = [op for s in steps for op in (s.body if isinstance(s, Guard) else (s,)) if isinstance(op, o.MbarWait)]
    for op in waits:
        if op.bar.name not in bits:
            bits[op.bar.name] = used
            used += next(r.slots for r in kernel.rings if r.name == op.bar.name.partition(".")[0])
    return bits


# ---- descriptors ---------------------------------------------------------------------------------------------------


def descriptor(address: int, lbo: int, sbo: int) -> int:
    """Shared-memory matrix descriptor with the 128-byte swizzle (PTX ISA, wgmma): offsets in units of 16 bytes."""
    return (address & 0x3FFFF) >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | SWIZZLE_128


def slot_address(context: HopperContext, buffer: Buffer, ref: Ref) -> tuple[int, str]:
    """(address of the slot, what is added to descriptors there: a slot that is no number, rows of the warpgroup)."""
    assert buffer.offset is not None
    index, start, more = list(ref.index), BASE + buffer.offset, ""
    slot = index.pop(0) if buffer.slots > 1 else None
    if slot is not None and slot.op is ExprOp.CONST:
        start += number(slot) * buffer.layout.bytes
    elif slot is not None:
        more += f" + (u64)({context.expr(slot)} * {buffer.layout.bytes >> 4})"
    if index:
        more += f" + (u64)({context.expr(index[0])} * {WARPGROUP_ROWS * buffer.layout.pitch >> 4})"
    return start, more


def block_start(buffer: Buffer, ref: Ref, width: int) -> int:
    """Bytes from the start of a tile to a block of `width` of its columns."""
    slab, inside = divmod(width * number(ref.cols) if ref.cols is not None else 0, SLAB_COLUMNS)
    return slab * buffer.layout.rows * buffer.layout.pitch + inside * buffer.layout.itemsize


def k_major(buffer: Buffer, start: int, kstep: int) -> int:
    """16 columns of the contracted axis: slabs of 64 columns, 32 bytes a step inside."""
    slab, inside = divmod(kstep, 4)
    return descriptor(
        start + slab * buffer.layout.rows * buffer.layout.pitch + inside * 32, 16, 8 * buffer.layout.pitch
    )


def mn_major(buffer: Buffer, start: int, kstep: int) -> int:
    """16 rows of the contracted axis; groups of 64 columns are a slab apart."""
    slab = buffer.layout.rows * buffer.layout.pitch
    return descriptor(start + kstep * 16 * buffer.layout.pitch, slab, 8 * buffer.layout.pitch)


def wgmma(context: HopperContext, op: o.Wgmma) -> tuple[str, dict[str, Argument]]:
    d, b = context.value_of(op.d), context.buffer(op.b)
    elem = b.elem.value
    b_start, b_more = slot_address(context, b, op.b)
    b_start += block_start(b, op.b, d.cols)
    ksteps = (b.layout.cols if op.b.transposed else b.layout.rows) // 16
    describe_b = k_major if op.b.transposed else mn_major
    first = 0 if op.zero else 1
    shared: dict[str, Argument] = {"transpose": 0 if op.b.transposed else 1, "d": context.c_name(op.d)}
    if op.a.name in context.values:
        steps = [
            {**{f"a{x}": str(4 * k + x) for x in range(4)}, "b": f"{describe_b(b, b_start, k):#x}ull{b_more}",
             "accumulate": str(1 if k else first)}
            for k in range(ksteps)
        ]  # fmt: skip
        return "wgmma_rs", {
            **shared,
            "name": f"wgmma_m64n{d.cols}k16_rs_{elem}",
            "a": context.c_name(op.a),
            "steps": steps,
        }
    a = context.buffer(op.a)
    a_start, a_more = slot_address(context, a, op.a)
    describe_a = k_major
    if op.a.transposed:
        describe_a, a_start = mn_major, a_start + block_start(a, op.a, WARPGROUP_ROWS)
    steps = [
        {"a": f"{describe_a(a, a_start, k):#x}ull{a_more}", "b": f"{describe_b(b, b_start, k):#x}ull{b_more}",
         "accumulate": str(1 if k else first)}
        for k in range(ksteps)
    ]  # fmt: skip
    shared["transpose_a"] = 1 if op.a.transposed else 0
    return "wgmma_ss", {**shared, "name": f"wgmma_m64n{d.cols}k16_ss_{elem}", "steps": steps}


# ---- the table -----------------------------------------------------------------------------------------------------


Call = tuple[str, dict[str, Argument]]


def one(macro: str, /, **arguments: Argument) -> list[Call]:
    return [(macro, arguments)]


def hopper_calls(context: HopperContext, op: Op) -> list[Call] | None:
    """Macro calls of an op that only this target has; None: a common op."""
    kind = kind_of(type(op))
    match op:
        case o.MbarWait():
            parity, flip = context.parity(op.bar)
            return one(kind, bar=context.barrier(op.bar), parity=parity, flip=flip)
        case o.MbarArrive():
            one_by_one = context.role.single or op.each_thread
            # before `full` the lanes of a warp wrote; before `free` a product was waited for, which they do together
            macro = "mbar_arrive_after_warp" if context.ring_of(op.bar)[1] == "full" else "mbar_arrive_warp"
            return one(kind if one_by_one else macro, bar=context.barrier(op.bar))
        case o.MbarExpect():
            return one(kind, bar=context.barrier(op.bar), bytes=op.bytes)
        case o.CopyTile():
            return one(kind, **pairs(context, op))
        case o.TmaLoad():
            return one(kind, boxes=slabs(context, op.dst), map=f"{op.src}_map", bar=context.barrier(op.bar),
                       row=context.expr(op.row), head=head_at(context, op))  # fmt: skip
        case o.TmaStore():
            boxes, width = slabs(context, op.src, op.column), context.schedule.head_dim(op.dst)
            return one(kind, boxes=[b for b in boxes if int(b["column"]) < width], map=f"{op.dst}_map",
                       row=context.expr(op.row), head=head_of(op.heads))  # fmt: skip
        case o.BulkCommit() | o.Proxy():
            return one(kind)
        case o.BulkRetire():
            wait = "bulk_wait_read" if op.until is Completion.READ else "bulk_wait"
            return one(kind, wait=wait, pending=op.pending)
        case o.Enter() | o.Leave():
            return [(kind, order(context, op))]
        case o.Sync():
            barrier = next(x for x in context.kernel.barriers if x.name == op.bar.name)
            at = f"{barrier.first} + {context.expr(op.bar.index[0])}" if op.bar.index else str(barrier.first)
            return one(kind, bar=at, threads=barrier.threads)
        case o.Open():
            return one(kind, regs=[context.c_name(r) for r in op.regs])
        case o.Wgmma():
            registers = [op.d, *([op.a] if op.a.name in context.values else [])]
            context.held.setdefault(op.group, []).extend(context.c_name(r) for r in registers)
            return [wgmma(context, op)]
        case o.Commit():
            context.flying.append(op.group)
            return one(kind)
        case o.Retire():
            return [(kind, retire(context, op))]
        case o.Vote():
            rows = next(v.rows for v in context.values.values() if v.fragment is Fragment.ROW) // 8
            return one(kind, dst=op.dst.name, rows=rows, pred=row_expr(context, op.pred))
        case o.StFrag() if context.value_of(op.src).fragment is Fragment.OPA:
            return packed_store(context, op)
        case o.StFrag():
            return [("st_matrix", st_matrix(context, op))]
        case o.BulkLoad():
            return one(kind, dst=context.address(op.dst), src=op.src, head=head_at(context, op), at=context.expr(op.at),
                       bytes=op.bytes, bar=context.barrier(op.bar))  # fmt: skip
        case o.RedFrag():
            added = one(kind, dst=op.dst, src=context.c_name(op.src), head=head_of(op.heads), at=context.expr(op.at),
                        tiles=context.value_of(op.src).cols // 8, step=8 * op.rows)  # fmt: skip
            if op.rows == WARPGROUP_ROWS:
                return added
            lines = [line for macro, arguments in added for line in call(context.target, macro, arguments)]
            return one("guard", predicate=f"warp < {op.rows // 16}", lines=lines)
        case _:
            return None


def pairs(context: HopperContext, op: o.CopyTile) -> dict[str, Argument]:
    """A warp copies whole rows of each slab, a lane two columns: as many rows before the first is stored as PAIRS in
    flight allow and divide the tile."""
    layout, warps = context.buffer(op.dst).layout, context.threads // 32
    if layout.swizzle is not Swizzle.B128:
        raise PassError(f"lower: op {op.id} copies to a tile without the 128-byte swizzle")
    batch = 1
    while 2 * batch * layout.slabs <= PAIRS and layout.rows % (2 * batch * warps) == 0:
        batch *= 2
    columns, covered = context.schedule.head_dim(op.src), layout.slabs * SLAB_COLUMNS
    return {
        "dst": context.address(op.dst), "src": op.src, "row": context.expr(op.row), "inside": context.inside(op),
        "rows": layout.rows, "warps": warps, "batch": batch, "slabs": layout.slabs,
        "slab_bytes": layout.rows * layout.pitch,
        "in_head": "true" if columns == covered else f"(int)x + {SLAB_COLUMNS} * slab < {columns}",
    }  # fmt: skip


def head_at(context: HopperContext, op: o.TmaLoad | o.BulkLoad) -> str:
    return head_of(op.heads) if op.head is None else context.expr(op.head)


def head_of(heads: Heads) -> str:
    return "h" if heads is Heads.Q else "hkv"


def slabs(context: HopperContext, ref: Ref, column: int = 0) -> list[dict[str, str]]:
    """Boxes of a tile: one a slab of 64 columns; `column`: where the tile lies in the tensor."""
    layout = context.buffer(ref).layout
    columns = layout.pitch // layout.itemsize
    start = context.address(ref)
    count = -(-layout.cols // columns)
    return [
        {"at": start if not k else f"{start} + {k * layout.rows * layout.pitch}", "column": str(column + k * columns)}
        for k in range(count)
    ]  # fmt: skip


def order(context: HopperContext, op: o.Enter | o.Leave) -> dict[str, Argument]:
    """A role waits on its own barrier and arrives on that of the next in turn."""
    ring = next(r for r in context.kernel.orders if r.name == op.ring)
    if isinstance(op, o.Enter):
        return {"bar": f"{ring.first} + w", "threads": ring.threads}
    return {"bar": f"{ring.first} + (w + 1) % {ring.members}", "threads": ring.threads}


def retire(context: HopperContext, op: o.Retire) -> dict[str, Argument]:
    """The groups newer than the one named may stay in flight."""
    if op.group not in context.flying:
        raise PassError(f"lower: op {op.id} retires {op.group}, which is not in flight")
    at = context.flying.index(op.group)
    pending = len(context.flying) - at - 1
    regs = list(dict.fromkeys(r for group in context.flying[: at + 1] for r in context.held.pop(group, ())))
    context.flying = context.flying[at + 1 :]
    return {"pending": pending, "regs": regs}


def row_expr(context: HopperContext, e: Expr) -> str:
    """An expression over row values, for row ri."""
    def spell(v: Expr) -> str:
        value = context.values.get(v.name)
        return f"{v.name}[ri]" if value is not None and value.fragment is Fragment.ROW else context.spell(v)

    return Printer(spell, context.elems, context.dense)(e)


def packed_store(context: HopperContext, op: o.StFrag) -> list[Call]:
    """With zeros in the columns of padding."""
    layout, dst = context.buffer(op.dst).layout, context.address(op.dst)
    slab, columns = layout.rows * layout.pitch, layout.cols % SLAB_COLUMNS
    made = one("st_matrix_packed", dst=dst, src=context.c_name(op.src), pairs=layout.cols // 16, slab_bytes=slab)
    last = f"{dst} + {layout.cols // SLAB_COLUMNS * slab}"
    return [*made, *(one("st_matrix_zeros", dst=last, first=columns // 16, last=SLAB_COLUMNS // 16) if columns else [])]


def st_matrix(context: HopperContext, op: o.StFrag) -> dict[str, Argument]:
    value, buffer = context.value_of(op.src), context.buffer(op.dst)
    pairs = min(value.cols, buffer.layout.cols) // 16
    first = pairs * (number(op.src.cols) if op.src.cols is not None else 0)
    scale = [f"{op.scaled}[{k}]" if op.scaled else "1.0f" for k in range(2)]
    return {
        "dst": context.address(op.dst), "src": op.src.name, "pack": f"pack_{buffer.elem.value}x2",
        "scale0": scale[0], "scale1": scale[1],
        "pairs": pairs, "first": first, "wide": buffer.layout.pitch // 32, "pitch": buffer.layout.pitch,
        "turn": TURNS[buffer.layout.swizzle], "slab_bytes": buffer.layout.rows * buffer.layout.pitch,
    }  # fmt: skip


