"""Processes on GPUs and in the host's memory: a table to read, sort and copy."""

from __future__ import annotations

from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QSize, QSortFilterProxyModel, Qt
from PySide6.QtGui import QColor, QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QTableView

from kvscope_app.look.number_text import NOTHING, UNKNOWN, num_bytes
from kvscope_app.look.table_text import as_tsv, chosen_rows
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.views.device.memory_parts import ProcessRow
from kvscope_app.views.device.piece_color import piece_color
from kvscope_app.views.table_head import TableHead

_HEAD: Final = TableHead(
    ("On", "PID", "Process", "Memory", "Cores"),
    (
        "The GPU, or the host's own memory",
        "Its number; on a GPU as the driver knows it, which in a container is the host's",
        "",
        "On a GPU what the driver says it has there; on the host what it has resident",
        "Processor cores that it used, 1.0: one of them all the time",
    ),
    (1, 3, 4),
)
_SORT: Final = Qt.ItemDataRole.UserRole
_MAX_HEIGHT: Final = 320
_SWATCH: Final = 10
_ANY_INDEX = QModelIndex | QPersistentModelIndex


class ProcessModel(QAbstractTableModel):
    """Rows as they were told last."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[ProcessRow] = []
        self.theme: Theme = DARK

    def show_rows(self, rows: list[ProcessRow]) -> None:
        """Tell of these from now on; who is the same stays where it is."""
        same = [(row.device, row.pid) for row in rows] == [(row.device, row.pid) for row in self._rows]
        if not same:
            self.beginResetModel()
        changed = rows != self._rows
        self._rows = rows
        if not same:
            self.endResetModel()
        elif changed and rows:
            self.dataChanged.emit(self.index(0, 2), self.index(len(rows) - 1, 4))

    def rowCount(self, parent: _ANY_INDEX = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: _ANY_INDEX = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(_HEAD)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return _HEAD.data(section, orientation, role)

    def data(self, index: _ANY_INDEX, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self._rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return _texts(row)[column]
        if role == _SORT:
            return (row.device, row.pid, row.name.lower(), row.num_bytes or -1, row.cores or -1.0)[column]
        if role == Qt.ItemDataRole.DecorationRole and column == 2:
            return QColor(piece_color(row.place, self.theme))
        return _HEAD.side(column) if role == Qt.ItemDataRole.TextAlignmentRole else None


class ProcessTable(QTableView):
    """Sorted by a click on a title; as it was told until then. As high as its rows, up to a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ProcessModel()
        self.rows.setParent(self)
        self._sorted = QSortFilterProxyModel(self)
        self._sorted.setSourceModel(self.rows)
        self._sorted.setSortRole(_SORT)
        self.setModel(self._sorted)
        self.setAccessibleName("Processes")
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setShowGrid(False)
        self.setIconSize(QSize(_SWATCH, _SWATCH))
        self.setTabKeyNavigation(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.verticalHeader().hide()
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        for column in range(len(_HEAD)):
            mode = QHeaderView.ResizeMode.Stretch if column == 2 else QHeaderView.ResizeMode.ResizeToContents
            header.setSectionResizeMode(column, mode)
        header.setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self.setSortingEnabled(True)
        self.rows.modelReset.connect(self._fit)
        self._fit()

    def apply_theme(self, theme: Theme) -> None:
        """Take its colours."""
        self.rows.theme = theme
        self.viewport().update()

    def minimumSizeHint(self) -> QSize:
        return QSize(60, 40)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            rows = chosen_rows(self) or list(range(self.model().rowCount()))
            QGuiApplication.clipboard().setText(as_tsv(self, rows))
        else:
            super().keyPressEvent(event)

    def _fit(self) -> None:
        rows = self.model().rowCount()
        height = self.horizontalHeader().sizeHint().height() + rows * self.verticalHeader().defaultSectionSize() + 4
        self.setFixedHeight(min(height, _MAX_HEIGHT))


def _texts(row: ProcessRow) -> tuple[str, ...]:
    cores = NOTHING if row.cores is None else f"{row.cores:.2f}"
    return (row.device, f"{row.pid}", row.name or UNKNOWN, num_bytes(row.num_bytes), cores)
