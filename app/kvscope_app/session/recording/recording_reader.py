"""Runs one read of a recording at a time on a thread and emits a signal at its end.

Owns the handle, the thread and the timer that polls it. Does not depend on the type of result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.recording.recording_handle import RecordingHandle

if TYPE_CHECKING:
    from kvscope_app.session.session import Session
    from kvscope_telemetry.recordings.read_budget import ProgressCallback
    from kvscope_telemetry.recordings.reader import Recording

_POLL_INTERVAL_MS: Final = 50
_Result = TypeVar("_Result")


class RecordingReader(QObject, Generic[_Result]):
    """Reads the session's recording on a thread. Call `start` only if no read is in progress.

    `result` is the result of the last read; if that read failed, `failure` is the reason.
    """

    finished = Signal()

    def __init__(self, session: Session, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.result: _Result | None = None
        self.failure = ""
        self._session, self._name = session, name
        self._handle: RecordingHandle | None = None
        self._work: Background[_Result] | None = None
        self._timer = QTimer(self, interval=_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)

    @property
    def is_reading(self) -> bool:
        return self._work is not None

    def start(self, read: Callable[[Recording, ProgressCallback], _Result]) -> bool:
        """Call `read` on the thread. Returns False if nothing was recorded."""
        assert self._work is None, "one reading at a time"
        handle = self._handle = self._handle or self._session.new_recording_handle()
        if handle is None:
            return False
        self._work = Background(lambda watch: read(handle.get(watch), watch), self._name)
        self._timer.start()
        return True

    def finish(self, seconds: float) -> None:
        """Block until the read ends, at most `seconds`."""
        if self._work is not None:
            self._work.wait(seconds)
            self._poll()

    def close(self) -> None:
        """Cancel the read, for which `finished` is not emitted."""
        self._timer.stop()
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            work.wait(2.0)

    def _poll(self) -> None:
        work = self._work
        if work is not None and work.is_finished:
            self._timer.stop()
            self._work = None
            self.result, self.failure = work.result, work.failure
            self.finished.emit()
