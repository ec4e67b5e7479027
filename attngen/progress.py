"""Says on stderr what is being waited for, once something has taken more than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

QUIET_SECONDS = 2.0
PACE_SECONDS = 1.0  # between lines of steps that end sooner
REPEAT_SECONDS = 10.0  # a step that does not end is mentioned again this often


class Progress:
    """A context in which `step` names what runs now. Silent for the first two seconds.

    with Progress() as progress:
        progress.step("compiling for sm_80")
    """

    def __init__(self, stream: TextIO | None = None, quiet: float = QUIET_SECONDS) -> None:
        self._stream, self._quiet = stream or sys.stderr, quiet
        self._step = self._shown = ""
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def step(self, text: str) -> None:
        with self._changed:
            self._step = text
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, self._quiet)
            while not self._ended:
                if self._step:
                    elapsed = time.monotonic() - self._start
                    print(f"[{elapsed:5.1f} s] {self._step}", file=self._stream, flush=True)
                    self._shown = self._step
                self._changed.wait_for(lambda: self._ended, PACE_SECONDS)
                self._changed.wait_for(lambda: self._ended or self._step != self._shown, REPEAT_SECONDS)
