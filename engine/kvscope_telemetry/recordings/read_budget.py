"""Limits the bytes and the time spent on opening a recording, independently of the sizes that the file claims.

Owns the remaining budget, and reports progress. Must not depend on a file format.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_STEP_BYTES: Final = 512 << 20
STEP_BYTES_A_STORED_BYTE: Final = 32
"""Limit of each of the three steps of opening a file (walking over its records, resolving doubtful chunks,
finding the engines). A step decompresses and inspects at most `MAX_STEP_BYTES` plus this many bytes per byte of
the file on disk.
"""
MAX_STEP_S: Final = 30.0
"""Time limit of each step of opening a file, in seconds."""
MAX_INFLATED_BYTES: Final = 4 << 30
INFLATED_BYTES_A_STORED_BYTE: Final = 64
"""Limit on the total uncompressed size of a file's chunks: `MAX_INFLATED_BYTES` plus this many bytes per byte
of the file on disk. Chunks beyond the limit are skipped.
"""
RECORD_BYTES: Final = 256
"""Bytes charged to the budget for each record, in addition to its data."""
_PROGRESS_EVERY: Final = 4 << 20

ProgressCallback = Callable[[float], bool]
"""Called with the share of the work that is done, from 0 to 1. Returns False to cancel."""


class ReadBudgetSpent(Exception):
    """Raised when the budget is used up. The message names the exceeded limit."""


class OpeningCancelled(Exception):
    pass


class ReadBudget:
    """Bytes and time that may still be spent on opening a file with `num_stored` bytes on disk. `clock` is monotonic,
    in seconds.
    """

    def __init__(
        self,
        num_stored: int,
        watch: ProgressCallback | None = None,
        *,
        max_seconds: float = MAX_STEP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_inflated = MAX_INFLATED_BYTES + INFLATED_BYTES_A_STORED_BYTE * num_stored
        self._max_bytes = MAX_STEP_BYTES + STEP_BYTES_A_STORED_BYTE * num_stored
        self._max_seconds = max_seconds
        self._clock = clock
        self._watch = watch
        self.begin_step(0.0, 1.0)

    def begin_step(self, from_share: float, to_share: float) -> None:
        """Start the step that covers progress `from_share` to `to_share` (0 to 1), with the full bytes and time of a
        step.
        """
        self._from_share, self._to_share, self._share = from_share, to_share, from_share
        self._remaining_bytes = self._max_bytes
        self._until_s = self._clock() + self._max_seconds
        self._unreported_bytes = _PROGRESS_EVERY  # so that the first `spend` reports progress

    def set_progress(self, share: float) -> None:
        self._share = self._from_share + (self._to_share - self._from_share) * min(share, 1.0)

    def spend(self, num_bytes: int) -> None:
        """Charge `num_bytes` before reading them.

        Raises:
            ReadBudgetSpent: The bytes or the time of the step are used up.
            OpeningCancelled: The progress callback returned False.
        """
        self._remaining_bytes -= num_bytes
        if self._remaining_bytes < 0:
            raise ReadBudgetSpent(f"more than {self._max_bytes >> 20} MiB would have to be read")
        self._unreported_bytes += num_bytes
        if self._unreported_bytes >= _PROGRESS_EVERY:
            self._unreported_bytes = 0
            self._report_progress()

    def _report_progress(self) -> None:
        if self._watch is not None and not self._watch(self._share):
            raise OpeningCancelled
        if self._clock() > self._until_s:
            raise ReadBudgetSpent(f"it took longer than {self._max_seconds:.0f} s")
