"""A conversation: its messages, system prompt and sampling options, and what of it is sent. No Qt.

Values as they are kept on disk.
"""

from __future__ import annotations

import secrets
import time
from typing import Final, Literal, TypeAlias

import msgspec

from kvscope_telemetry.messages.commands import ChatMessage
from kvscope_telemetry.messages.sampling_params import ModelSampling, ResolvedSampling, SamplingParams

NEW_TITLE: Final = "New conversation"
MAX_TITLE: Final = 60
DEFAULT_SAMPLING: Final = SamplingParams(max_tokens=512)
"""What is not said is as the model's makers have it, or as `UNKNOWN_MODEL`."""
UNKNOWN_MODEL: Final = ModelSampling(temperature=0.7, top_p=0.95)
"""For a model whose makers say nothing."""

Ending: TypeAlias = Literal["", "stop", "length", "stopped", "refused", "error", "interrupted"]
"""How an answer ended; empty while it is being written."""


class AnswerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Numbers of one answer, kept with it. None: not known."""

    number: int = 0
    """Of the request in its engine, 0 before it was accepted."""
    epoch: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    """From arrival to first token, as the engine says."""
    first_seen_s: float | None = None
    """From Submit to the first token here: the way between is in it."""
    tokens_per_s: float | None = None
    total_s: float | None = None
    queue_s: float | None = None
    """Before the engine began with it."""
    adapter: str = ""
    """The LoRA adapter that was asked for; empty: none."""

    @property
    def context_tokens(self) -> int:
        """Tokens of context in use after the answer."""
        return self.num_prompt_tokens + self.num_tokens


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn. `note` says why an answer ended as it did, when there is more to say than `ending`."""

    role: Literal["user", "assistant"]
    content: str = ""
    ending: Ending = ""
    note: str = ""
    stats: AnswerStats = AnswerStats()


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a person said and what came back. Owned by the chat controller; widgets read it."""

    key: str
    title: str = NEW_TITLE
    named: bool = False
    """Whether a person gave the title."""
    system: str = ""
    sampling: SamplingParams = DEFAULT_SAMPLING
    adapter: str = ""
    """The LoRA adapter that prompts ask for, by name; empty: the model alone."""
    messages: list[Message] = []
    changed_s: float = 0.0
    """Seconds since 1970."""

    @property
    def last_stats(self) -> AnswerStats | None:
        """Of the newest answer that the engine took."""
        answered = (m.stats for m in reversed(self.messages) if m.stats.num_prompt_tokens)
        return next(answered, None)


def new_conversation(like: Conversation | None = None) -> Conversation:
    """An empty one, with the options of another."""
    fresh = Conversation(key=secrets.token_hex(8), changed_s=time.time())
    if like is not None:
        fresh.system, fresh.sampling, fresh.adapter = like.system, like.sampling, like.adapter
    return fresh


def title_from(prompt: str) -> str:
    """The beginning of a prompt as a title."""
    line = " ".join(prompt.split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…"


def sampling_of(model: ModelSampling) -> ResolvedSampling:
    """What is sent for fields that a person leaves empty."""
    return SamplingParams().resolved(UNKNOWN_MODEL if model == ModelSampling() else model)


def sampling_to_send(conversation: Conversation, model: ModelSampling) -> SamplingParams:
    """The conversation's options. What the model's makers say is left to its engine, so that it is never said twice."""
    sampling = conversation.sampling
    return sampling.resolved(UNKNOWN_MODEL) if model == ModelSampling() else sampling


def to_send(conversation: Conversation) -> tuple[ChatMessage, ...]:
    """The turns the engine gets: the last is the user's. Prompts whose answer is empty (refused) are left
    out, so that roles take turns as chat templates want."""
    turns = [ChatMessage(role="system", content=conversation.system)] if conversation.system.strip() else []
    messages = conversation.messages
    for index, message in enumerate(messages):
        answer = messages[index + 1] if index + 1 < len(messages) else None
        unanswered = answer is not None and not answer.content
        if message.content and not (message.role == "user" and unanswered):
            turns.append(ChatMessage(role=message.role, content=message.content))
    return tuple(turns)
