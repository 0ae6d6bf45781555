"""Line above a conversation: its title, and actions on the whole conversation."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSignalBlocker, QSize, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QLineEdit, QToolButton, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import set_icon, tool_button
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.conversation_picker import ConversationCombo

_MIN_TITLE_WIDTH: Final = 200
"""Width of the drop-down, in pixels at a zoom of 100 %, below which the buttons move below it."""


class ChatHead(QWidget):
    """Drop-down of conversations and six buttons. During a rename, a text field replaces the drop-down."""

    renamed = Signal(str)
    rename_ended = Signal()

    def __init__(self, combo: ConversationCombo) -> None:
        super().__init__()
        self.combo = combo
        self.title_line = QLineEdit()
        self.title_line.setAccessibleName("Conversation name")
        self.title_line.hide()
        self.search = tool_button("Search", "Search conversations (Ctrl+Shift+F)")
        self.new = tool_button("New", "New conversation (Ctrl+N)")
        self.rename = tool_button("Rename", "Rename this conversation (F2)")
        self.remove = tool_button("Delete", "Delete this conversation")
        self.follow = tool_button(
            "Follow", "Select each new request, so the page map shows its blocks", checkable=True, checked=True
        )
        self.settings = tool_button("Options", "System prompt and sampling options", checkable=True)
        self._theme: Theme = DARK
        self._has_list = False
        self._lay_out()
        self.title_line.editingFinished.connect(self._on_renamed)
        for button in (self.follow, self.settings):
            button.toggled.connect(self._draw_icons)

    def show_with_list(self, has_list: bool) -> None:
        """Hide the drop-down if `has_list`, because a list then shows the conversations."""
        self._has_list = has_list
        self._spacer.setVisible(has_list)
        self.search.setHidden(has_list)
        self._show_title_line(False)
        self._arrange()

    def begin_rename(self, title: str) -> None:
        self.title_line.setText(title)
        self.title_line.selectAll()
        self._show_title_line(True)
        self.title_line.setFocus()

    @property
    def is_renaming(self) -> bool:
        return not self.title_line.isHidden()

    def cancel_rename(self) -> None:
        with QSignalBlocker(self.title_line):
            self._show_title_line(False)
        self.rename_ended.emit()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._draw_icons()

    def _draw_icons(self) -> None:
        icons = ("find", "plus", "pencil", "trash", "map", "gear")
        for name, button in zip(icons, self._buttons(), strict=True):
            set_icon(button, name, self._theme)

    def _buttons(self) -> tuple[QToolButton, ...]:
        return self.search, self.new, self.rename, self.remove, self.follow, self.settings

    def _on_renamed(self) -> None:
        if self.is_renaming:
            is_ended_by_key = self.title_line.hasFocus()  # otherwise it ended because the focus moved elsewhere
            self._show_title_line(False)
            self.renamed.emit(self.title_line.text())
            if is_ended_by_key:
                self.rename_ended.emit()

    def _show_title_line(self, is_shown: bool) -> None:
        self.title_line.setVisible(is_shown)
        self.combo.setVisible(not is_shown and not self._has_list)

    def minimumSizeHint(self) -> QSize:
        """Return the width of the buttons: in less width than both need, the title moves above them."""
        margins = self._row.contentsMargins()
        width = self._button_row.minimumSize().width() + margins.left() + margins.right()
        return QSize(width, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def _arrange(self) -> None:
        """Place the buttons beside the title if there is enough width, or if a list shows the titles; else below it."""
        title_width = self.width() - self._button_row.sizeHint().width()
        is_beside = self._has_list or title_width >= scaled(_MIN_TITLE_WIDTH)
        self._row.setDirection(QBoxLayout.Direction.LeftToRight if is_beside else QBoxLayout.Direction.TopToBottom)

    def _lay_out(self) -> None:
        self._spacer = QWidget()
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight, self)
        self._row.setContentsMargins(10, 6, 8, 4)
        self._row.setSpacing(2)
        for widget in (self.combo, self.title_line, self._spacer):
            self._row.addWidget(widget, 1)
        self._button_row = QHBoxLayout()
        self._button_row.setSpacing(2)
        self._button_row.addStretch(1)
        for button in self._buttons():
            self._button_row.addWidget(button)
        self._row.addLayout(self._button_row)
