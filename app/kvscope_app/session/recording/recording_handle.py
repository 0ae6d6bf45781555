"""Separate handle on a session's recording, for work on another thread. Imports no Qt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording


class RecordingHandle:
    """Handle on a recording that is opened when it is first used. Used by one thread at a time.

    `open_recording` opens the recording with all data written so far. `flush` makes buffered data readable before the
    recording is read again.
    """

    def __init__(self, open_recording: Callable[[ProgressCallback], Recording], flush: Callable[[], object]) -> None:
        self._open_recording = open_recording
        self._flush = flush
        self._recording: Recording | None = None

    def get(self, watch: ProgressCallback) -> Recording:
        """Return the recording with all data recorded so far. Blocks. Raises BadInput if it cannot be read."""
        if self._recording is None:
            self._recording = self._open_recording(watch)
        elif self._recording.may_grow:
            self._flush()
            self._recording.grow()
        return self._recording
