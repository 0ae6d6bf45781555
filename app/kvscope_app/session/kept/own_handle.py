"""A separate handle on a session's recording, for work on a thread beside the session's.

Owns when it is opened and looked at anew. Used by one thread at a time. Knows no Qt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording


class OwnHandle:
    """`open_it` opens it, all that was kept until then; `flush` has what is in memory written, before a second look."""

    def __init__(self, open_it: Callable[[ProgressCallback], Recording], flush: Callable[[], object]) -> None:
        self._open_it = open_it
        self._flush = flush
        self._recorded: Recording | None = None

    def get(self, watch: ProgressCallback) -> Recording:
        """With all that was recorded until now. Waits; raises BadInput where it cannot be read."""
        if self._recorded is None:
            self._recorded = self._open_it(watch)
        elif self._recorded.may_grow:
            self._flush()
            self._recorded.grow()
        return self._recorded
