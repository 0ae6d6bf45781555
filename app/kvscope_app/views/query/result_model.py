"""Table model of a query result, sorted by a click on a column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.views.table import TableHead
from kvscope_telemetry.exports.query.result_formats import cell_text, is_number
from kvscope_telemetry.printable import printable

if TYPE_CHECKING:
    from kvscope_telemetry.exports.query.recording_database import QueryResult

Index = QModelIndex | QPersistentModelIndex
_ROOT: Final = QModelIndex()


class ResultModel(QAbstractTableModel):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._head = TableHead(())
        self._rows: list[tuple[Any, ...]] = []

    def show_result(self, result: QueryResult) -> None:
        self.beginResetModel()
        numbers = {index for index, name in enumerate(result.types) if is_number(name)}
        titles = [printable(name) for name in result.names]
        self._head, self._rows = TableHead(titles, result.types, numbers), list(result.rows)
        self.endResetModel()

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self._head)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return self._head.data(section, orientation, role)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return self._head.side(index.column())
        if role not in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            return None
        text = printable(cell_text(self._rows[index.row()][index.column()]))
        return plain_tip(text) if role == Qt.ItemDataRole.ToolTipRole else text

    def value(self, row: int, name: str) -> Any:
        """Return the value of the column `name` in a row; None if there is no such column."""
        titles = list(self._head.titles)
        return self._rows[row][titles.index(name)] if name in titles else None

    def sort(self, column: int, order: Qt.SortOrder = Qt.SortOrder.AscendingOrder) -> None:
        """Sort by a column. Unknown values come last in both orders."""
        if not 0 <= column < len(self._head):
            return
        self.layoutAboutToBeChanged.emit()
        values = [row[column] for row in self._rows]
        known = [index for index, value in enumerate(values) if value is not None]
        is_descending = order == Qt.SortOrder.DescendingOrder
        try:
            known.sort(key=values.__getitem__, reverse=is_descending)
        except TypeError:  # maps and structs have no order
            known.sort(key=lambda index: str(values[index]), reverse=is_descending)
        old_indexes = [*known, *(index for index, value in enumerate(values) if value is None)]
        new_indexes = {old: new for new, old in enumerate(old_indexes)}
        self._rows = [self._rows[index] for index in old_indexes]
        before = self.persistentIndexList()  # of the selection
        after = [self.index(new_indexes[index.row()], index.column()) for index in before]
        self.changePersistentIndexList(before, after)
        self.layoutChanged.emit()
