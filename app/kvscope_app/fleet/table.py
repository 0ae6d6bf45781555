"""The table's widths, keys and order. Knows neither engines nor the fleet."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView

from kvscope_app.fleet.columns import Column
from kvscope_app.fleet.map_picture import SIZE
from kvscope_app.fleet.model import FleetModel, FleetProxy
from kvscope_app.look.theme import Theme
from kvscope_app.look.zoom import scaled
from kvscope_telemetry.fleet.entries import FleetEntry
from kvscope_telemetry.fleet.row import FleetRow

_PADDING: Final = 14
_NARROWEST: Final = 56
_WIDTHS: Final = {
    Column.MAP: SIZE[0] + _PADDING,
    Column.STATE: 150,
    Column.ENGINE: 76,
    Column.VERSION: 90,
    Column.MODEL: 130,
    Column.USAGE: 84,
    Column.RUNNING: 76,
    Column.WAITING: 76,
    Column.FIRST_TOKEN: 92,
    Column.HIT_RATE: 76,
    Column.PREEMPTIONS: 104,
}
"""As all lengths here, at a text size of 100 %."""


class FleetTable(QTableView):
    """Sorted by a click on a heading; Enter and a double click open."""

    open_wanted = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetModel(self)
        self.proxy = FleetProxy(self)
        self.proxy.setSourceModel(self.fleet)
        self.setModel(self.proxy)
        self.setAccessibleName("Engines of the fleet")
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSortingEnabled(True)
        self.sortByColumn(Column.NAME, Qt.SortOrder.AscendingOrder)
        self.setIconSize(QSize(*SIZE))
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTabKeyNavigation(False)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.verticalHeader().hide()
        self.verticalHeader().setDefaultSectionSize(SIZE[1] + _PADDING)
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setMinimumSectionSize(scaled(_NARROWEST))
        for column, width in _WIDTHS.items():
            self.setColumnWidth(column, scaled(width))
        header.setSectionResizeMode(Column.MAP, QHeaderView.ResizeMode.Fixed)
        header.setSectionResizeMode(Column.NAME, QHeaderView.ResizeMode.Stretch)
        self.doubleClicked.connect(self.open_wanted)

    @property
    def chosen(self) -> list[FleetRow]:
        """The selected ones, as they are shown."""
        places = sorted(index.row() for index in self.selectionModel().selectedRows())
        return [self.proxy.row_at(place) for place in places]

    def show_rows(self, rows: tuple[FleetRow, ...], *, settles: bool) -> None:
        """Show these, in their new order where it `settles`; what was selected stays so."""
        chosen = {row.entry for row in self.chosen}
        self.fleet.ratio = self.devicePixelRatioF()
        self.fleet.show(rows)
        if settles:
            self.proxy.settle()
        if chosen and not self.selectionModel().hasSelection():
            self._choose(chosen)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self.fleet.theme = theme
        self.viewport().update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.open_wanted.emit()
        else:
            super().keyPressEvent(event)

    def _choose(self, entries: set[FleetEntry]) -> None:
        for place in range(self.proxy.rowCount()):
            if self.proxy.row_at(place).entry in entries:
                self.selectRow(place)
                return
