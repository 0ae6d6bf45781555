"""The sheet "Recordings": everything that kvscope recorded or opened, to search, open, write about and clean up.

Owns its widgets and what was removed last. What is listed is the library's; opening is the window's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QUrl
from PySide6.QtGui import QDesktopServices, QKeySequence, QShortcut
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QStackedLayout, QWidget

from kvscope_app.library.entry import Entry
from kvscope_app.library.library import Library
from kvscope_app.library.library_table import LibraryTable
from kvscope_app.library.model import TAGS
from kvscope_app.look.file_dialogs import ask_open
from kvscope_app.look.makers import empty_state, label
from kvscope_app.look.number_text import plural
from kvscope_app.look.theme import Theme
from kvscope_app.window.file_opening import FileOpening
from kvscope_app.window.open_file import ask_file, try_to_open
from kvscope_app.window.sheets.help_sheets import Sheet
from kvscope_app.window.window_body import WindowBody
from kvscope_telemetry.recorded import Recorded
from kvscope_telemetry.recordings.sample import HYBRID_TEXT, SAMPLE_TEXT, hybrid_recording, sample_recording

NOTHING_YET: Final = "No recordings yet. Everything you record or open is listed here."
NOTHING_FOUND: Final = "No recording matches."
_FILES: Final = "Recordings (*.mcap *.mcap.part);;All files (*)"
Compare = Callable[[Path, Path], object]


class RecordingsSheet(Sheet):
    """Of one window. `compare` is given two files where comparing is offered."""

    def __init__(self, window: WindowBody, library: Library, compare: Compare | None = None) -> None:
        super().__init__("Recordings", window)
        self._window, self._library, self._compare = window, library, compare
        self._removed: list[str] = []
        self.search = QLineEdit()
        self.search.setPlaceholderText("Search names, models, tags and notes")
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName("Search recordings")
        self.table = LibraryTable()
        self.status_label = label("", "muted", wraps=True)
        self._empty = empty_state(NOTHING_YET)
        self._middle = QStackedLayout()
        self.undo = QPushButton("Undo")
        self.buttons: dict[str, QPushButton] = {}
        self._lay_out()
        self._connect()
        library.watch()
        self._show()
        self.apply_theme(window.themes.theme)
        self.resize_comfortably(1200, 540)
        self.search.setFocus()

    def apply_theme(self, theme: Theme) -> None:
        """Take the colours of `theme`."""
        self.table.apply_theme(theme)

    @property
    def chosen(self) -> list[Entry]:
        """The selected ones, as they are shown."""
        return self.table.chosen

    # What a person does

    def open_chosen(self) -> None:
        """Open each selected recording in a window of its own."""
        for entry in self.chosen:
            if not entry.is_missing:
                try_to_open(self._window, entry.open_path)

    def compare_chosen(self) -> None:
        """Compare the two selected recordings."""
        if self._compare is not None and len(self.chosen) == 2:
            first, second = (Path(entry.open_path) for entry in self.chosen)
            self._compare(first, second)

    def reveal_chosen(self) -> None:
        """Show the folder of the first selected recording."""
        for entry in self.chosen[:1]:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(Path(entry.path).parent)))

    def find_chosen(self) -> None:
        """Ask where the missing recording is now."""
        entry = self.chosen[0]
        ask_open(
            self,
            f"Where is {entry.name} now?",
            "",
            _FILES,
            lambda path: self._library.relocate(entry.path, Path(path)),
        )

    def remove_chosen(self) -> None:
        """Take them off the list; the files stay."""
        self._removed = [entry.path for entry in self.chosen]
        if self._removed:
            self._library.remove(self._removed)
            self.status_label.setText(
                f"{plural(len(self._removed), 'recording')} removed from the list; the files were not deleted."
            )
            self.undo.show()
            self.table.setFocus()  # and not the button that comes next

    def undo_remove(self) -> None:
        """List again what was removed last."""
        self._library.restore(self._removed)
        self._removed = []
        self.undo.hide()
        self.status_label.setText("")

    # private

    def _let_go(self) -> None:
        """It goes, or its window does."""
        self._library.changed.disconnect(self._show)
        self._library.failed.disconnect(self._tell)
        self._window.themes.changed.disconnect(self.apply_theme)
        self._library.unwatch()

    def _tell(self, text: str) -> None:
        self.status_label.setText(text)

    def _show(self) -> None:
        status = self._library.status
        self.table.show_entries(status.entries)
        if not self._removed:
            looking = "Reading recordings…" if status.is_looking else ""
            self.status_label.setText(status.trouble or looking)
        self._show_middle()
        self._show_buttons()

    def _search(self, text: str) -> None:
        self.table.proxy.search(text)
        self._show_middle()
        self._show_buttons()

    def _show_middle(self) -> None:
        has_any = bool(self._library.status.entries)
        self._empty.setText(NOTHING_FOUND if has_any else NOTHING_YET)
        self._middle.setCurrentIndex(0 if self.table.proxy.rowCount() else 1)

    def _show_buttons(self) -> None:
        chosen = self.chosen
        there = [entry for entry in chosen if not entry.is_missing]
        wanted = {
            "open": bool(there),
            "compare": len(there) == 2 == len(chosen),
            "reveal": len(chosen) == 1,
            "find": len(chosen) == 1 and not there,
            "remove": bool(chosen),
        }
        for name, enabled in wanted.items():
            self.buttons[name].setEnabled(enabled)
        self.buttons["find"].setVisible(any(entry.is_missing for entry in self._library.status.entries))

    def _edited(self, path: str, column: int, words: str) -> None:
        (self._library.set_tags if column == TAGS else self._library.set_notes)(path, words)

    def _connect(self) -> None:
        self.search.textChanged.connect(self._search)
        self.table.model_of_list.edited = self._edited
        self.table.open_wanted.connect(self.open_chosen)
        self.table.selectionModel().selectionChanged.connect(self._show_buttons)
        self._library.changed.connect(self._show)
        self._library.failed.connect(self._tell)
        self.finished.connect(self._let_go)
        self._window.closing.connect(self.close)
        self._window.themes.changed.connect(self.apply_theme)
        self.undo.clicked.connect(self.undo_remove)
        keys = (
            (QKeySequence.StandardKey.Find, self.search.setFocus),
            (QKeySequence.StandardKey.Undo, self._undo_key),
            (QKeySequence.StandardKey.Delete, self._delete_key),
        )
        for key, run in keys:
            QShortcut(QKeySequence(key), self, run)

    def _undo_key(self) -> None:
        if self._removed:
            self.undo_remove()

    def _delete_key(self) -> None:
        if self.table.hasFocus():
            self.remove_chosen()

    def _lay_out(self) -> None:
        self.undo.hide()
        body, stack = QWidget(), self._middle
        body.setLayout(stack)
        stack.addWidget(self.table)
        stack.addWidget(self._empty)
        line = QHBoxLayout()
        line.addWidget(self.status_label, 1)
        line.addWidget(self.undo)
        self.column.addWidget(self.search)
        self.column.addWidget(body, 1)
        self.column.addLayout(line)
        self.column.addLayout(self._button_row())

    def _button_row(self) -> QHBoxLayout:
        made = (
            ("open", "Open", "Play it in its own window", self.open_chosen),
            ("compare", "Compare", "Select two to compare them side by side", self.compare_chosen),
            ("reveal", "Show in folder", "Open the containing folder", self.reveal_chosen),
            ("find", "Locate…", "Locate the missing file", self.find_chosen),
            ("remove", "Remove from list", "The file is not deleted", self.remove_chosen),
        )
        row = QHBoxLayout()
        for name, text, tip, run in made:
            button = QPushButton(text)
            button.setToolTip(tip)
            button.setAutoDefault(False)
            button.clicked.connect(run)
            self.buttons[name] = button
            row.addWidget(button)
        self.buttons["open"].setProperty("look", "primary")
        self.buttons["compare"].setVisible(self._compare is not None)
        row.addStretch()
        sample, hybrid, other = map(QPushButton, ("Sample recording", "Hybrid sample", "Open another file…"))
        sample.setToolTip(SAMPLE_TEXT)
        hybrid.setToolTip(HYBRID_TEXT)
        sample.clicked.connect(lambda: try_to_open(self._window, str(sample_recording())))
        hybrid.clicked.connect(lambda: try_to_open(self._window, str(hybrid_recording())))
        other.clicked.connect(lambda: ask_file(self._window))
        for button in (sample, hybrid, other):
            button.setAutoDefault(False)
            row.addWidget(button)
        return row


def show_recordings(window: WindowBody, compare: Compare | None = None) -> RecordingsSheet | None:
    """Bring up the sheet of `window`; returns None where there is no list."""
    library = window.openers.library
    if library is None:
        return None
    if compare is None and window.openers.compare is not None:
        compare = partial(compare_two, window)
    sheet = window.findChild(RecordingsSheet) or RecordingsSheet(window, library, compare)
    sheet.show()
    sheet.raise_()
    sheet.activateWindow()
    return sheet


def compare_two(window: WindowBody, first: Path, second: Path) -> None:
    """Two recordings of the list, opened beside the window for what compares them.

    Open both, one after the other, and hand them to what compares; say why not where one cannot be opened.
    """

    def open_next(path: Path, then: Callable[[Recorded], object]) -> None:
        opening = FileOpening(str(path), window)
        opening.opened.connect(then)
        opening.failed.connect(
            lambda reason: window.banner.tell("These recordings cannot be compared", reason, passes=True)
        )
        window.closing.connect(opening.cancel)
        for ended in (opening.opened, opening.failed, opening.cancelled):
            ended.connect(opening.deleteLater)

    compare = window.openers.compare
    if compare is not None:
        open_next(first, lambda a: open_next(second, lambda b: compare(a, b, window)))
