"""Tells windows how the opening of a recording goes. Knows no window; signals are emitted on the GUI thread."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.playback.recording_opening import RecordingOpening

_LOOK_MS: Final = 30


class FileOpening(QObject):
    """Of a path it begins at once. Exactly one of `opened`, `failed` and `cancelled` comes, then it is of no use."""

    progressed = Signal(float)
    """The share that is done, 0 to 1."""
    opened = Signal(object)
    """The `Recording`."""
    failed = Signal(str)
    """Why it cannot be opened, in one line."""
    cancelled = Signal()

    def __init__(self, path: str | RecordingOpening, parent: QObject) -> None:
        super().__init__(parent)
        self._opening = RecordingOpening(path) if isinstance(path, str) else path
        self._clock = QTimer(self, interval=_LOOK_MS)
        self._clock.timeout.connect(self._look)
        self._clock.start()

    def cancel(self) -> None:
        """Give it up; the thread ends soon after."""
        self._opening.cancel()

    def _look(self) -> None:
        opening = self._opening
        if not opening.is_over:
            self.progressed.emit(opening.share)
            return
        self._clock.stop()
        if opening.is_unwanted or (opening.recording is None and not opening.failure):
            self.cancelled.emit()
        elif opening.failure:
            self.failed.emit(opening.failure)
        else:
            self.opened.emit(opening.recording)
