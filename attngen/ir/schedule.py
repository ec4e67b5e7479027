"""Level 3: the scheduled program. This object is printed, verified and lowered op by op; nothing beside it decides
what the kernel does. `Schedule.parse` and `Schedule.print` are inverse (attngen.ir.text).

Control has four shapes: `item` (loop over the work source), `tiles` (loop over key or query tiles, with classes,
phases and a drain), `block` (straight line) and `guard` (a warp-uniform rare block)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from attngen.expr import DType, Expr
from attngen.ir.ops import Op, Ref, Stmt
from attngen.layout import Fragment, SmemLayout


class Elem(Enum):
    """Storage type of a tensor or buffer element."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"

    @property
    def bytes(self) -> int:
        return {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8, "u8": 1}[self.value]


class Access(Enum):
    IN = "in"
    OUT = "out"
    CAPTURE = "capture"  # a tensor of the user's expressions: strides and sizes travel with it
    WORK = "work"  # a workspace of the module


@dataclass(frozen=True, kw_only=True)
class TensorArg:
    """A tensor parameter: pointer and strides in elements (64 bit); captures and workspaces also bring sizes. The last
    dimension is contiguous, unless the tensor is `strided`."""

    name: str
    elem: Elem
    rank: int
    access: Access
    strided: bool = False


@dataclass(frozen=True, kw_only=True)
class ScalarArg:
    name: str
    dtype: DType


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Shared memory: `slots` tiles of one layout, `offset` bytes from the start of dynamic shared memory."""

    name: str
    elem: Elem
    layout: SmemLayout
    slots: int = 1
    offset: int | None = None

    @property
    def bytes(self) -> int:
        return self.slots * self.layout.bytes


class Cursor(Enum):
    RESTART = "restart"  # slot 0 for the first tile of each item; parity bits are kept
    CARRY = "carry"


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Slots handed between roles by mbarriers `full` and `free`: arrivals (and bytes) each barrier counts a phase."""

    name: str
    slots: int
    full_arrivals: int
    full_bytes: int
    free_arrivals: int
    cursor: Cursor
    buffers: tuple[str, ...]
    offset: int | None = None  # of its barriers: full[0..], free[0..], 8 bytes each

    @property
    def bytes(self) -> int:
        return 16 * self.slots


@dataclass(frozen=True, kw_only=True)
class OrderRing:
    """Roles that take turns: named barriers `first`, `first + 1`, .. one a member, `threads` a barrier."""

    name: str
    members: int
    first: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """Named barriers `first` .. `first + count - 1`, each for `threads` threads; a use gives the index: `o[w]`."""

    name: str
    first: int
    threads: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Value:
    """A register value of a role: rows x cols of one warp (ROW: rows only, COL: cols only). The 64 rows of a wgmma are
    16 of each of the four warps of its warpgroup."""

    name: str
    fragment: Fragment
    dtype: str  # f32, i32, bool, or packed bf16x2, f16x2
    rows: int
    cols: int
    copies: int = 1
    rows_axis: str = "M"
    cols_axis: str = "N"

    @property
    def registers(self) -> int:
        """32-bit registers a thread."""
        per_row = self.rows // 8
        count = {
            Fragment.ACC: per_row * self.cols // 4,
            Fragment.OPA: per_row * self.cols // 8,
            Fragment.ROW: per_row,
            Fragment.COL: self.cols // 4,
            Fragment.UNI: 1,
        }[self.fragment]
        return count * self.copies


# ---- control -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A rare block that a whole warp enters or skips."""

    id: str
    pred: Expr
    body: tuple[Op, ...]
    touches: tuple[Ref, ...]
    only: str = ""
    note: str = ""


Step = Op | Guard


@dataclass(frozen=True, kw_only=True)
class Block:
    name: str
    ops: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """Tiles of class `cls`: the counter runs on while it is below `end`. An unrolled loop leaves a range after a whole
    round: before the round that `end` cuts if `whole` (no other tile may run as this class), else behind it."""

    cls: str
    end: Expr
    whole: bool = False


class Classes(Enum):
    CLONED = "cloned"  # one body a class
    BRANCH = "branch"  # one body, the ops of the weaker class under a uniform branch


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Loop over tiles: counter `var` runs from `start` through the ranges in order. `lets` are evaluated at the head of
    each step; `ahead`: those that read memory a step before, also for the step after the last. `unroll` phases clone
    the step; `phase` gives the index variables of a phase (slot, copy) as expressions of `var`. `drain` runs once
    after the last step."""

    var: str
    start: int
    ranges: tuple[Range, ...]
    lets: tuple[Stmt, ...] = ()
    ahead: bool = False
    unroll: int = 1
    phase: tuple[Stmt, ...] = ()  # before the ops, whose indices use these names
    classes: Classes = Classes.CLONED
    step: tuple[Step, ...]
    drain: tuple[Step, ...] = ()


Node = Block | Tiles


@dataclass(frozen=True, kw_only=True)
class Item:
    """One unit of work: `lets` are uniform scalars of the item, then the body."""

    lets: tuple[Stmt, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Warps first..first+warps-1. `regs`: registers a thread (setmaxnreg where the target has it). `split`: warpgroups
    (or warps) among which the rows of its values are split; index variable `w`. `single`: one thread runs the body, the
    other warps only take part in the register split. `exit`: once, after the last item."""

    name: str
    first_warp: int
    warps: int
    regs: int
    values: tuple[Value, ...] = ()
    item: Item
    split: int = 1
    single: bool = False
    exit: tuple[Step, ...] = ()


class WorkSource(Enum):
    GRID = "grid"  # one CTA an item, item index = CTA index
    TABLE = "table"  # a table cached by shape
    TABLE_KEYS = "table_keys"  # the same, items are tiles of keys of a key head
    DEVICE_TABLE = "device_table"  # the workspace `work`: a table made by earlier kernels of the module
    SECTIONS = "sections"  # one CTA a section of `section` items: heads and, inside a head, row tiles from the last
    SINGLE = "single"  # one CTA
    ELEMENTS = "elements"  # one thread an element of the first output
    GRID_KEYS = "grid_keys"  # as grid, items are tiles of keys of a key head
    ROWS = "rows"  # one warp a row (b, h, i)


# a CTA takes one item after another from a table
PERSISTENT = frozenset({WorkSource.TABLE, WorkSource.TABLE_KEYS, WorkSource.DEVICE_TABLE})
WORK_TABLE = "work"  # the workspace with the items of a kernel whose source is DEVICE_TABLE: [rounds, CTAs, 4]


class Order(Enum):
    ASCENDING = "ascending"
    LONGEST_FIRST = "longest_first"  # inside a head the row tiles with most keys come first
    RANKED = "ranked"  # the same where only the device knows: an item has the rank of a row tile, not its number


@dataclass(frozen=True, kw_only=True)
class Work:
    """Items of a kernel: row tiles of block_m rows, for each batch and head unless all share them."""

    source: WorkSource
    order: Order
    block_m: int
    per_batch: bool = True
    per_head: bool = True


@dataclass(frozen=True, kw_only=True)
class Kernel:
    name: str
    threads: int
    min_ctas: int
    work: Work
    tensors: tuple[TensorArg, ...]
    scalars: tuple[ScalarArg, ...]
    buffers: tuple[Buffer, ...] = ()
    rings: tuple[Ring, ...] = ()
    orders: tuple[OrderRing, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    roles: tuple[Role, ...]

    @property
    def smem_bytes(self) -> int:
        ends = [b.offset + b.bytes for b in self.buffers if b.offset is not None]
        ends += [r.offset + r.bytes for r in self.rings if r.offset is not None]
        return max(ends, default=0)

    def buffer(self, name: str) -> Buffer | None:
        return next((b for b in self.buffers if b.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """A tensor the module needs between its kernels: its shape in run-time sizes. zero: filled with zeros before the
    first kernel."""

    name: str
    elem: Elem
    shape: tuple[Expr, ...]
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A decision and its reason, one line of `explain`; part of the text so that a schedule explains itself."""

    subject: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A module: kernels in launch order and their workspaces."""

    name: str
    target: str
    kernels: tuple[Kernel, ...]
    workspaces: tuple[Workspace, ...] = ()
    facts: tuple[Fact, ...] = ()
    head_dim_qk: int = 0
    head_dim_v: int = 0

    def head_dim(self, tensor: str) -> int:
        """Columns of a tensor of the call."""
        return self.head_dim_qk if tensor in ("q", "k", "dq", "dk") else self.head_dim_v

    def __str__(self) -> str:
        return self.print()

    def print(self) -> str:
        from attngen.ir.text import print_schedule

        return print_schedule(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        from attngen.ir.text import parse_schedule

        return parse_schedule(text)


@dataclass(frozen=True)
class VerifiedSchedule:
    """A schedule that passed `attngen.ir.verify.verify`, the only place that makes one. `lower` takes nothing else."""

    schedule: Schedule
    checks: tuple[str, ...] = field(default=())


def ops_of(kernel: Kernel) -> Iterator[tuple[Role, Op]]:
    """Every op of a kernel in textual order, those inside guards included."""
    for role in kernel.roles:
        for step in steps_of(role):
            if isinstance(step, Guard):
                yield from ((role, op) for op in step.body)
            else:
                yield role, step


def steps_of(role: Role) -> Iterator[Step]:
    for node in role.item.body:
        if isinstance(node, Block):
            yield from node.ops
        else:
            yield from node.step
            yield from node.drain
    yield from role.exit


