"""How often a session looks for news: every display frame, and more seldom while nothing happens.

Owns the timer. Must not know what is looked at.
"""

from __future__ import annotations

import time
from typing import Final

from PySide6.QtCore import QObject, Qt, QTimer

FRAME_MS: Final = 16
WAITING_MS: Final = 100
"""How often is looked while nothing comes but signs of life, and requests are under way."""
IDLE_MS: Final = 250
"""The same while there are none: nobody sees that the first frame came so much later."""
_BUSY_FOR_NS: Final = 1_000_000_000
_CALM_AFTER_NS: Final = 8_000_000_000
"""By then the summary of the last busy second came as well."""


class PollTimer(QTimer):
    """Timer whose `timeout` says when to poll the source."""

    def __init__(self, parent: QObject) -> None:
        super().__init__(parent, timerType=Qt.TimerType.PreciseTimer, interval=FRAME_MS)
        self._busy_ns = 0

    @property
    def is_calm(self) -> bool:
        """Whether nothing happened for long, and no request is under way."""
        return self.interval() == IDLE_MS and time.monotonic_ns() - self._busy_ns >= _CALM_AFTER_NS

    def keep(self, is_busy: bool, *, is_waiting: bool = False) -> None:
        """Look at every display frame while something happens, and for a second after; then by whether requests are
        under way."""
        now_ns = time.monotonic_ns()
        if is_busy:
            self._busy_ns = now_ns
        wanted_ms = FRAME_MS if now_ns - self._busy_ns < _BUSY_FOR_NS else WAITING_MS if is_waiting else IDLE_MS
        if wanted_ms != self.interval():
            self.setInterval(wanted_ms)
