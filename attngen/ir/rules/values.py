"""Register values: written before they are read, whole where a row is meant, used, and within the register file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from attngen.expr import Expr, variables, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Op, Ref, Scope
from attngen.ir.rules.case import Case, Finding, ops
from attngen.ir.schedule import Access, Kernel, Value
from attngen.ir.walk import Edge, Event, expressions, operands, reads, statements, writes
from attngen.layout import Fragment

Cell = tuple[str, int]  # a value and its copy


def cells(event: Event, refs: tuple[Ref, ...], values: dict[str, Value]) -> Iterator[Cell]:
    for ref in refs:
        value = values.get(ref.name)
        if value is not None:
            index = event.index(ref)
            yield ref.name, (index[0] or 0) if index and value.copies > 1 else 0


def read_cells(event: Event, values: dict[str, Value]) -> Iterator[Cell]:
    op = event.op
    if op is not None:
        extra = () if isinstance(op, o.Vote) else operands(op) & values.keys()
        yield from cells(event, (*reads(op), *(Ref(name=n) for n in sorted(extra))), values)
    elif event.edge is Edge.ENTER and event.guard is not None:
        yield from cells(event, tuple(Ref(name=n) for n in sorted(variables(event.guard.pred))), values)


def defined(case: Case) -> Iterator[Finding]:
    """No path of the walk reads a register that it did not write in this item: a loop may run zero times, a guard may
    be skipped, and what an earlier item left is not the value that is meant."""
    told: set[tuple[str, str | None]] = set()
    for walked in case.walks:
        values = {v.name: v for v in walked.role.values}
        written: set[Cell] = set()
        for event in walked.events:
            if event.edge is Edge.ITEM:
                written.clear()
            name = event.op.id if event.op is not None else event.guard.id if event.guard is not None else None
            for cell in read_cells(event, values):
                if cell not in written and (cell[0], name) not in told:
                    told.add((cell[0], name))
                    yield Finding("defined", f"{cell[0]} is read and was not written, {walked.scenario}", name)
            if event.op is not None:
                written.update(cells(event, writes(event.op), values))


def partial(case: Case) -> Iterator[Finding]:
    """A row value summed over the elements that a thread holds is a quarter of the sum, until a reduction over the
    quad: it may be scaled and added to, and not be divided by, stored or compared."""
    told: set[str] = set()
    for walked in case.walks:
        rows = {v.name for v in walked.role.values if v.fragment is Fragment.ROW}
        parts: set[str] = set()
        for event in walked.events:
            op = event.op
            if isinstance(op, o.Reduce | o.Fill):
                parts.discard(op.dst.name)
            elif isinstance(op, o.Map):
                own = set(parts)
                for s in op.body:
                    bad = sorted(own & _beyond_linear(s.value))
                    if bad and op.id not in told:
                        told.add(op.id)
                        yield Finding("partial", f"{bad[0]} is still the partial sum of one thread", op.id)
                    carries = (s.accumulate and s.scope is Scope.ELEM) or bool(own & variables(s.value))
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
    useful: set[tuple[str, str]] = set()
    for walked in case.walks:
        values = {v.name: v for v in walked.role.values}
        made: dict[Cell, str] = {}
        for event in walked.events:
            op = event.op
            reader = op.id if op is not None else ""
            for cell in read_cells(event, values):
                if made.get(cell, reader) != reader:
                    useful.add((made[cell], cell[0]))
            if op is not None:
                for cell in cells(event, writes(op), values):
                    made[cell] = op.id
                    wrote[op.id, cell[0]] = walked.role.name
                useful |= {(op.id, name) for name in intermediates(op)}
    for (name, value), role in wrote.items():
        if (name, value) not in useful:
            yield Finding("unused", f"role {role}: {value} is written and no other op reads it", name)
    everything = [op for role in case.kernel.roles for op in ops(role)]
    read = {r.name for op in everything for r in reads(op)}
    for op in everything:
        for ref in writes(op):
            if ref.name in case.buffers and ref.name not in read:
                yield Finding("unused", f"{ref.name} is filled and never read", op.id)


@lru_cache(maxsize=4096)
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
    done = {n for role in kernel.roles for op in ops(role) for n in outputs(op)}
    for t in kernel.tensors:
        if t.access is Access.OUT and t.name not in done:
            yield Finding("outputs", f"nothing is stored to {t.name}")
        if t.access is Access.WORK and t.name in consumed(kernel) and t.name not in produced(case, kernel):
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
            if isinstance(op, o.CompactTiles):
                names.add(op.src)
        names |= {e.name for e in walk(*roots) if e.op is ExprOp.LOAD}
    return names


def produced(case: Case, kernel: Kernel) -> set[str]:
    """What this kernel and the ones before it store."""
    before = case.schedule.kernels[: case.schedule.kernels.index(kernel) + 1]
    return {n for k in before for role in k.roles for op in ops(role) for n in outputs(op)}
