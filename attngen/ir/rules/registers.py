"""Registers of a role: accumulators and A fragments at the fullest point of its walks."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir import ops as o
from attngen.ir.rules.case import Case, Finding
from attngen.ir.rules.uses import Cell, Use, cells
from attngen.ir.rules.views import Walk
from attngen.layout import Fragment

# registers below the first accumulator; a rule that fitted every compile seen: necessary, not sufficient
ADDRESSES = 24


def peak(walked: Walk[Use]) -> tuple[int, str]:
    """Registers of accumulators and A fragments at the fullest point of a walk, and the op there."""
    values = {v.name: v for v in walked.role.values if v.fragment in (Fragment.ACC, Fragment.OPA)}
    size = {name: v.registers // v.copies for name, v in values.items()}
    held: dict[int, set[Cell]] = {}  # position of a wait for a group -> what the group holds until then
    issued: dict[str, set[Cell]] = {}
    uses = list(walked.events)
    for k, use in enumerate(uses):
        if isinstance(use.op, o.Wgmma):
            issued.setdefault(use.op.group, set()).update(cells(use.event, (use.op.d, use.op.a), values))
        elif isinstance(use.op, o.Retire):
            held[k] = issued.pop(use.op.group, set())
    live: set[Cell] = set()
    best, at = 0, ""
    for k, use in reversed(list(enumerate(uses))):
        if use.op is None:
            continue
        written = {c for c in use.writes if c[0] in size}
        total = sum(size[name] for name, _ in live | written)
        if total > best:
            best, at = total, use.op.id
        live -= written
        live.update(c for c in (*use.reads, *use.operands) if c[0] in size)
        live |= held.get(k, set())
    return best, at


def registers(case: Case) -> Iterator[Finding]:
    """24 + accumulators + A fragments stay below the registers of a thread; beyond that the compiler spills
    accumulators and serialises the products, without another sign."""
    for role in case.kernel.roles:
        if role.regs > case.target.max_regs:
            yield Finding("registers", f"role {role.name} asks for {role.regs}; a thread has {case.target.max_regs}")
        full, at = max((peak(w) for w in case.registers.walks if w.role is role), default=(0, ""))
        if full and ADDRESSES + full >= role.regs:
            yield Finding(
                "registers",
                f"role {role.name}: {ADDRESSES} + {full} registers of accumulators and A fragments are not "
                f"below {role.regs}", at or None,
            )  # fmt: skip
