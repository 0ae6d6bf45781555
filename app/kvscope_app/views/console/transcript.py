"""Shown messages of one conversation, newest at the bottom. Follows the end unless the user scrolled up."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QFrame, QPushButton, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.console.conversation import Conversation, Message, left_out
from kvscope_app.views.console.message_card import MessageCard

MAX_SHOWN: Final = 40
"""Number of messages shown initially; "Show earlier messages" adds as many again."""
_NEAR_END_PX: Final = 24


class Transcript(QScrollArea):
    request_wanted = Signal(object, object)
    again_wanted = Signal(object)
    """Emitted with the answer to regenerate."""
    edit_wanted = Signal(object)
    """Emitted with the prompt to edit."""
    version_wanted = Signal(object)
    """Emitted with the version of a message to show."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Conversation")
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.cards: list[MessageCard] = []
        self._theme: Theme = DARK
        self._conversation: Conversation | None = None
        self._first = 0
        self._last_width = 0
        """Minimum width that was last reported to the surrounding layout."""
        self._follows = True
        self._body = QWidget()
        self._column = QVBoxLayout(self._body)
        self._column.setContentsMargins(10, 8, 10, 8)
        self._column.setSpacing(8)
        self._earlier = QPushButton("Show earlier messages")
        self._earlier.clicked.connect(self._show_earlier)
        self._column.addWidget(self._earlier)
        self._column.addStretch(1)
        self.setWidget(self._body)
        self.verticalScrollBar().rangeChanged.connect(self._on_range)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)

    def minimumSizeHint(self) -> QSize:
        """Return a width that fits the widest card, since content that is cut off at the side could not be scrolled
        to."""
        bar = self.verticalScrollBar().sizeHint().width()
        return QSize(self._body.minimumSizeHint().width() + bar, super().minimumSizeHint().height())

    def show_conversation(self, conversation: Conversation) -> None:
        if conversation is not self._conversation:
            self._conversation = conversation
            self._first = max(len(conversation.path) - MAX_SHOWN, 0)
            self._follows = True
        self._rebuild(conversation)

    def show_text(self, message: Message) -> None:
        if (card := self._card_of(message)) is not None:
            card.show_text()
            self._set_card_widths()

    def show_state(self, written: Message | None, progress: str, *, can_ask: bool) -> None:
        """Show the engine's progress on the answer `written`; None: none is being written.

        `can_ask`: whether a prompt can be sent now.
        """
        for card in self.cards:
            is_written = card.message is written
            card.show_state(progress if is_written else "", can_ask=can_ask and written is None)
        self._set_card_widths()

    def show_end(self, message: Message) -> None:
        if (card := self._card_of(message)) is not None:
            card.show_whole()
            card.apply_theme(self._theme)
            self._show_left_out()
            self._set_card_widths()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        for card in self.cards:
            card.apply_theme(theme)

    def _rebuild(self, conversation: Conversation) -> None:
        path = conversation.path
        self._first = min(self._first, max(len(path) - MAX_SHOWN, 0))  # the path of another version may be shorter
        shown = path[self._first :]
        same = 0
        while same < min(len(shown), len(self.cards)) and self.cards[same].message is shown[same]:
            same += 1
        for card in self.cards[same:]:
            self._column.removeWidget(card)
            card.hide()
            card.deleteLater()
        del self.cards[same:]
        for message in shown[same:]:
            card = MessageCard(message)
            self._connect(card)
            card.apply_theme(self._theme)
            self._column.insertWidget(self._column.count() - 1, card)
            self.cards.append(card)
        for card in self.cards:
            versions = [message.key for message in conversation.versions(card.message)]
            card.show_versions(versions.index(card.message.key), len(versions))
        self._show_left_out()
        self._earlier.setVisible(self._first > 0)

    def _show_left_out(self) -> None:
        if self._conversation is not None:
            keys = left_out(self._conversation.path)
            for card in self.cards:
                card.show_left_out(card.message.key in keys)

    def _card_of(self, message: Message) -> MessageCard | None:
        return next((card for card in reversed(self.cards) if card.message is message), None)

    def _set_card_widths(self) -> None:
        width = self._body.minimumSizeHint().width()
        if width != self._last_width:
            self._last_width = width
            self.updateGeometry()

    def _connect(self, card: MessageCard) -> None:
        card.request_wanted.connect(self.request_wanted)
        card.again_wanted.connect(lambda: self.again_wanted.emit(card.message))
        card.edit_wanted.connect(lambda: self.edit_wanted.emit(card.message))
        card.version_wanted.connect(lambda step: self._on_version(card.message, step))

    def _on_version(self, message: Message, step: int) -> None:
        if self._conversation is not None:
            versions = self._conversation.versions(message)
            keys = [version.key for version in versions]
            self.version_wanted.emit(versions[keys.index(message.key) + step])

    def _show_earlier(self) -> None:
        if self._conversation is not None:
            self._follows = False
            self._first = max(self._first - MAX_SHOWN, 0)
            self._rebuild(self._conversation)

    def _on_range(self, _low: int, high: int) -> None:
        if self._follows:
            self.verticalScrollBar().setValue(high)

    def _on_scrolled(self, value: int) -> None:
        self._follows = value >= self.verticalScrollBar().maximum() - _NEAR_END_PX
