"""One chat: the conversation that is shown, its options, and where the next prompt is written.

Joins the widgets to the chat; owns which conversation is shown and which prompt is being changed.
"""

from __future__ import annotations

import time
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QScrollArea, QStackedWidget, QVBoxLayout, QWidget

from kvscope_app.look.makers import label, tool_button
from kvscope_app.look.number_text import count
from kvscope_app.look.theme import Theme
from kvscope_app.session.session import Session
from kvscope_app.views.console.answer import Phase
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.chat_head import ChatHead
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.context_bar import ContextBar
from kvscope_app.views.console.conversation import Conversation
from kvscope_app.views.console.options import OptionsPanel
from kvscope_app.views.console.picker import ConversationCombo, ConversationList, ConversationModel
from kvscope_app.views.console.starters import Starters
from kvscope_app.views.console.transcript import Transcript
from kvscope_app.views.told import why_no_prompts
from kvscope_telemetry.messages.sampling_params import ModelSampling
from kvscope_telemetry.source import SourceState

LIST_FROM_WIDTH = 640
STATS_EVERY_S = 0.2
_NOT_READY = {
    SourceState.CONNECTING: "Connecting to the engine…",
    SourceState.LOADING: "The model is loading…",
    SourceState.ENDED: "The engine has ended",
    SourceState.REFUSED: "The engine does not let you in",
}

_WRITTEN_ELSEWHERE = "Another window writes an answer here"


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
        self.list = ConversationList(self._model, self._on_row)
        self.combo = ConversationCombo(self._model, self._on_row)
        self.transcript = Transcript()
        self.starters = Starters()
        self.options = OptionsPanel()
        self.composer = Composer()
        self.context = ContextBar()
        self.notice = label(wraps=True)
        self.head = ChatHead(self.combo)
        self.undo = tool_button("Undo", "Bring it back")
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
        answer = self.chat.answer_of(self.current.key)
        self.composer.show_state(
            is_writing=answer is not None,
            is_stopping=answer is not None and answer.phase is Phase.STOPPING,
            blocked=self._blocked(),
        )
        self.starters.offer(self.session.takes_prompts)
        hello, stats = self.session.live_mirror.hello, self.current.last_stats
        self.options.show_model(hello.model.sampling if hello else ModelSampling())
        limit = 0 if hello is None else hello.cache.max_request_tokens or hello.model.max_model_len
        self.context.show_fill(stats.context_tokens if stats else 0, limit)

    def _blocked(self) -> str:
        if not self.session.takes_prompts:
            return why_no_prompts(self.session.live_mirror.capabilities) or "This engine takes no prompts"
        if self.session.is_viewer:
            return "You are a viewer: no prompts"
        if self.chat.is_written_elsewhere(self.current):
            return _WRITTEN_ELSEWHERE
        if self.options.problem:
            return "The sampling options need a look"
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
        if self._blocked() or self.chat.answer_of(self.current.key) is not None or has_text:
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
            self._tell("Changing an earlier prompt: what follows it is replaced. Esc keeps everything.")

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

    def _on_row(self, row: int) -> None:
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
        if answer is None or answer.phase is not Phase.WRITING or now_s - self._stats_s >= STATS_EVERY_S:
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
        self.chat.told.connect(self._tell)
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
