"""Table of an inspector page, with wrapping rows, links and copying. Owns the selection in it."""

from __future__ import annotations

from typing import Any, Final

from PySide6.QtCore import (
    QAbstractTableModel,
    QEvent,
    QItemSelectionModel,
    QModelIndex,
    QPersistentModelIndex,
    QPoint,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QFont, QGuiApplication, QKeyEvent, QKeySequence, QMouseEvent, QResizeEvent
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QMenu, QTableView

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.inspector.facts import Fact, FactGroup, FactsPage, as_json, as_text

Index = QModelIndex | QPersistentModelIndex
_ROLES: Final = Qt.ItemDataRole
_ALIGN_TOP: Final = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop
_NAME_SHARE: Final = 0.36
_MAX_NAME_WIDTH: Final = 190
_MAX_SHORT_LENGTH: Final = 22
"""Maximum number of characters of a value that is measured to see if it fits on one line."""
_HEADING_PAD: Final = 14
_CELL_PAD: Final = 10


class FactTable(QTableView):
    followed = Signal(object)

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
        self.activated.connect(self._open_link)
        self.facts.rows_changed.connect(self._fit_rows)
        self.facts.modelReset.connect(self._on_reset)
        self.facts.modelAboutToBeReset.connect(self._remember_selected)
        self._selected_name = ""

    def show_page(self, page: FactsPage | None) -> None:
        self.facts.show_page(page)

    def apply_theme(self, theme: Theme) -> None:
        self.facts.theme = theme
        self.viewport().update()

    def copy(self, *, all_rows: bool = False) -> str:
        """Copy the selected rows, or all if none is selected, as tab-separated lines. Returns the text."""
        return _set_clipboard(as_text(self._selected_facts(all_rows=all_rows)))

    def copy_json(self) -> str:
        return _set_clipboard(as_json(self._selected_facts(all_rows=True)))

    def minimumSizeHint(self) -> QSize:
        return QSize(60, 40)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy()
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self._open_link(self.currentIndex())
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
            name = min(round(width * _NAME_SHARE), _MAX_NAME_WIDTH)
            self.setColumnWidth(0, name)
            self.setColumnWidth(1, width - name)
            self._fit_rows(list(range(self.facts.rowCount())))

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() is QEvent.Type.FontChange and hasattr(self, "facts"):
            self._fit_rows(list(range(self.facts.rowCount())))

    def _remember_selected(self) -> None:
        rows = {index.row() for index in self.selectedIndexes()}
        fact = self.facts.fact_at(rows.pop()) if len(rows) == 1 else None
        self._selected_name = "" if fact is None else fact.name

    def _on_reset(self) -> None:
        self.clearSpans()
        facts = [(row, self.facts.fact_at(row)) for row in range(self.facts.rowCount())] if self._selected_name else []
        selected = next((row for row, fact in facts if fact is not None and fact.name == self._selected_name), None)
        if selected is not None:  # regardless of keyboard modifiers held meanwhile
            flags = QItemSelectionModel.SelectionFlag
            self.selectionModel().select(self.facts.index(selected, 0), flags.ClearAndSelect | flags.Rows)
        for row in self.facts.headings:
            self.setSpan(row, 0, 1, 2)
        self._fit_rows(list(range(self.facts.rowCount())))

    def _fit_rows(self, rows: list[int]) -> None:
        metrics, line_height = self.fontMetrics(), self.fontMetrics().height()
        name_width, value_width = self.columnWidth(0) - _CELL_PAD, self.columnWidth(1) - _CELL_PAD
        for row in rows:
            fact = self.facts.fact_at(row)
            if fact is None:
                self.setRowHeight(row, line_height + _HEADING_PAD)
            elif (
                len(fact.value) <= _MAX_SHORT_LENGTH  # longer values are not measured
                and metrics.horizontalAdvance(fact.value) <= value_width
                and metrics.horizontalAdvance(fact.name) <= name_width
                and "\n" not in fact.value
            ):
                self.setRowHeight(row, line_height + 6)
            else:
                self.setRowHeight(row, max(self.sizeHintForRow(row), line_height + 6))

    def _on_clicked(self, index: QModelIndex) -> None:
        if index.column() == 1 and not QGuiApplication.keyboardModifiers():
            self._open_link(index)

    def _open_link(self, index: QModelIndex) -> None:
        fact = self.facts.fact_at(index.row())
        if fact is not None and fact.link is not None:
            self.followed.emit(fact.link)

    def _selected_facts(self, *, all_rows: bool) -> list[Fact]:
        rows = sorted({index.row() for index in self.selectedIndexes()})
        shown_rows = range(self.facts.rowCount()) if all_rows or not rows else rows
        return [fact for row in shown_rows if (fact := self.facts.fact_at(row)) is not None]

    def _show_menu(self, position: QPoint) -> None:
        menu = QMenu(self)
        menu.addAction("Copy", self.copy)
        menu.addAction("Copy all", lambda: self.copy(all_rows=True))
        menu.addAction("Copy all as JSON", self.copy_json)
        menu.exec(self.viewport().mapToGlobal(position))
        menu.deleteLater()


def _set_clipboard(text: str) -> str:
    if text:
        QGuiApplication.clipboard().setText(text)
    return text


class FactModel(QAbstractTableModel):
    """Item model of a page: one row per heading and per fact, with columns for name and value.

    If only values change, rows are updated in place.
    """

    rows_changed = Signal(list)

    def __init__(self) -> None:
        super().__init__()
        self.theme: Theme = DARK
        self._rows: list[Fact | FactGroup] = []

    def show_page(self, page: FactsPage | None) -> None:
        rows: list[Fact | FactGroup] = []
        for group in () if page is None else page.groups:
            rows += [group, *group.facts]
        if [_row_key(row) for row in rows] != [_row_key(row) for row in self._rows]:
            self.beginResetModel()
            self._rows = rows
            self.endResetModel()
            return
        changed = [index for index, row in enumerate(rows) if row != self._rows[index] and isinstance(row, Fact)]
        self._rows = rows
        for index in changed:
            self.dataChanged.emit(self.index(index, 0), self.index(index, 1))
        if changed:
            self.rows_changed.emit(changed)

    @property
    def headings(self) -> list[int]:
        return [index for index, row in enumerate(self._rows) if isinstance(row, FactGroup)]

    def fact_at(self, row: int) -> Fact | None:
        """Return the fact in a row, or None for a heading or a row beyond the end."""
        item = self._rows[row] if 0 <= row < len(self._rows) else None
        return item if isinstance(item, Fact) else None

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 2

    def flags(self, index: Index) -> Qt.ItemFlag:
        is_fact = self.fact_at(index.row()) is not None
        return Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable if is_fact else Qt.ItemFlag.NoItemFlags

    def data(self, index: Index, role: int = _ROLES.DisplayRole) -> Any:
        row = self._rows[index.row()] if index.row() < len(self._rows) else None
        if isinstance(row, FactGroup):
            return self._heading(row, role) if index.column() == 0 else None
        if not isinstance(row, Fact):
            return None
        if role == _ROLES.DisplayRole:
            return row.name if index.column() == 0 else row.value
        if role == _ROLES.ForegroundRole:
            name = "muted" if index.column() == 0 else "accent" if row.link is not None else "text"
            return self.theme.color(name)
        if role == _ROLES.ToolTipRole:
            return plain_tip(row.tip) if row.tip else None
        return _ALIGN_TOP if role == _ROLES.TextAlignmentRole else None

    def _heading(self, group: FactGroup, role: int) -> Any:
        if role == _ROLES.DisplayRole:
            return group.title
        if role == _ROLES.FontRole:
            return sans(weight=QFont.Weight.DemiBold)
        if role == _ROLES.ForegroundRole:
            return self.theme.color("text")
        return Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter if role == _ROLES.TextAlignmentRole else None


def _row_key(row: Fact | FactGroup) -> str:
    return row.name if isinstance(row, Fact) else f"\0{row.title}"
