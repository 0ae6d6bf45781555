"""One chat: the conversation that is shown, its options, and where the next prompt is written.

Joins the widgets to the chat; owns which conversation is shown and which prompt is being changed.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QScrollArea,
    QSizePolicy,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.load.sample_prompts import sample_prompts, short_prompts
from kvscope_app.look.makers import label, tool_button
from kvscope_app.look.number_text import count
from kvscope_app.look.plain_text import plain_tip
from kvscope_app.look.theme import DARK, Theme
from kvscope_app.look.zoom import scaled
from kvscope_app.session.session import Session
from kvscope_app.views.capability_messages import why_no_prompts
from kvscope_app.views.console.answer import AnswerPhase
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.chat_head import ChatHead
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.conversation import Conversation
from kvscope_app.views.console.options_panel import OptionsPanel
from kvscope_app.views.console.picker import ConversationCombo, ConversationList, ConversationModel
from kvscope_app.views.console.transcript import Transcript
from kvscope_telemetry.messages.sampling_params import ModelSampling
from kvscope_telemetry.source import SourceState

NUM_STARTERS = 3
_TEXT_MARGINS = 34
NEARLY_FULL: Final = 0.8
FULL: Final = 0.95
LIST_FROM_WIDTH = 640
STATS_EVERY_S = 0.2
_NOT_READY = {
    SourceState.CONNECTING: "Connecting to the engine…",
    SourceState.LOADING: "The model is loading…",
    SourceState.ENDED: "The engine has stopped",
    SourceState.REFUSED: "The engine denied access",
}

_WRITTEN_ELSEWHERE = "Another window is writing an answer here"


class ChatPage(QWidget):
    """The whole chat in one widget."""

    done = Signal(str, object, object)
    """As a view's."""

    def __init__(self, session: Session, chat: Chat) -> None:
        super().__init__()
        self.session, self.chat = session, chat
        self.current: Conversation = chat.conversations[0]
        self._edited: int | None = None
        self._deleted: Conversation | None = None
        self._stats_s = 0.0
        self._model = ConversationModel(chat, self)
        self.list = ConversationList(self._model, self.show_row)
        self.combo = ConversationCombo(self._model, self.show_row)
        self.transcript = Transcript()
        self.starters = Starters()
        self.options = OptionsPanel()
        self.composer = Composer()
        self.context = ContextBar()
        self.notice = label(wraps=True)
        self.head = ChatHead(self.combo)
        self.undo = tool_button("Undo", "Restore")
        self._lay_out()
        self._connect()
        self._tell("  ".join(chat.warnings))
        self.show_conversation(self.current)

    def show_conversation(self, conversation: Conversation) -> None:
        """Show another conversation."""
        self.current, self._edited = conversation, None
        self._model.follow()
        self._show_row()
        self.options.show_conversation(conversation)
        self._show_messages()
        prompts = [message.content for message in conversation.messages if message.role == "user"]
        self.composer.edit.set_earlier(prompts)

    def new_conversation(self) -> None:
        """Begin another one with the same options."""
        self.show_conversation(self.chat.add(self.current))
        self.composer.edit.setFocus()

    def apply_theme(self, theme: Theme) -> None:
        """Hand the colours on."""
        self._model.theme = theme
        for part in (self.head, self.transcript, self.options, self.context):
            part.apply_theme(theme)
        self.notice.setStyleSheet(f"color: {theme.warn};")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        wide = self.width() >= LIST_FROM_WIDTH
        self.list.setVisible(wide)
        self.head.show_beside_list(wide)

    def show_status(self) -> None:
        """What can be sent depends on the engine; the context's limit on its model."""
        self.options.show_adapters(self.session.status.adapters)
        answer = self.chat.answer_of(self.current.key)
        self.composer.show_state(
            is_writing=answer is not None,
            is_stopping=answer is not None and answer.phase is AnswerPhase.STOPPING,
            blocked=self.why_blocked(),
        )
        self.starters.offer(self.session.takes_prompts)
        hello, stats = self.session.live_mirror.hello, self.current.last_stats
        self.options.show_model(hello.model.sampling if hello else ModelSampling())
        limit = 0 if hello is None else hello.cache.max_request_tokens or hello.model.max_model_len
        self.context.show_fill(stats.context_tokens if stats else 0, limit)

    def why_blocked(self) -> str:
        if not self.session.takes_prompts:
            return why_no_prompts(self.session.live_mirror.capabilities) or "This engine accepts no prompts"
        if self.session.is_viewer:
            return "Viewers cannot send prompts"
        if self.chat.is_written_elsewhere(self.current):
            return _WRITTEN_ELSEWHERE
        if self.options.problem:
            return "Check the options"
        return _NOT_READY.get(self.session.status.state, "")

    def _on_send(self, text: str) -> None:
        self.chat.look()
        if self.chat.is_written_elsewhere(self.current):
            self.composer.set_text(text)
            self._tell(_WRITTEN_ELSEWHERE)
            return
        if self._edited is not None:
            self.chat.cut(self.current, self._edited)
            self._edited = None
        self._tell("")
        self.chat.ask(self.current, text)
        self.composer.edit.set_earlier([m.content for m in self.current.messages if m.role == "user"])

    def _on_starter(self, prompt: str) -> None:
        """Sent, or put into the composer where nothing can be sent now or somebody writes there already."""
        has_text = bool(self.composer.edit.toPlainText().strip())
        if self.why_blocked() or self.chat.answer_of(self.current.key) is not None or has_text:
            self.composer.set_text(prompt)
        else:
            self._on_send(prompt)

    def _on_follow(self, on: bool) -> None:
        self.chat.follow_on_map = on

    def _on_options(self) -> None:
        self.chat.touch(self.current)
        self.show_status()

    def _on_edit(self, index: int) -> None:
        if self.chat.answer_of(self.current.key) is None:
            self._edited = index
            self.composer.set_text(self.current.messages[index].content)
            self._tell("Editing an earlier prompt replaces what follows it. Esc cancels.")

    def _on_edit_cancelled(self) -> None:
        if self._edited is not None:
            self._edited = None
            self.composer.edit.clear()
            self._tell("")

    def delete(self) -> None:
        """The conversation that is shown goes; it can be brought back."""
        self._deleted = deleted = self.current
        self._remove(deleted)
        self._tell(f"Deleted “{deleted.title}”.")
        self.undo.setVisible(bool(deleted.messages))
        if deleted.messages:
            words = f"deleting “{deleted.title}”"
            self.done.emit(words, partial(self._bring_back, deleted), partial(self._remove, deleted))

    def _on_undo(self) -> None:
        if self._deleted is not None:
            deleted, self._deleted = self._deleted, None
            self._bring_back(deleted)
        self._tell("")

    def _remove(self, conversation: Conversation) -> None:
        if conversation not in self.chat.conversations:  # another window was faster
            return
        row = self.chat.conversations.index(conversation)
        self.chat.delete(conversation)
        if conversation is self.current:
            self.show_conversation(self.chat.conversations[min(row, len(self.chat.conversations) - 1)])

    def _bring_back(self, conversation: Conversation) -> None:
        """Once, whoever asks."""
        if all(conversation.key != other.key for other in self.chat.conversations):
            self.chat.restore(conversation)
        found = self.chat.find(conversation.key)
        if found is not None:
            self.show_conversation(found)

    def show_row(self, row: int) -> None:
        if 0 <= row < len(self.chat.conversations):
            self.show_conversation(self.chat.conversations[row])

    def rename(self) -> None:
        """In place: the list where it is seen, the drop-down's own line otherwise."""
        row = self.chat.conversations.index(self.current)
        if self.list.isVisible():
            self.list.edit(self._model.index(row))
            return
        self.head.begin_rename(self.current.title)

    def _on_text(self, key: str, text: str) -> None:
        if key == self.current.key:
            self.transcript.add_text(text)

    def _on_answer(self, key: str) -> None:
        if key != self.current.key:
            return
        answer = self.chat.answer_of(key)
        now_s = time.monotonic()
        if answer is None or answer.phase is not AnswerPhase.WRITING or now_s - self._stats_s >= STATS_EVERY_S:
            self._stats_s = now_s
            self.transcript.show_state(answer)
            self.show_status()

    def _on_messages(self, key: str) -> None:
        if key == self.current.key:
            self._show_messages()

    def _on_listed(self) -> None:
        if self.current not in self.chat.conversations:  # another window deleted it
            self.show_conversation(self.chat.conversations[0])
        self._model.follow()
        self._show_row()
        self.show_status()

    def _on_request(self, epoch: int, number: int) -> None:
        mirror = self.session.mirror
        if mirror.epoch == epoch and mirror.requests.row_of(number) is not None:
            self.session.select_request(number)
        else:
            self._tell(f"Request #{count(number)} is no longer known to the engine.")

    def _show_messages(self) -> None:
        has_any = bool(self.current.messages)
        self._pages.setCurrentIndex(1 if has_any else 0)
        self.transcript.show_conversation(self.current, self.chat.answer_of(self.current.key))
        self.show_status()

    def _show_row(self) -> None:
        if self.current in self.chat.conversations:
            row = self.chat.conversations.index(self.current)
            self.list.show_row(row)
            self.combo.show_row(row)

    def _tell(self, text: str) -> None:
        self.notice.setText(text)
        self._notice_row.setVisible(bool(text))
        self.undo.hide()

    def _connect(self) -> None:
        self.head.new.clicked.connect(self.new_conversation)
        self.head.rename.clicked.connect(self.rename)
        self.head.renamed.connect(lambda title: self.chat.rename(self.current, title))
        self.head.remove.clicked.connect(self.delete)
        self.undo.clicked.connect(self._on_undo)
        self.head.settings.toggled.connect(self._options.setVisible)
        self.head.follow.toggled.connect(self._on_follow)
        self.composer.sent.connect(self._on_send)
        self.composer.stop_wanted.connect(lambda: self.chat.stop(self.current))
        self.composer.edit_cancelled.connect(self._on_edit_cancelled)
        self.starters.chosen.connect(self._on_starter)
        self.starters.edit_wanted.connect(self.composer.set_text)
        self.options.changed.connect(self._on_options)
        self.transcript.again_wanted.connect(lambda index: self.chat.ask_again(self.current, index))
        self.transcript.edit_wanted.connect(self._on_edit)
        self.transcript.request_wanted.connect(self._on_request)
        self.chat.listed.connect(self._on_listed)
        self.chat.messages_changed.connect(self._on_messages)
        self.chat.text_added.connect(self._on_text)
        self.chat.answer_changed.connect(self._on_answer)
        self.chat.notified.connect(self._tell)
        self.session.status_changed.connect(self.show_status)

    def _lay_out(self) -> None:
        self._pages = QStackedWidget()
        self._pages.addWidget(self.starters)
        self._pages.addWidget(self.transcript)
        main = QVBoxLayout()
        main.setContentsMargins(0, 0, 0, 8)
        main.setSpacing(6)
        main.addWidget(self.head)
        main.addWidget(self._options_area())
        self.options.error.setContentsMargins(12, 0, 12, 0)
        main.addWidget(self.options.error)
        main.addWidget(self._pages, 1)
        main.addWidget(self._notice_line())
        main.addWidget(self.composer)
        main.addWidget(self.context)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        row.addWidget(self.list)
        row.addLayout(main, 1)

    def _options_area(self) -> QScrollArea:
        self._options = QScrollArea()
        self._options.setWidget(self.options)
        self._options.setWidgetResizable(True)
        self._options.setFrameShape(QScrollArea.Shape.NoFrame)
        self._options.setMaximumHeight(self.options.sizeHint().height() + 4)
        self._options.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._options.hide()
        return self._options

    def _notice_line(self) -> QWidget:
        self._notice_row = QWidget()
        row = QHBoxLayout(self._notice_row)
        row.setContentsMargins(12, 0, 10, 0)
        row.addWidget(self.notice, 1)
        row.addWidget(self.undo)
        return self._notice_row


class ContextBar(QWidget):
    """How full the model's context is: a thin bar and the two numbers.

    Tokens of the conversation, and how many one request may have, 0 when that is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        self.bar.setFixedWidth(scaled(72))
        self.bar.setAccessibleName("Context fill")
        self.text = label(look="muted", elastic=True)
        self._theme: Theme = DARK
        self._share = 0.0
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 0, 12, 0)
        row.setSpacing(8)
        row.addWidget(self.bar)
        row.addWidget(self.text, 1)

    def show_fill(self, used: int, limit: int) -> None:
        """`used` of `limit` tokens."""
        self._share = min(used / limit, 1.0) if limit else 0.0
        self.bar.setVisible(limit > 0)
        self.bar.setValue(round(self._share * 1000))
        whole = f"{count(used)} of {count(limit)} context tokens" if limit else f"{count(used)} context tokens"
        self.text.setText(whole if used or limit else "")
        self.text.setToolTip(f"{self._share:.0%} of one request's maximum, by model and KV cache" if limit else "")
        self._color()

    def apply_theme(self, theme: Theme) -> None:
        """Recolour."""
        self._theme = theme
        self._color()

    def _color(self) -> None:
        name = "bad" if self._share >= FULL else "warn" if self._share >= NEARLY_FULL else "accent"
        sheet = f"QProgressBar::chunk {{ background: {getattr(self._theme, name)}; }}"
        if self.bar.styleSheet() != sheet:
            self.bar.setStyleSheet(sheet)


# What an empty conversation shows: a few prompts to begin with.
class Starters(QWidget):
    """Buttons that send a prompt; with Shift they put it into the composer, to be edited first."""

    chosen = Signal(str)
    """To be sent."""
    edit_wanted = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 24, 12, 24)
        column.setSpacing(8)
        column.addStretch(1)
        self._hint = hint = label("Ask the model something and watch the cache answer.", "muted", wraps=True)
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.addWidget(hint)
        for prompt in short_prompts(sample_prompts())[:NUM_STARTERS]:
            column.addWidget(self._button(prompt))
        column.addStretch(2)

    def offer(self, can_be_sent: bool) -> None:
        """Where nobody takes prompts, none is proposed."""
        for part in (self._hint, *self.findChildren(StarterButton)):
            part.setVisible(can_be_sent)

    def _button(self, prompt: str) -> QPushButton:
        button = StarterButton(prompt)
        button.clicked.connect(lambda: self._choose(prompt))
        return button

    def _choose(self, prompt: str) -> None:
        is_shifted = QApplication.keyboardModifiers() & Qt.KeyboardModifier.ShiftModifier
        (self.edit_wanted if is_shifted else self.chosen).emit(prompt)


class StarterButton(QPushButton):
    """A prompt on one line, ended by "…" where there is no room."""

    def __init__(self, prompt: str) -> None:
        super().__init__()
        self._prompt = prompt
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.setToolTip(plain_tip(f"{prompt}\n\nClick to send, Shift+click to edit first"))
        self.setAccessibleName(prompt)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self._fit()

    def _fit(self) -> None:
        room = self.width() - _TEXT_MARGINS
        elided = self.fontMetrics().elidedText(self._prompt, Qt.TextElideMode.ElideRight, room)
        self.setText(elided.replace("&", "&&"))  # a single one marks a key
