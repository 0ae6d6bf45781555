"""Mark at which the cached prefix of a prompt ended: a line below the text, and a mark in the text if the position is
known.
"""

from __future__ import annotations

from typing import Final

from PySide6.QtGui import QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QTextEdit

from kvscope_app.ui.plain_text import PlainLabel
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.console.prefix_break import PrefixBreak

_MAX_MARKED_CHARS: Final = 12


class PrefixMark(PlainLabel):
    """Line that is hidden if the prefix did not end here. Marks the first characters after the prefix in `body`, which
    shows plain text.
    """

    def __init__(self, body: QTextEdit) -> None:
        super().__init__()
        self._body = body
        self._theme: Theme = DARK
        self._shown: PrefixBreak | None = None
        self._has_mark = False
        self.setWordWrap(True)
        self.hide()

    def show_break(self, shown: PrefixBreak | None) -> None:
        if shown != self._shown:
            self._shown = shown
            self.setText("" if shown is None else shown.text)
            self.setVisible(shown is not None)
            self._mark_text()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.setStyleSheet(f"color: {theme.muted};")
        self._mark_text()

    def _mark_text(self) -> None:
        if self._shown is None or self._shown.offset is None:
            if self._has_mark:
                self._body.setExtraSelections([])
            self._has_mark = False
            return
        self._has_mark = True
        text = self._body.toPlainText()
        end = self._shown.offset + _MAX_MARKED_CHARS
        position, until = (len(text[:index].encode("utf-16-le")) // 2 for index in (self._shown.offset, end))
        cursor = QTextCursor(self._body.document())
        cursor.setPosition(position)
        cursor.setPosition(until, QTextCursor.MoveMode.KeepAnchor)
        mark = QTextCharFormat()
        mark.setUnderlineStyle(QTextCharFormat.UnderlineStyle.DashUnderline)
        mark.setUnderlineColor(self._theme.color("warn"))
        mark.setBackground(self._theme.color("warn", 50))
        selection = QTextEdit.ExtraSelection()
        selection.cursor, selection.format = cursor, mark
        self._body.setExtraSelections([selection])
