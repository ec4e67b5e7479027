"""The record of a run: what was measured, on what, and who was missing why. Tables and pages are made of its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attngen.bench.cases import Case, Data, Direction, Pattern
from attngen.bench.timing import Mode
from attngen.errors import AttngenError

FORMAT = 1


class RecordError(AttngenError):
    """A file that is no record of a run."""


@dataclass(frozen=True)
class Line:
    """A contender on a case. `tflops`: by the operations of the case; `error`, `allowed`: of the sampled rows, None
    where nothing was checked; `model`: TFLOP/s that the machine model gives at the highest clock."""

    case: Case
    name: str
    mode: Mode
    ms: float
    low: float
    high: float
    tflops: float
    error: float | None = None
    allowed: float | None = None
    poisoned: bool | None = None
    model: float | None = None


@dataclass(frozen=True)
class Absent:
    """A contender that has no time for a case."""

    case: Case
    name: str
    reason: str


@dataclass(frozen=True)
class FirstCall:
    """Seconds until the first result of a variant: in a fresh process with an empty cache, and in one that finds the
    kernel there; milliseconds of a second call."""

    variant: str
    head_dim: int
    cold_seconds: float
    cached_seconds: float
    second_ms: float


@dataclass
class Record:
    """Grows while a run goes on."""

    environment: dict[str, str]
    settings: dict[str, float]
    clocks: dict[str, dict[str, str]] = field(default_factory=dict)  # before and after
    roof: float | None = None  # TFLOP/s of the tensor cores at the highest clock
    matmul: dict[str, float] = field(default_factory=dict)  # TFLOP/s by mode
    missing: dict[str, str] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)

    @property
    def failed(self) -> list[Line | Absent]:
        """Cases of attngen itself that have no right result."""
        return [a for a in self.absent if a.name.startswith("attngen")]

    def find(self, case: Case, name: str, mode: Mode = Mode.GAPS) -> Line | None:
        return next((x for x in self.lines if (x.case, x.name, x.mode) == (case, name, mode)), None)

    def cases(self, group: str) -> list[Case]:
        """Of one group, in the order of the run."""
        every = [x.case for x in self.lines] + [x.case for x in self.absent]
        return list(dict.fromkeys(c for c in every if c.group == group))

    @property
    def modes(self) -> list[Mode]:
        return [m for m in Mode if any(x.mode is m for x in self.lines)]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **_plain(asdict(self))}, indent=1) + "\n"

    @staticmethod
    def read(path: Path) -> Record:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != FORMAT:
                raise ValueError("another format")
            return Record(**{
                **data, "lines": [_line(x) for x in data["lines"]],
                "absent": [Absent(**{**x, "case": _case(x["case"])}) for x in data["absent"]],
                "first_calls": [FirstCall(**x) for x in data["first_calls"]],
            })  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(
                f"{path}: not a record of this version ({type(error).__name__}: {error}). Allowed: what `attngen bench "
                "--json FILE` writes"
            ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, (Pattern, Data, Direction, Mode)):
        return value.value
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _case(x: dict[str, Any]) -> Case:
    kinds = {"pattern": Pattern(x["pattern"]), "data": Data(x["data"]), "direction": Direction(x["direction"])}
    return Case(**{**x, **kinds})


def _line(x: dict[str, Any]) -> Line:
    return Line(**{**x, "case": _case(x["case"]), "mode": Mode(x["mode"])})
