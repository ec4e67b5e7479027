"""Register values: written before they are read, whole where a row is meant, used, and within the register file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from attngen.expr import Expr, variables, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Op, Scope
from attngen.ir.rules.case import Case, Finding, ops
from attngen.ir.rules.uses import Cell
from attngen.ir.schedule import WORK_TABLE, Access, Elem, Kernel, WorkSource
from attngen.ir.walk import Edge, expressions, statements
from attngen.layout import Fragment, Swizzle


def defined(case: Case) -> Iterator[Finding]:
    """No path of the walk reads a register that it did not write in this item: a loop may run zero times, a guard may
    be skipped, and what an earlier item left is not the value that is meant."""
    told: set[tuple[str, str | None]] = set()
    for walked in case.registers.walks:
        written: set[Cell] = set()
        for use in walked.events:
            event = use.event
            if event.edge is Edge.ITEM:
                written.clear()
            for cell in (*use.reads, *use.operands):
                if cell not in written:
                    name = event.op.id if event.op is not None else event.guard.id if event.guard is not None else None
                    if (cell[0], name) not in told:
                        told.add((cell[0], name))
                        yield Finding("defined", f"{cell[0]} is read and was not written, {walked.scenario}", name)
            written.update(use.writes)


def vectors(case: Case) -> Iterator[Finding]:
    """A shared vector that a map names has an element for each column of the map, and none for a row."""
    for role in case.kernel.roles:
        values = {v.name: v for v in role.values}
        for op in ops(role):
            for ref in op.copies if isinstance(op, o.Map) else ():
                buffer = case.buffers.get(ref.name)
                if not isinstance(op, o.Map) or buffer is None:
                    continue
                columns = values[op.over.name].cols if op.over.name in values else 0
                layout = buffer.layout
                if (layout.rows, layout.cols, layout.swizzle, buffer.elem) != (1, columns, Swizzle.LINEAR, Elem.F32):
                    message = f"{ref.name} is no vector of f32 with an element for each of {columns} columns"
                    yield Finding("vectors", message, op.id)
                if any(ref.name in variables(*s.exprs) for s in op.body if s.scope is Scope.ROW):
                    yield Finding("vectors", f"{ref.name} has no element of a row", op.id)


def shares(case: Case) -> Iterator[Finding]:
    """The blocks of the warps that share a product with a shared `a.T` cover its tile once."""
    for role in case.kernel.roles:
        values = {v.name: v for v in role.values}
        for op in ops(role):
            if not (isinstance(op, o.MmaSync) and op.a.transposed and {op.a.name, op.b.name} <= set(case.buffers)):
                continue
            d, rows, cols = values[op.d.name], case.buffers[op.a.name].layout.cols, case.buffers[op.b.name].layout.cols
            if rows % d.rows or cols % d.cols or rows * cols != role.warps * d.rows * d.cols:
                message = f"{role.warps} warps have {d.rows} x {d.cols} each of a tile of {rows} x {cols}"
                yield Finding("shares", message, op.id)


def partial(case: Case) -> Iterator[Finding]:
    """A row value summed over the elements that a thread holds is a quarter of the sum, until a reduction over the
    quad: it may be scaled and added to, and not be divided by, stored or compared."""
    told: set[str] = set()
    beyond, names = cache(_beyond_linear), cache(variables)
    for walked in case.registers.walks:
        rows = {v.name for v in walked.role.values if v.fragment is Fragment.ROW}
        parts: set[str] = set()
        for use in walked.events:
            op = use.op
            if isinstance(op, o.Reduce | o.Fill):
                parts.discard(op.dst.name)
            elif isinstance(op, o.Map):
                own = set(parts)
                for s in op.body:
                    bad = sorted(own & beyond(s.value))
                    if bad and op.id not in told:
                        told.add(op.id)
                        yield Finding("partial", f"{bad[0]} is still the partial sum of one thread", op.id)
                    carries = (s.accumulate and s.scope is Scope.ELEM) or bool(own & names(s.value))
                    own = own | {s.target} if carries else own - {s.target}
                parts = (parts | own) & rows & own
            elif isinstance(op, o.StFrag | o.StRows):
                name = op.scaled if isinstance(op, o.StFrag) else op.src.name
                if name in parts and op.id not in told:
                    told.add(op.id)
                    yield Finding("partial", f"{name} is still the partial sum of one thread", op.id)


_LINEAR = frozenset({ExprOp.ADD, ExprOp.SUB, ExprOp.MUL, ExprOp.NEG, ExprOp.FMA, ExprOp.VAR, ExprOp.CONST})


def _beyond_linear(e: Expr) -> set[str]:
    """Variables that go through anything but sums and products."""
    found: set[str] = set()
    for node in walk(e):
        if node.op not in _LINEAR:
            found |= variables(*node.args)
    return found


def unused(case: Case) -> Iterator[Finding]:
    """What an op computes is read by another op on some walk (an accumulator that only its own product reads is lost),
    and what is loaded is read: a schedule that lost an op often still runs, and stores what was there before."""
    wrote: dict[tuple[str, str], str] = {}  # (op, value) -> role
    useful = {(op.id, name) for role in case.kernel.roles for op in ops(role) for name in intermediates(op)}
    for walked in case.registers.walks:
        made: dict[Cell, str] = {}
        for use in walked.events:
            reader = use.op.id if use.op is not None else ""
            for cell in (*use.reads, *use.operands):
                if made.get(cell, reader) != reader:
                    useful.add((made[cell], cell[0]))
            for cell in use.writes:
                made[cell] = reader
                wrote[reader, cell[0]] = walked.role.name
    for (name, value), role in wrote.items():
        if (name, value) not in useful:
            yield Finding("unused", f"role {role}: {value} is written and no other op reads it", name)
    everything = [op for role in case.kernel.roles for op in ops(role)]
    read = {r.name for op in everything for r in case.facts[id(op)].reads}
    for op in everything:
        for ref in case.facts[id(op)].writes:
            if ref.name in case.buffers and ref.name not in read:
                yield Finding("unused", f"{ref.name} is filled and never read", op.id)


def intermediates(op: Op) -> frozenset[str]:
    """What an op makes and reads itself afterwards."""
    made: set[str] = set()
    used: set[str] = set()
    for s in statements(op):
        used |= made & variables(*s.exprs)
        made.add(s.target)
    return frozenset(used)


def stored(case: Case) -> Iterator[Finding]:
    """Every output is stored, and a workspace is written before it is read."""
    kernel = case.kernel
    made = produced(case, kernel)
    if kernel.work.source is WorkSource.DEVICE_TABLE and WORK_TABLE not in made:
        yield Finding("outputs", f"items come from the workspace {WORK_TABLE}, and nothing has written it")
    done = {n for role in kernel.roles for op in ops(role) for n in outputs(op)}
    for t in kernel.tensors:
        if t.access is Access.OUT and t.name not in done:
            yield Finding("outputs", f"nothing is stored to {t.name}")
        if t.access is Access.WORK and t.name in consumed(kernel) and t.name not in made:
            yield Finding("outputs", f"the workspace {t.name} is read and nothing has written it")


def outputs(op: Op) -> Iterator[str]:
    """Tensors that an op stores to."""
    dst = getattr(op, "dst", None)
    if isinstance(dst, str):
        yield dst
    if isinstance(op, o.Map):
        yield from (s.target for s in op.body if s.index)
    if isinstance(op, o.Pointwise | o.SumRows):
        yield from (s.target for s in op.body)


def consumed(kernel: Kernel) -> set[str]:
    names: set[str] = set()
    for role in kernel.roles:
        roots = [s.value for s in role.item.lets]
        for op in ops(role):
            roots += [*expressions(op), *(e for s in statements(op) for e in s.exprs)]
            if isinstance(op, o.CompactTiles | o.RankTile | o.DealItems | o.CastFrag):
                names.add(op.src)
        names |= {e.name for e in walk(*roots) if e.op is ExprOp.LOAD}
    return names


def produced(case: Case, kernel: Kernel) -> set[str]:
    """What this kernel and the ones before it store."""
    before = case.schedule.kernels[: case.schedule.kernels.index(kernel) + 1]
    return {n for k in before for role in k.roles for op in ops(role) for n in outputs(op)}
