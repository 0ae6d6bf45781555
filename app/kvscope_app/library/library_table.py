"""The table of recordings: widths, keys, pictures. Knows neither files nor the library."""

from __future__ import annotations

from PySide6.QtCore import QItemSelectionModel, Qt
from PySide6.QtWidgets import QAbstractItemView, QHeaderView

from kvscope_app.library.entry import Entry
from kvscope_app.library.file_facts import PICTURE_SIZE
from kvscope_app.library.model import COLUMNS, NOTES, PADDING, PICTURE, TAGS, WHEN, LibraryModel, LibraryProxy
from kvscope_app.look.table_text import chosen_rows
from kvscope_app.look.theme import Theme
from kvscope_app.views.table import PictureTable


class LibraryTable(PictureTable):
    """Words are edited in place: a double click there opens nothing."""

    def __init__(self) -> None:
        super().__init__("Recordings", PICTURE_SIZE, PADDING)
        self.model_of_list = LibraryModel(self)
        self.proxy = LibraryProxy(self)
        self.proxy.setSourceModel(self.model_of_list)
        self.setModel(self.proxy)
        self.setProperty("look", "roomy")
        self.setEditTriggers(QAbstractItemView.EditTrigger.DoubleClicked | QAbstractItemView.EditTrigger.EditKeyPressed)
        self.setSortingEnabled(True)
        self.sortByColumn(WHEN, Qt.SortOrder.DescendingOrder)
        self.horizontalHeader().setStretchLastSection(True)
        for place, column in enumerate(COLUMNS):
            self.setColumnWidth(place, column.width)
        self.horizontalHeader().setSectionResizeMode(PICTURE, QHeaderView.ResizeMode.Fixed)

    @property
    def chosen(self) -> list[Entry]:
        """The selected ones, as they are shown."""
        return [self.proxy.entry_at(row) for row in chosen_rows(self)]

    def show_entries(self, entries: tuple[Entry, ...]) -> None:
        """Show these; what was selected stays so, by its path."""
        chosen = {entry.path for entry in self.chosen}
        self.model_of_list.show(entries)
        if chosen and not self.selectionModel().hasSelection():
            for row in range(self.proxy.rowCount()):
                if self.proxy.entry_at(row).path in chosen:
                    flags = QItemSelectionModel.SelectionFlag
                    self.selectionModel().select(self.proxy.index(row, 0), flags.Select | flags.Rows)

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self.model_of_list.theme = theme
        self.viewport().update()

    def is_opener(self, column: int) -> bool:
        return column not in (TAGS, NOTES)
