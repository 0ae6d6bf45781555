"""Waits on the GUI thread for the end of work on another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from PySide6.QtCore import QObject, QTimer

from kvscope_app.session.background import Background

POLL_MS: Final = 30


class BackgroundWatch(QObject):
    """Calls `on_end` once, on the GUI thread, after `work` has ended, also if it failed or was cancelled.

    Until then, it calls `on_progress` every `POLL_MS` with the fraction done. It calls neither after `stop`, nor after
    `parent` was deleted.
    """

    def __init__(
        self,
        work: Background[Any],
        on_end: Callable[[], object],
        parent: QObject,
        on_progress: Callable[[float], object] | None = None,
    ) -> None:
        super().__init__(parent)
        self._work, self._on_end, self._on_progress = work, on_end, on_progress
        self._timer = QTimer(self, interval=POLL_MS)
        self._timer.timeout.connect(self._poll)
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()
        self.deleteLater()

    def cancel(self) -> None:
        """Stop, and request the cancellation of the work."""
        self.stop()
        self._work.cancel()

    def _poll(self) -> None:
        if not self._work.is_finished:
            if self._on_progress is not None:
                self._on_progress(self._work.share)
            return
        self.stop()
        self._on_end()
