"""Chat controller: owns all conversations and the unfinished answers, and connects them to the session. No widgets.

Several answers may be written concurrently: in several conversations, or to the same prompt. Received text is passed on
in batches every `FLUSH_MS`, independent of the rate of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_app.ui.number_text import count
from kvscope_app.views.console.answer_requests import answer_requests
from kvscope_app.views.console.attachments import Attachment
from kvscope_app.views.console.chat_answer import AnswerPhase, ChatAnswer
from kvscope_app.views.console.conversation import (
    BlockHashes,
    Conversation,
    Draft,
    Message,
    new_conversation,
    title_from,
)
from kvscope_app.views.console.conversation_saver import ConversationSaver
from kvscope_app.views.console.conversation_store import ConversationStore
from kvscope_app.views.console.tools import ToolResult
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Command,
    Done,
    Failed,
    Finished,
    Refused,
    Reply,
    Tokens,
)
from kvscope_telemetry.source import SourceState

FLUSH_MS: Final = 40
STOP_TIMEOUT_MS: Final = 5000
"""Maximum time until an engine ends a request after replying to Abort. The answer then counts as stopped."""


class Chat(QObject):
    conversations_changed = Signal()
    """Emitted when conversations were added or removed, or when their title or activity changed."""
    messages_changed = Signal(str)
    """Emitted with the key of a conversation when its messages or its shown path have changed."""
    text_added = Signal(str, object)
    """Emitted with the key of a conversation and an unfinished answer of it (a `Message`) that got more text."""
    answer_changed = Signal(str)
    """Emitted with the key of a conversation when the phase or statistics of an unfinished answer changed."""
    answer_ended = Signal(str, object)
    """Emitted with the key of the conversation and the complete message when an answer has ended."""
    notified = Signal(str)
    """Emitted with a sentence for the user, such as the reason why saving failed."""

    def __init__(self, session: Session, store: ConversationStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.follow_on_map = True
        self._session = session
        self._answers: list[ChatAnswer] = []
        self._epoch: int | None = None
        loaded = store.load()
        self.warnings = loaded.warnings
        self.conversations: list[Conversation] = loaded.conversations or [new_conversation()]
        self._drafts = loaded.drafts
        self._saver = ConversationSaver(store, self.conversations, self._drafts, self.is_writing, self)
        self._saver.notified.connect(self.notified)
        self._saver.messages_changed.connect(self.messages_changed)
        self._saver.conversations_changed.connect(self._on_external_change)
        self._flush_timer = QTimer(self, interval=FLUSH_MS)
        self._flush_timer.timeout.connect(self.flush)
        session.replies.connect(self._on_replies)
        session.status_changed.connect(self._on_status)

    @property
    def is_own_engine(self) -> bool:
        """Whether the engine is kvscope's, which accepts tokens of earlier answers and reports log-probabilities."""
        hello = self._session.live_mirror.hello
        return hello is not None and hello.capabilities.commands and not hello.api

    @property
    def folder(self) -> Path:
        """Folder with the database of conversations."""
        return self._saver.store.folder

    def find(self, key: str) -> Conversation | None:
        return next((c for c in self.conversations if c.key == key), None)

    def answers_of(self, key: str) -> list[ChatAnswer]:
        """Return the unfinished answers of a conversation: several if they answer the same prompt."""
        return [answer for answer in self._answers if answer.conversation.key == key]

    def draft_of(self, key: str) -> Draft:
        """Return the unsent text of a conversation. Call `mark_draft_changed` after a change to it."""
        return self._drafts.setdefault(key, Draft())

    def mark_draft_changed(self, key: str) -> None:
        self._saver.mark_draft_changed(key)

    def add_conversation_with(self, template: Conversation, prompt: Message) -> Conversation:
        """Add a conversation at the top with the options of `template` and, as its draft, the prompt `prompt`."""
        added = new_conversation(template)
        self._drafts[added.key] = Draft(text=prompt.content, attachments=list(prompt.attachments))
        self.conversations.insert(0, added)
        self._saver.mark_draft_changed(added.key)
        self.conversations_changed.emit()
        return added

    def add_conversation(self, template: Conversation | None = None) -> Conversation:
        """Add a conversation at the top, with the options of `template`.

        Returns the first conversation instead if it is empty and unnamed.
        """
        first = self.conversations[0] if self.conversations else None
        if first is not None and not first.messages and not first.named:
            return first
        added = new_conversation(template)
        self.conversations.insert(0, added)
        self.conversations_changed.emit()
        return added

    def delete(self, conversation: Conversation) -> None:
        """Remove a conversation, and abort the request that is writing an answer in it. If no conversation remains, add
        an empty one with the same options.
        """
        self.stop(conversation)
        self._answers = [answer for answer in self._answers if answer.conversation is not conversation]
        self.conversations.remove(conversation)
        self._saver.delete(conversation)  # the draft stays in memory, for `restore`
        if not self.conversations:
            self.conversations.append(new_conversation(conversation))
        self.conversations_changed.emit()

    def restore(self, conversation: Conversation) -> None:
        for message in conversation.messages:
            if message.role == "assistant" and not message.ending:
                message.ending = "stopped"
        self.conversations.insert(0, conversation)
        self._saver.mark_changed(conversation)
        self._saver.mark_draft_changed(conversation.key)
        self.conversations_changed.emit()

    def add_stored(self, conversations: Sequence[Conversation]) -> None:
        """Store further conversations, all or none, and list them by the time of their last change.

        Raises KvscopeError if writing fails.
        """
        self._saver.store.add_all(conversations)
        for conversation in conversations:
            self._list(conversation)
        self.conversations_changed.emit()

    def remove_stored(self, conversations: Sequence[Conversation]) -> None:
        """Delete conversations, all or none. Raises KvscopeError if writing fails."""
        keys = {conversation.key for conversation in conversations}
        self._saver.store.delete_all(keys)
        self.conversations[:] = [c for c in self.conversations if c.key not in keys]
        self._on_external_change()

    def open_stored(self, key: str) -> Conversation | None:
        """Return the conversation with this key. If it is not loaded yet, read and list it; None if it is unknown."""
        found = self.find(key)
        if found is None and (found := self._saver.store.read_one(key)) is not None:
            self._list(found)
            self.conversations_changed.emit()
        return found

    def rename(self, conversation: Conversation, title: str) -> None:
        if title.strip() and title != conversation.title:
            conversation.title, conversation.named = title.strip(), True
            self._saver.mark_changed(conversation)
            self.conversations_changed.emit()

    def mark_changed(self, conversation: Conversation) -> None:
        self._saver.mark_changed(conversation)

    def ask(self, conversation: Conversation, prompt: str, attachments: Sequence[Attachment] = ()) -> None:
        """Send a prompt, with files before it, after the shown messages. Its answers, `Conversation.num_answers`, are
        written into new messages.
        """
        if not conversation.named and not conversation.messages:
            conversation.title = title_from(prompt)
        conversation.append("user", prompt, attachments)
        self._submit(conversation, conversation.num_answers)

    def send_results(self, conversation: Conversation, answer: Message, results: list[ToolResult]) -> None:
        """Send the results of the functions that `answer` calls, and continue the chat with them."""
        if not self.is_writing(conversation.key):
            conversation.last = answer.key
            conversation.append("user", "\n\n".join(result.content for result in results)).tool_results = results
            self._submit(conversation, 1)

    def regenerate(self, conversation: Conversation, answer: Message) -> None:
        """Generate another version of `answer`. The previous version is kept."""
        if not self.is_writing(conversation.key) and answer.role == "assistant":
            conversation.last = answer.parent
            self._submit(conversation, 1)

    def send_edited(
        self, conversation: Conversation, edited: Message, prompt: str, attachments: Sequence[Attachment] = ()
    ) -> None:
        """Send `prompt` as another version of the prompt `edited`. The previous version is kept."""
        if not self.is_writing(conversation.key):
            conversation.last = edited.parent
            self.ask(conversation, prompt, attachments)

    def send_without_oldest(self, conversation: Conversation, prompt: Message, starts_at: str) -> None:
        """Send `prompt` again as another version, with which the messages before the one with key `starts_at` are left
        out. If that is the prompt's own key, it is sent alone.
        """
        if not self.is_writing(conversation.key):
            conversation.last = prompt.parent
            again = conversation.append("user", prompt.content, prompt.attachments)
            again.starts_at = again.key if starts_at == prompt.key else starts_at
            self._submit(conversation, conversation.num_answers)

    def show_path(self, conversation: Conversation, last: str) -> None:
        """Show the messages up to the one with key `last`. The next prompt is sent with them."""
        if last != conversation.last:
            conversation.last = last
            self._saver.mark_changed(conversation)
            self.messages_changed.emit(conversation.key)

    def stop(self, conversation: Conversation, message: Message | None = None) -> None:
        """Ask the engine to stop the answer `message`, or all unfinished answers of the conversation. Answers end when
        the engine confirms it.
        """
        answers = [answer for answer in self.answers_of(conversation.key) if message in (None, answer.message)]
        aborts = {}
        for answer in answers:
            answer.set_stopping()
            index = None if message is None else answer.index
            aborts[answer.request_id] = Abort(request_id=answer.request_id, index=index)
        try:
            for abort in aborts.values():
                self._session.send(abort)
        except KvscopeError as error:
            self.notified.emit(str(error))
        if answers:
            self.answer_changed.emit(conversation.key)

    def store_blocks(self, conversation: Conversation, answer: Message, blocks: BlockHashes) -> None:
        """Store the hashes of an answer's blocks, which changes neither its text nor the time of the last change."""
        answer.block_hashes = blocks
        self._saver.mark_answer_changed(conversation)

    def is_written_elsewhere(self, conversation: Conversation) -> bool:
        """Whether another window is writing an answer in this conversation. The answer's text appears here when it is
        saved.
        """
        return self._saver.is_written_elsewhere(conversation.key)

    def reload_changes(self) -> None:
        self._saver.reload_changes()

    def save(self) -> None:
        self._saver.save()

    def flush(self) -> None:
        """Pass on the text received since the last call, and remove the answers that have ended."""
        for answer in list(self._answers):
            key = answer.conversation.key
            has_new_text, answer.has_new_text = answer.has_new_text, False
            self._find_number(answer)
            if has_new_text:
                self.text_added.emit(key, answer.message)
                self._saver.mark_answer_changed(answer.conversation)
            if answer.is_ended:
                self._answers.remove(answer)
                self._saver.mark_changed(answer.conversation)
                self.answer_ended.emit(key, answer.message)
                self.conversations_changed.emit()
            elif has_new_text:
                self.answer_changed.emit(key)
        if not self._answers:
            self._flush_timer.stop()

    def shut_down(self) -> str:
        """Mark unfinished answers as interrupted and save. Returns a message for the user, or ""."""
        for answer in self._answers:
            if not answer.is_ended:
                answer.end("interrupted", "the window was closed")
        self.flush()
        return self._saver.shut_down()

    def is_writing(self, key: str) -> bool:
        """Whether this window is writing an answer in the conversation with this key."""
        return bool(self.answers_of(key))

    def _submit(self, conversation: Conversation, num_answers: int) -> None:
        self._epoch = self._session.live_mirror.epoch
        messages, hello = conversation.append_answers(num_answers), self._session.live_mirror.hello
        requests = answer_requests(conversation, messages, hello, self._epoch or 0, is_own_engine=self.is_own_engine)
        for request in requests:
            self._answers += request.answers
            self._send(request.answers, request.submit)
        self._flush_timer.start()
        self._saver.mark_changed(conversation)
        self._saver.save()  # save now, so that other windows see that an answer is being written here
        self._move_to_top(conversation)
        self.messages_changed.emit(conversation.key)

    def _send(self, answers: Iterable[ChatAnswer], command: Command) -> None:
        refusal = ""
        try:
            if not self._session.send(command):
                refusal = "the engine accepts no prompts now"
        except KvscopeError as error:
            refusal = str(error)
        for answer in answers if refusal else ():
            answer.end("refused", refusal)

    def _on_replies(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, Failed | Done | Tokens | Accepted | Finished | Refused) and reply.request_id:
                for answer in self._answers:
                    if answer.request_id == reply.request_id:
                        self._on_reply_of_request(answer, reply)

    def _on_reply_of_request(
        self, answer: ChatAnswer, reply: Failed | Done | Tokens | Accepted | Finished | Refused
    ) -> None:
        if isinstance(reply, Failed):
            if answer.phase is AnswerPhase.STOPPING or answer.index is None:  # else another answer's Abort failed
                answer.end("interrupted", reply.reason)
        elif isinstance(reply, Done):
            # The engine has processed the Abort. The answer ends with its Finished, which normally follows.
            if answer.phase is AnswerPhase.STOPPING:
                QTimer.singleShot(STOP_TIMEOUT_MS, self, partial(self._end_as_lost, answer))
        elif not isinstance(reply, Tokens | Finished) or reply.index == (answer.index or 0):
            self._on_reply(answer, reply)

    def _on_reply(self, answer: ChatAnswer, reply: Tokens | Accepted | Finished | Refused) -> None:
        if isinstance(reply, Tokens):
            mirror = self._session.live_mirror
            answer.add_tokens(reply, mirror.stops.stopped_ns(0, mirror.time_ns) / 1e9)
            if reply.num_missed:
                self.notified.emit(f"{count(reply.num_missed)} pieces of this answer were lost while disconnected.")
        elif isinstance(reply, Accepted):
            answer.set_accepted(reply)
            self._select(answer)
            self.answer_changed.emit(answer.conversation.key)
        elif isinstance(reply, Finished):
            answer.set_finished(reply)
        else:
            answer.set_refused(reply)

    def _end_as_lost(self, answer: ChatAnswer) -> None:
        """End an answer for which the engine sent no final reply in time, because it has lost this client's session."""
        if not answer.is_ended:
            answer.end("stopped", "the engine sent no reason")

    def _select(self, answer: ChatAnswer) -> None:
        is_shown = answer.message.key == answer.conversation.last
        if self.follow_on_map and is_shown and answer.message.stats.number:
            self._session.selection.select_request(answer.message.stats.number)

    def _find_number(self, answer: ChatAnswer) -> None:
        """Find the answer's request number by its request id, for engines whose own API does not report the number."""
        if not answer.message.stats.number:
            number = self._session.live_mirror.requests.newest_with(answer.request_id)
            if number:
                answer.set_number(number)
                self._select(answer)
                self.answer_changed.emit(answer.conversation.key)

    def _on_status(self) -> None:
        """Mark answers as interrupted if the engine ended or was replaced; their text stays."""
        status, epoch = self._session.status, self._session.live_mirror.epoch
        is_other_engine = self._epoch is not None and epoch is not None and epoch != self._epoch
        if status.state is SourceState.ENDED or is_other_engine:
            reason = status.reason or "the engine stopped"
            for answer in self._answers:
                if not answer.is_ended:
                    answer.end("interrupted", reason)
        self._epoch = epoch if epoch is not None else self._epoch

    def _list(self, conversation: Conversation) -> None:
        row = sum(other.changed_s > conversation.changed_s for other in self.conversations)
        self.conversations.insert(row, conversation)

    def _move_to_top(self, conversation: Conversation) -> None:
        self.conversations.remove(conversation)
        self.conversations.insert(0, conversation)
        self.conversations_changed.emit()

    def _on_external_change(self) -> None:
        if not self.conversations:
            self.conversations.append(new_conversation())
        self.conversations_changed.emit()
