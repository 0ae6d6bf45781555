"""One answer on its way: from Submit to its end, as the replies tell it. No Qt.

Owns the message it writes into until the end; nobody else changes that message meanwhile.
"""

from __future__ import annotations

import time
from enum import Enum, auto

import msgspec

from kvscope_app.views.console.conversation import AnswerStats, Conversation, Ending, Message
from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Tokens

_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "stopped", "error": "error"}


class AnswerPhase(Enum):
    """Where the answer is."""

    SENT = auto()
    QUEUED = auto()
    """Accepted, no token yet."""
    WRITING = auto()
    STOPPING = auto()
    """Stop was pressed; the engine has not said that it stopped."""
    ENDED = auto()


class ChatAnswer:
    """Writes into `message`. `pending` is text that came and was not yet shown."""

    def __init__(self, request_id: str, conversation: Conversation, message: Message, epoch: int) -> None:
        self.request_id = request_id
        self.conversation = conversation
        self.message = message
        self.phase = AnswerPhase.SENT
        self._pending: list[str] = []
        self._sent_s = time.monotonic()
        self._first_s = 0.0
        self._last_s = 0.0
        message.stats = AnswerStats(epoch=epoch, adapter=conversation.adapter)

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.phase is AnswerPhase.ENDED

    @property
    def waited_s(self) -> float:
        """Since it was sent."""
        return time.monotonic() - self._sent_s

    def take_pending(self) -> str:
        """Text since the last call."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def stopping(self) -> None:
        """Stop was asked for."""
        if not self.is_ended:
            self.phase = AnswerPhase.STOPPING

    def accepted(self, reply: Accepted) -> None:
        """The engine took it."""
        if self.phase is AnswerPhase.SENT:
            self.phase = AnswerPhase.QUEUED
        number = reply.numbers[0] if reply.numbers else 0
        self._update(number=number, num_prompt_tokens=reply.num_prompt_tokens)

    def is_request(self, number: int) -> None:
        """Which of the engine's requests it is."""
        self._update(number=number)

    def tokens(self, reply: Tokens) -> None:
        """More text."""
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        self._last_s = now_s
        if self.phase in (AnswerPhase.SENT, AnswerPhase.QUEUED):
            self.phase = AnswerPhase.WRITING
        self.message.content += reply.text
        self._pending.append(reply.text)
        count = self.message.stats.num_tokens + len(reply.token_ids)
        self._update(num_tokens=count, first_seen_s=self._first_s - self._sent_s, tokens_per_s=self._speed(count))

    def finished(self, reply: Finished) -> None:
        """The engine ended it, and says its own times."""
        usage, timing = reply.usage, reply.timing
        stats = self.message.stats
        self._update(
            num_prompt_tokens=usage.prompt_tokens or stats.num_prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_tokens=max(usage.completion_tokens, stats.num_tokens),
            ttft_s=timing.ttft_s,
            total_s=timing.total_s or self.waited_s,
            queue_s=timing.queue_s,
        )
        if timing.ttft_s is not None and usage.completion_tokens > 1 and timing.total_s > timing.ttft_s:
            speed = (usage.completion_tokens - 1) / (timing.total_s - timing.ttft_s)
            self._update(tokens_per_s=speed)
        reason = "" if reply.finish_reason in _ENDINGS else f"the engine says {reply.finish_reason[:40]!r}"
        self.end(_ENDINGS.get(reply.finish_reason, "stopped"), reply.error or reason)

    def refused(self, reply: Refused) -> None:
        """The engine did not take it."""
        self.end("refused", reply.reason)

    def end(self, ending: Ending, note: str = "") -> None:
        """No more will come, for this reason."""
        self.message.ending, self.message.note = ending, note
        self.phase = AnswerPhase.ENDED

    def _speed(self, count: int) -> float | None:
        took_s = self._last_s - self._first_s
        return (count - 1) / took_s if count > 1 and took_s > 0 else None

    def _update(self, **values: object) -> None:
        self.message.stats = msgspec.structs.replace(self.message.stats, **values)
