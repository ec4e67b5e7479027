"""Small cases of `attngen bench`, and contenders that are told what they do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attngen.bench.cases import Case, Inputs, Pattern, make
from attngen.bench.contenders import Call
from attngen.bench.timing import Launch, Mode, Settings, Time
from attngen.reference import reference

CPU = torch.device("cpu")
SMALL = Case("grid", Pattern.CAUSAL, 2, 4, 2, 40, 72, 32, 16)


def small(pattern: Pattern, **changes: Any) -> Inputs:
    square = {"seqlen_k": SMALL.seqlen_q} if pattern is Pattern.DOCUMENT else {}  # one list of ids
    return make(replace(SMALL, pattern=pattern, **square, **changes), CPU)


class Named:
    def __init__(self, name: str, factor: float = 1.0, error: Exception | None = None) -> None:
        self.name, self.factor, self.error = name, factor, error

    def missing(self) -> str | None:
        return None

    def call(self, inputs: Inputs) -> Call:
        if self.error:
            raise self.error
        exact, _ = reference(inputs.spec, inputs.q, inputs.k, inputs.v)
        return Call(lambda: (exact * self.factor).bfloat16())


def timed(calls: dict[str, Launch], mode: Mode, settings: Settings) -> dict[str, Time]:
    return {name: Time(2.0 + len(name), 1.0, 30.0) for name in calls}
