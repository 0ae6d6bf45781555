"""Asks for the words of a bookmark that was just made; whoever has none to say presses Esc, and it stays."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QFrame, QHBoxLayout, QLineEdit, QWidget

from kvscope_app.look.makers import label
from kvscope_app.playback.playback import wall_text
from kvscope_app.session.bookmarks import Bookmarks
from kvscope_telemetry.summaries.bookmark import MAX_TEXT, Bookmark

_WIDTH: Final = 420


class NotePopup(QFrame):
    """Above `at` (of the screen); gone with the next click elsewhere."""

    def __init__(self, parent: QWidget, bookmarks: Bookmarks, bookmark: Bookmark) -> None:
        super().__init__(parent, Qt.WindowType.Popup)
        self._bookmarks, self._bookmark = bookmarks, bookmark
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setProperty("look", "card")
        self.setAccessibleName("Note of the bookmark")
        self.note = QLineEdit()
        self.note.setMaxLength(MAX_TEXT)
        self.note.setPlaceholderText("A note, if you like; Enter keeps it")
        self.note.setAccessibleName("Note")
        self.note.returnPressed.connect(self._keep)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 12, 8)
        row.addWidget(label(f"Bookmark at {wall_text(bookmark.time_ns)}", "heading"))
        row.addWidget(self.note, 1)

    def show_above(self, at: QPoint) -> None:
        """Bring it up."""
        self.resize(_WIDTH, self.sizeHint().height())
        self.move(at.x() - _WIDTH // 2, at.y() - self.height() - 8)
        self.show()
        self.note.setFocus()

    def _keep(self) -> None:
        if self.note.text().strip():
            self._bookmarks.rename(self._bookmark, self.note.text())
        self.close()
