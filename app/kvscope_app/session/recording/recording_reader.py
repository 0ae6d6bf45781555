"""Runs one read of a recording at a time on a thread and emits a signal when it has ended.

Owns the handle, the thread and the timer that polls it. Must not know what is read or by which caller.
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
_Made = TypeVar("_Made")


class RecordingReader(QObject, Generic[_Made]):
    """Call `start` whenever no read is in progress.

    `result` is that of the last read, or `failure` the reason why there is none.
    """

    finished = Signal()

    def __init__(self, session: Session, name: str, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.result: _Made | None = None
        self.failure = ""
        self._session, self._name = session, name
        self._handle: RecordingHandle | None = None
        self._work: Background[_Made] | None = None
        self._timer = QTimer(self, interval=_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)

    @property
    def is_reading(self) -> bool:
        """Whether a read is in progress, so that `finished` will be emitted."""
        return self._work is not None

    def start(self, read: Callable[[Recording, ProgressCallback], _Made]) -> bool:
        """Call `read` on the thread. Returns False if nothing was recorded."""
        assert self._work is None, "one reading at a time"
        handle = self._handle = self._handle or self._session.new_recording_handle()
        if handle is None:
            return False
        self._work = Background(lambda watch: read(handle.get(watch), watch), self._name)
        self._timer.start()
        return True

    def finish(self, seconds: float) -> None:
        """Block until the read ends, for at most `seconds`."""
        if self._work is not None:
            self._work.wait(seconds)
            self._poll()

    def close(self) -> None:
        """Cancel the read. `finished` is not emitted for it."""
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
