"""Everything a schedule names exists, and is used where it can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from attngen.expr import Expr, walk
from attngen.expr import Op as ExprOp
from attngen.ir import ops as o
from attngen.ir.ops import Op, kind_of
from attngen.ir.rules.case import Case, Finding, groups, ops
from attngen.ir.schedule import Guard, Role, Tiles
from attngen.ir.walk import expressions, references, statements, tiles_of
from attngen.target import Feature

INDICES = frozenset(  # of the item, of an element, of a part of a role
    {"b", "h", "hkv", "i", "j", "it", "jt", "m", "n", "rank", "w"}
)
FEATURES: dict[type[Op], Feature] = {
    o.CpAsync: Feature.CP_ASYNC, o.CpVector: Feature.CP_ASYNC, o.CpCommit: Feature.CP_ASYNC, o.CpWait: Feature.CP_ASYNC,
    o.Ldmatrix: Feature.LDMATRIX, o.MmaSync: Feature.LDMATRIX,
    o.TmaLoad: Feature.TMA, o.TmaStore: Feature.TMA, o.TmaReduce: Feature.TMA, o.BulkLoad: Feature.TMA,
    o.BulkCommit: Feature.TMA, o.BulkRetire: Feature.TMA, o.Proxy: Feature.TMA,
    o.MbarWait: Feature.MBARRIER, o.MbarArrive: Feature.MBARRIER, o.MbarExpect: Feature.MBARRIER,
    o.Wgmma: Feature.WGMMA, o.Open: Feature.WGMMA, o.Commit: Feature.WGMMA, o.Retire: Feature.WGMMA,
}  # fmt: skip


def ids(case: Case) -> Iterator[Finding]:
    """Op ids are unique in a role: findings, comments of the text and the emulator's messages name ops by them."""
    for role in case.kernel.roles:
        guards = [s.id for _, steps in groups(role) for s in steps if isinstance(s, Guard)]
        for name, count in Counter([*guards, *(op.id for op in ops(role))]).items():
            if count > 1:
                yield Finding("ids", f"{count} ops of role {role.name} have this id", name)


def names(case: Case) -> Iterator[Finding]:
    """Buffers, values, barriers, rings, tensors: what is not declared has no address, register or parameter."""
    kernel = case.kernel
    tensors = {t.name for t in kernel.tensors}
    for ring in kernel.rings:
        for name in ring.buffers:
            if name not in case.buffers:
                yield Finding("names", f"ring {ring.name} hands over {name}, which is no buffer")
    bars = {b.name for b in kernel.barriers} | {f"{r.name}.{side}" for r in kernel.rings for side in ("full", "free")}
    orders = {r.name for r in kernel.orders}
    for role in kernel.roles:
        values = {v.name for v in role.values}
        for op in ops(role):
            bar = getattr(op, "bar", None)
            if bar is not None and bar.name not in bars:
                yield Finding("names", f"{bar.name} is no barrier; there are {_list(bars)}", op.id)
            for ref in references(op):
                if ref != bar and ref.name not in values and ref.name not in case.buffers:
                    yield Finding("names", f"{ref.name} is neither a buffer nor a value of role {role.name}", op.id)
            if isinstance(op, o.StFrag) and op.scaled and op.scaled not in values:
                yield Finding("names", f"{op.scaled} is no value of role {role.name}", op.id)
            for field in ("src", "dst"):
                tensor = getattr(op, field, None)
                if isinstance(tensor, str) and tensor not in tensors:
                    yield Finding("names", f"{tensor} is no tensor; there are {_list(tensors)}", op.id)
            for e in walk(*expressions(op), *(e for s in statements(op) for e in s.exprs)):
                if e.op is ExprOp.LOAD and e.name not in tensors:
                    yield Finding("names", f"{e.name} is no tensor; there are {_list(tensors)}", op.id)
            for s in statements(op):
                if s.index and s.target not in tensors:
                    yield Finding("names", f"{s.target} is no tensor; there are {_list(tensors)}", op.id)
            if isinstance(op, o.Enter | o.Leave) and op.ring not in orders:
                yield Finding("names", f"{op.ring} is no order ring", op.id)


def _list(found: set[str]) -> str:
    return ", ".join(sorted(found)) or "none"


def scalars(case: Case, role: Role) -> set[str]:
    """Names an expression may use anywhere in a role: indices, parameters, sizes, item scalars, values."""
    kernel = case.kernel
    known = (
        set(INDICES) | {s.name for s in kernel.scalars} | {v.name for v in role.values} | {"group", "heads", "batch"}
    )
    known |= {f"{t.name}_n{k}" for t in kernel.tensors for k in range(t.rank)}
    return known | {s.target for s in role.item.lets}


def variables(case: Case) -> Iterator[Finding]:
    """Statements and indices use only what has a value at that place: a local lives in its own op."""
    for role in case.kernel.roles:
        known = scalars(case, role)
        inside: dict[int, set[str]] = {}
        for loop in tiles_of(role):
            names = known | {loop.var, *(s.target for s in (*loop.lets, *loop.phase))}
            inside.update({id(op): names for step in (*loop.step, *loop.drain) for op in _flat(step)})
        for op in ops(role):
            here = set(inside.get(id(op), known))
            if isinstance(op, o.Map):
                here |= {r.name for r in op.copies}
            yield from _unknown(op, here, *expressions(op))
            for s in statements(op):
                yield from _unknown(op, here, *s.exprs)
                here.add(s.target)
        for loop in tiles_of(role):
            for step in (*loop.step, *loop.drain):
                if isinstance(step, Guard):
                    missing = {e.name for e in walk(step.pred) if e.op is ExprOp.VAR} - inside[id(step)]
                    for name in sorted(missing):
                        yield Finding("variables", f"{name} has no value here", step.id)


def _flat(step: Op | Guard) -> Iterator[Op | Guard]:
    yield step
    if isinstance(step, Guard):
        yield from step.body


def _unknown(op: Op, known: set[str], *roots: Expr) -> Iterator[Finding]:
    for e in walk(*roots):
        if e.op is ExprOp.VAR and e.name not in known:
            yield Finding("variables", f"{e.name} has no value here", op.id)


def slots(case: Case) -> Iterator[Finding]:
    """An index beyond the slots of a buffer or ring, or the copies of a value, addresses its neighbour."""
    limits: dict[str, int] = {b.name: b.slots for b in case.kernel.buffers}
    limits |= {f"{r.name}.{side}": r.slots for r in case.kernel.rings for side in ("full", "free")}
    limits |= {b.name: b.count for b in case.kernel.barriers}
    told: set[tuple[str, str]] = set()
    for role, events in case.pieces:
        known = {**limits, **{v.name: v.copies for v in role.values}}
        for event in events:
            if event.op is None:
                continue
            for ref in case.facts[id(event.op)].references:
                limit = known.get(ref.name, 1)
                index = event.index(ref)
                wrong = index[:1] if limit > 1 else ()
                if limit > 1 and (not index or index[0] is None):
                    message = f"{ref.name} has {limit} slots and the index is {'missing' if not index else 'not known'}"
                elif wrong and wrong[0] is not None and not 0 <= wrong[0] < limit:
                    message = f"index {wrong[0]} of {ref.name}, which has {limit} slots"
                else:
                    continue
                if (event.op.id, ref.name) not in told:
                    told.add((event.op.id, ref.name))
                    yield Finding("slots", message, event.op.id)


def classes(case: Case) -> Iterator[Finding]:
    """An op of a class that no range has is never executed, and outside of a loop there are no classes. Of two ranges
    that follow one another in an unrolled loop, one takes over what is left of the other's last round."""
    for role in case.kernel.roles:
        for loop in (n for n in role.item.body if isinstance(n, Tiles) and n.unroll > 1):
            for here, after in pairwise(loop.ranges):
                if here.whole == after.whole:
                    message = f"of {here.cls} and {after.cls}, one has to be whole and the other not: what is left of a"
                    yield Finding("classes", f"{message} round of {loop.unroll} steps goes to the other class", "")
        for node in role.item.body:
            known = {r.cls for r in node.ranges} if isinstance(node, Tiles) else set()
            for step in node.step if isinstance(node, Tiles) else node.ops:
                for op in _flat(step):
                    if op.only and op.only not in known:
                        yield Finding("classes", f"no range has the class {op.only}; there are {_list(known)}", op.id)


def features(case: Case) -> Iterator[Finding]:
    """The target has the instruction."""
    for role in case.kernel.roles:
        for op in ops(role):
            needed = FEATURES.get(type(op))
            if needed is not None and not case.target.has(needed):
                yield Finding(
                    "features", f"{case.target.name} has no {needed.value}, which {kind_of(type(op))} needs", op.id
                )


def convergence(case: Case) -> Iterator[Finding]:
    """What all threads must reach together, or count alike, is not under a predicate, a guard or a class: warps that
    take the other way would wait for ever, or count other groups."""
    together = (o.CtaSync, o.CpCommit, o.Sync, o.Enter, o.Leave, o.Wgmma, o.Open, o.Commit, o.Retire, o.Proxy)
    for role in case.kernel.roles:
        for _, steps in groups(role):
            for step in steps:
                for op in step.body if isinstance(step, Guard) else (step,):
                    if isinstance(op, together) and (isinstance(step, Guard) or op.when is not None or op.only):
                        way = (
                            "a guard"
                            if isinstance(step, Guard)
                            else "a predicate"
                            if op.when is not None
                            else "a class"
                        )
                        yield Finding("convergence", f"{kind_of(type(op))} is under {way}", op.id)
