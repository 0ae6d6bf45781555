"""Asks for the words of a bookmark that was just made; whoever has none to say presses Esc, and it stays."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QObject, Qt
from PySide6.QtGui import QFocusEvent, QKeyEvent
from PySide6.QtWidgets import QApplication, QFrame, QHBoxLayout, QLineEdit, QWidget

from kvscope_app.look.clock_text import wall_text
from kvscope_app.look.makers import label
from kvscope_app.session.kept.bookmarks import Bookmarks
from kvscope_telemetry.summaries.bookmark import MAX_TEXT, Bookmark

_WIDTH: Final = 440
_BY_A_PERSON: Final = (
    Qt.FocusReason.MouseFocusReason,
    Qt.FocusReason.TabFocusReason,
    Qt.FocusReason.BacktabFocusReason,
    Qt.FocusReason.ShortcutFocusReason,
)


class NotePopup(QFrame):
    """Over the lower edge of `parent`; gone with Enter, Esc and the next click elsewhere."""

    def __init__(self, parent: QWidget, bookmarks: Bookmarks, bookmark: Bookmark) -> None:
        super().__init__(parent)
        self._over = parent
        self._bookmarks, self._bookmark = bookmarks, bookmark
        self._focus_before = QApplication.focusWidget()
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setProperty("look", "card")
        self.setAccessibleName("Note of the bookmark")
        self.note = QLineEdit()
        self.note.setMaxLength(MAX_TEXT)
        self.note.setPlaceholderText("A note, if you like; Enter keeps it")
        self.note.setAccessibleName("Note")
        self.note.installEventFilter(self)
        self.note.returnPressed.connect(self._keep)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 8, 12, 8)
        row.addWidget(label(f"Bookmark at {wall_text(bookmark.time_ns)}", "heading"))
        row.addWidget(self.note, 1)

    def show_above(self, height: int) -> None:
        """Bring it up, `height` pixels above the lower edge."""
        room = self._over.size()
        self.resize(min(_WIDTH, room.width()), self.sizeHint().height())
        self.move((room.width() - self.width()) // 2, max(0, room.height() - height - self.height()))
        self.show()
        self.raise_()
        self.note.setFocus()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Esc is about the note here, not about what it means in the window."""
        is_escape = isinstance(event, QKeyEvent) and event.key() == Qt.Key.Key_Escape
        if is_escape and event.type() == QEvent.Type.ShortcutOverride:
            event.accept()
            return True
        if is_escape and event.type() == QEvent.Type.KeyPress:
            self._leave()
            return True
        if isinstance(event, QFocusEvent) and event.lostFocus() and event.reason() in _BY_A_PERSON:
            self.close()
        return False

    def _keep(self) -> None:
        if self.note.text().strip():
            self._bookmarks.rename(self._bookmark, self.note.text())
        self._leave()

    def _leave(self) -> None:
        """The keyboard goes back to where it was."""
        if self._focus_before is not None and self._focus_before.isVisible():
            self._focus_before.setFocus()
        self.close()
