"""What an op costs: warp instructions of each kind, cycles of the tensor cores, bytes that are copied.

Counted from the typed contents of the op. A statement of a `map` is counted by what it depends on: an expression of the
row alone once a row, of the column once a column, else once an element; interned subexpressions once. Counts are of one
thread, which is one warp instruction of its warp."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from attngen.errors import PassError
from attngen.expr import DType, Expr, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref, Scope, Stmt
from attngen.ir.schedule import Buffer, Kernel, Role, Value
from attngen.layout import Fragment
from attngen.model.rates import Instr, Rates

WARP = 32
K_STEP = 16  # contracted elements of one tensor instruction

Counts = dict[Instr, float]


@dataclass(frozen=True)
class Work:
    """Warp instructions a warp by kind; `latency`: the longest chain of dependent instructions of one element, in
    cycles; `chain`: the longest sum that has to run in order."""

    counts: Mapping[Instr, float] = field(default_factory=dict)
    latency: float = 0.0
    chain: float = 0.0

    @property
    def instructions(self) -> float:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Product:
    """A contraction: `cycles` of the SM's tensor cores for one part of a role (a warpgroup, or all its warps), of which
    `step` are one instruction."""

    cycles: float
    step: float


class Varies(IntFlag):
    """What an expression depends on inside a fragment."""

    NOTHING = 0
    ROW = 1
    COL = 2
    ELEM = 4


_ELEM = Varies.ROW | Varies.COL
_FREE = {ExprOp.CONST, ExprOp.VAR, ExprOp.NEG, ExprOp.NOT}
_MUFU = {ExprOp.EXP2, ExprOp.LOG2, ExprOp.RCP, ExprOp.TANH_APPROX}
_WITH_SCALE = {ExprOp.EXP, ExprOp.LOG}
_COMPARES = {ExprOp.EQ, ExprOp.NE, ExprOp.LT, ExprOp.LE, ExprOp.GT, ExprOp.GE}
DIVISION = {Instr.MUFU: 1.0, Instr.FMA: 8.0, Instr.ALU: 2.0}  # correctly rounded: a reciprocal, Newton steps, a check


def node_cost(e: Expr) -> Mapping[Instr, float]:
    """Instructions of one node, its operands apart. A negation is a modifier of the instruction that reads it, a
    conjunction of comparisons the predicate operand of the second one. Nothing is contracted: the text says fma where
    it means it."""
    match e.op:
        case x if x in _FREE:
            return {}
        case ExprOp.ADD | ExprOp.SUB:
            return {Instr.FMA if e.dtype is DType.F32 else Instr.ALU: 1.0}
        case ExprOp.MUL | ExprOp.FMA:
            return {Instr.FMA: 1.0}
        case ExprOp.ABS:
            return {} if e.dtype is DType.F32 else {Instr.ALU: 1.0}
        case ExprOp.MIN | ExprOp.MAX | ExprOp.WHERE:
            return {Instr.ALU: 1.0}
        case x if x in _COMPARES:
            return {Instr.ALU: 1.0}
        case ExprOp.AND | ExprOp.OR:
            return {} if any(a.op in _COMPARES for a in e.args) else {Instr.ALU: 1.0}
        case x if x in _MUFU:
            return {Instr.MUFU: 1.0}
        case x if x in _WITH_SCALE:
            return {Instr.MUFU: 1.0, Instr.FMA: 1.0}
        case ExprOp.TANH:
            return {Instr.MUFU: 2.0, Instr.FMA: 3.0}
        case ExprOp.SIGMOID:
            return {Instr.MUFU: 2.0, Instr.FMA: 2.0}
        case ExprOp.SQRT:
            return {Instr.MUFU: 1.0, Instr.FMA: 4.0}
        case ExprOp.DIV:
            return DIVISION
        case ExprOp.FLOOR:
            return {Instr.CONVERT: 1.0}
        case ExprOp.FLOORDIV | ExprOp.MOD:
            by = e.args[1].value if e.args[1].op is ExprOp.CONST else None
            power = isinstance(by, int) and by > 0 and by & (by - 1) == 0
            return {Instr.ALU: 1.0} if power else {Instr.CONVERT: 2.0, Instr.MUFU: 1.0, Instr.ALU: 12.0}
        case ExprOp.F32 | ExprOp.I32:
            if e.args[0].dtype is DType.BOOL:
                return {Instr.ALU: 1.0}
            index = e.args[0].op is ExprOp.VAR and e.args[0].name in ("i", "j")
            return {Instr.FMA: 1.0} if index else {Instr.CONVERT: 1.0}  # a map holds its indices as floats
        case ExprOp.LOAD:
            return {Instr.GLOBAL: 1.0, Instr.ALU: 1.0, Instr.FMA: 2.0 * len(e.args)}  # 64-bit multiply-adds, a widening
        case _:
            raise PassError(f"model: {e.op} has no cost")


def node_latency(cost: Mapping[Instr, float], rates: Rates) -> float:
    return sum(rates.instructions[kind].latency * min(n, 4) for kind, n in cost.items())


@dataclass(frozen=True)
class _Made:
    """A node: what it varies with, when it is there, and the variables below it."""

    varies: Varies
    ready: float
    names: frozenset[str]


@dataclass
class _Statements:
    """Counts the statements of one op over a fragment of `rows` x `cols` a thread."""

    rates: Rates
    values: Mapping[str, Value]
    rows: int
    cols: int
    varies: dict[str, Varies] = field(default_factory=dict)  # of locals and of what was written
    ready: dict[str, float] = field(default_factory=dict)  # latency until a target is there
    counts: Counts = field(default_factory=dict)
    latency: float = 0.0
    chain: float = 0.0
    done: dict[Expr, _Made] = field(default_factory=dict)

    def times(self, varies: Varies) -> int:
        if varies & Varies.ELEM or varies & _ELEM == _ELEM:
            return self.rows * self.cols
        return self.rows if varies & Varies.ROW else self.cols if varies & Varies.COL else 0

    def add(self, cost: Mapping[Instr, float], times: float) -> None:
        for kind, n in cost.items():
            self.counts[kind] = self.counts.get(kind, 0.0) + n * times

    def variable(self, e: Expr) -> Varies:
        if e.name in self.varies:
            return self.varies[e.name]
        if e.name in ("i", "j"):
            return Varies.ROW if e.name == "i" else Varies.COL
        value = self.values.get(e.name)
        if value is None:
            return Varies.NOTHING
        return {Fragment.ROW: Varies.ROW, Fragment.COL: Varies.COL, Fragment.UNI: Varies.NOTHING}.get(
            value.fragment, Varies.ELEM
        )

    def expression(self, root: Expr) -> _Made:
        """Nodes that an earlier statement made are not counted again."""
        for e in walk(root):
            if e in self.done:
                continue
            if e.op is ExprOp.VAR:
                self.done[e] = _Made(self.variable(e), self.ready.get(e.name, 0.0), frozenset((e.name,)))
                continue
            below = [self.done[a] for a in e.args]
            varies = Varies.NOTHING
            for made in below:
                varies |= made.varies
            cost = node_cost(e)
            self.add(cost, self.times(varies))
            # what varies with nothing is made once an item
            took = node_latency(cost, self.rates) if varies else 0.0
            ready = max((made.ready for made in below), default=0.0) + took
            self.done[e] = _Made(varies, ready, frozenset().union(*(made.names for made in below)))
        return self.done[root]

    def statement(self, s: Stmt) -> None:
        made = self.expression(s.value)
        varies, ready = made.varies, made.ready
        known = self.values.get(s.target)
        scope = {Scope.ROW: Varies.ROW, Scope.COL: Varies.COL, Scope.ELEM: Varies.ELEM, Scope.ITEM: Varies.NOTHING}[
            s.scope
        ]
        fma = self.rates.instructions[Instr.FMA]
        if known is not None and known.fragment is Fragment.OPA:
            self.add({Instr.ALU: 0.5}, self.times(Varies.ELEM))
            ready += self.rates.instructions[Instr.ALU].latency
        if s.accumulate:
            self.add({Instr.FMA: 1.0}, self.times(scope))
            self.chain = max(self.chain, self.cols * fma.latency)
            ready += fma.latency
            scope = Varies.ROW if known is None or known.fragment is not Fragment.ACC else scope
        self.latency = max(self.latency, ready)
        self.varies[s.target] = varies if known is None and not s.accumulate else scope
        self.ready[s.target] = ready
        # what reads the target from here on reads another value
        self.done = {e: made for e, made in self.done.items() if s.target not in made.names}

    def work(self) -> Work:
        return Work({k: n for k, n in self.counts.items() if n}, self.latency, self.chain)


def statements_work(body: Iterable[Stmt], over: Value, values: Mapping[str, Value], rates: Rates) -> Work:
    rows, cols = over.rows // 8, over.cols // 4
    counter = _Statements(rates, values, rows, cols)
    for s in body:
        counter.statement(s)
    return counter.work()


class Costs:
    """The costs of the ops of one role of a kernel."""

    def __init__(self, kernel: Kernel, role: Role, rates: Rates) -> None:
        self.kernel, self.role, self.rates = kernel, role, rates
        self.values = {v.name: v for v in role.values}
        self.threads = WARP * (1 if role.single else role.warps)

    def buffer(self, ref: Ref) -> Buffer:
        found = self.kernel.buffer(ref.name)
        if found is None:
            raise PassError(f"model: {ref.name} is not a buffer of {self.kernel.name}")
        return found

    # ---- tensor cores --------------------------------------------------------------------------------------------

    def product(self, op: o.Wgmma | o.MmaSync) -> Product:
        d, b = self.values[op.d.name], self.buffer(op.b)
        contracted = b.layout.cols if op.b.transposed else b.layout.rows
        rows = d.rows * self.role.warps // self.role.split
        steps = math.ceil(contracted / K_STEP)
        step = 2 * rows * d.cols * K_STEP / self.rates.tensor_flops
        if isinstance(op, o.Wgmma):
            # both operands come from shared memory in the time of the step, a from registers where it is a value
            read = d.cols + (0 if op.a.name in self.values else rows)
            step = max(step, read * K_STEP * b.layout.itemsize / self.rates.shared_bytes)
        return Product(steps * step, step)

    def operands(self, op: o.MmaSync) -> Work:
        """The ldmatrix of a synchronous product: each warp reads all of b, and its rows of a."""
        d, b = self.values[op.d.name], self.buffer(op.b)
        tiles = b.layout.rows * b.layout.cols / 64
        if op.a.name not in self.values:
            contracted = b.layout.cols if op.b.transposed else b.layout.rows
            tiles += d.rows * contracted / 64
        return Work({Instr.SHARED: tiles / 4}, self.rates.instructions[Instr.SHARED].latency)

    # ---- copies --------------------------------------------------------------------------------------------------

    def bytes(self, op: Op) -> int:
        """Bytes of shared memory that an asynchronous load fills, those of padding included."""
        if isinstance(op, o.BulkLoad):
            return op.bytes
        assert isinstance(op, o.TmaLoad | o.CpAsync | o.CpVector)
        return self.buffer(op.dst).layout.bytes

    def moved(self, op: Op) -> float:
        """Bytes that a copy reads from global memory or writes there."""
        if isinstance(op, o.BulkLoad):
            return op.bytes
        assert isinstance(op, o.TmaLoad | o.CpAsync | o.CpVector | o.TmaStore | o.TmaReduce)
        ref = op.dst if isinstance(op, o.TmaLoad | o.CpAsync | o.CpVector) else op.src
        buffer = self.buffer(ref)
        part = len(ref.index) > (buffer.slots > 1)  # the rows of one warpgroup
        layout = buffer.layout
        return layout.rows * layout.cols * layout.itemsize / (self.role.split if part else 1)

    # ---- the instruction stream ----------------------------------------------------------------------------------

    def work(self, op: Op) -> Work | None:
        """Instructions of an op that computes or moves data through registers; None for the others."""
        match op:
            case o.Map():
                return statements_work(op.body, self.values[op.over.name], self.values, self.rates)
            case o.Reduce():
                return self._reduce(op)
            case o.Vote():
                return self._rows(op.pred)
            case o.Fill():
                return Work({Instr.ALU: float(self.values[op.dst.name].registers)})
            case o.StFrag():
                return self._fragment(self._part(op.src, self.buffer(op.dst)), bool(op.scaled))
            case o.LdFrag() | o.Ldmatrix():
                return self._fragment(self.values[op.dst.name].registers, False)
            case o.LdVec():
                return self._memory(self.values[op.dst.name].registers / 2, Instr.SHARED)
            case o.StRows():
                return self._memory(self.values[op.src.name].rows / 8, Instr.GLOBAL)
            case o.RedAdd():
                return self._memory(self.values[op.src.name].registers, Instr.GLOBAL)
            case o.CpAsync():
                return self._memory(self.bytes(op) / (op.bytes * self.threads), Instr.GLOBAL)
            case o.CpVector():
                return self._memory(self.bytes(op) / (4 * self.threads), Instr.GLOBAL)
            case o.CopyTile():
                buffer = self.buffer(op.dst)
                each = buffer.layout.bytes / buffer.layout.itemsize / self.threads
                return Work({Instr.GLOBAL: each, Instr.SHARED: each, Instr.ALU: 4 * each}, 400.0)
            case o.StTile():
                each = self.buffer(op.src).layout.bytes / (op.bytes * self.threads)
                return Work({Instr.SHARED: each, Instr.GLOBAL: each, Instr.ALU: 4 * each}, 40.0)
            case _:
                return None

    def _memory(self, count: float, kind: Instr) -> Work:
        return Work({kind: count, Instr.ALU: 3 * count}, self.rates.instructions[Instr.ALU].latency)

    def _part(self, src: Ref, buffer: Buffer) -> float:
        """Registers of the block of columns of a fragment that a tile takes."""
        value = self.values[src.name]
        return value.registers * min(value.cols, buffer.layout.cols) / value.cols

    def _fragment(self, registers: float, scaled: bool) -> Work:
        """Elements packed in pairs, four registers of pairs an instruction."""
        counts = {Instr.ALU: registers / 2, Instr.SHARED: registers / 8}
        if scaled:
            counts[Instr.FMA] = registers
        return Work(counts, self.rates.instructions[Instr.SHARED].latency)

    def _reduce(self, op: o.Reduce) -> Work:
        """Each thread its columns, then two exchanges with the lanes of the quad."""
        src = self.values[op.src.name]
        kind = Instr.ALU if op.kind is o.ReduceKind.MAX else Instr.FMA
        rows = src.rows // 8
        inside = 0 if src.fragment is Fragment.ROW else src.registers // src.copies - rows
        step = self.rates.instructions[Instr.SHUFFLE].latency + self.rates.instructions[kind].latency
        counts: Counts = {Instr.SHUFFLE: 2.0 * rows}
        counts[kind] = counts.get(kind, 0.0) + inside + 2.0 * rows
        depth = math.log2(max(inside / rows, 1)) * self.rates.instructions[kind].latency
        return Work(counts, 2 * step + depth)

    def _rows(self, pred: Expr) -> Work:
        rows = next((v for v in self.values.values() if v.fragment is Fragment.ROW), None)
        if rows is None:
            raise PassError(f"model: a vote of {self.role.name}, which has no row value")
        counter = _Statements(self.rates, self.values, rows.rows // 8, 0)
        made = counter.expression(pred)
        counter.add({Instr.ALU: 1.0}, 1)
        return Work(counter.counts, made.ready)
