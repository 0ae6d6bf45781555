"""Reports the progress of opening a recording by signals on the GUI thread. Contains no widgets."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal

from kvscope_app.playback.recording_opening import RecordingOpening
from kvscope_app.session.background_watch import BackgroundWatch


class FileOpening(QObject):
    """Opening of one recording. The constructor starts it, unless `path` is a `RecordingOpening` that was started
    before.

    Emits exactly one of `opened`, `failed` and `cancelled`.
    """

    progressed = Signal(float)
    """Emitted with the fraction of the file that has been read, 0 to 1."""
    opened = Signal(object)
    failed = Signal(str)
    """Emitted with the reason in one line if the recording cannot be opened."""
    cancelled = Signal()

    def __init__(self, path: str | RecordingOpening, parent: QObject) -> None:
        super().__init__(parent)
        self._opening = RecordingOpening(path) if isinstance(path, str) else path
        BackgroundWatch(self._opening, self._on_end, self, self.progressed.emit)

    def cancel(self) -> None:
        self._opening.cancel()

    def _on_end(self) -> None:
        opening = self._opening
        if opening.is_cancelled or (opening.recording is None and not opening.failure):
            self.cancelled.emit()
        elif opening.failure:
            self.failed.emit(opening.failure)
        else:
            self.opened.emit(opening.recording)
