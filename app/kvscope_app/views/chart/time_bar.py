"""Bar above charts: visible time range, follow button, and the time at the pointer."""

from __future__ import annotations

import math

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from kvscope_app.ui.widget_factories import tool_button
from kvscope_app.ui.widgets import FittingLabel, SegmentedControl

RANGES_S = {"30 s": 30.0, "1 min": 60.0, "10 min": 600.0, "All": math.inf}
"""Length in seconds of each selectable range. `All` is the whole session, as far as it is retained."""
DEFAULT_RANGE = "1 min"
_OPTIONAL_RANGES = (0, 2)
"""Indices in `RANGES_S` of the ranges that are hidden first if space is short."""
_WIDEST_TIME = "00:00:00"


class TimeBar(QWidget):
    """Bar with the range buttons on the left, Live (in a recording: Follow) and the link button on the right.

    The time at the pointer is between them.
    """

    range_chosen = Signal(float)
    """Emitted with the length of the selected range in seconds, `math.inf` for everything."""
    live_requested = Signal()

    def __init__(self, link: QToolButton, *, is_file: bool = False, inset: bool = True) -> None:
        """Create the bar.

        Args:
            link: Button that links the charts' range with that of other views.
            is_file: Whether a recording is shown, which is never live.
            inset: Whether the bar has margins.
        """
        super().__init__()
        self.ranges = SegmentedControl(list(RANGES_S), "Visible range")
        self.ranges.set_current(list(RANGES_S).index(DEFAULT_RANGE))
        self.ranges.chosen.connect(lambda index: self.range_chosen.emit(list(RANGES_S.values())[index]))
        self.time = FittingLabel()
        self.time.setProperty("look", "muted")
        text, target = ("Follow", "the cursor") if is_file else ("Live", "the present")
        tip = f"Follow {target}. Drag a chart, or Ctrl+wheel over it, to look back; click to go there."
        self.live = tool_button(text, tip, checkable=True, checked=True)
        self.live.clicked.connect(self._on_live)
        self.link = link
        layout = self._row = QHBoxLayout(self)
        layout.setContentsMargins(*((8, 6, 8, 2) if inset else (0, 0, 0, 0)))
        layout.setSpacing(8)
        layout.addWidget(self.ranges, alignment=Qt.AlignmentFlag.AlignLeft)
        layout.addWidget(self.time, 1)
        layout.addWidget(self.live)
        layout.addWidget(link)

    def minimumSizeHint(self) -> QSize:
        """Return the size for the narrowest dock.

        As the bar narrows, the time at the pointer is hidden first, then the buttons' padding is reduced, then two
        ranges are hidden. No text is elided.
        """
        width = self._buttons_width() - sum(map(self.ranges.width_of, _OPTIONAL_RANGES))
        return QSize(width, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.ranges.set_compact(self.width() < self._buttons_width() + self.ranges.saved_width)
        buttons_width = self._buttons_width()
        available = self.width() - buttons_width
        for index in _OPTIONAL_RANGES:
            self.ranges.set_button_visible(index, available >= 0)
            available += self.ranges.width_of(index)
        time_width = self.fontMetrics().horizontalAdvance(_WIDEST_TIME)
        self.time.setVisible(self.width() >= buttons_width + time_width + self._row.spacing())

    def show_time(self, *lengths: str) -> None:
        """Show the longest of these texts that fits as the time at the pointer, or nothing if none is given."""
        self.time.set_variants(*lengths)

    def _buttons_width(self) -> int:
        hidden = sum(self.ranges.width_of(index) for index in _OPTIONAL_RANGES if not self.ranges.is_shown(index))
        margins = self._row.contentsMargins()
        ends = self.live.minimumSizeHint().width() + self._row.spacing() + self.link.minimumSizeHint().width()
        buttons = self.ranges.minimumSizeHint().width() + hidden + ends
        return margins.left() + buttons + self._row.spacing() + margins.right()

    def show_range(self, seconds: float) -> None:
        lengths = list(RANGES_S.values())
        if seconds in lengths:
            self.ranges.set_current(lengths.index(seconds))
        else:
            self.ranges.clear()

    def set_following(self, following: bool) -> None:
        self.live.setChecked(following)

    def _on_live(self) -> None:
        self.live.setChecked(True)
        self.live_requested.emit()
