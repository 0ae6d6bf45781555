"""The table of a page: rows that wrap, values that lead somewhere, and copying. Owns what is selected in it."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QModelIndex, QPoint, QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence, QMouseEvent, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QMenu, QTableView

from kvscope_app.look.theme import Theme
from kvscope_app.views.inspector.fact_model import FactModel
from kvscope_app.views.inspector.facts import Fact, Page, as_json, as_text

_NAME_SHARE: Final = 0.36
_NAME_MOST: Final = 190
_SHORT: Final = 22
"""Values of so few letters take one line."""
_HEADING_PAD: Final = 14
_NAME_PAD: Final = 10
"""What of the first column is not for letters."""


class FactTable(QTableView):
    """Shows a page."""

    followed = Signal(object)
    """The `Link` that was clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = FactModel()
        self.setModel(self.facts)
        self.facts.setParent(self)
        self.setAccessibleName("Facts")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setStyleSheet("QTableView { padding-left: 10px; padding-right: 4px; }")
        self.setShowGrid(False)
        self.setWordWrap(True)
        self.setMouseTracking(True)
        self.setTabKeyNavigation(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.horizontalHeader().hide()
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.horizontalHeader().setMinimumSectionSize(20)
        self.verticalHeader().hide()
        self.verticalHeader().setMinimumSectionSize(10)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._show_menu)
        self.clicked.connect(self._on_clicked)
        self.activated.connect(self._follow)
        self.facts.rows_changed.connect(self._fit_rows)
        self.facts.modelReset.connect(self._on_reset)

    def show_page(self, page: Page | None) -> None:
        """Tell this from now on."""
        self.facts.show_page(page)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self.facts.theme = theme
        self.viewport().update()

    def copy(self, *, all_rows: bool = False) -> str:
        """Put the selected rows, or all where none are, on the clipboard as tab separated lines; what that is."""
        return _put(as_text(self._chosen(all_rows=all_rows)))

    def copy_json(self) -> str:
        """The same of all rows, as a JSON object."""
        return _put(as_json(self._chosen(all_rows=True)))

    def minimumSizeHint(self) -> QSize:
        return QSize(60, 40)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._follow(self.currentIndex())
        else:
            super().keyPressEvent(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        super().mouseMoveEvent(event)
        index = self.indexAt(event.position().toPoint())
        fact = self.facts.fact_at(index.row()) if index.column() == 1 else None
        is_link = fact is not None and fact.link is not None
        self.viewport().setCursor(Qt.CursorShape.PointingHandCursor if is_link else Qt.CursorShape.ArrowCursor)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            width = self.viewport().width()
            name = min(round(width * _NAME_SHARE), _NAME_MOST)
            self.setColumnWidth(0, name)
            self.setColumnWidth(1, width - name)
            self._fit_rows(list(range(self.facts.rowCount())))

    def changeEvent(self, event: QEvent) -> None:
        """Larger text needs higher rows."""
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange and hasattr(self, "facts"):
            self._fit_rows(list(range(self.facts.rowCount())))

    def _on_reset(self) -> None:
        self.clearSpans()
        for row in self.facts.headings:
            self.setSpan(row, 0, 1, 2)
        self._fit_rows(list(range(self.facts.rowCount())))

    def _fit_rows(self, rows: list[int]) -> None:
        metrics, line = self.fontMetrics(), self.fontMetrics().height()
        room, room_beside = self.columnWidth(0) - _NAME_PAD, self.columnWidth(1) - _NAME_PAD
        for row in rows:
            fact = self.facts.fact_at(row)
            if fact is None:
                self.setRowHeight(row, line + _HEADING_PAD)
            elif (
                len(fact.value) <= _SHORT  # what is longer is not even measured
                and metrics.horizontalAdvance(fact.value) <= room_beside
                and metrics.horizontalAdvance(fact.name) <= room
                and "\n" not in fact.value
            ):
                self.setRowHeight(row, line + 6)
            else:
                self.setRowHeight(row, max(self.sizeHintForRow(row), line + 6))

    def _on_clicked(self, index: QModelIndex) -> None:
        if index.column() == 1 and not QGuiApplication.keyboardModifiers():
            self._follow(index)

    def _follow(self, index: QModelIndex) -> None:
        fact = self.facts.fact_at(index.row())
        if fact is not None and fact.link is not None:
            self.followed.emit(fact.link)

    def _chosen(self, *, all_rows: bool) -> list[Fact]:
        rows = sorted({index.row() for index in self.selectedIndexes()})
        wanted = range(self.facts.rowCount()) if all_rows or not rows else rows
        return [fact for row in wanted if (fact := self.facts.fact_at(row)) is not None]

    def _show_menu(self, position: QPoint) -> None:
        menu = QMenu(self)
        menu.addAction("Copy", self.copy)
        menu.addAction("Copy all", lambda: self.copy(all_rows=True))
        menu.addAction("Copy all as JSON", self.copy_json)
        menu.exec(self.viewport().mapToGlobal(position))
        menu.deleteLater()


def _put(text: str) -> str:
    if text:
        QGuiApplication.clipboard().setText(text)
    return text
