"""By which column, and which way: what a click on a heading says, for the keyboard."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QHeaderView, QToolButton, QWidget

from kvscope_app.fleet.columns import TITLES, Column
from kvscope_app.look.makers import label, tool_button


class OrderBox(QWidget):
    """Of the table with `header`; the two say the same."""

    def __init__(self, header: QHeaderView) -> None:
        super().__init__()
        self._header = header
        self.column = QComboBox()
        self.column.addItems([TITLES[column] for column in Column])
        self.column.setAccessibleName("Sort by")
        self.way: QToolButton = tool_button("Descending", "Turn the order round", checkable=True)
        words = label("&Sort by", "muted")
        words.setBuddy(self.column)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        for widget in (words, self.column, self.way):
            row.addWidget(widget)
        self._follow()
        header.sortIndicatorChanged.connect(self._follow)
        self.column.activated.connect(self._choose)
        self.way.clicked.connect(self._choose)

    def _choose(self) -> None:
        way = Qt.SortOrder.DescendingOrder if self.way.isChecked() else Qt.SortOrder.AscendingOrder
        self._header.setSortIndicator(self.column.currentIndex(), way)

    def _follow(self) -> None:
        self.column.setCurrentIndex(self._header.sortIndicatorSection())
        self.way.setChecked(self._header.sortIndicatorOrder() is Qt.SortOrder.DescendingOrder)
