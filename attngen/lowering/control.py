"""Blocks, tile loops and scalars of an item as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attngen.cprint import C_DTYPE, Printer
from attngen.errors import PassError
from attngen.ir.ops import Op, Stmt
from attngen.ir.schedule import Classes, Guard, Step, Tiles
from attngen.ir.text import describe
from attngen.lowering.context import RoleContext
from attngen.lowering.sm80 import calls
from attngen.render import Argument, call


def op_body(context: RoleContext, op: Op, made: Iterable[tuple[str, dict[str, Argument]]]) -> list[str]:
    """The lines of an op from its macro calls, under its condition."""
    lines: list[str] = []
    for macro, arguments in made:
        lines += call(context.target, macro, arguments)
    if op.when is not None:
        lines = call(context.target, "when", {"predicate": context.expr(op.when), "body": lines})
    return lines


def op_lines(context: RoleContext, op: Op) -> list[str]:
    """The lines of an op under its comment."""
    return [f"// {describe(op)}", *op_body(context, op, calls(context, op))]


def steps(context: RoleContext, steps: Sequence[Step], cls: str) -> list[str]:
    lines: list[str] = []
    for step in steps:
        if isinstance(step, Guard):
            raise PassError(f"lower: {context.target} has no macro for guard {step.id}")
        if not step.only or step.only == cls:
            lines += op_lines(context, step)
    return lines


def tiles(context: RoleContext, node: Tiles) -> list[str]:
    if node.classes is Classes.BRANCH:
        return branched(context, node)
    ranges = [
        {
            "cls": r.cls, "end": context.expr(r.end),
            "body": "\n".join("  " + line for line in [*lets(context, node.lets), *steps(context, node.step, r.cls)]),
        }
        for r in node.ranges
    ]  # fmt: skip
    return call(context.target, "tiles", {"var": node.var, "start": node.start, "ranges": ranges})


def branched(context: RoleContext, node: Tiles) -> list[str]:
    """One body for all classes; ops of one class stand under a uniform branch on the ranges of that class."""
    lines = lets(context, node.lets)
    for step in node.step:
        text = steps(context, (step,), step.only)
        if step.only:
            inside = " || ".join(within(context, node, k) for k, r in enumerate(node.ranges) if r.cls == step.only)
            text = [text[0], *call(context.target, "when", {"predicate": inside, "body": text[1:]})]
        lines += text
    last = node.ranges[-1]
    return call(context.target, "tiles", {"var": node.var, "start": node.start, "ranges": [
        {"cls": ", ".join(r.cls for r in node.ranges), "end": context.expr(last.end),
         "body": "\n".join("  " + x for x in lines)}
    ]})  # fmt: skip


def within(context: RoleContext, node: Tiles, k: int) -> str:
    """The counter lies in range k, given that it lies in one of them."""
    above = [f"{node.var} >= {context.expr(node.ranges[k - 1].end)}"] if k else []
    below = [f"{node.var} < {context.expr(node.ranges[k].end)}"] if k + 1 < len(node.ranges) else []
    return " && ".join([*above, *below])


def lets(context: RoleContext, lets: Sequence[Stmt]) -> list[str]:
    printer = Printer(context.spell, context.elems, context.dense)
    return [f"const {C_DTYPE[s.value.dtype]} {s.target} = {printer(s.value)};" for s in lets]
