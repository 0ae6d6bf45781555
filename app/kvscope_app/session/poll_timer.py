"""Polling interval of a session: every display frame while there is activity, longer otherwise."""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QObject, Qt, QTimer

FRAME_MS: Final = 16
WAITING_MS: Final = 100
"""Polling interval while requests are running or waiting but only heartbeats arrive."""
IDLE_MS: Final = 250
"""Polling interval without requests. The resulting delay of the first frame is not noticeable."""
_BUSY_INTERVAL_NS: Final = 1_000_000_000
_CALM_DELAY_NS: Final = 8_000_000_000
"""Time without activity until `is_calm`: long enough that the summary of the last busy second has arrived."""


class PollTimer(QTimer):
    """Timer that emits `timeout` when the source should be polled."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent, timerType=Qt.TimerType.PreciseTimer, interval=FRAME_MS)
        self._last_busy_ns = 0

    @property
    def is_calm(self) -> bool:
        """Whether nothing has happened for `_CALM_DELAY_NS` and no request is unfinished."""
        return self.interval() == IDLE_MS and time.monotonic_ns() - self._last_busy_ns >= _CALM_DELAY_NS

    def update_interval(self, is_busy: bool, *, is_waiting: bool = False) -> None:
        """Set the interval: `FRAME_MS` during activity and for one second after, then `WAITING_MS` or `IDLE_MS`.

        `is_waiting` says whether there are unfinished requests.
        """
        now_ns = time.monotonic_ns()
        if is_busy:
            self._last_busy_ns = now_ns
        wanted_ms = (
            FRAME_MS if now_ns - self._last_busy_ns < _BUSY_INTERVAL_NS else WAITING_MS if is_waiting else IDLE_MS
        )
        if wanted_ms != self.interval():
            self.setInterval(wanted_ms)
