"""Bookmarks and alarms as a list, oldest first. Owns which are shown; renaming tells their owner."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt

from kvscope_app.look.mark_signs import sign_pixmap
from kvscope_app.look.number_text import seconds
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.playback.mark_words import mark_text
from kvscope_app.session.kept.bookmarks import Bookmarks
from kvscope_telemetry.summaries.bookmark import Bookmark

Index = QModelIndex | QPersistentModelIndex
_ROLE = Qt.ItemDataRole
ALL, MINE, ALARMS = range(3)


class MarkModel(QAbstractListModel):
    """Of `bookmarks`."""

    def __init__(self, bookmarks: Bookmarks, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self.choice = ALL
        self.marks: list[Bookmark] = []
        self._bookmarks = bookmarks

    def refresh(self) -> bool:
        """Show what there is; whether anything changed. What was selected is not any more."""
        wanted = [mark for mark in self._bookmarks.shown if self.choice in (ALL, MINE if mark.is_note else ALARMS)]
        if wanted == self.marks:
            return False
        self.beginResetModel()
        self.marks = wanted
        self.endResetModel()
        return True

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.marks)

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        is_mine = index.isValid() and self._bookmarks.is_kept(self.marks[index.row()])
        return flags | Qt.ItemFlag.ItemIsEditable if is_mine else flags

    def data(self, index: Index, role: int = _ROLE.DisplayRole) -> Any:
        if not index.isValid():
            return None
        mark = self.marks[index.row()]
        if role == _ROLE.DisplayRole:
            return _line(mark)
        if role == _ROLE.ToolTipRole:
            return plain_tip(_line(mark))
        if role == _ROLE.EditRole:
            return mark.text
        if role == _ROLE.DecorationRole:
            return sign_pixmap(is_note=mark.is_note, theme=self.theme)
        return None

    def setData(self, index: Index, value: Any, role: int = _ROLE.EditRole) -> bool:
        if role != _ROLE.EditRole or not index.isValid() or str(value).strip() == self.marks[index.row()].text:
            return False
        self._bookmarks.rename(self.marks[index.row()], str(value))
        return True


def _line(mark: Bookmark) -> str:
    lasted = f"  ({seconds((mark.until_ns - mark.time_ns) / 1e9)})" if mark.until_ns else ""
    return mark_text(mark) + lasted
