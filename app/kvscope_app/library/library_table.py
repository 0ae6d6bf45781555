"""The table of recordings: widths, keys, pictures. Knows neither files nor the library."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView

from kvscope_app.library.entry import Entry
from kvscope_app.library.file_facts import PICTURE_SIZE
from kvscope_app.library.model import Column, LibraryModel, LibraryProxy
from kvscope_app.look.theme import Theme

_PADDING: Final = 12
_WIDTHS: Final = {
    Column.PICTURE: PICTURE_SIZE[0] + _PADDING,
    Column.NAME: 165,
    Column.MODEL: 140,
    Column.WHEN: 138,
    Column.LENGTH: 70,
    Column.SIZE: 78,
    Column.PEAK: 70,
    Column.PREEMPTIONS: 80,
    Column.REQUESTS: 74,
    Column.TAGS: 96,
}


class LibraryTable(QTableView):
    """Sorted by a click on a heading; Enter and a double click open, but where words are edited."""

    open_wanted = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.model_of_list = LibraryModel(self)
        self.proxy = LibraryProxy(self)
        self.proxy.setSourceModel(self.model_of_list)
        self.setModel(self.proxy)
        self.setProperty("look", "roomy")
        self.setAccessibleName("Recordings")
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.DoubleClicked | QAbstractItemView.EditTrigger.EditKeyPressed)
        self.setSortingEnabled(True)
        self.sortByColumn(Column.WHEN, Qt.SortOrder.DescendingOrder)
        self.setIconSize(QSize(*PICTURE_SIZE))
        self.setShowGrid(False)
        self.setWordWrap(False)
        self.setTabKeyNavigation(False)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.verticalHeader().hide()
        self.verticalHeader().setDefaultSectionSize(PICTURE_SIZE[1] + _PADDING)
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setStretchLastSection(True)
        for column, width in _WIDTHS.items():
            self.setColumnWidth(column, width)
        header.setSectionResizeMode(Column.PICTURE, QHeaderView.ResizeMode.Fixed)
        self.doubleClicked.connect(self._double_clicked)

    @property
    def chosen(self) -> list[Entry]:
        """The selected ones, as they are shown."""
        rows = sorted(index.row() for index in self.selectionModel().selectedRows())
        return [self.proxy.entry_at(row) for row in rows]

    def show_entries(self, entries: tuple[Entry, ...]) -> None:
        """Show these; what was selected stays so, by its path."""
        chosen = {entry.path for entry in self.chosen}
        self.model_of_list.show(entries)
        if chosen and not self.selectionModel().hasSelection():
            for row in range(self.proxy.rowCount()):
                if self.proxy.entry_at(row).path in chosen:
                    self.selectRow(row)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self.model_of_list.theme = theme
        self.viewport().update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and self.state() is not QAbstractItemView.State.EditingState:
            self.open_wanted.emit()
        else:
            super().keyPressEvent(event)

    def _double_clicked(self) -> None:
        if self.currentIndex().column() not in (Column.TAGS, Column.NOTES):
            self.open_wanted.emit()
