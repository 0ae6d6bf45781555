"""Table of recordings, with its column widths and selection."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QAbstractItemView

from kvscope_app.recent_recordings.folder_scanner import ListedRecording
from kvscope_app.recent_recordings.recordings_model import COLUMNS, RECORDED, RecordingsModel
from kvscope_app.ui.table_text import selected_rows
from kvscope_app.ui.theme import Theme
from kvscope_app.views.table import OpenableTable

_ROW_PADDING = 10


class RecordingsTable(OpenableTable):
    """Table of recordings, newest first until the user sorts by another column."""

    def __init__(self) -> None:
        super().__init__("Recordings")
        self.recordings = RecordingsModel(self)
        self.setModel(self.recordings)
        self.setProperty("look", "roomy")
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSortingEnabled(True)
        self.sortByColumn(RECORDED, Qt.SortOrder.DescendingOrder)
        self.horizontalHeader().setStretchLastSection(True)
        self.fit_samples(COLUMNS)
        self.fix_row_heights(_ROW_PADDING)

    @property
    def selected(self) -> list[ListedRecording]:
        return [self.recordings.shown[row] for row in selected_rows(self)]

    def apply_theme(self, theme: Theme) -> None:
        self.recordings.theme = theme
        self.viewport().update()
