"""Card over the timeline with the statistics of the measured range."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QGridLayout, QHBoxLayout, QVBoxLayout, QWidget

from kvscope_app.ui.widget_factories import label, number_label, tool_button
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.timeline.measured_range import MeasuredRange

_MARGIN: Final = 8
_MIN_WIDTH_FOR_TWO_COLUMNS: Final = 640
"""Minimum width of the parent, in pixels, for showing the statistics in two columns. Two columns need less
height than one.
"""


class RangeCard(QFrame):
    closed = Signal()
    chosen = Signal(object)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setProperty("look", "tip")
        self.setCursor(Qt.CursorShape.ArrowCursor)
        self.setAccessibleName("Measured range")
        self.measured: MeasuredRange | None = None
        self._title = label("", "heading")
        self._grid = QGridLayout()
        self._delayed = QHBoxLayout()
        self.copy_button = tool_button("Copy", "Copy as text")
        self.close_button = tool_button("Close", "Close (Esc)")
        for button in (self.copy_button, self.close_button):
            button.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # the timeline keeps the keyboard focus
        self._lay_out()
        self.copy_button.clicked.connect(self.copy)
        self.close_button.clicked.connect(self.closed)
        self.hide()

    def show_measured(self, measured: MeasuredRange) -> None:
        self.measured = measured
        self._title.setText(measured.title)
        self.setToolTip(measured.note)
        _clear(self._grid)
        _clear(self._delayed)
        parent = self.parentWidget()
        num_columns = 2 if parent is not None and parent.width() >= scaled(_MIN_WIDTH_FOR_TWO_COLUMNS) else 1
        num_rows = -(-len(measured.rows) // num_columns)
        for index, (name, value) in enumerate(measured.rows):
            column, row = divmod(index, num_rows)
            self._grid.addWidget(label(name, "muted"), row, 2 * column)
            self._grid.addWidget(number_label(value), row, 2 * column + 1)
        if measured.delayed:
            self._delayed.addWidget(label("Most delayed", "muted"))
        for delayed in measured.delayed:
            button = tool_button(delayed.text, f"Go to request #{delayed.number} where its delay begins")
            button.setFocusPolicy(Qt.FocusPolicy.NoFocus)
            button.clicked.connect(lambda _=False, request=delayed: self.chosen.emit(request))
            self._delayed.addWidget(button)
        self._delayed.addStretch()
        self.show()
        self.move_to_corner()

    def move_to_corner(self) -> None:
        """Move to the parent's lower right corner, so that the upper lanes stay visible."""
        parent = self.parentWidget()
        if parent is None:
            return
        self.adjustSize()
        x, y = parent.width() - self.width() - _MARGIN, parent.height() - self.height() - _MARGIN
        self.move(max(x, 0), max(y, 0))
        self.raise_()

    def copy(self) -> None:
        if self.measured is not None:
            QGuiApplication.clipboard().setText(self.measured.text)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.addWidget(self._title, 1)
        head.addWidget(self.copy_button)
        head.addWidget(self.close_button)
        self._grid.setHorizontalSpacing(16)
        self._grid.setVerticalSpacing(2)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 8)
        column.setSpacing(4)
        column.addLayout(head)
        column.addLayout(self._grid)
        column.addLayout(self._delayed)


def _clear(layout: QGridLayout | QHBoxLayout) -> None:
    while (item := layout.takeAt(0)) is not None:
        widget = item.widget()
        if widget is not None:
            widget.hide()
            widget.deleteLater()
