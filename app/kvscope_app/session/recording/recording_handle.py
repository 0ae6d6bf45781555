"""Separate handle on a session's recording, for work on another thread.

Opens the recording when it is first used, and extends it when the session has recorded more. Used by one thread at a
time. Imports no Qt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording


class RecordingHandle:
    """Lazily opened handle.

    `open_it` opens the recording with everything written so far. `flush` has buffered data written before the recording
    is read again.
    """

    def __init__(self, open_it: Callable[[ProgressCallback], Recording], flush: Callable[[], object]) -> None:
        self._open_it = open_it
        self._flush = flush
        self._recorded: Recording | None = None

    def get(self, watch: ProgressCallback) -> Recording:
        """Return the recording with everything recorded so far. Blocks. Raises BadInput if it cannot be read."""
        if self._recorded is None:
            self._recorded = self._open_it(watch)
        elif self._recorded.may_grow:
            self._flush()
            self._recorded.grow()
        return self._recorded
