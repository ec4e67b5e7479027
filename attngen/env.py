"""Every environment variable attngen reads, in one table. None of them may change the text of a generated
kernel."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Variable(Generic[T_co]):
    """One variable: how its text becomes a value, and what holds when it is unset or empty."""

    name: str
    default: T_co
    parse: Callable[[str], T_co]
    help: str

    def get(self) -> T_co:
        """The value now. Read at each call, so that a test or a user can change it while the process runs."""
        text = os.environ.get(self.name, "")
        return self.parse(text) if text else self.default


def _path(text: str) -> Path | None:
    return Path(text).expanduser()


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part).expanduser() for part in text.split(os.pathsep) if part)


_NO_PATH: Path | None = None
_NO_PATHS: tuple[Path, ...] = ()

CACHE_DIR = Variable(
    "ATTNGEN_CACHE_DIR", _NO_PATH, _path, "directory of compiled kernels; unset: the user's cache directory"
)
PRECOMPILED = Variable(
    "ATTNGEN_PRECOMPILED",
    _NO_PATHS,
    _paths,
    "read-only folders of precompiled kernels, looked at before the cache",
)

VARIABLES: tuple[Variable[object], ...] = (CACHE_DIR, PRECOMPILED)
