"""How much time the plots show, whether they follow what is shown, and what time the mouse is on."""

from __future__ import annotations

import math

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from kvscope_app.look.makers import tool_button
from kvscope_app.look.widgets import FittingLabel, SegmentedControl

RANGES_S = {"30 s": 30.0, "1 min": 60.0, "10 min": 600.0, "All": math.inf}
"""`All`: the whole session, as far as it is kept."""
DEFAULT_RANGE = "1 min"
_FIRST_TO_GO = (0, 2)
"""Of the ranges, where there is no room for all."""
_LONGEST_CLOCK = "00:00:00"
"""A time of day that needs as much width as any other."""


class TimeBar(QWidget):
    """Range buttons at the left, Live (in a recording Follow) and the link at the right, the time under the mouse
    between them."""

    range_chosen = Signal(float)
    """Seconds; infinite for all there is."""
    live_requested = Signal()

    def __init__(self, link: QToolButton, *, is_file: bool = False, inset: bool = True) -> None:
        """`link`: the button that links the charts' range. `is_file`: of a recording, where nothing is live. `inset`:
        with margins of its own.
        """
        super().__init__()
        self.ranges = SegmentedControl(list(RANGES_S), "Visible range")
        self.ranges.set_current(list(RANGES_S).index(DEFAULT_RANGE))
        self.ranges.chosen.connect(lambda index: self.range_chosen.emit(list(RANGES_S.values())[index]))
        self.time = FittingLabel()
        self.time.setProperty("look", "muted")
        word, what = ("Follow", "the cursor") if is_file else ("Live", "the present")
        tip = f"Follow {what}. Drag a chart, or Ctrl+wheel over it, to look back; click to go there."
        self.live = tool_button(word, tip, checkable=True, checked=True)
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
        """The least width, for narrow docks.

        With less and less room, the time under the mouse is hidden, buttons stand closer together, and two ranges are
        hidden. No text is cut.
        """
        least = self._whole_width() - sum(map(self.ranges.width_of, _FIRST_TO_GO))
        return QSize(least, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.ranges.set_close(self.width() < self._whole_width() + self.ranges.saved_width)
        whole = self._whole_width()
        room = self.width() - whole
        for index in _FIRST_TO_GO:
            self.ranges.set_shown(index, room >= 0)
            room += self.ranges.width_of(index)
        clock = self.fontMetrics().horizontalAdvance(_LONGEST_CLOCK)
        self.time.setVisible(self.width() >= whole + clock + self._row.spacing())

    def show_time(self, *lengths: str) -> None:
        """Show the time under the mouse, by the longest of these texts that fits; without texts, no time."""
        self.time.set_lengths(*lengths)

    def _whole_width(self) -> int:
        """The least width of all buttons, those that are hidden included."""
        hidden = sum(self.ranges.width_of(index) for index in _FIRST_TO_GO if not self.ranges.is_shown(index))
        margins = self._row.contentsMargins()
        ends = self.live.minimumSizeHint().width() + self._row.spacing() + self.link.minimumSizeHint().width()
        buttons = self.ranges.minimumSizeHint().width() + hidden + ends
        return margins.left() + buttons + self._row.spacing() + margins.right()

    def show_range(self, seconds: float) -> None:
        """Which of the ranges is shown; none where it is another."""
        lengths = list(RANGES_S.values())
        if seconds in lengths:
            self.ranges.set_current(lengths.index(seconds))
        else:
            self.ranges.clear()

    def set_following(self, following: bool) -> None:
        """Show whether the plots follow what is shown."""
        self.live.setChecked(following)

    def _on_live(self) -> None:
        self.live.setChecked(True)
        self.live_requested.emit()
