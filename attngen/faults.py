"""Fault injection: who notices when a schedule is broken. Every mutant (attngen.ir.mutate) is judged twice, each time
as if the other judge did not exist: by the verifier, and by the emulator with numbers against float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from attngen.commute import why_equal
from attngen.config import TileConfig
from attngen.emulator import Mode
from attngen.errors import AttngenError, CompileError, EmulatorError, VerifyError
from attngen.gradient import BackwardKernel
from attngen.gradient_trial import GradientError, GradientTrial
from attngen.ir.mutate import Mutant, mutants
from attngen.ir.schedule import VerifiedSchedule
from attngen.ir.verify import verify
from attngen.kernel import Generated, Kernel
from attngen.signature import VECTOR_BYTES, Shapes
from attngen.spec import Attention
from attngen.trial import LSE_ABSOLUTE, Data, Errors, Trial, distance, inputs

WORKERS = 2  # the time goes to a C++ compiler, which runs beside the interpreter
TAIL = 22  # keys and queries beyond whole tiles


def _square(config: TileConfig) -> tuple[int, int]:
    # under a causal mask a whole streamed tile behind those on the diagonal, whichever axis is owned
    length = max(config.block_m + config.block_n, 3 * config.block_n) + TAIL
    return length, length


def _more_queries(config: TileConfig) -> tuple[int, int]:
    """Under a causal mask the first row tile sees no key: it visits no tile, and every row of it is empty."""
    keys = config.block_n + TAIL
    return keys + config.block_m + TAIL, keys


CASES = ((Data.NEGATIVE, _square), (Data.GROWING, _square), (Data.NORMAL, _more_queries))
FLOOR = 1e-5
MARGIN = 2.0  # a mutant's error against that of the kernel itself: a fault changes more than the rounding


@dataclass(frozen=True)
class Verdict:
    """What each judge said of a mutant; empty: nothing. `equivalent`: why nothing is to be said (attngen.commute)."""

    mutant: str
    verifier: str
    emulator: str
    equivalent: str = ""

    @property
    def caught(self) -> bool:
        return bool(self.verifier or self.emulator)

    @property
    def missed(self) -> bool:
        return not self.caught and not self.equivalent


class Probe(Protocol):
    """One set of inputs, and what the kernel itself makes of them."""

    @property
    def kind(self) -> Data: ...

    @property
    def ok(self) -> bool:
        """Whether the kernel itself is right."""
        ...

    def finding(self, module: Any, mode: Mode) -> str:
        """What is wrong with the results of a mutant; empty: nothing."""
        ...


@dataclass(frozen=True)
class ForwardProbe:
    kind: Data
    trial: Trial
    own: Errors

    @property
    def ok(self) -> bool:
        return self.own.ok

    def finding(self, module: Generated, mode: Mode) -> str:
        errors = self.trial.run(module, mode)
        if errors.out > MARGIN * self.own.out + FLOOR:
            return f"out off by {errors.out:.1e}"
        if errors.lse > max(errors.lse_allowed, LSE_ABSOLUTE):
            return f"lse off by {errors.lse:.1e}"
        return ""


@dataclass(frozen=True)
class GradientProbe:
    """`bits`: the gradients themselves, where all runs have to give the same; a mutant with others lost the order."""

    kind: Data
    trial: GradientTrial
    own: tuple[GradientError, ...]
    bits: Mapping[str, Tensor]

    @property
    def ok(self) -> bool:
        return all(e.ok for e in self.own)

    @staticmethod
    def of(kernel: BackwardKernel, kind: Data, trial: GradientTrial) -> GradientProbe:
        bits = trial.gradients(kernel) if kernel.asked.same_bits else {}
        return GradientProbe(kind, trial, trial.run(kernel), bits)

    def finding(self, module: BackwardKernel, mode: Mode) -> str:
        got = self.trial.gradients(module, mode)
        for own in self.own:
            error = distance(got[own.name], self.trial.exact[own.name].double())
            if error > MARGIN * own.error + FLOOR:
                return f"gradient of {own.name} off by {error:.1e}"
            if own.name in self.bits and not torch.equal(got[own.name], self.bits[own.name]):
                return f"gradient of {own.name} has other bits"
        return ""


@dataclass(frozen=True)
class Judge:
    """A kernel, and the inputs that its mutants are tried on."""

    kernel: Kernel | BackwardKernel
    probes: tuple[Probe, ...]

    @staticmethod
    def of(
        kernel: Kernel | BackwardKernel, spec: Callable[[Shapes], Attention], equal_lengths: bool = False
    ) -> Judge:
        """`equal_lengths`: the description takes no other (one list of document ids)."""
        config = kernel.configs[0] if isinstance(kernel, BackwardKernel) else kernel.config
        probes: list[Probe] = []
        for seed, (kind, lengths) in enumerate(CASES):
            queries, keys = lengths(config)
            shapes = Shapes(B=1, Hq=2, Hkv=1, Sq=keys if equal_lengths else queries, Sk=keys)
            made = spec(shapes), *inputs(shapes, kernel.signature, kind, seed)
            if isinstance(kernel, BackwardKernel):
                probes.append(GradientProbe.of(kernel, kind, GradientTrial(*made, seed)))
            else:
                probes.append(ForwardProbe(kind, trial := Trial(*made), trial.run(kernel)))
        return Judge(kernel, tuple(probes))

    def all(self, tell: Callable[[int, int], None] = lambda done, count: None) -> tuple[Verdict, ...]:
        """Every mutant of the kernel's schedule; `tell` hears how far it is."""
        listed = tuple(mutants(self.kernel.schedule))
        verdicts: list[Verdict] = []
        with ThreadPoolExecutor(WORKERS) as pool:
            for verdict in pool.map(self.judge, listed):
                verdicts.append(verdict)
                tell(len(verdicts), len(listed))
        return tuple(verdicts)

    def judge(self, mutant: Mutant) -> Verdict:
        equivalent = why_equal(mutant.swap) if mutant.swap else ""
        return Verdict(str(mutant), self.verifier(mutant), self.emulator(mutant), equivalent)

    def verifier(self, mutant: Mutant) -> str:
        try:
            verify(mutant.schedule)
        except VerifyError as error:
            return error.rule
        return ""

    def emulator(self, mutant: Mutant) -> str:
        """Nothing is asked of the verifier: the mutant is called verified and run."""
        schedule = VerifiedSchedule(mutant.schedule)
        try:
            module = (
                self.kernel.with_schedule(schedule) if isinstance(self.kernel, BackwardKernel)
                else Generated(schedule, self.kernel.target, "mutant")
            )  # fmt: skip
        except AttngenError as error:
            return f"not lowered: {error}"
        for probe in self.probes:
            for mode in Mode:
                try:
                    finding = probe.finding(module, mode)
                except CompileError:
                    finding = "does not compile"
                except EmulatorError as error:
                    finding = str(error).splitlines()[0]
                if finding:
                    return f"{finding} ({probe.kind.value}, {mode.name.lower()})"
        return ""


INTRODUCTION = """# Fault injection

Each op of a schedule deleted, each pair of neighbours swapped, in turn. Both judges see every mutant, each run alone:
the verifier reads the schedule; the emulator runs its lowered text, unverified, in its three modes on three kinds of
data (very negative logits, growing maxima, row tiles without a key) and compares with float64. Gradients that are to
have the same bits in every run are compared bit by bit, in every mode. Where neither notices a swap, the rules of
`attngen/commute.py` say why it computes the same. Each section is written by
`attngen verify --mask MASK --head-dim D --target TARGET [--backward] --fault-injection --write`; not edited by hand.
"""


def document(existing: str, section: str) -> str:
    """The document with this section in the place of the one of the same heading, or behind the others."""
    sections = {_heading(text): text for text in re.split(r"^(?=## )", existing, flags=re.MULTILINE)[1:]}
    sections[_heading(section)] = section
    return "\n".join([INTRODUCTION, *(text.rstrip("\n") + "\n" for text in sections.values())])


def _heading(section: str) -> str:
    return section.split("\n", 1)[0]


def report(kernel: Kernel | BackwardKernel, verdicts: Sequence[Verdict]) -> str:
    """One section of the document, with the table as Markdown."""
    rows = [
        f"| {_cell(v.mutant)} | {_cell(v.verifier)} | {_cell(v.emulator)} | {_cell('' if v.caught else v.equivalent)} |"
        for v in verdicts
    ]
    count = {
        "verifier and emulator": sum(bool(v.verifier and v.emulator) for v in verdicts),
        "verifier alone": sum(bool(v.verifier and not v.emulator) for v in verdicts),
        "emulator alone": sum(bool(v.emulator and not v.verifier) for v in verdicts),
        "neither, equivalent": sum(not v.caught and not v.missed for v in verdicts),
        "neither": sum(v.missed for v in verdicts),
    }
    missed = [f"- {_cell(v.mutant)}" for v in verdicts if v.missed]
    what, shapes = kernel.variant.description, ""
    if isinstance(kernel, BackwardKernel):
        what += f", {kernel.asked}, {'the same bits in every run' if kernel.asked.same_bits else 'in any order'}"
        shapes = "; ".join(f"{name} {config}" for name, config in kernel.levels.configs)
    else:
        shapes = str(kernel.config)
    return "\n".join(
        [
            f"## {kernel.target.name}, {what}, {_rows(kernel)}",
            "",
            f"Schedule: {what}, {_rows(kernel)}, {kernel.signature.dtype.value}, {kernel.target.name}, {shapes}.",
            "",
            "| caught by | mutants |",
            "| --- | --- |",
            *(f"| {name} | {number} |" for name, number in count.items()),
            f"| all | {len(verdicts)} |",
            "",
            *(["Caught by neither, without a known reason:", "", *missed, ""] if missed else []),
            "| mutant | verifier: rule | emulator | equivalent because |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _rows(kernel: Kernel | BackwardKernel) -> str:
    s = kernel.signature
    return f"head_dim {s.head_dim_qk}" + (f", rows on {s.alignment} bytes" if s.alignment < VECTOR_BYTES else "")


def _cell(text: str) -> str:
    short = re.sub(r"0x[0-9a-f]+", "ADDRESS", text.replace("|", "\\|").replace("\n", " "))
    return short if len(short) <= 160 else short[:157] + "..."
