"""Zoomed time range that the linked views of a session share, with its undo history. Contains no widgets.

Without a zoom, `span` is None and each view shows its own range. Charts and the roofline show the length chosen in
their bar (`time_bar.RANGES_S`, `ROOFLINE_RANGES_S`), up to the time shown. The timeline and the fragmentation map show
the whole session or the range chosen in the view.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.time_span import TimeSpan

_MERGE_INTERVAL_S: Final = 0.8
"""Maximum seconds between consecutive changes, such as wheel events, that are undone together."""
_MAX_UNDO_STEPS: Final = 100


class SharedZoom(QObject):
    """Zoomed range of a timeline, on the timeline's clock (nanoseconds since 1970)."""

    changed = Signal()

    def __init__(self, parent: QObject | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a zoom. `clock` returns a time in seconds; changes in quick succession are undone together."""
        super().__init__(parent)
        self._clock = clock
        self._span: TimeSpan | None = None
        self._undo_spans: list[TimeSpan | None] = []
        self._redo_spans: list[TimeSpan | None] = []
        self._last_change_s: float | None = None

    @property
    def span(self) -> TimeSpan | None:
        return self._span

    @property
    def can_go_back(self) -> bool:
        return bool(self._undo_spans)

    @property
    def can_go_forward(self) -> bool:
        return bool(self._redo_spans)

    def show(self, span: TimeSpan | None) -> None:
        """Show `span` in all linked views; None ends the zoom."""
        if span == self._span:
            return
        now_s = self._clock()
        is_same_zoom = (
            self._last_change_s is not None
            and now_s - self._last_change_s < _MERGE_INTERVAL_S
            and bool(self._undo_spans)
        )
        self._last_change_s = now_s
        if not is_same_zoom:
            self._undo_spans = [*self._undo_spans[1 - _MAX_UNDO_STEPS :], self._span]
        self._redo_spans = []
        self._set_span(span)

    def back(self) -> bool:
        """Undo the last change of the zoom. Returns False if there is none."""
        return self._move_between(self._undo_spans, self._redo_spans)

    def forward(self) -> bool:
        """Redo the zoom that was undone last. Returns False if there is none."""
        return self._move_between(self._redo_spans, self._undo_spans)

    def _move_between(self, source: list[TimeSpan | None], target: list[TimeSpan | None]) -> bool:
        if not source:
            return False
        target.append(self._span)
        self._last_change_s = None
        self._set_span(source.pop())
        return True

    def _set_span(self, span: TimeSpan | None) -> None:
        self._span = span
        self.changed.emit()
