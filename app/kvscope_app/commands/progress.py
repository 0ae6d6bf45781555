"""Shows a command's progress as a line on a terminal, which is removed when the work is done.

Shows nothing if stderr is not a terminal, unless a program requests lines on standard output.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

SHOW_AFTER_S = 0.5


class ProgressBar:
    """Context manager that shows a command's progress. Call `report_progress` with the fraction done, 0 to 1."""

    def __init__(self, activity: str, *, is_forced: bool = False) -> None:
        """If `is_forced`, print each fraction as a line on standard output, for programs that parse it."""
        self._activity = activity
        self._is_forced = is_forced
        self._next_s = time.monotonic() + SHOW_AFTER_S
        self._is_shown = False

    def report_progress(self, share: float) -> bool:
        """Show the fraction done. Always returns True, which means that the work may continue."""
        now_s = time.monotonic()
        if self._is_forced:
            print(f"{share:.4f}", flush=True)
        elif now_s >= self._next_s and sys.stderr.isatty():
            print(f"\r\x1b[K{self._activity}: {share:.0%}", end="", file=sys.stderr, flush=True)
            self._next_s, self._is_shown = now_s + 0.1, True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
