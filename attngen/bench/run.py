"""A run: every case through every contender, checked, then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch

from attngen.bench import machine
from attngen.bench.cases import Case, Inputs, make
from attngen.bench.check import Verdict, truth_of
from attngen.bench.contenders import Attngen, Call, Contender
from attngen.bench.predict import predicted
from attngen.bench.record import Absent, Line, Record
from attngen.bench.timing import Launch, Mode, Settings, Time, measure

Measure = Callable[[dict[str, Launch], Mode, Settings], dict[str, Time]]
Predict = Callable[[Contender, Inputs], float | None]
Say = Callable[[str], None]


def begin(on: torch.device, contenders: Sequence[Contender], modes: Sequence[Mode], settings: Settings) -> Record:
    """The record of a run before its first case."""
    record = Record(machine.environment(on), asdict(settings))
    record.clocks["before"] = machine.clocks(on)
    record.roof = machine.roof(on, machine.highest_clock(record.clocks["before"]))
    record.missing = {c.name: reason for c in contenders if (reason := c.missing()) is not None}
    a, b = machine.matmul(on)
    torch.matmul(a, b)
    for mode in modes:
        ms = measure({"matmul": lambda: torch.matmul(a, b)}, mode, settings)["matmul"].ms
        record.matmul[mode.value] = 2 * machine.MATMUL**3 / ms / 1e9
    return record


def by_model(on: torch.device, now: dict[str, str]) -> Predict:
    """What the machine model says of attngen's own kernels."""
    mhz = machine.highest_clock(now)

    def predict(contender: Contender, inputs: Inputs) -> float | None:
        if not isinstance(contender, Attngen) or mhz is None or inputs.dout is not None:
            return None
        return predicted(inputs, contender.target, machine.capability(on), machine.sms(on), mhz)

    return predict


def run(
    record: Record, cases: Iterable[Case], contenders: Sequence[Contender], modes: Sequence[Mode], settings: Settings,
    on: torch.device, say: Say, keep: Callable[[Record], None], timed: Measure = measure,
    predict: Predict = lambda contender, inputs: None,
) -> None:  # fmt: skip
    """Adds the lines of each case to `record`, and hands it to `keep` after each."""
    present = [c for c in contenders if c.name not in record.missing]
    for case in cases:
        inputs = make(case, on)
        calls, verdicts = _ready(record, inputs, present)
        model = {c.name: predict(c, inputs) for c in present if c.name in calls}
        for mode in modes:
            times = timed({name: call.run for name, call in calls.items()}, mode, settings)
            for name, t in times.items():
                v = verdicts[name]
                tflops = inputs.operations / t.ms / 1e9
                record.lines.append(
                    Line(case, name, mode, t.ms, t.low, t.high, tflops, v.error, v.allowed, v.poisoned, model[name])
                )
            say(f"{case} {mode.value}: " + "  ".join(f"{n} {t.ms:.3f} ms" for n, t in times.items()))
        keep(record)


def _ready(record: Record, inputs: Inputs, present: Sequence[Contender]) -> tuple[dict[str, Call], dict[str, Verdict]]:
    """The calls that compute the case rightly; the others are noted as absent, with the reason."""
    truth = truth_of(inputs)
    calls: dict[str, Call] = {}
    verdicts: dict[str, Verdict] = {}
    for c in present:
        try:
            call = c.call(inputs)
            verdict = truth.check(call)
        except Exception as error:  # a peer may fail in any of its layers, with errors of torch, triton or a library
            record.absent.append(Absent(inputs.case, c.name, _first_line(error)))
        else:
            if verdict.ok:
                calls[c.name], verdicts[c.name] = call, verdict
            else:
                found = f"an error of {verdict.error:.2e} in {truth.sample}; allowed {verdict.allowed:.2e}"
                record.absent.append(Absent(inputs.case, c.name, f"wrong: {found}"))
    return calls, verdicts


def _first_line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0][:200] if words else ''}"
