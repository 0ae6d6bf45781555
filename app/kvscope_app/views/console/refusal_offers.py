"""Offers on the card of a prompt that was too long: a new conversation, or the same prompt without the oldest turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace
from PySide6.QtCore import QObject, Qt, QTimer, Signal
from PySide6.QtWidgets import QPushButton, QVBoxLayout, QWidget

from kvscope_app.session.session import Session
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import Conversation, Message, messages_to_send, omitted_keys
from kvscope_app.views.console.prompt_estimator import MAX_WAIT_MS, next_tag
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, PromptEstimate, Reply

_NOTHING_FITS: Final = "Even alone, this prompt does not fit: shorten it, or lower Max tokens in the options."
_NO_ANSWER: Final = "The engine did not say how many turns fit: try again."
_MAX_RESERVED_SHARE: Final = 0.25
"""Largest part of the context that is kept free for the answer if the engine would cut a longer one."""


class RefusalOffers(QWidget):
    """Buttons below an answer that was refused because its prompt was too long."""

    new_chat_requested = Signal()
    shorten_requested = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.new_chat = QPushButton("New chat from here")
        self.new_chat.setToolTip("Start a conversation with this prompt, the system prompt and the options")
        self.shorten = QPushButton("Leave out the oldest turns")
        self.shorten.setToolTip("Send this prompt again with as many of the newest turns as fit")
        self.new_chat.clicked.connect(self.new_chat_requested)
        self.shorten.clicked.connect(self.shorten_requested)
        column = QVBoxLayout(self)  # one below the other: side by side, they would widen a narrow dock
        column.setContentsMargins(0, 2, 0, 2)
        column.setSpacing(4)
        for button in (self.new_chat, self.shorten):
            column.addWidget(button, 0, Qt.AlignmentFlag.AlignLeft)


class TurnFitter(QObject):
    """Finds the fewest oldest turns without which a prompt fits, by asking the engine for estimates."""

    found = Signal(object, object, str)
    """Emitted with the conversation, the prompt and the key of the first message to send."""
    failed = Signal(str)
    """Emitted with a sentence for the user if no number of turns fits, or the engine does not answer."""

    def __init__(self, session: Session, chat: Chat, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session, self._chat = session, chat
        self._conversation: Conversation | None = None
        self._prompt: Message | None = None
        self._starts: Sequence[str] = ()
        """Keys of the prompts at which the sent messages could start, oldest first. The last one is the prompt's."""
        self._low = self._high = self._tried = 0
        """Bounds of the binary search in `_starts`: the first start that fits is in `_low` to `_high`, inclusive; it is
        `len(_starts)` if none fits.
        """
        self._tag = 0
        self._patience = QTimer(self, singleShot=True, interval=MAX_WAIT_MS)
        self._patience.timeout.connect(lambda: self._fail(_NO_ANSWER))
        session.replies.connect(self._on_replies)

    def fit(self, conversation: Conversation, prompt: Message) -> None:
        """Start the search for `prompt`. A search in progress ends without a result."""
        path = conversation.path_to(prompt.key)
        skipped = omitted_keys(path)
        prompts = [message.key for message in path if message.role == "user" and message.key not in skipped]
        self._conversation, self._prompt, self._starts = conversation, prompt, prompts[1:]
        self._low, self._high = 0, len(self._starts)
        self._continue()

    def _continue(self) -> None:
        conversation, prompt = self._conversation, self._prompt
        if conversation is None or prompt is None:
            return
        if self._low == self._high:
            self._end()
            if self._low == len(self._starts):
                self.failed.emit(_NOTHING_FITS)
            else:
                self.found.emit(conversation, prompt, self._starts[self._low])
            return
        self._tried = (self._low + self._high) // 2
        messages = messages_to_send(
            conversation,
            with_token_ids=self._chat.is_own_engine,
            last=prompt.key,
            starts_at=self._starts[self._tried],
        )
        self._ask(EstimatePrompt(messages=messages, adapter=conversation.adapter))

    def _ask(self, command: EstimatePrompt) -> None:
        self._tag = next_tag()
        try:
            is_sent = self._session.send(replace(command, tag=self._tag))
        except KvscopeError:  # more than a message may have
            self._narrow(fits=False)
            return
        if is_sent:
            self._patience.start()
        else:
            self._fail(_NO_ANSWER)

    def _on_replies(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            conversation = self._conversation
            if conversation is None or not isinstance(reply, PromptEstimate | Failed) or reply.tag != self._tag:
                continue
            if isinstance(reply, PromptEstimate):
                if limit := self._limit_of(reply):
                    self._narrow(fits=self._fits(reply, limit, conversation))
                else:
                    self._fail(_NO_ANSWER)
            elif reply.is_unanswered:
                self._fail(_NO_ANSWER)
            else:
                self._narrow(fits=False)

    def _narrow(self, *, fits: bool) -> None:
        if fits:
            self._high = self._tried
        else:
            self._low = self._tried + 1
        self._continue()

    def _limit_of(self, estimate: PromptEstimate) -> int:
        """Return the maximum number of tokens of prompt and answer; 0 if unknown."""
        hello = self._session.live_mirror.hello
        known = 0 if hello is None else hello.cache.max_request_tokens or hello.model.max_model_len
        return estimate.max_request_tokens or known

    def _fits(self, estimate: PromptEstimate, limit: int, conversation: Conversation) -> bool:
        """Whether the prompt leaves enough tokens for an answer.

        If the block pool is smaller than the model's context, the engine refuses a prompt whose longest answer does not
        fit. Otherwise, it cuts the answer, and at most `_MAX_RESERVED_SHARE` of the context is kept free for it.
        """
        hello = self._session.live_mirror.hello
        wanted = conversation.sampling.max_tokens or 1
        is_cut = hello is None or limit >= hello.model.max_model_len
        needed = min(wanted, max(1, int(limit * _MAX_RESERVED_SHARE))) if is_cut else wanted
        return estimate.num_prompt_tokens + needed <= limit

    def _fail(self, why: str) -> None:
        self._end()
        self.failed.emit(why)

    def _end(self) -> None:
        self._conversation = self._prompt = None
        self._tag = 0
        self._patience.stop()
