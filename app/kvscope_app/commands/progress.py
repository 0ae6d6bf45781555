"""Shows a command's progress: a line on a terminal, removed when the work is done; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

SHOW_AFTER_S = 0.5


class ProgressBar:
    """Context manager that shows progress; call `watch` with the share that is done, 0 to 1."""

    def __init__(self, what: str, *, always: bool = False) -> None:
        """`always`: on standard output, a line each, for a program that reads them."""
        self._what = what
        self._always = always
        self._next_s = time.monotonic() + SHOW_AFTER_S
        self._is_shown = False

    def watch(self, share: float) -> bool:
        """Show the share that is done; always returns True, so the work goes on."""
        now_s = time.monotonic()
        if self._always:
            print(f"{share:.4f}", flush=True)
        elif now_s >= self._next_s and sys.stderr.isatty():
            print(f"\r\x1b[K{self._what}: {share:.0%}", end="", file=sys.stderr, flush=True)
            self._next_s, self._is_shown = now_s + 0.1, True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
