"""Every error attngen raises on purpose. All derive from AttngenError, so a caller can catch one class.

A message names the argument, its value, what is allowed, the target where it matters, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """A place in the user's source: where a traced expression was written."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class AttngenError(Exception):
    """Base class of all errors of this project."""


class SpecError(AttngenError):
    """The description of a variant is not valid (bad argument, unsupported combination)."""


class TraceError(SpecError):
    """A score or mask function cannot be traced. Carries the user's file and line."""

    def __init__(self, message: str, where: Location | None = None) -> None:
        self.where = where
        at = (
            f"\n  at {where}\n    {where.text.strip()}"
            if where and where.text
            else (f"\n  at {where}" if where else "")
        )
        super().__init__(message + at)


class SignatureError(AttngenError):
    """Tensors or compile-time arguments do not fit what a kernel can be made for."""


class GradientError(AttngenError):
    """A derivative was asked for that attngen cannot compute."""


class PassError(AttngenError):
    """A pass met a program it cannot transform; names the pass and the value."""


class ScheduleError(AttngenError):
    """A schedule text does not parse."""


class VerifyError(AttngenError):
    """A schedule breaks a rule of the verifier. Carries the rule's name and the op."""

    def __init__(self, rule: str, message: str, op: str | None = None) -> None:
        self.rule, self.op = rule, op
        super().__init__(f"[{rule}] {f'op {op}: ' if op else ''}{message}")


class CompileError(AttngenError):
    """The CUDA or C++ compiler refused the generated text, or the build gate refused the result."""


class EmulatorError(AttngenError):
    """The emulator found an error in a kernel: a race, a bad address, a deadlock, a wrong fragment."""


class LaunchError(AttngenError):
    """A kernel could not be launched on this device with these arguments."""


class MissingToolError(AttngenError):
    """Something the machine lacks (a compiler, CuPy, a GPU); the message says how to get it."""


class EmulationWarning(UserWarning):
    """A call on CPU tensors will take long: it runs in the emulator."""
