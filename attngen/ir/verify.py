"""The verifier: the only maker of a `VerifiedSchedule`, and `lower` takes nothing else.

A rule walks or simulates what the schedule says (attngen.ir.walk, attngen.ir.rules); none of them knows the passes that
inserted waits and barriers. Rules that walk need a schedule whose names resolve, so the list has two parts."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.errors import SignatureError, VerifyError
from attngen.ir.rules import copies, groups, machine, memory, names, registers, resources, rings, values
from attngen.ir.rules.case import Case, Rule
from attngen.ir.schedule import Schedule, VerifiedSchedule
from attngen.target import target

STATIC = (
    Rule("ids", names.ids),
    Rule("names", names.names),
    Rule("variables", names.variables),
    Rule("classes", names.classes),
    Rule("features", names.features),
    Rule("convergence", names.convergence),
    Rule("threads", resources.threads),
    Rule("copy-units", copies.copy_units),
    Rule("offsets", memory.offsets),
    Rule("smem-limit", memory.limit),
    Rule("setmaxnreg", resources.setmaxnreg),
    Rule("code-size", resources.code_size),
    Rule("trips", rings.ranges),
    Rule("outputs", values.stored),
    Rule("vectors", values.vectors),
    Rule("shares", values.shares),
)
WALKING = (
    Rule("slots", names.slots),
    Rule("defined", values.defined),
    Rule("partial", values.partial),
    Rule("unused", values.unused),
    Rule("overlap", memory.overlap),
    Rule("registers", registers.registers),
    Rule("copy-groups", copies.copy_groups),
    Rule("wgmma", groups.wgmma),
    Rule("rings", rings.protocol),
    Rule("bulk", rings.bulk),
    Rule("order", machine.order),
)


def _findings(schedule: Schedule) -> Iterator[VerifyError]:
    try:
        chip = target(schedule.target)
    except SignatureError as error:
        yield VerifyError("target", str(error))
        return
    for kernel in schedule.kernels:
        case = Case(schedule, kernel, chip)
        static = [found for rule in STATIC for found in rule.check(case)]
        yield from static
        if not static:
            for rule in WALKING:
                yield from rule.check(case)


def findings(schedule: Schedule) -> list[VerifyError]:
    """Everything that is wrong. The rules that walk are left out where names do not resolve."""
    return list(_findings(schedule))


def verify(schedule: Schedule) -> VerifiedSchedule:
    """The schedule as one that may be lowered. VerifyError names the rule, the op, and what is wrong."""
    for found in _findings(schedule):
        raise found
    return VerifiedSchedule(schedule, tuple(rule.name for rule in (*STATIC, *WALKING)))
