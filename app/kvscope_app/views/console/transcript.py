"""Messages of the shown conversation, newest at the bottom. Scrolls with new text unless the user scrolled up."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QApplication, QFrame, QPushButton, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.console.conversation import Conversation, Message, omitted_keys
from kvscope_app.views.console.message_card import MessageCard
from kvscope_app.views.console.to_end_button import ToEndButton

MESSAGES_PER_PAGE: Final = 40
"""Number of messages shown at first, and added by "Show earlier messages"."""
_NEAR_END_PX: Final = 24


class Transcript(QScrollArea):
    request_clicked = Signal(object, object)
    regenerate_requested = Signal(object)
    edit_requested = Signal(object)
    new_chat_requested = Signal(object)
    shorten_requested = Signal(object)
    """Like `new_chat_requested`, emitted with the answer that was refused because its prompt was too long."""
    version_requested = Signal(object)
    """Emitted when the user clicks a version button of a message, with the version (a `Message`) to show."""
    comparison_requested = Signal(object, object)
    """Emitted with a message and the version to compare its blocks with, None to end the comparison."""
    block_chosen = Signal(object, int)
    """Emitted with an answer and the index of the block that was chosen in its strip."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName("Conversation")
        self.setWidgetResizable(True)
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.cards: list[MessageCard] = []
        self._theme: Theme = DARK
        self._conversation: Conversation | None = None
        self._first_shown = 0
        self._last_width = 0
        self._is_following = True
        self.to_end = ToEndButton(self)
        self.to_end.clicked.connect(self.scroll_to_end)
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
        """Return a width that fits the widest card, because there is no horizontal scroll bar."""
        bar = self.verticalScrollBar().sizeHint().width()
        return QSize(self._body.minimumSizeHint().width() + bar, super().minimumSizeHint().height())

    def show_conversation(self, conversation: Conversation) -> None:
        if conversation is not self._conversation:
            self._conversation = conversation
            self._first_shown = max(len(conversation.path) - MESSAGES_PER_PAGE, 0)
            self._is_following = True
        self._rebuild(conversation)

    def show_text(self, message: Message) -> None:
        if (card := self._card_of(message)) is not None:
            card.show_text()
            self._set_card_widths()
            self.to_end.show_new_text()

    def show_state(self, written: Message | None, progress: str, *, can_ask: bool, can_estimate: bool) -> None:
        """Show the engine's progress on `written`, the answer being written, or None if no answer is being written.

        `can_ask` says whether a prompt can be sent now, `can_estimate` whether the engine estimates prompts.
        """
        for card in self.cards:
            is_written = card.message is written
            card.show_state(progress if is_written else "", can_ask=can_ask and written is None)
            is_newest = card is self.cards[-1]
            card.show_offers(is_newest=is_newest, can_shorten=can_ask and can_estimate and written is None)
        self._set_card_widths()

    def show_end(self, message: Message) -> None:
        if (card := self._card_of(message)) is not None:
            card.show_whole()
            card.apply_theme(self._theme)
            self._show_left_out()
            self._set_card_widths()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self.to_end.apply_theme(theme)
        for card in self.cards:
            card.apply_theme(theme)

    def scroll_to_end(self) -> None:
        """Scroll to the newest text, and follow text that arrives later."""
        self._is_following = True
        self.verticalScrollBar().setValue(self.verticalScrollBar().maximum())

    def event(self, event: QEvent) -> bool:
        """Claim Home and End before the window's shortcuts, which move the timeline."""
        if event.type() == QEvent.Type.ShortcutOverride and _is_home_or_end(event):
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if not _is_home_or_end(event):
            super().keyPressEvent(event)
        elif event.key() == Qt.Key.Key_End:
            self.scroll_to_end()
        else:
            self.verticalScrollBar().setValue(0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.to_end.place()

    def _rebuild(self, conversation: Conversation) -> None:
        path = conversation.path
        # the path of another version may be shorter
        self._first_shown = min(self._first_shown, max(len(path) - MESSAGES_PER_PAGE, 0))
        shown = path[self._first_shown :]
        num_same = 0
        while num_same < min(len(shown), len(self.cards)) and self.cards[num_same].message is shown[num_same]:
            num_same += 1
        for card in self.cards[num_same:]:
            self._column.removeWidget(card)
            card.hide()
            card.deleteLater()
        del self.cards[num_same:]
        for message in shown[num_same:]:
            card = MessageCard(message)
            self._connect(card)
            card.apply_theme(self._theme)
            self._column.insertWidget(self._column.count() - 1, card)
            self.cards.append(card)
        for card in self.cards:
            versions = [message.key for message in conversation.versions(card.message)]
            card.versions.show_versions(versions.index(card.message.key), len(versions))
        self._show_left_out()
        self._earlier.setVisible(self._first_shown > 0)

    def _show_left_out(self) -> None:
        if self._conversation is not None:
            keys = omitted_keys(self._conversation.path)
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
        card.request_clicked.connect(self.request_clicked)
        card.regenerate_requested.connect(lambda: self.regenerate_requested.emit(card.message))
        card.edit_requested.connect(lambda: self.edit_requested.emit(card.message))
        card.offers.new_chat_requested.connect(lambda: self.new_chat_requested.emit(card.message))
        card.offers.shorten_requested.connect(lambda: self.shorten_requested.emit(card.message))
        card.versions.version_requested.connect(lambda step: self._on_version(card.message, step))
        card.versions.comparison_requested.connect(lambda index: self._on_comparison(card.message, index))
        card.cache.strip.chosen.connect(lambda index: self.block_chosen.emit(card.message, index))

    def _on_version(self, message: Message, step: int) -> None:
        if self._conversation is not None:
            versions = self._conversation.versions(message)
            keys = [version.key for version in versions]
            self.version_requested.emit(versions[keys.index(message.key) + step])

    def _on_comparison(self, message: Message, index: int) -> None:
        if self._conversation is not None:
            other = self._conversation.versions(message)[index] if index >= 0 else None
            self.comparison_requested.emit(message, other)

    def reveal(self, key: str) -> None:
        """Scroll to the message with `key`, if it is on the shown path."""
        path = [] if self._conversation is None else [message.key for message in self._conversation.path]
        if self._conversation is None or key not in path:
            return
        if path.index(key) < self._first_shown:
            self._first_shown = path.index(key)
            self._rebuild(self._conversation)
        self._is_following = False
        card = next(card for card in self.cards if card.message.key == key)
        QApplication.sendPostedEvents(self._body, QEvent.Type.LayoutRequest)  # new cards have no position before
        self.ensureWidgetVisible(card)
        card.body.setFocus()

    def _show_earlier(self) -> None:
        if self._conversation is not None:
            self._is_following = False
            self._first_shown = max(self._first_shown - MESSAGES_PER_PAGE, 0)
            self._rebuild(self._conversation)

    def _on_range(self, _low: int, high: int) -> None:
        if self._is_following:
            self.verticalScrollBar().setValue(high)
        self.to_end.show_position(is_at_end=self._is_at_end)

    def _on_scrolled(self, _value: int) -> None:
        self._is_following = self._is_at_end
        self.to_end.show_position(is_at_end=self._is_at_end)

    @property
    def _is_at_end(self) -> bool:
        bar = self.verticalScrollBar()
        return bar.value() >= bar.maximum() - _NEAR_END_PX


def _is_home_or_end(event: QEvent) -> bool:
    return (
        isinstance(event, QKeyEvent)
        and event.key() in (Qt.Key.Key_Home, Qt.Key.Key_End)
        and event.modifiers() == Qt.KeyboardModifier.NoModifier
    )
