"""Threads, registers of the launch, and the size of the code."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.expr import Op as ExprOp
from attngen.expr import walk
from attngen.ir import ops as o
from attngen.ir.ops import Op, Scope
from attngen.ir.rules.case import Case, Finding
from attngen.ir.schedule import Block, Classes, Guard, Kernel, Role, Step
from attngen.ir.walk import statements
from attngen.layout import Fragment
from attngen.target import INSTRUCTION_BYTES, Feature

WARPGROUP = 4  # warps


def threads(case: Case) -> Iterator[Finding]:
    """The roles are the warps of the CTA, each warp in one of them."""
    kernel = case.kernel
    if kernel.threads > case.target.max_threads:
        yield Finding("threads", f"{kernel.threads} threads; a CTA has at most {case.target.max_threads}")
    warps = [w for r in kernel.roles for w in range(r.first_warp, r.first_warp + r.warps)]
    if sorted(warps) != list(range(kernel.threads // 32)) or kernel.threads % 32:
        yield Finding(
            "threads",
            f"the roles have warps {_ranges(kernel)}; {kernel.threads} threads are {kernel.threads / 32:g} warps",
        )
    for role in kernel.roles:
        if role.split < 1 or role.warps % role.split:
            yield Finding("threads", f"role {role.name}: {role.warps} warps do not split in {role.split}")


def _ranges(kernel: Kernel) -> str:
    return ", ".join(f"{r.first_warp}..{r.first_warp + r.warps - 1}" for r in kernel.roles)


def launch_registers(kernel: Kernel, regs_per_sm: int) -> int:
    """Registers a thread that the launch allocates: an SM's over the threads it holds, in steps of 8."""
    return regs_per_sm // (kernel.threads * kernel.min_ctas) // 8 * 8


def setmaxnreg(case: Case) -> Iterator[Finding]:
    """Register counts of the roles are legal immediates, equal in a warpgroup, and fit what the launch allocated: a
    role that asks for more than the others gave back waits for ever."""
    kernel = case.kernel
    if not case.target.has(Feature.SETMAXNREG) or len(kernel.roles) < 2:
        return
    total = 0
    for first in range(0, kernel.threads // 32, WARPGROUP):
        members = [r for r in kernel.roles if r.first_warp < first + WARPGROUP and first < r.first_warp + r.warps]
        counts = {r.regs for r in members}
        if len(counts) > 1:
            names = ", ".join(f"{r.name} {r.regs}" for r in members)
            yield Finding("setmaxnreg", f"one warpgroup, one register count: {names}")
        total += max(counts, default=0) * WARPGROUP * 32
    for role in kernel.roles:
        if role.regs % 8 or not 24 <= role.regs <= 256:
            yield Finding("setmaxnreg", f"role {role.name}: {role.regs} is not a multiple of 8 in 24..256")
    launch = launch_registers(kernel, case.target.regs_per_sm)
    if total > launch * kernel.threads:
        yield Finding("setmaxnreg", f"the roles take {total} registers; the launch has {launch} x {kernel.threads}")


# ---- code size ---------------------------------------------------------------------------------------------------


def instructions(op: Op, role: Role) -> int:
    """A rough count: elementwise code is unrolled over the registers of its fragment."""
    values = {v.name: v for v in role.values}
    if isinstance(op, o.Map):
        over = values.get(op.over.name)
        if over is None:
            return 0
        times = {
            Scope.ITEM: 1,
            Scope.ROW: over.rows // 8,
            Scope.COL: over.cols // 4,
            Scope.ELEM: over.rows * over.cols // 32,
        }
        leaves = (ExprOp.CONST, ExprOp.VAR)
        return sum(times[s.scope] * max(1, sum(e.op not in leaves for e in walk(*s.exprs))) for s in statements(op))
    if isinstance(op, o.MmaSync):
        d = values.get(op.d.name)
        return 0 if d is None else d.rows // 16 * d.cols // 8 * 8 * 3 // 2
    used = [values[r.name] for r in (*op.reads(), *op.writes()) if r.name in values]
    moved = max((v.registers // v.copies for v in used if v.fragment in (Fragment.ACC, Fragment.OPA)), default=0)
    if isinstance(op, o.Reduce | o.Fill | o.StFrag | o.LdFrag | o.RedAdd | o.RedFrag):
        return moved + 8
    return 32 if isinstance(op, o.Wgmma) else 8


def code_bytes(role: Role) -> int:
    def size(steps: tuple[Step, ...], cls: str | None) -> int:
        flat = [(s, op) for s in steps for op in (s.body if isinstance(s, Guard) else (s,))]
        return INSTRUCTION_BYTES * sum(
            instructions(op, role) for s, op in flat if cls is None or {s.only, op.only} <= {"", cls}
        )

    total = size(role.exit, None)
    for node in role.item.body:
        if isinstance(node, Block):
            total += size(node.ops, None)
        else:
            bodies = list(dict.fromkeys(r.cls for r in node.ranges)) if node.classes is Classes.CLONED else [None]
            total += node.unroll * sum(size(node.step, cls) + size(node.drain, None) for cls in bodies)
    return total * 3 // 4  # the compiler fuses and shares: 0.70 to 0.81 of this count on five Hopper kernels


def code_size(case: Case) -> Iterator[Finding]:
    """Phases and classes clone the step. A loop that leaves the instruction cache is slower than what cloning saved."""
    total = sum(code_bytes(r) for r in case.kernel.roles)
    if total > case.target.instruction_cache:
        yield Finding(
            "code-size",
            f"{case.kernel.name}: about {total} bytes of code; the instruction cache holds "
            f"{case.target.instruction_cache}",
        )
