"""Zoomed time range that the linked views of a session share.

Owns the zoom and its undo history. Without a zoom, `span` is None and each view shows its own range: charts the length
chosen in their bar (`time_bar.RANGES_S`), up to the time shown; the roofline likewise (`ROOFLINE_RANGES_S`); the
timeline and the fragmentation map the whole session, or what was chosen there. Knows no views.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.time_span import TimeSpan

_ONE_ZOOM_S: Final = 0.8
"""Changes that follow each other faster, such as wheel events, are undone together."""
_MAX_EARLIER: Final = 100


class SharedZoom(QObject):
    """Zoom that the linked views of a timeline share, on that timeline's clock (nanoseconds since 1970)."""

    changed = Signal()

    def __init__(self, parent: QObject | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a zoom. `clock` returns seconds and decides which changes are undone together."""
        super().__init__(parent)
        self._clock = clock
        self._span: TimeSpan | None = None
        self._earlier: list[TimeSpan | None] = []
        self._later: list[TimeSpan | None] = []
        self._changed_s: float | None = None

    @property
    def span(self) -> TimeSpan | None:
        """The zoomed range; None without a zoom."""
        return self._span

    @property
    def can_go_back(self) -> bool:
        return bool(self._earlier)

    @property
    def can_go_forward(self) -> bool:
        return bool(self._later)

    def show(self, span: TimeSpan | None) -> None:
        """Show `span` in all linked views. None ends the zoom."""
        if span == self._span:
            return
        now_s = self._clock()
        is_same_zoom = self._changed_s is not None and now_s - self._changed_s < _ONE_ZOOM_S and bool(self._earlier)
        self._changed_s = now_s
        if not is_same_zoom:
            self._earlier = [*self._earlier[1 - _MAX_EARLIER :], self._span]
        self._later = []
        self._set(span)

    def back(self) -> bool:
        """Undo the last change. Returns whether there was one."""
        return self._step(self._earlier, self._later)

    def forward(self) -> bool:
        """Redo the change that was undone last. Returns whether there was one."""
        return self._step(self._later, self._earlier)

    def _step(self, source: list[TimeSpan | None], target: list[TimeSpan | None]) -> bool:
        if not source:
            return False
        target.append(self._span)
        self._changed_s = None
        self._set(source.pop())
        return True

    def _set(self, span: TimeSpan | None) -> None:
        self._span = span
        self.changed.emit()
