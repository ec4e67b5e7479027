"""The build gate: a kernel that compiled can still be refused, for what its log or its machine code says."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attngen.errors import MissingToolError
from attngen.predict import MAXIMUM, MMA, PACK, SPECIAL, WGMMA, Counts
from attngen.runtime.compile import Artifact, Resources
from attngen.runtime.sass import sass_counts, spills_in_loops
from attngen.target import INSTRUCTION_BYTES

# The assembler says so when it gave up on a schedule: wgmma made synchronous, fences added, setmaxnreg
# dropped.
LOG_WORDS = ("serialized", "injected", "ignored")

MEANING = {
    WGMMA: "products of warpgroups",
    MMA: "products of warps",
    SPECIAL: "exponentials, logarithms and reciprocals",
    PACK: "conversions of two numbers to 16 bits",
    MAXIMUM: "maxima and minima of floats",
}


class Rule(enum.Enum):
    """Which check a finding comes from."""

    LOG = "log"
    SPILL = "spill"
    LOOP_SPILL = "loop-spill"
    COUNT = "count"


@dataclass(frozen=True)
class GateFinding:
    """One thing the gate saw. A finding that is not fatal is a note."""

    rule: Rule
    symbol: str | None
    message: str
    fatal: bool


@dataclass(frozen=True)
class GateReport:
    """What the gate found. `sass_checked` is False when machine code had to be read and could not be."""

    findings: tuple[GateFinding, ...]
    sass_checked: bool

    @property
    def ok(self) -> bool:
        return not any(finding.fatal for finding in self.findings)

    def __str__(self) -> str:
        head = "build gate: passed" if self.ok else "build gate: refused"
        return "\n".join((head, *(f"  [{item.rule.value}] {item.message}" for item in self.findings)))


def check(
    artifact: Artifact, *, expected: Mapping[str, Counts] | None = None, spilled: float = 0.0
) -> GateReport:
    """Checks every kernel of a module.

    `expected`: by symbol, how often instructions have to occur (attngen.predict). A count outside its bounds
    refuses a kernel: the text or the compiler dropped work of the schedule, or does it twice.

    A spill inside a hot loop refuses a kernel, if more than a share `spilled` of the loop's instructions touch local
    memory; one outside of them costs an item a few instructions, and is reported.
    Loops are looked at only where the assembler reports local memory: without any, none can spill. Where they cannot be
    looked at, a spill refuses the kernel."""
    findings = list(_log_findings(artifact.log))
    sass_checked = True
    for symbol, counts in (expected or {}).items():
        try:
            findings.extend(_count_findings(artifact, symbol, counts))
        except MissingToolError as error:
            sass_checked = False
            findings.append(GateFinding(Rule.COUNT, symbol, f"{symbol}: instructions were not counted: {error}", False))
    for symbol, used in artifact.resources.items():
        known = True
        if used.stack_bytes or used.spill_store_bytes or used.spill_load_bytes:
            try:
                findings.extend(_loop_findings(artifact.cubin, symbol, spilled))
            except MissingToolError as error:
                sass_checked = known = False
                message = f"{symbol}: the loops were not checked for spills: {error}"
                findings.append(GateFinding(Rule.LOOP_SPILL, symbol, message, fatal=False))
        # roles off the critical path may spill where warps are specialised
        findings.extend(_spill_findings(symbol, used, known or artifact.arch.endswith("a")))
    return GateReport(tuple(findings), sass_checked)


def _log_findings(log: str) -> Iterator[GateFinding]:
    for line in log.splitlines():
        if any(word in line.lower() for word in LOG_WORDS):
            yield GateFinding(Rule.LOG, None, f"the compiler says: {line.strip()}", fatal=True)


def _count_findings(artifact: Artifact, symbol: str, expected: Counts) -> Iterator[GateFinding]:
    found = artifact.instructions.get(symbol) or sass_counts(artifact.cubin, symbol)
    for mnemonic, bounds in expected.items():
        count = found.get(mnemonic, 0)
        if count in bounds:
            continue
        means = (
            "fewer: work of the schedule is missing in the text, or the compiler dropped it"
            if count < bounds.least
            else "more: the text has work that the schedule does not have, or the compiler doubled some"
        )
        message = (
            f"{symbol}: {count} {mnemonic} ({MEANING[mnemonic]}) in the machine code, the schedule has {bounds}; "
            f"{means}. Compiled by {artifact.compiler}: try another version of NVRTC"
        )
        yield GateFinding(Rule.COUNT, symbol, message, fatal=True)


def _spill_findings(symbol: str, used: Resources, tolerated: bool) -> Iterator[GateFinding]:
    if used.spill_store_bytes or used.spill_load_bytes:
        message = (
            f"{symbol}: {used.spill_store_bytes} bytes of spill stores and {used.spill_load_bytes} "
            f"of spill loads at {used.registers} registers"
        )
        yield GateFinding(Rule.SPILL, symbol, message, fatal=not tolerated)


def _loop_findings(cubin: bytes, symbol: str, spilled: float) -> Iterator[GateFinding]:
    loops: dict[tuple[int, int, bool], int] = {}
    for spill in spills_in_loops(cubin, symbol):
        place = (spill.loop_start, spill.loop_end, spill.hot)
        loops[place] = loops.get(place, 0) + 1
    for (start, end, hot), count in loops.items():
        kind = "a hot loop" if hot else "an outer loop"
        message = f"{symbol}: {count} local-memory accesses in {kind}, SASS {start:#06x} to {end:#06x}"
        instructions = (end - start) // INSTRUCTION_BYTES + 1
        yield GateFinding(Rule.LOOP_SPILL, symbol, message, fatal=hot and count > spilled * instructions)
