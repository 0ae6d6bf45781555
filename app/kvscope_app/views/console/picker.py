"""Chooses the conversation that is shown: a list beside it where there is space, otherwise a drop-down above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, Qt
from PySide6.QtGui import QPaintEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QComboBox,
    QListView,
    QSizePolicy,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
)

from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import Conversation

Index = QModelIndex | QPersistentModelIndex


class ConversationModel(QAbstractListModel):
    """The chat's conversations, newest first; titles can be edited in place."""

    def __init__(self, chat: Chat, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.theme: Theme = DARK
        self._chat = chat
        self._shown: list[Conversation] = list(chat.conversations)

    def follow(self) -> None:
        """Show the conversations as the chat has them now."""
        if self._shown != self._chat.conversations or len(self._shown) != len(self._chat.conversations):
            self.beginResetModel()
            self._shown = list(self._chat.conversations)
            self.endResetModel()
        elif self._shown:
            self.dataChanged.emit(self.index(0), self.index(len(self._shown) - 1))

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self._shown)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not 0 <= index.row() < len(self._shown):
            return None
        conversation = self._shown[index.row()]
        is_writing = self._chat.answer_of(conversation.key) is not None
        if role == Qt.ItemDataRole.DisplayRole:
            return f"● {conversation.title}" if is_writing else conversation.title
        if role == Qt.ItemDataRole.EditRole:
            return conversation.title
        if role == Qt.ItemDataRole.ToolTipRole:
            tip = f"{conversation.title}\nAn answer is being written" if is_writing else conversation.title
            return plain_tip(tip)
        return None

    def setData(self, index: Index, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        if role != Qt.ItemDataRole.EditRole or not 0 <= index.row() < len(self._shown):
            return False
        self._chat.rename(self._shown[index.row()], str(value))
        return True

    def flags(self, index: Index) -> Qt.ItemFlag:
        return super().flags(index) | Qt.ItemFlag.ItemIsEditable


class ConversationList(QListView):
    """The list; F2 or a double click renames."""

    def __init__(self, model: ConversationModel, on_chosen: Callable[[int], None]) -> None:
        super().__init__()
        self.setAccessibleName("Conversations")
        self.setModel(model)
        self.setUniformItemSizes(True)
        self.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        triggers = QAbstractItemView.EditTrigger
        self.setEditTriggers(triggers.DoubleClicked | triggers.EditKeyPressed)
        self.setFixedWidth(scaled(190))
        self.clicked.connect(lambda index: on_chosen(index.row()))
        self.activated.connect(lambda index: on_chosen(index.row()))

    def show_row(self, row: int) -> None:
        """Mark the conversation that is shown."""
        self.setCurrentIndex(self.model().index(row, 0))


class ConversationCombo(QComboBox):
    """The drop-down."""

    def __init__(self, model: ConversationModel, on_chosen: Callable[[int], None]) -> None:
        super().__init__()
        self.setAccessibleName("Conversation")
        self.setModel(model)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(8)
        self.view().setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.activated.connect(on_chosen)

    def show_row(self, row: int) -> None:
        """Name the conversation that is shown."""
        self.setCurrentIndex(row)

    def paintEvent(self, event: QPaintEvent) -> None:
        """As Qt does, but a title that has no room ends in "…"."""
        option = QStyleOptionComboBox()
        self.initStyleOption(option)
        painter = QStylePainter(self)
        painter.drawComplexControl(QStyle.ComplexControl.CC_ComboBox, option)
        room = self.style().subControlRect(
            QStyle.ComplexControl.CC_ComboBox, option, QStyle.SubControl.SC_ComboBoxEditField, self
        )
        option.currentText = self.fontMetrics().elidedText(
            self.currentText(), Qt.TextElideMode.ElideRight, room.width() - 4
        )
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, option)
        painter.end()
