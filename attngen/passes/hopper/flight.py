"""When an asynchronous product has to be retired: before the first op that needs its accumulator, or that overwrites
the registers it reads. Products complete in order, so retiring one retires those issued before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.ir.ops import Ref, Wgmma
from attngen.ir.schedule import Guard, Step


def reads(step: Step) -> set[Ref]:
    """Values and buffers of an op, those of a guard's ops included."""
    ops = step.body if isinstance(step, Guard) else (step,)
    return {r for op in ops for r in op.reads()}


def writes(step: Step) -> set[Ref]:
    ops = step.body if isinstance(step, Guard) else (step,)
    return {r for op in ops for r in op.writes()}


def conflict(flying: Wgmma, step: Step) -> bool:
    """A product in flight and an op after it. Products into one accumulator are in order by themselves."""
    touched = writes(step) | reads(step)
    if isinstance(step, Wgmma):
        return flying.d in {step.a, step.b} or (flying.d == step.d and step.zero)
    return flying.d in touched or flying.a in writes(step)


@dataclass(frozen=True)
class Flight:
    """`retired[k]`: position of the step before which the product at position k is retired; len(steps): at the end."""

    retired: dict[int, int]


def fly(steps: Sequence[Step]) -> Flight:
    flying: list[int] = []
    retired: dict[int, int] = {}
    for position, step in enumerate(steps):
        last = max((n for n, k in enumerate(flying) if conflict(product(steps[k]), step)), default=-1)
        for k in flying[: last + 1]:
            retired[k] = position
        flying = flying[last + 1 :]
        if isinstance(step, Wgmma):
            flying.append(position)
    retired.update(dict.fromkeys(flying, len(steps)))
    return Flight(retired)


def product(step: Step) -> Wgmma:
    assert isinstance(step, Wgmma)
    return step
