"""Range of time visible in the heatmap view, shared by its charts: one time scale, and the rules by which it moves.

There are three modes: fit everything (also as data grows), follow the newest data at the right edge, or stay fixed.
"""

from __future__ import annotations

from enum import StrEnum

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.time_span import SHORTEST_NS, TimeSpan
from kvscope_app.views.heatmap.time_scale import MAX_COLUMN_NS, TimeScale
from kvscope_telemetry.summaries.summary import SECOND_NS


class TimeFrameMode(StrEnum):
    FIT = "fit"
    FOLLOW = "follow"
    FIXED = "stand"


class TimeFrame(QObject):
    """Visible range of the heatmap view. Owns `scale`, whose columns are device pixels."""

    changed = Signal()
    span_chosen = Signal(object)
    """Emitted with the `TimeSpan` that the user zoomed or panned to, or None if the user chose to fit or follow."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.scale = TimeScale()
        self.mode = TimeFrameMode.FIT
        self._range: tuple[int, int] | None = None
        self._requested: TimeSpan | None = None
        """Range passed to `show_only`, which is shown again when the width changes."""

    def set_width(self, width: int) -> None:
        if width != self.scale.width and width > 0:
            self._set_scale(self.scale.resized(width))
            if self._requested is not None:
                self.show_only(self._requested)

    def set_range(self, begin_ns: int, end_ns: int) -> None:
        if self._range != (begin_ns, end_ns):
            self._range = (begin_ns, end_ns)
            self._set_scale(self.scale)

    @property
    def span(self) -> TimeSpan:
        return TimeSpan(self.scale.begin_ns, self.scale.end_ns)

    def fit(self) -> None:
        """Show the full range of the data, and report with `span_chosen` that the user chose it."""
        self._set_mode(TimeFrameMode.FIT, self.scale)
        self.span_chosen.emit(None)

    def end_zoom(self) -> None:
        """Show the full range of the data, unless the view follows the newest data."""
        if self.mode is TimeFrameMode.FIXED:
            self._set_mode(TimeFrameMode.FIT, self.scale)

    def show_only(self, span: TimeSpan) -> None:
        """Show `span`, rounded to whole columns, and change to fixed mode."""
        width = self.scale.width
        min_column_ns = -(-span.length_ns // max(width - 1, 1))
        column_ns = min(max(min_column_ns, SHORTEST_NS // width), MAX_COLUMN_NS)
        self._set_mode(TimeFrameMode.FIXED, TimeScale(span.begin_ns // column_ns, width, column_ns), span)

    def set_following(self, following: bool) -> None:
        self._set_mode(TimeFrameMode.FOLLOW if following else TimeFrameMode.FIXED, self.scale)
        if following:
            self.span_chosen.emit(None)

    def zoom(self, factor: float, x: float) -> None:
        """Zoom in by `factor` around column `x`, and change to fixed mode."""
        self._set_mode(TimeFrameMode.FIXED, self.scale.zoomed(factor, x))
        self.span_chosen.emit(self.span)

    def pan(self, columns: int) -> None:
        """Move the visible range to earlier times by `columns`, but keep part of the data visible."""
        if columns:
            self._set_mode(TimeFrameMode.FIXED, self._bounded(self.scale.moved(-columns)))
            self.span_chosen.emit(self.span)

    def reveal(self, time_ns: int) -> None:
        """Pan by the smallest number of columns that makes `time_ns` visible."""
        x = int(self.scale.x_of(time_ns))
        if x < 0 or x >= self.scale.width:
            self.pan(-(x if x < 0 else x - self.scale.width + 1))

    def _bounded(self, scale: TimeScale) -> TimeScale:
        if self._range is None:
            return scale
        first_column, last_column = (at // scale.column_ns for at in self._range)
        min_covered = scale.width // 8  # columns that stay covered by data
        first = max(scale.first, first_column - scale.width + min_covered)
        return scale.moved(min(first, last_column - min_covered) - scale.first)

    def _set_mode(self, mode: TimeFrameMode, scale: TimeScale, requested: TimeSpan | None = None) -> None:
        self._requested = requested
        old_mode = self.mode
        self.mode = mode
        self._set_scale(scale, is_new_mode=old_mode is not mode)

    def _set_scale(self, scale: TimeScale, *, is_new_mode: bool = False) -> None:
        if self._range is not None:
            scale = self._positioned(scale, *self._range)
        if is_new_mode or scale != self.scale:
            self.scale = scale
            self.changed.emit()

    def _positioned(self, scale: TimeScale, begin_ns: int, end_ns: int) -> TimeScale:
        if self.mode is TimeFrameMode.FOLLOW:
            return scale.ending_at(end_ns)
        if self.mode is TimeFrameMode.FIT:
            fits = scale.begin_ns <= begin_ns < scale.begin_ns + scale.column_ns and end_ns <= scale.end_ns
            has_space = end_ns - begin_ns < (scale.end_ns - begin_ns) * 0.85
            fitted = scale.fitted(begin_ns, max(end_ns, begin_ns + SECOND_NS))
            return scale if fits and not (has_space and fitted.column_ns < scale.column_ns) else fitted
        return scale
