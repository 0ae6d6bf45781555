"""Chat page: the shown conversation, its options, and the prompt field.

Connects the widgets with the `Chat` controller. Owns the choice of the shown conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from PySide6.QtCore import QEvent, Qt, Signal
from PySide6.QtGui import QKeyEvent, QResizeEvent
from PySide6.QtWidgets import (
    QHBoxLayout,
    QScrollArea,
    QSplitter,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.chat_turns import ChatTurn
from kvscope_app.session.session import Session
from kvscope_app.ui.editing import edit_item
from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label, tool_button
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.capability_messages import why_no_prompts
from kvscope_app.views.console.attachment_widgets import PromptAttachments
from kvscope_app.views.console.attachments import Attachment
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.chat_answer import AnswerPhase
from kvscope_app.views.console.chat_head import ChatHead
from kvscope_app.views.console.composer import Composer
from kvscope_app.views.console.context_bar import ContextBar
from kvscope_app.views.console.conversation import Conversation, Draft, Message, estimate_of_draft
from kvscope_app.views.console.conversation_files import ConversationFiles
from kvscope_app.views.console.conversation_picker import ConversationCombo, ConversationList, ConversationModel
from kvscope_app.views.console.options_panel import OptionsPanel
from kvscope_app.views.console.preset_bar import PresetBar
from kvscope_app.views.console.presets import PresetStore
from kvscope_app.views.console.progress_text import progress_text
from kvscope_app.views.console.prompt_estimator import PromptEstimator
from kvscope_app.views.console.refusal_offers import TurnFitter
from kvscope_app.views.console.sample_prompt_buttons import SamplePromptButtons
from kvscope_app.views.console.search_panel import SearchPanel
from kvscope_app.views.console.tools import ToolResult
from kvscope_app.views.console.transcript import Transcript
from kvscope_app.views.console.turn_cache import TurnCache
from kvscope_telemetry.messages.commands import EstimatePrompt
from kvscope_telemetry.messages.sampling_params import ModelSampling
from kvscope_telemetry.source import SourceState

MIN_WIDTH_FOR_LIST = 640
STATS_INTERVAL_S = 0.2
_NOT_READY = {
    SourceState.CONNECTING: "Connecting to the engine…",
    SourceState.LOADING: "The model is loading…",
    SourceState.ENDED: "The engine has stopped",
    SourceState.REFUSED: "The engine denied access",
}

_WRITTEN_ELSEWHERE: Final = "Another window is generating an answer in this conversation"
_WAIT_HINT: Final = "An answer is being written: send when it has ended, or stop it with Esc."
_EDITING: Final = "Editing a prompt: Send adds a new version, and the old one is kept."
_SAME_ANSWERS: Final = "At temperature 0, all answers to a prompt are the same: choose a higher one in the options."
_LIST_WIDTH: Final = 220


class ChatPage(QWidget):
    done = Signal(str, object, object)
    """Emitted after an undoable action with the arguments of `View.done`: a description, and functions that
    undo and redo it.
    """

    def __init__(self, session: Session, chat: Chat) -> None:
        super().__init__()
        self.session, self.chat = session, chat
        self.current: Conversation = chat.conversations[0]
        self._deleted: Conversation | None = None
        self._is_send_notice = False
        self._last_stats_s = 0.0
        self._model = ConversationModel(chat, self)
        self.list = ConversationList(self._model, self.show_row, self._delete_row)
        self.search = SearchPanel(self.list, chat.folder, chat.save)
        self.combo = ConversationCombo(self._model, self.show_row)
        self.transcript = Transcript()
        self.turn_cache = TurnCache(session, chat, self.transcript, self)
        self.sample_buttons = SamplePromptButtons()
        self.options = OptionsPanel()
        self.presets = PresetBar(
            PresetStore(chat.folder), lambda: self.current, chat.find, self._show_options, self.show_message
        )
        self.composer = Composer()
        self.attachments = PromptAttachments(
            self.composer, lambda: self._draft, self._on_attachments, self.show_message
        )
        self.files = ConversationFiles(chat, self, self.show_conversation)
        self.context = ContextBar()
        self.estimator = PromptEstimator(session, self._estimate_command, self)
        self.fitter = TurnFitter(session, chat, self)
        self.notice = label(wraps=True)
        self.head = ChatHead(self.combo)
        self.undo = tool_button("Undo", "Restore")
        self.cancel_edit = tool_button("Cancel", "Leave the prompt as it is (Esc)")
        self._lay_out()
        self._connect()
        self.show_message("  ".join(chat.warnings))
        self.presets.apply_default(self.current)
        self.show_conversation(self.current)

    def show_conversation(self, conversation: Conversation) -> None:
        if conversation is not self.current:
            self._select_request_of(conversation)
            self.estimator.clear()
        self.current = conversation
        self._show_draft()
        self._model.refresh()
        self._show_row()
        self.options.show_conversation(conversation)
        self.composer.answer_count.show_number(conversation.num_answers)
        self.show_messages()

    def show_turn(self, turn: ChatTurn) -> None:
        """Show the conversation of `turn`, on a path with its answer, and scroll to the answer."""
        conversation = self.chat.find(turn.conversation)
        answer = None if conversation is None else conversation.find(turn.answer)
        if conversation is not None and answer is not None:
            self._reveal(conversation, answer)

    def _reveal(self, conversation: Conversation, message: Message) -> None:
        if message not in conversation.path:
            self.chat.show_path(conversation, conversation.newest_end(message))
        self.show_conversation(conversation)
        self.transcript.reveal(message.key)

    def new_conversation(self) -> None:
        added = self.chat.add_conversation(self.presets.template(self.current))
        self.presets.apply_default(added)
        self.show_conversation(added)
        self.composer.edit.setFocus()

    def apply_theme(self, theme: Theme) -> None:
        self._model.theme = theme
        for widget in (self.head, self.transcript, self.options, self.composer, self.context):
            widget.apply_theme(theme)
        self.notice.setStyleSheet(f"color: {theme.warn};")

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._show_columns()

    def _show_columns(self) -> None:
        """Show the list beside the conversation if there is space, otherwise only one of them."""
        is_wide = self.width() >= scaled(MIN_WIDTH_FOR_LIST)
        self.search.show_with_list(is_wide)
        self.search.setVisible(is_wide or self.search.is_open)
        self._right.setVisible(is_wide or not self.search.is_open)
        self.head.show_with_list(is_wide)

    def event(self, event: QEvent) -> bool:
        """Claim Esc before the window's shortcut if it can stop or cancel something here."""
        is_esc = event.type() == QEvent.Type.ShortcutOverride and _is_escape(event)
        if is_esc and self._escape_action() is not None:
            event.accept()
            return True
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        escape = self._escape_action() if _is_escape(event) else None
        if escape is None:
            super().keyPressEvent(event)
        else:
            escape()

    def _escape_action(self) -> Callable[[], None] | None:
        """Return the action of Esc, or None: end the search, cancel the renaming or the edit, or stop the answer."""
        if self.search.has_focus:
            return self._end_search
        if self.head.is_renaming:
            return self.head.cancel_rename
        if self._draft.edited:
            return self._cancel_edit
        answers = self.chat.answers_of(self.current.key)
        is_stoppable = any(answer.phase is not AnswerPhase.STOPPING for answer in answers)
        return partial(self.chat.stop, self.current) if is_stoppable else None

    def show_status(self) -> None:
        self.options.show_adapters(self.session.status.adapters)
        answers, blocked = self.chat.answers_of(self.current.key), self.why_blocked()
        self.composer.show_state(
            is_writing=bool(answers),
            is_stopping=all(answer.phase is AnswerPhase.STOPPING for answer in answers),
            blocked=blocked,
        )
        self.transcript.show_state(
            {answer.message.key: progress_text(answer, self.session) for answer in answers},
            can_ask=not blocked,
            can_estimate=self.session.estimates_prompts,
        )
        if self._is_send_notice and not answers and not blocked:
            self.show_message("")
        self.sample_buttons.set_available(self.session.accepts_prompts)
        hello, stats = self.session.live_mirror.hello, self.current.last_stats
        self.options.show_logprobs_available(hello is None or self.chat.is_own_engine)
        self.options.show_model(hello.model.sampling if hello else ModelSampling())
        limit = 0 if hello is None else hello.cache.max_request_tokens or hello.model.max_model_len
        max_tokens = self.current.sampling.max_tokens
        if self.estimator.refusal:
            self.context.show_refusal(self.estimator.refusal)
        elif self.estimator.estimate is not None:
            self.context.show_estimate(self.estimator.estimate, limit, max_tokens)
        else:
            self.context.show_fill(stats.context_tokens if stats else 0, limit, max_tokens or 0)

    def why_blocked(self) -> str:
        """Return why no prompt can be sent now, or "" if one can."""
        if not self.session.accepts_prompts:
            return why_no_prompts(self.session.live_mirror.capabilities) or "This engine accepts no prompts"
        if self.session.is_viewer:
            return "Viewers cannot send prompts"
        if self.chat.is_written_elsewhere(self.current):
            return _WRITTEN_ELSEWHERE
        if self.options.problem:
            return "Check the options"
        return _NOT_READY.get(self.session.status.state, "")

    @property
    def _draft(self) -> Draft:
        return self.chat.draft_of(self.current.key)

    def _show_draft(self) -> None:
        draft = self._draft
        self.composer.edit.setPlainText(draft.shown)
        self.composer.edit.moveCursor(self.composer.edit.textCursor().MoveOperation.End)
        self.attachments.show_draft()
        self._edit_row.setVisible(bool(draft.edited))

    def _estimate_command(self) -> EstimatePrompt | None:
        return estimate_of_draft(self.current, self._draft, with_token_ids=self.chat.is_own_engine)

    def _on_typed(self) -> None:
        draft, text = self._draft, self.composer.edit.toPlainText()
        if not text.strip() and not draft.shown_attachments:
            self.estimator.clear()
        self.estimator.update_later()
        if text == draft.shown:
            return
        if draft.edited:
            draft.edited_text = text
        else:
            draft.text = text
        self.chat.mark_draft_changed(self.current.key)

    def _on_attachments(self) -> None:
        self.estimator.update_later()
        self.chat.mark_draft_changed(self.current.key)

    def _on_send(self, text: str) -> None:
        conversation = self.current
        self.chat.reload_changes()
        if self.current is not conversation:
            self.show_message("This conversation was deleted in another window")
            return
        if self.chat.is_written_elsewhere(conversation):
            self.show_message(_WRITTEN_ELSEWHERE)
            return
        draft = self._draft
        edited = next((message for message in conversation.messages if message.key == draft.edited), None)
        attachments = list(draft.shown_attachments)
        draft.clear_shown()
        self.chat.mark_draft_changed(conversation.key)
        self._show_draft()
        self._send_prompt(text, edited, attachments)

    def _on_results(self, answer: Message, results: list[ToolResult]) -> None:
        if blocked := self.why_blocked():
            self.show_message(blocked)
        else:
            self.chat.send_results(self.current, answer, results)
            self.composer.edit.setFocus()

    def _on_not_sent(self) -> None:
        self.show_message(self.why_blocked() or _WAIT_HINT)
        self._is_send_notice = True

    def _send_prompt(self, text: str, edited: Message | None = None, attachments: Sequence[Attachment] = ()) -> None:
        self.show_message("")
        last_before = self.current.last
        if edited is None:
            self.chat.ask(self.current, text, attachments)
        else:
            self.chat.send_edited(self.current, edited, text, attachments)
            self._push_undo("editing a prompt", last_before)

    def regenerate(self, answer: Message) -> None:
        if self.why_blocked() or self.chat.is_writing(self.current.key):
            return
        last_before = self.current.last
        self.chat.regenerate(self.current, answer)
        self._push_undo("regenerating an answer", last_before)

    def _on_new_chat_from(self, refused: Message) -> None:
        prompt = self.current.path_to(refused.parent)[-1]
        self.show_conversation(self.chat.add_conversation_with(self.current, prompt))
        self.composer.edit.setFocus()

    def _on_shorten(self, refused: Message) -> None:
        self.show_message("")
        self.fitter.fit(self.current, self.current.path_to(refused.parent)[-1])

    def _on_fitting_turns(self, conversation: Conversation, prompt: Message, starts_at: str) -> None:
        """Send `prompt` without the oldest turns, unless the user has gone on to something else meanwhile."""
        is_shown = conversation is self.current and prompt in conversation.path
        if is_shown and not self.why_blocked() and not self.chat.is_writing(conversation.key):
            last_before = conversation.last
            self.chat.send_without_oldest(conversation, prompt, starts_at)
            self._push_undo("leaving out the oldest turns", last_before)

    def _push_undo(self, step_name: str, last_before: str) -> None:
        """Register an undo step called `step_name`, which shows the path that ends in message `last_before` again."""
        key, last_after = self.current.key, self.current.last
        self.done.emit(step_name, partial(self._show_path, key, last_before), partial(self._show_path, key, last_after))

    def _show_path(self, key: str, last: str) -> None:
        conversation = self.chat.find(key)
        if conversation is not None:
            self.chat.stop(conversation)
            self.chat.show_path(conversation, last)
            self.show_conversation(conversation)

    def _on_version(self, version: Message) -> None:
        self.chat.show_path(self.current, self.current.newest_end(version))
        self._select_request_of(self.current)

    def _on_sample_prompt(self, prompt: str) -> None:
        """Send `prompt`, or insert it into the prompt field if it cannot be sent now or the field has text."""
        has_text = bool(self.composer.edit.toPlainText().strip())
        if self.why_blocked() or self.chat.is_writing(self.current.key) or has_text:
            self.composer.set_text(prompt)
        else:
            self._send_prompt(prompt)
            self.composer.edit.setFocus()  # the clicked button is hidden, and the focus would leave the console

    def _on_follow(self, is_on: bool) -> None:
        self.chat.follow_on_map = is_on

    def _show_options(self, conversation: Conversation) -> None:
        """Show options that a preset changed."""
        self.chat.mark_changed(conversation)
        if conversation is self.current:
            self.options.show_conversation(conversation)
            self.estimator.update_later()
            self.show_status()

    def _on_options(self) -> None:
        self.chat.mark_changed(self.current)
        self.estimator.update_later()
        self.presets.show_current()
        self.show_status()

    def _on_num_answers(self, number: int) -> None:
        self.current.num_answers = number
        self.chat.mark_changed(self.current)
        self.show_message(_SAME_ANSWERS if number > 1 and self.options.is_greedy else "")

    def _on_edit(self, prompt: Message) -> None:
        draft = self._draft
        if draft.edited != prompt.key:
            draft.begin_edit(prompt)
            self.chat.mark_draft_changed(self.current.key)
            self._show_draft()
        self.composer.edit.setFocus()

    def _cancel_edit(self) -> None:
        self._draft.clear_shown()
        self.chat.mark_draft_changed(self.current.key)
        self._show_draft()
        self.composer.edit.setFocus()

    def delete(self) -> None:
        self._delete(self.current)

    def _delete_row(self, row: int) -> None:
        if 0 <= row < len(self.chat.conversations):
            self._delete(self.chat.conversations[row])

    def _delete(self, deleted: Conversation) -> None:
        self._deleted = deleted
        self._remove(deleted)
        self.show_message(f"Deleted “{deleted.title}”.")
        self.undo.setVisible(bool(deleted.messages))
        if deleted.messages:
            step_name = f"deleting “{deleted.title}”"
            self.done.emit(step_name, partial(self._restore, deleted), partial(self._remove, deleted))
        if not self.list.hasFocus():
            self.composer.edit.setFocus()

    def _on_undo(self) -> None:
        if self._deleted is not None:
            self._restore(self._deleted)

    def _remove(self, conversation: Conversation) -> None:
        if conversation not in self.chat.conversations:  # another window has already removed it
            return
        row = self.chat.conversations.index(conversation)
        self.chat.delete(conversation)
        if conversation is self.current:
            self.show_conversation(self.chat.conversations[min(row, len(self.chat.conversations) - 1)])

    def _restore(self, conversation: Conversation) -> None:
        if conversation is self._deleted:
            self._deleted = None
            self.show_message("")
        if all(conversation.key != other.key for other in self.chat.conversations):
            self.chat.restore(conversation)
        restored = self.chat.find(conversation.key)
        if restored is not None:
            self.show_conversation(restored)

    def _end_search(self) -> None:
        self.search.end()
        self.composer.edit.setFocus()

    def _open_hit(self, key: str, message_key: str) -> None:
        """Show a conversation that was found, and scroll to the message."""
        conversation = self.chat.open_stored(key)
        if conversation is None:
            self.show_message("This conversation was deleted in another window")
            return
        message = conversation.find(message_key)
        if message is not None:
            self._reveal(conversation, message)
        else:
            self.show_conversation(conversation)
            self.composer.edit.setFocus()

    def show_row(self, row: int) -> None:
        if 0 <= row < len(self.chat.conversations):
            self.show_conversation(self.chat.conversations[row])

    def rename(self) -> None:
        row = self.chat.conversations.index(self.current)
        if self.list.isVisible():
            edit_item(self.list, self._model.index(row))
            return
        self.head.begin_rename(self.current.title)

    def _on_text(self, key: str, message: Message) -> None:
        if key == self.current.key:
            self.transcript.show_text(message)

    def _on_answer(self, key: str) -> None:
        if key != self.current.key:
            return
        is_streaming = all(answer.phase is AnswerPhase.WRITING for answer in self.chat.answers_of(key))
        now_s = time.monotonic()
        if not is_streaming or now_s - self._last_stats_s >= STATS_INTERVAL_S:
            self._last_stats_s = now_s
            self.show_status()

    def _on_answer_ended(self, key: str, message: Message) -> None:
        if key == self.current.key:
            self.transcript.show_end(message)
            self.estimator.update_later()
            self.turn_cache.refresh()
            self.show_status()

    def _on_messages(self, key: str) -> None:
        if key == self.current.key:
            self.show_messages()

    def _on_conversations_changed(self) -> None:
        if self.current not in self.chat.conversations:  # another window deleted it
            self.show_conversation(self.chat.conversations[0])
        self._model.refresh()
        self._show_row()
        self.show_status()

    def _on_request(self, epoch: int, number: int) -> None:
        mirror = self.session.mirror
        if mirror.epoch == epoch and mirror.requests.row_of(number) is not None:
            self.session.selection.select_request(number)
        else:
            self.show_message(f"Request #{count(number)} is no longer known to the engine.")

    def _select_request_of(self, conversation: Conversation) -> None:
        """Select the newest request of `conversation`, if a request of the current conversation is selected."""
        epoch, selected = self.session.mirror.epoch, self.session.selection.request
        numbers_before = {m.stats.number for m in self.current.messages if m.stats.epoch == epoch}
        if self.chat.follow_on_map and selected is not None and selected in numbers_before:
            numbers = (m.stats.number for m in reversed(conversation.path) if m.stats.number and m.stats.epoch == epoch)
            self.session.selection.select_request(next(numbers, None))

    def show_messages(self) -> None:
        path = self.current.path
        self._pages.setCurrentIndex(1 if path else 0)
        self.transcript.show_conversation(self.current)
        self.estimator.update_later()
        self.turn_cache.show_conversation(self.current)
        self.composer.edit.set_earlier(
            [message.content for message in path if message.role == "user" and not message.tool_results]
        )
        self.show_status()

    def _show_row(self) -> None:
        if self.current in self.chat.conversations:
            row = self.chat.conversations.index(self.current)
            self.list.show_row(row)
            self.combo.show_row(row)

    def show_message(self, text: str) -> None:
        self._is_send_notice = False
        self.notice.setText(text)
        self._notice_row.setVisible(bool(text))
        self.undo.hide()

    def _connect(self) -> None:
        self.search.opened.connect(self._open_hit)
        self.search.activity_changed.connect(self._show_columns)
        self.head.search.clicked.connect(self.search.start)
        self.head.new.clicked.connect(self.new_conversation)
        self.head.rename.clicked.connect(self.rename)
        self.head.renamed.connect(lambda title: self.chat.rename(self.current, title))
        self.head.rename_ended.connect(self.composer.edit.setFocus)
        self.head.remove.clicked.connect(self.delete)
        self.undo.clicked.connect(self._on_undo)
        self.head.settings.toggled.connect(self._options.setVisible)
        self.head.follow.toggled.connect(self._on_follow)
        self.composer.sent.connect(self._on_send)
        self.composer.refused.connect(self._on_not_sent)
        self.composer.stop.clicked.connect(lambda: self.chat.stop(self.current))
        self.composer.answer_count.chosen.connect(self._on_num_answers)
        self.composer.edit.textChanged.connect(self._on_typed)
        self.cancel_edit.clicked.connect(self._cancel_edit)
        self.sample_buttons.chosen.connect(self._on_sample_prompt)
        self.sample_buttons.edit_requested.connect(self.composer.set_text)
        self.options.changed.connect(self._on_options)
        self.transcript.regenerate_requested.connect(self.regenerate)
        self.transcript.new_chat_requested.connect(self._on_new_chat_from)
        self.transcript.shorten_requested.connect(self._on_shorten)
        self.fitter.found.connect(self._on_fitting_turns)
        self.fitter.failed.connect(self.show_message)
        self.transcript.edit_requested.connect(self._on_edit)
        self.transcript.version_requested.connect(self._on_version)
        self.transcript.results_sent.connect(self._on_results)
        self.options.tools.failed.connect(self.show_message)
        self.transcript.stop_requested.connect(lambda message: self.chat.stop(self.current, message))
        self.transcript.request_clicked.connect(self._on_request)
        self.chat.conversations_changed.connect(self._on_conversations_changed)
        self.chat.messages_changed.connect(self._on_messages)
        self.chat.text_added.connect(self._on_text)
        self.chat.answer_changed.connect(self._on_answer)
        self.chat.answer_ended.connect(self._on_answer_ended)
        self.chat.notified.connect(self.show_message)
        self.files.reported.connect(self.show_message)
        self.files.done.connect(self.done)
        self.turn_cache.notified.connect(self.show_message)
        self.presets.done.connect(self.done)
        self.session.status_changed.connect(self.show_status)
        self.estimator.changed.connect(self.show_status)

    def _lay_out(self) -> None:
        self._pages = QStackedWidget()
        self._pages.addWidget(self.sample_buttons)
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
        main.addWidget(self._edit_line())
        main.addWidget(self.attachments.row)
        main.addWidget(self.composer)
        main.addWidget(self.context)
        self._right = QWidget()
        self._right.setLayout(main)
        split = QSplitter()
        split.setChildrenCollapsible(False)
        split.addWidget(self.search)
        split.addWidget(self._right)
        split.setStretchFactor(1, 1)
        split.setSizes([scaled(_LIST_WIDTH), scaled(MIN_WIDTH_FOR_LIST)])
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(split)

    def _options_area(self) -> QScrollArea:
        self._options = QScrollArea()
        self.options.column.insertWidget(0, self.presets)
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

    def _edit_line(self) -> QWidget:
        self._edit_row = QWidget()
        row = QHBoxLayout(self._edit_row)
        row.setContentsMargins(12, 0, 10, 0)
        row.addWidget(label(_EDITING, "muted", wraps=True), 1)
        row.addWidget(self.cancel_edit)
        self._edit_row.hide()
        return self._edit_row


def _is_escape(event: QEvent) -> bool:
    return (
        isinstance(event, QKeyEvent)
        and event.key() == Qt.Key.Key_Escape
        and event.modifiers() == Qt.KeyboardModifier.NoModifier
    )
