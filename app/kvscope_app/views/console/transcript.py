"""Messages of the shown conversation, newest at the bottom. Scrolls with new text unless the user scrolled up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import QApplication, QFrame, QPushButton, QScrollArea, QVBoxLayout, QWidget

from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.views.console.answer_group import AnswerGroup
from kvscope_app.views.console.conversation import Conversation, Message, omitted_keys
from kvscope_app.views.console.message_card import MessageCard
from kvscope_app.views.console.to_end_button import ToEndButton

MESSAGES_PER_PAGE: Final = 40
"""Number of messages shown at first, and added by "Show earlier messages"."""
_NEAR_END_PX: Final = 24


@dataclass(frozen=True, slots=True)
class TranscriptRow:
    """One message, or the answers to a prompt that were requested together."""

    widget: MessageCard | AnswerGroup
    cards: list[MessageCard]

    def shows(self, messages: Sequence[Message]) -> bool:
        return len(messages) == len(self.cards) and all(
            card.message is message for card, message in zip(self.cards, messages, strict=True)
        )


class Transcript(QScrollArea):
    request_clicked = Signal(object, object)
    regenerate_requested = Signal(object)
    edit_requested = Signal(object)
    new_chat_requested = Signal(object)
    shorten_requested = Signal(object)
    """Like `new_chat_requested`, emitted with the answer that was refused because its prompt was too long."""
    version_requested = Signal(object)
    """Emitted when the user chooses a version of a message or one of several answers, with the `Message` to show."""
    results_sent = Signal(object, object)
    """Emitted with an answer and the results of the functions that it calls, a list of `ToolResult`."""
    stop_requested = Signal(object)
    """Emitted with one of several answers that shall be stopped."""
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
        self._rows: list[TranscriptRow] = []
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

    @property
    def cards(self) -> list[MessageCard]:
        """Cards of all messages shown, also of answers that are side by side, oldest first."""
        return [card for row in self._rows for card in row.cards]

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

    def show_state(self, progress: Mapping[str, str], *, can_ask: bool, can_estimate: bool) -> None:
        """Show the engine's progress on the answers being written, a text by key of the answer.

        `can_ask` says whether a prompt can be sent now, `can_estimate` whether the engine estimates prompts.
        """
        last = "" if self._conversation is None else self._conversation.last
        for card in self.cards:
            key = card.message.key
            card.show_state(progress.get(key, ""), can_ask=can_ask and not progress)
            card.calls.show_state(is_newest=key == last, can_send=can_ask and not progress)
            card.show_offers(is_newest=key == last, can_shorten=can_ask and can_estimate and not progress)
        for row in self._rows:
            if isinstance(row.widget, AnswerGroup):
                row.widget.show_unfinished(progress.keys())
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
        for row in self._rows:
            if isinstance(row.widget, AnswerGroup):
                row.widget.apply_theme(theme)
            for card in row.cards:
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
        shown = [[message] for message in path[self._first_shown :]]
        if shown:
            shown[-1] = conversation.batch_of(path[-1])
        num_same = 0
        while num_same < min(len(shown), len(self._rows)) and self._rows[num_same].shows(shown[num_same]):
            num_same += 1
        for row in self._rows[num_same:]:
            self._column.removeWidget(row.widget)
            row.widget.hide()
            row.widget.deleteLater()
        del self._rows[num_same:]
        for messages in shown[num_same:]:
            self._rows.append(self._new_row(messages))
            self._column.insertWidget(self._column.count() - 1, self._rows[-1].widget)
        for row in self._rows:
            if isinstance(row.widget, AnswerGroup):
                row.widget.show_chosen(conversation.last)
            for card in row.cards:
                versions = [message.key for message in conversation.versions(card.message)]
                can_switch = len(versions) > len(row.cards)
                card.versions.show_versions(versions.index(card.message.key), len(versions), can_switch=can_switch)
        self._show_left_out()
        self._earlier.setVisible(self._first_shown > 0)

    def _new_row(self, messages: Sequence[Message]) -> TranscriptRow:
        is_group = len(messages) > 1
        cards = [MessageCard(message, number if is_group else 0) for number, message in enumerate(messages, 1)]
        for card in cards:
            self._connect(card)
            card.apply_theme(self._theme)
        if not is_group:
            return TranscriptRow(cards[0], cards)
        group = AnswerGroup(cards, self._theme)
        group.chosen.connect(self.version_requested)
        group.stop_requested.connect(self.stop_requested)
        return TranscriptRow(group, cards)

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
        card.calls.results_sent.connect(lambda results: self.results_sent.emit(card.message, results))
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
