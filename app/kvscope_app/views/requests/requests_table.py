"""Widget of the request table: selection, context menu, column widths and the progress bars."""

from __future__ import annotations

from functools import partial
from typing import Final

from PySide6.QtCore import QItemSelection, QModelIndex, QPersistentModelIndex, QPoint, QRect, QSize, Qt, Signal
from PySide6.QtGui import QAction, QColor, QGuiApplication, QMouseEvent, QPainter
from PySide6.QtWidgets import (
    QMenu,
    QStyledItemDelegate,
    QStyleOptionViewItem,
)

from kvscope_app.ui.table_text import as_tsv, selected_rows
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.requests.request_model import (
    ADAPTER_COLUMN,
    CLIENT_COLUMN,
    COLUMNS,
    OUTPUT_COLUMN,
    PROGRESS_ROLE,
    RequestModel,
)
from kvscope_app.views.table import RowTable, SwatchDelegate

MOMENTS: Final = {
    "arrival_ns": "arrival",
    "started_ns": "start",
    "first_token_ns": "first token",
    "ended_ns": "end",
}
"""Names of the points in time of a request's life, by field of `RequestWallTimes`."""
_BAR_HEIGHT = 2
_MARGIN = 6


class RequestTable(RowTable):
    """Table of requests, sortable by its headers. Its context menu can move the cursor to a point in time of a request,
    abort the request or copy it.
    """

    row_chosen = Signal()
    abort_requested = Signal()
    client_requested = Signal()
    moment_requested = Signal(str)
    """Emitted with a key of `MOMENTS` when the user asks to move the cursor to that time of the current row's request.
    """

    def __init__(self, model: RequestModel) -> None:
        super().__init__("Requests", is_multi_select=True)
        self._requests = model
        self._delegate = ProgressDelegate(self)
        self.setModel(model)
        self.setItemDelegateForColumn(OUTPUT_COLUMN, self._delegate)
        self._swatches = SwatchDelegate(self)
        self.setItemDelegateForColumn(0, self._swatches)
        self._set_up_appearance()
        self._set_up_actions()
        self.selectionModel().selectionChanged.connect(self._on_selection)

    def apply_theme(self, theme: Theme) -> None:
        self._delegate.theme = theme
        self.viewport().update()

    def show_columns_in_use(self) -> None:
        for column, is_used in (
            (ADAPTER_COLUMN, self._requests.has_adapters),
            (CLIENT_COLUMN, self._requests.has_clients),
        ):
            if self.isColumnHidden(column) == is_used:
                self.setColumnHidden(column, not is_used)

    def height_of(self, num_rows: int) -> int:
        """Return the height in pixels of a table with `num_rows` rows, including header and horizontal scroll bar."""
        bars = self.horizontalHeader().sizeHint().height() + self.horizontalScrollBar().sizeHint().height()
        return bars + num_rows * self.verticalHeader().defaultSectionSize()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        row = self.indexAt(event.position().toPoint()).row()
        is_reclick = self.selectionModel().isRowSelected(row) and event.button() is Qt.MouseButton.LeftButton
        super().mousePressEvent(event)
        # the selection did not change, so Qt emitted no signal
        if is_reclick and self.selectionModel().isRowSelected(row):
            self.row_chosen.emit()

    def _set_up_appearance(self) -> None:
        self.fix_row_heights(9)
        self.setSortingEnabled(True)
        self.sortByColumn(0, Qt.SortOrder.DescendingOrder)
        self.setIconSize(QSize(scaled(10), scaled(10)))
        self.fit_samples(COLUMNS)
        self.show_columns_in_use()

    def _set_up_actions(self) -> None:
        self.abort = QAction("Abort request", self)
        self.abort.triggered.connect(self.abort_requested)
        self.moments = [QAction(f"Go to its {text}", self) for text in MOMENTS.values()]
        for action, name in zip(self.moments, MOMENTS, strict=True):
            action.triggered.connect(partial(self.moment_requested.emit, name))
        self.one_client = QAction("Show only its client", self)
        self.one_client.triggered.connect(self.client_requested)
        separator = QAction(self)
        separator.setSeparator(True)
        self.copy_id = QAction("Copy id", self)
        self.copy_id.triggered.connect(self._copy_id)
        self.copy_row = QAction("Copy rows", self)
        self.copy_row.triggered.connect(self._copy_row)
        self.copy_json = QAction("Copy as JSON", self)
        self.copy_json.triggered.connect(self._copy_json)
        self.addActions([*self.moments, self.one_client, separator])
        self.addActions([self.abort, self.copy_id, self.copy_row, self.copy_json])
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._show_menu)

    def _show_menu(self, position: QPoint) -> None:
        row = self.indexAt(position).row()
        if row < 0:
            return
        self.abort.setEnabled(self._requests.is_active(row))
        self.one_client.setVisible(self._requests.has_clients and self._requests.client_at(row) > 0)
        menu = QMenu(self)
        menu.setToolTipsVisible(True)
        menu.addActions(self.actions())
        menu.exec(self.viewport().mapToGlobal(position))
        menu.deleteLater()
        self.abort.setEnabled(True)

    def _on_selection(self, _selected: QItemSelection, _deselected: QItemSelection) -> None:
        if self.selectionModel().hasSelection():
            self.row_chosen.emit()

    def _copy_id(self) -> None:
        row = self.currentIndex().row()
        if row >= 0:
            QGuiApplication.clipboard().setText(self._requests.request_id_at(row))

    def _copy_row(self) -> None:
        if rows := selected_rows(self):
            QGuiApplication.clipboard().setText(as_tsv(self, rows))

    def _copy_json(self) -> None:
        if text := self._requests.json_at(self.currentIndex().row()):
            QGuiApplication.clipboard().setText(text)


class ProgressDelegate(QStyledItemDelegate):
    """Paints the output column: its text above a progress bar of the share of `max_tokens` generated so far."""

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
