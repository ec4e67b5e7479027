"""A kernel of several roles as text: barriers, one branch a role, items of a table, loops with phases and drains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from attngen.cprint import C_DTYPE
from attngen.expr import DType, Op, add, const, loads, substitute, var, variables
from attngen.ir import ops as o
from attngen.ir.ops import Stmt
from attngen.ir.schedule import (
    Block,
    Classes,
    Guard,
    Kernel,
    Order,
    Role,
    Schedule,
    Step,
    Tiles,
    Value,
    WorkSource,
    steps_of,
)
from attngen.ir.text import describe
from attngen.ir.walk import expressions
from attngen.layout import Fragment
from attngen.lowering.control import lets, op_body, within
from attngen.lowering.kernel import bases
from attngen.lowering.ops import calls
from attngen.lowering.phases import Values, at_phase, phase_values
from attngen.lowering.sm90 import BASE, HopperContext, hopper_calls
from attngen.params import fields
from attngen.render import Argument, call, environment

WARPS_A_GROUP = 4
ONE_THREAD = (o.TmaLoad, o.BulkLoad, o.MbarExpect)  # of a role that does other things too


def op_lines(context: HopperContext, op: o.Op) -> list[str]:
    made = hopper_calls(context, op) or calls(context, op)
    if isinstance(op, ONE_THREAD) and not context.role.single:
        lines = [line for macro, arguments in made for line in call(context.target, macro, arguments)]
        made = [("when", {"predicate": "tid == 0", "body": lines})]
    return op_body(context, op, made)


def step_lines(context: HopperContext, steps: Sequence[Step], cls: str, values: Values) -> list[str]:
    """A straight line of ops and guards of one class, with slots and copies as numbers."""
    lines: list[str] = []
    context.flying = []  # no group is in flight across an edge
    for step in steps:
        if step.only and step.only != cls:
            continue
        lines.append(f"// {describe(step)}")
        bound = at_phase(step, values)
        if isinstance(bound, Guard):
            inner: list[str] = []
            for op in (x for x in bound.body if x.only in ("", cls)):
                inner += [f"// {describe(op)}", *op_lines(context, op)]
            lines += call(context.target, "guard", {"predicate": context.expr(bound.pred), "lines": inner})
        else:
            lines += op_lines(context, bound)
    return lines


def tiles_lines(context: HopperContext, node: Tiles) -> list[str]:
    total = context.expr(node.ranges[-1].end)
    before, head = lets_ahead(context, node) if node.ahead else ([], lets(context, node.lets))
    if node.classes is Classes.BRANCH:
        return [*before, *branched(context, node, head)]
    if not node.drain and node.unroll == 1:
        ranges = [
            {
                "cls": r.cls,
                "end": context.expr(r.end),
                "body": indented([*head, *step_lines(context, node.step, r.cls, {})]),
            }
            for r in node.ranges
        ]
        return [*before, *call(context.target, "tiles", {"var": node.var, "start": node.start, "ranges": ranges})]
    bodies = []
    for cls in dict.fromkeys(r.cls for r in node.ranges):
        body: list[str] = []
        for number in range(node.unroll):
            values = phase_values(node, number)
            body += call(context.target, "phase", {
                "var": node.var, "total": total, "drain": step_lines(context, node.drain, cls, values),
                "step": [*head, *step_lines(context, node.step, cls, values)],
            })  # fmt: skip
        bodies.append({"cls": cls, "condition": " || ".join(conditions(context, node, cls)), "body": indented(body)})
    macro = "tiles_drained" if len(bodies) == len(node.ranges) else "tiles_alternating"
    return [*before, *call(context.target, macro, {"var": node.var, "start": node.start, "ranges": bodies})]


def lets_ahead(context: HopperContext, node: Tiles) -> tuple[list[str], list[str]]:
    """Before the loop, and at the head of a step: what reads memory has been read before the step."""
    t = var(node.var, DType.I32)
    before, head = list[str](), list[str]()
    for s in node.lets:
        if not loads(s.value):
            head += lets(context, (s,))
            continue
        kind, following = C_DTYPE[s.value.dtype], f"{s.target}_next"
        before.append(f"{kind} {following} = {context.expr(substitute(s.value, {t: const(node.start)}))};")
        head.append(f"const {kind} {s.target} = {following};")
        head.append(f"{following} = {context.expr(substitute(s.value, {t: add(t, const(1))}))};")
    return before, head


def branched(context: HopperContext, node: Tiles, head: list[str]) -> list[str]:
    """One body for all classes; ops of one class stand under a uniform branch."""
    cls, total = ", ".join(r.cls for r in node.ranges), context.expr(node.ranges[-1].end)
    used = lets(context, _used(node.lets, node.drain))
    # what is read a step ahead is read at its head
    first, stated = (head, []) if node.ahead else ([], head)
    if node.unroll == 1:
        turning = [s for s in node.lets if turns_with(s, node)]
        stated = [x for x in stated if x not in lets(context, turning)]
        body = [*own_index(context.role), *first, *where_used(stated, branches(context, node, {}))]
        body += [f"{s.target} = {s.target} == {s.value.args[1].value} - 1 ? 0 : {s.target} + 1;" for s in turning]
        ranges = [{"cls": cls, "end": total, "body": indented(body)}]
        start = {var(node.var, DType.I32): const(node.start)}
        loop = [
            *(f"int {s.target} = {context.expr(substitute(s.value, start))};" for s in turning),
            *call(context.target, "tiles", {"var": node.var, "start": node.start, "ranges": ranges}),
        ]
        drain = step_lines(context, node.drain, "", {})
        return [*loop, *(["{", *(f"  {x}" for x in [*used, *drain]), "}"] if drain else [])]
    body = []
    for number in range(node.unroll):
        values = phase_values(node, number)
        body += call(context.target, "phase", {
            "var": node.var, "total": total, "step": [*first, *where_used(stated, branches(context, node, values))],
            "drain": [*used, *step_lines(context, node.drain, "", values)],
        })  # fmt: skip
    ranges = [{"cls": cls, "condition": "true", "body": indented(body)}]
    return call(context.target, "tiles_drained", {"var": node.var, "start": node.start, "ranges": ranges})


def turns_with(s: Stmt, node: Tiles) -> bool:
    """A remainder of the counter by a number that is no power of two: kept from step to step, as dividing takes long
    and the first wait of a step needs it."""
    if s.value.op is not Op.MOD or variables(s.value) != {node.var} or node.ahead:
        return False
    size = s.value.args[1].value
    return isinstance(size, int) and size & (size - 1) != 0


def own_index(role: Role) -> list[str]:
    """In a step, the index of a warpgroup is opaque to the compiler, which would keep the addresses that it makes of it
    in registers over all steps."""
    if role.split == 1:
        return []
    return [f"const int w = (int)opaque_u32(group - {role.first_warp // WARPS_A_GROUP});"]


def branches(context: HopperContext, node: Tiles, values: Values) -> list[Piece]:
    """The ops of a step, in pieces; those of one class that follow each other are one, under a branch: the compiler
    orders no instructions across it."""
    context.flying = []
    pieces: list[Piece] = []
    for only, run in groupby(node.step, key=lambda step: step.only):
        ops: list[Piece] = []
        for step in run:
            bound = at_phase(step, values)
            assert not isinstance(bound, Guard)
            ops.append(Piece([f"// {describe(step)}", *op_lines(context, bound)],
                             isinstance(bound, o.Commit), isinstance(bound, o.Retire)))  # fmt: skip
        if only:
            inside = " || ".join(within(context, node, k) for k, r in enumerate(node.ranges) if r.cls == only)
            body = [line for piece in ops for line in piece.lines]
            ops = [Piece(call(context.target, "when", {"predicate": inside or "true", "body": body}))]
        pieces += ops
    return pieces


@dataclass(frozen=True)
class Piece:
    """Lines of an op, or of some under one branch. `ends`: products that are issued; `waits`: for them."""

    lines: list[str]
    ends: bool = False
    waits: bool = False


def where_used(stated: Sequence[str], pieces: Sequence[Piece]) -> list[str]:
    """Statements of scalars before the first piece that names them. What is named right behind a wait for products is
    worked out beside them: there the compiler would put it behind the wait, unless it cannot see through it."""
    left, lines, beside = list(stated), list[str](), 0
    for before, piece in zip([Piece([]), *pieces], pieces, strict=False):
        named, needed = _words(piece.lines), list[str]()
        for statement in reversed(left):
            target = statement.split()[2]
            if target in named:
                early = before.waits and target in _words(piece.lines)
                needed.insert(0, _opaque(statement) if early else statement)
                named |= _words([statement])
                left.remove(statement)
        at = beside if before.waits else len(lines)
        lines[at:at] = needed
        lines += piece.lines
        beside = len(lines) if piece.ends else beside
    return lines


def _opaque(statement: str) -> str:
    """A statement of an integer whose value the compiler does not see through."""
    left, right = statement.removesuffix(";").split(" = ", 1)
    return f"{left} = (int)opaque_u32({right});" if left.startswith("const int ") else statement


def _words(lines: Sequence[str]) -> set[str]:
    return {word for line in lines for word in re.findall(r"\w+", line)}


def _used(found: Sequence[Stmt], steps: Sequence[Step]) -> list[Stmt]:
    """The scalars of a step that some ops name."""
    wanted = {n for op in steps if not isinstance(op, Guard) for e in expressions(op) for n in variables(e)}
    kept: list[Stmt] = []
    for s in reversed(found):
        if s.target in wanted:
            wanted |= variables(s.value)
            kept.append(s)
    return kept[::-1]


def conditions(context: HopperContext, node: Tiles, cls: str) -> list[str]:
    """When a round of phases has the class: the counter lies in one of the ranges of the class. A class that stands
    alone is entered behind those before it, which says that its ranges have begun."""
    alone = len({r.cls for r in node.ranges}) == len(node.ranges)
    found = []
    for k, r in enumerate(node.ranges):
        if r.cls == cls:
            begun = [f"!({before_end(context, node, k - 1)})"] if k and not alone else []
            ends = [before_end(context, node, k)] if k + 1 < len(node.ranges) else []
            found.append(" && ".join([*begun, *ends]) or "true")
    return found


def before_end(context: HopperContext, node: Tiles, k: int) -> str:
    """A round belongs to range k or one before it."""
    end, whole = context.expr(node.ranges[k].end), node.ranges[k].whole
    return f"{node.var} + {node.unroll - 1} < {end}" if whole else f"{node.var} < {end}"


def indented(lines: Sequence[str]) -> str:
    return "\n".join("  " + line for line in lines)


def role_lines(context: HopperContext, role: Role) -> list[str]:
    """Registers, indices, values, items, and what is left to do after the last one."""
    body: list[str] = []
    for node in role.item.body:
        body += step_lines(context, node.ops, "", {}) if isinstance(node, Block) else tiles_lines(context, node)
    lines = ["u32 phase = 0;"] if context.bits else []
    if not role.single:
        lines += [
            f"const int w = group - {role.first_warp // WARPS_A_GROUP}, tid = thread_id() % 128, warp = tid / 32;",
            "const int lane = tid % 32, quad = lane % 4;",
        ]
    lines += [line for v in role.values for line in declarations(v)]
    rings = [
        r for r in context.kernel.orders if any(isinstance(s, o.Enter) and s.ring == r.name for s in steps_of(role))
    ]
    for r in rings:
        lines += call(context.target, "ring_armed", {"last": r.members - 1, "bar": r.first, "threads": r.threads})
    work = context.kernel.work
    of_item: dict[str, Argument] = {
        "lets": [*bases(context.kernel, role), *lets(context, role.item.lets)], "body": body,
    }  # fmt: skip
    if work.source is WorkSource.TABLE_KEYS:
        lines += call(context.target, "items_keys", of_item)
    else:
        first = "rank" if work.order is Order.RANKED else "m"
        lines += call(context.target, "items", {**of_item, "first": first})
    for r in rings:
        lines += call(context.target, "ring_closed", {"bar": r.first, "threads": r.threads})
    lines += step_lines(context, role.exit, "", {})
    if role.single:
        own = f"thread_id() == {32 * role.first_warp}"
        lines = call(context.target, "when", {"predicate": own, "body": lines})
    return lines


def declarations(v: Value) -> list[str]:
    kind = {"f32": "float", "i32": "int", "bool": "bool"}.get(v.dtype, "u32")
    if v.fragment is Fragment.UNI:
        return [f"{kind} {v.name} = {kind}();"]
    count = v.registers // v.copies
    names = [v.name] if v.copies == 1 else [f"{v.name}{k}" for k in range(v.copies)]
    return [f"{kind} {name}[{count}];" for name in names]


def kernel_with_roles(schedule: Schedule, kernel: Kernel) -> list[str]:
    barriers = [
        {"at": f"{BASE + (r.offset or 0) + 8 * (k + (r.slots if free else 0))}u", "count": str(arrivals)}
        for r in kernel.rings
        for free, arrivals in ((False, r.full_arrivals), (True, r.free_arrivals))
        for k in range(r.slots)
    ]
    launch = 65536 // kernel.threads // 8 * 8
    roles = []
    for role in kernel.roles:
        setreg = "dec" if role.regs < launch else "inc"
        lines = call(schedule.target, "role", {
            "setreg": setreg, "regs": role.regs, "lines": role_lines(HopperContext(schedule, kernel, role), role),
        })  # fmt: skip
        first, last = role.first_warp // WARPS_A_GROUP, (role.first_warp + role.warps) // WARPS_A_GROUP
        roles.append({"name": role.name, "first": str(first), "last": str(last), "body": indented(lines)})
    text = str(environment().get_template(f"ops/{schedule.target}.jinja").module.kernel_roles(  # type: ignore[attr-defined]
        name=kernel.name, threads=kernel.threads, params=[f.declaration for f in fields(kernel)],
        asserts=[f'static_assert(sizeof({kernel.name}_params) <= 4096, "parameters exceed what a launch can pass");'],
        barriers=barriers, roles=roles,
    ))  # fmt: skip
    return text.strip("\n").split("\n")
