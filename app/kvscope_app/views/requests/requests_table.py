"""The request table's widget: keys, context menu, column widths."""

from __future__ import annotations

from PySide6.QtCore import QItemSelection, QModelIndex, QPersistentModelIndex, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QAction, QColor, QGuiApplication, QPainter
from PySide6.QtWidgets import (
    QMenu,
    QStyledItemDelegate,
    QStyleOptionViewItem,
)

from kvscope_app.look.table_text import as_tsv, chosen_rows
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.requests.model import ADAPTER_COLUMN, COLUMNS, OUTPUT_COLUMN, PROGRESS_ROLE, RequestModel
from kvscope_app.views.table import SwatchDelegate, Table

_BAR_HEIGHT = 2
_MARGIN = 6


class RequestTable(Table):
    """Sortable by clicking a header; the context menu aborts and copies."""

    row_chosen = Signal()
    abort_wanted = Signal()

    def __init__(self, model: RequestModel) -> None:
        super().__init__("Requests", many=False)
        self._requests = model
        self._delegate = ProgressDelegate(self)
        self.setModel(model)
        self.setItemDelegateForColumn(OUTPUT_COLUMN, self._delegate)
        self._swatches = SwatchDelegate(self)
        self.setItemDelegateForColumn(0, self._swatches)
        self._set_up_looks()
        self._set_up_actions()
        self.selectionModel().selectionChanged.connect(self._on_selection)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of the bars."""
        self._delegate.theme = theme
        self.viewport().update()

    def show_adapters(self, has_any: bool) -> None:
        """Their column, where there are any."""
        if self.isColumnHidden(ADAPTER_COLUMN) == has_any:
            self.setColumnHidden(ADAPTER_COLUMN, not has_any)

    def height_of(self, num_rows: int) -> int:
        """With the header, and the bar below that scrolls sideways."""
        bars = self.horizontalHeader().sizeHint().height() + self.horizontalScrollBar().sizeHint().height()
        return bars + num_rows * self.verticalHeader().defaultSectionSize()

    def _set_up_looks(self) -> None:
        self.fix_row_heights(9)
        self.setSortingEnabled(True)
        self.sortByColumn(0, Qt.SortOrder.DescendingOrder)
        self.setIconSize(QSize(10, 10))
        self.fit_samples(COLUMNS)
        self.setColumnHidden(ADAPTER_COLUMN, True)

    def _set_up_actions(self) -> None:
        self.abort = QAction("Abort request", self)
        self.abort.triggered.connect(self.abort_wanted)
        self.copy_id = QAction("Copy id", self)
        self.copy_id.triggered.connect(self._copy_id)
        self.copy_row = QAction("Copy row", self)
        self.copy_row.triggered.connect(self._copy_row)
        self.copy_json = QAction("Copy as JSON", self)
        self.copy_json.triggered.connect(self._copy_json)
        self.addActions([self.abort, self.copy_id, self.copy_row, self.copy_json])
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._show_menu)

    def _show_menu(self, position: QPoint) -> None:
        row = self.indexAt(position).row()
        if row < 0:
            return
        self.abort.setEnabled(not self._requests.is_finished(row))
        menu = QMenu(self)
        menu.setToolTipsVisible(True)
        menu.addActions(self.actions())
        menu.exec(self.viewport().mapToGlobal(position))
        menu.deleteLater()
        self.abort.setEnabled(True)

    def _on_selection(self, selected: QItemSelection, _deselected: QItemSelection) -> None:
        if not selected.isEmpty():
            self.row_chosen.emit()

    def _copy_id(self) -> None:
        row = self.currentIndex().row()
        if row >= 0:
            QGuiApplication.clipboard().setText(self._requests.request_id_at(row))

    def _copy_row(self) -> None:
        if rows := chosen_rows(self):
            QGuiApplication.clipboard().setText(as_tsv(self, rows))

    def _copy_json(self) -> None:
        if text := self._requests.json_at(self.currentIndex().row()):
            QGuiApplication.clipboard().setText(text)


class ProgressDelegate(QStyledItemDelegate):
    """How the output column of the request table is painted: a small bar below the tokens.

    Text as always, and a bar as long as the share that is there.
    """

    theme: Theme = DARK

    def paint(
        self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex | QPersistentModelIndex
    ) -> None:
        super().paint(painter, option, index)
        share = index.data(PROGRESS_ROLE)
        if share is None:
            return
        box: QRect = option.rect
        width = box.width() - 2 * _MARGIN
        top = box.bottom() - _BAR_HEIGHT - 1
        painter.fillRect(box.left() + _MARGIN, top, width, _BAR_HEIGHT, QColor(self.theme.border))
        filled = round(width * min(max(share, 0.0), 1.0))
        painter.fillRect(box.left() + _MARGIN, top, filled, _BAR_HEIGHT, QColor(self.theme.accent))
