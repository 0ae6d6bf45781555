"""The fleet as a table: a row an engine, and its order. Knows no engine."""

from __future__ import annotations

from typing import Any, Final

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QObject, QPersistentModelIndex, QSortFilterProxyModel, Qt
from PySide6.QtGui import QColor, QPixmap

from kvscope_app.fleet.columns import NUMBERS, TIPS, TITLES, Column, sort_key, text_of, tip_of, words_of
from kvscope_app.fleet.map_picture import map_pixmap
from kvscope_app.look.number_text import NOTHING
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.session.state_words import STATE_COLORS
from kvscope_app.views.table_head import TableHead
from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.fleet.pool_bins import PoolBins
from kvscope_telemetry.fleet.row import FleetRow

Index = QModelIndex | QPersistentModelIndex
_ROOT: Final = QModelIndex()
_HEAD: Final = TableHead([TITLES[column] for column in Column], [TIPS.get(column, "") for column in Column], NUMBERS)


class FleetModel(QAbstractTableModel):
    """In the order of the list."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.rows: tuple[FleetRow, ...] = ()
        self.theme: Theme = DARK
        self.ratio = 1.0
        """Pixels a point of the screen it is on."""
        self._pictures: dict[FleetEntry, tuple[PoolBins, Theme, float, QPixmap]] = {}

    def show(self, rows: tuple[FleetRow, ...]) -> None:
        """Show these; where they are the same engines in the same order, what is selected stays."""
        before = [row.entry for row in self.rows]
        if [row.entry for row in rows] != before:
            self.beginResetModel()
            self.rows = rows
            self.endResetModel()
            self._pictures.clear()
            return
        self.rows = rows
        if rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(rows) - 1, len(Column) - 1))

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(Column)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        return _HEAD.data(section, orientation, role)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], Column(index.column())
        if role == Qt.ItemDataRole.DisplayRole:
            return text_of(row, column)
        if role == Qt.ItemDataRole.DecorationRole and column is Column.MAP:
            return self._picture(row)
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip(tip_of(row))
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _HEAD.side(column)
        if role == Qt.ItemDataRole.ForegroundRole:
            return self._ink(row, column)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{TITLES[column]}: {text_of(row, column)}"
        return None

    def _ink(self, row: FleetRow, column: Column) -> QColor | None:
        if column is Column.STATE:
            return self.theme.color(STATE_COLORS[row.state])
        return self.theme.color("muted") if text_of(row, column) == NOTHING else None

    def _picture(self, row: FleetRow) -> QPixmap | None:
        if row.bins is None:
            return None
        kept = self._pictures.get(row.entry)
        if kept is None or kept[0] is not row.bins or kept[1:3] != (self.theme, self.ratio):
            kept = (row.bins, self.theme, self.ratio, map_pixmap(row.bins, self.theme, self.ratio))
            self._pictures[row.entry] = kept
        return kept[3]


class FleetProxy(QSortFilterProxyModel):
    """Those that have every word that is searched for. Unknown comes last, whichever way is sorted.

    Rows move when `settle` is called, not with every number.
    """

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._words: tuple[str, ...] = ()
        self.setDynamicSortFilter(False)

    def search(self, text: str) -> None:
        """Show only what has all words of `text` somewhere."""
        self._words = tuple(text.casefold().split())
        self.settle()

    def settle(self) -> None:
        """Look anew at what is shown, and in which order."""
        self.invalidate()
        self.sort(self.sortColumn(), self.sortOrder())

    def row_at(self, place: int) -> FleetRow:
        """The one in a row as it is shown."""
        return self._rows[self.mapToSource(self.index(place, 0)).row()]

    def filterAcceptsRow(self, source_row: int, source_parent: Index) -> bool:
        if not self._words:
            return True
        words = words_of(self._rows[source_row])
        return all(word in words for word in self._words)

    def lessThan(self, source_left: Index, source_right: Index) -> bool:
        column = Column(source_left.column())
        left, right = (sort_key(self._rows[index.row()], column) for index in (source_left, source_right))
        if left is None or right is None:
            is_up = self.sortOrder() is Qt.SortOrder.AscendingOrder
            return (left is not None) == is_up and (left is None) != (right is None)
        return left < right

    @property
    def _rows(self) -> tuple[FleetRow, ...]:
        model = self.sourceModel()
        assert isinstance(model, FleetModel), "it sorts nothing else"
        return model.rows
