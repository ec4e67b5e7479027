"""Schedule -> text. A walk: each op becomes one macro call with identifiers, numbers and printed expressions as
arguments. Nothing is decided here; `lower` accepts only a verified schedule. The parts are in `attngen.lowering`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attngen.ir.schedule import VerifiedSchedule
from attngen.lowering.kernel import kernel_lines
from attngen.lowering.roles import kernel_with_roles
from attngen.render import select_prelude


@dataclass(frozen=True)
class Source:
    """The emitted text. `text` is banner + prelude + body; the emulator compiles the identical `body`.

    `line_ops`: which op each line of the body belongs to (1 is the first line)."""

    banner: str
    prelude: str
    body: str
    line_ops: Mapping[int, str]

    @property
    def text(self) -> str:
        return f"{self.banner}\n{self.prelude}\n{self.body}"

    def __str__(self) -> str:
        return self.text


def lower(verified: VerifiedSchedule, banner: str) -> Source:
    """The CUDA text of every kernel of a module."""
    if not isinstance(verified, VerifiedSchedule):
        raise TypeError(
            f"lower takes a VerifiedSchedule (attngen.ir.verify.verify makes one), not {type(verified).__name__}"
        )
    schedule = verified.schedule
    lines: list[str] = []
    for kernel in schedule.kernels:
        emit = kernel_lines if len(kernel.roles) == 1 else kernel_with_roles
        lines += [*emit(schedule, kernel), ""]
    body = "\n".join(lines)
    return Source(banner, select_prelude(schedule.target, body), body, line_ops(body))


def line_ops(body: str) -> dict[int, str]:
    """Which op a line belongs to: the last op comment above it."""
    result: dict[int, str] = {}
    current = ""
    for number, line in enumerate(body.split("\n"), 1):
        text = line.strip()
        if text.startswith("// "):
            current = text[3:].split("  #")[0]
        elif text.startswith("extern"):
            current = ""
        if current:
            result[number] = current
    return result
