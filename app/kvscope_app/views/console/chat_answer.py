"""One unfinished answer: its state from Submit to its end, updated from replies. Imports no Qt.

Until the end, only `ChatAnswer` may modify the message that it writes into.
"""

from __future__ import annotations

import time
from enum import Enum, auto

import msgspec

from kvscope_app.ui.number_text import count, plural
from kvscope_app.views.console.conversation import AnswerStats, Conversation, Ending, Message, system_digest
from kvscope_app.views.console.scored_token import scored_tokens
from kvscope_telemetry.messages.commands import Accepted, Finished, Refused, Tokens

_ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "stopped", "error": "error"}


class AnswerPhase(Enum):
    SENT = auto()
    QUEUED = auto()
    WRITING = auto()
    STOPPING = auto()
    """Abort was sent, but the engine has not confirmed it."""
    ENDED = auto()


class ChatAnswer:
    """Unfinished answer, whose text and statistics are written to `message` as replies arrive.

    `max_tokens` is the requested limit, or None for as many tokens as fit. `index` is that of the completion, or
    None if the request has only one.
    """

    def __init__(
        self,
        request_id: str,
        conversation: Conversation,
        message: Message,
        epoch: int,
        max_tokens: int | None = None,
        model: str = "",
        index: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.conversation = conversation
        self.message = message
        self.phase = AnswerPhase.SENT
        self.has_new_text = False
        """Whether text arrived since the attribute was last set to False."""
        self._max_tokens = max_tokens
        self._sent_s = time.monotonic()
        self._first_token_s = 0.0
        self._first_token_running_s = 0.0
        system = system_digest(conversation.system)
        message.stats = AnswerStats(epoch=epoch, model=model, adapter=conversation.adapter, system=system)

    @property
    def is_ended(self) -> bool:
        return self.phase is AnswerPhase.ENDED

    @property
    def waited_s(self) -> float:
        """Seconds since the prompt was sent."""
        return time.monotonic() - self._sent_s

    def set_stopping(self) -> None:
        if not self.is_ended:
            self.phase = AnswerPhase.STOPPING

    def set_accepted(self, reply: Accepted) -> None:
        if self.phase is AnswerPhase.SENT:
            self.phase = AnswerPhase.QUEUED
        index = self.index or 0
        number = reply.numbers[index] if index < len(reply.numbers) else 0
        self._update(number=number, num_prompt_tokens=reply.num_prompt_tokens)

    def set_number(self, number: int) -> None:
        self._update(number=number)

    def add_tokens(self, reply: Tokens, stopped_s: float = 0.0) -> None:
        """Append the text of `reply`. `stopped_s` is the total time so far in which the engine was paused or
        suspended.
        """
        now_s = time.monotonic()
        self._first_token_s = self._first_token_s or now_s
        self._first_token_running_s = self._first_token_running_s or now_s - stopped_s
        if self.phase in (AnswerPhase.SENT, AnswerPhase.QUEUED):
            self.phase = AnswerPhase.WRITING
        self.message.scored_tokens += scored_tokens(reply, len(self.message.content))
        self.message.content += reply.text
        self.message.token_ids += reply.token_ids
        self.has_new_text = True
        num_tokens = self.message.stats.num_tokens + len(reply.token_ids)
        running_s = now_s - stopped_s - self._first_token_running_s
        tokens_per_s = (num_tokens - 1) / running_s if num_tokens > 1 and running_s > 0 else None
        self._update(num_tokens=num_tokens, first_seen_s=self._first_token_s - self._sent_s, tokens_per_s=tokens_per_s)

    def set_finished(self, reply: Finished) -> None:
        usage, timing = reply.usage, reply.timing
        stats = self.message.stats
        self._update(
            num_prompt_tokens=usage.prompt_tokens or stats.num_prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_tokens=max(usage.completion_tokens, stats.num_tokens),
            ttft_s=timing.ttft_s,
            total_s=timing.total_s or self.waited_s,
            queue_s=timing.queue_s,
            stopped_s=timing.stopped_s,
        )
        running_s = timing.total_s - timing.stopped_s
        if timing.ttft_s is not None and usage.completion_tokens > 1 and running_s > timing.ttft_s:
            self._update(tokens_per_s=(usage.completion_tokens - 1) / (running_s - timing.ttft_s))
        reason = "" if reply.finish_reason in _ENDINGS else f"the engine says {reply.finish_reason[:40]!r}"
        if reply.finish_reason == "length":
            reason = self._limit_reached()
        self.message.tool_calls = list(reply.tool_calls)
        if reply.content is not None:
            self.message.content = reply.content
            self.message.scored_tokens = []  # their positions are those in the text with the calls
        self.end(_ENDINGS.get(reply.finish_reason, "stopped"), reply.error or reason)

    def set_refused(self, reply: Refused) -> None:
        self.message.is_too_long = reply.is_too_long
        self.end("refused", reply.reason)

    def end(self, ending: Ending, note: str = "") -> None:
        self.message.ending, self.message.note = ending, note
        self.phase = AnswerPhase.ENDED

    def _limit_reached(self) -> str:
        if self._max_tokens is not None and self.message.stats.num_tokens >= self._max_tokens:
            return f"Max tokens is {count(self._max_tokens)}"
        return f"the context is full ({plural(self.message.stats.context_tokens, 'token')})"

    def _update(self, **values: object) -> None:
        self.message.stats = msgspec.structs.replace(self.message.stats, **values)
