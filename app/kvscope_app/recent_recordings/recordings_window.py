"""The window "Recordings", which sorts, filters, opens and compares the recordings of a folder. Changes no file.

Owns its widgets and the folder's scanner. Its parent, a main window, opens and compares recordings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtGui import QDesktopServices, QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QStackedLayout, QWidget

from kvscope_app.playback.file_opening import FileOpening
from kvscope_app.recent_recordings.folder_scanner import FolderListing, FolderScanner, ListedRecording
from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_app.recent_recordings.recent_files import recording_folder
from kvscope_app.recent_recordings.recordings_table import RecordingsTable
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_folder
from kvscope_app.ui.number_text import plural
from kvscope_app.ui.sheet import Sheet
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import empty_state, label
from kvscope_telemetry.recordings.reader import Recording

NO_RECORDINGS: Final = "No recordings in this folder."
NO_MATCH: Final = "No recording matches."
_POLL_MS: Final = 80


class RecordingsWindow(Sheet):
    def __init__(self, window: SessionWindow) -> None:
        super().__init__("Recordings", window)
        self._window = window
        settings = window.themes.settings.values
        folder = settings.listed_folder or str(recording_folder(settings))
        self.folder = QLineEdit(folder)
        self.folder.setReadOnly(True)
        self.folder.setAccessibleName("Folder")
        self.filter = QLineEdit()
        self.filter.setPlaceholderText("Filter by name, model or engine")
        self.filter.setClearButtonEnabled(True)
        self.filter.setAccessibleName("Filter recordings")
        self.table = RecordingsTable()
        self.status_label = label("", "muted", wraps=True)
        self._empty = empty_state("")
        self._table_or_message = QStackedLayout()
        self.buttons: dict[str, QPushButton] = {}
        self._listing = FolderListing()
        self._scanner = FolderScanner(folder)
        self._poll_timer = QTimer(self, interval=_POLL_MS)
        self._poll_timer.timeout.connect(self._poll)
        self._poll_timer.start()
        self._lay_out()
        self._connect()
        self._show()
        self.apply_theme(window.themes.theme)
        self.resize_comfortably(1100, 540)
        self.filter.setFocus()

    @property
    def selected(self) -> list[ListedRecording]:
        return self.table.selected

    def apply_theme(self, theme: Theme) -> None:
        self.table.apply_theme(theme)

    def open_selected(self) -> None:
        for recording in self.selected:
            try_to_open(self._window, recording.path)

    def compare_selected(self) -> None:
        if len(self.selected) == 2:
            first, second = self.selected
            compare_two(self._window, first.path, second.path)

    def show_folder(self) -> None:
        QDesktopServices.openUrl(QUrl.fromLocalFile(self.folder.text()))

    def ask_other_folder(self) -> None:
        ask_folder(self, "Folder of recordings", self.list_folder, self.folder.text())

    def list_folder(self, folder: str) -> None:
        """List the recordings of `folder`, and save it for the next time the window is opened."""
        settings = self._window.themes.settings
        is_default = Path(folder) == recording_folder(settings.values)
        settings.change(listed_folder="" if is_default else folder)
        self.folder.setText(folder)
        self._scanner.close()
        self._scanner = FolderScanner(folder)
        self._poll()

    def _poll(self) -> None:
        listing = self._scanner.listing
        if listing is not self._listing:
            self._listing = listing
            self._show()

    def _show(self) -> None:
        self.table.recordings.set_recordings(self._listing.recordings)
        self.status_label.setText(_status_text(self._listing))
        self._show_table_or_message()
        self._show_buttons()

    def _filter(self, text: str) -> None:
        self.table.recordings.filter_by(text)
        self._show_table_or_message()
        self._show_buttons()

    def _show_table_or_message(self) -> None:
        listing = self._listing
        if listing.problem:
            self._empty.setText(f"The folder cannot be read: {listing.problem}")
        elif not listing.recordings:
            self._empty.setText("" if listing.is_reading else NO_RECORDINGS)
        else:
            self._empty.setText(NO_MATCH)
        self._table_or_message.setCurrentIndex(0 if self.table.recordings.rowCount() else 1)

    def _show_buttons(self) -> None:
        num_chosen = len(self.selected)
        self.buttons["open"].setEnabled(num_chosen > 0)
        self.buttons["compare"].setEnabled(num_chosen == 2)

    def _stop(self) -> None:
        self._poll_timer.stop()
        self._scanner.close()
        self._window.themes.changed.disconnect(self.apply_theme)

    def _connect(self) -> None:
        self.filter.textChanged.connect(self._filter)
        self.table.open_requested.connect(self.open_selected)
        self.table.selectionModel().selectionChanged.connect(self._show_buttons)
        self.finished.connect(self._stop)
        self._window.closing.connect(self.close)
        self._window.themes.changed.connect(self.apply_theme)
        QShortcut(QKeySequence(QKeySequence.StandardKey.Find), self, self.filter.setFocus)

    def _lay_out(self) -> None:
        folder_row = QHBoxLayout()
        folder_row.addWidget(self.folder, 1)
        folder_row.addWidget(self._button("change", "Change folder…", "List another folder", self.ask_other_folder))
        body = QWidget()
        body.setLayout(self._table_or_message)
        self._table_or_message.addWidget(self.table)
        self._table_or_message.addWidget(self._empty)
        buttons = QHBoxLayout()
        for button in (
            self._button("open", "Open", "Play each in its own window", self.open_selected),
            self._button("compare", "Compare", "Select two to compare them side by side", self.compare_selected),
            self._button("show_folder", "Show in folder", "Open the folder in the file manager", self.show_folder),
        ):
            buttons.addWidget(button)
        self.buttons["open"].setProperty("look", "primary")
        self.buttons["compare"].setVisible(self._window.openers.compare is not None)
        buttons.addWidget(self.status_label, 1)
        self.column.addLayout(folder_row)
        self.column.addWidget(self.filter)
        self.column.addWidget(body, 1)
        self.column.addLayout(buttons)

    def _button(self, name: str, text: str, tip: str, run: Callable[[], object]) -> QPushButton:
        button = QPushButton(text)
        button.setToolTip(tip)
        button.setAutoDefault(False)
        button.clicked.connect(run)
        self.buttons[name] = button
        return button


def show_recordings(window: SessionWindow) -> RecordingsWindow:
    """Show and activate the window "Recordings" of `window`, creating it on the first call."""
    recordings = window.findChild(RecordingsWindow) or RecordingsWindow(window)
    recordings.show()
    recordings.raise_()
    recordings.activateWindow()
    return recordings


def compare_two(window: SessionWindow, first: str, second: str) -> None:
    """Open both recordings, then compare them. The banner reports a failure."""

    def open_next(path: str, on_opened: Callable[[Recording], object]) -> None:
        opening = FileOpening(path, window)
        opening.opened.connect(on_opened)
        opening.failed.connect(
            lambda reason: window.banner.show_message("These recordings cannot be compared", reason, is_temporary=True)
        )
        window.closing.connect(opening.cancel)
        for end_signal in (opening.opened, opening.failed, opening.cancelled):
            end_signal.connect(opening.deleteLater)

    compare = window.openers.compare
    if compare is not None:
        open_next(first, lambda a: open_next(second, lambda b: compare(a, b, window)))


def _status_text(listing: FolderListing) -> str:
    if listing.is_reading:
        return "Reading recordings…"
    count = plural(len(listing.recordings), "recording") if listing.recordings else ""
    return f"{count}, the newest; {listing.num_left_out} older are not listed" if listing.num_left_out else count
