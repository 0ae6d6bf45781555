"""Conversation: its messages with all versions, its options, and the turns to send. Imports no Qt.

Messages form a tree: each names the message that it follows. Regenerating an answer or editing a prompt adds another
message after the same one, so that nothing is removed. The path that ends in `last` is shown and sent.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import msgspec

from kvscope_telemetry.messages.commands import ChatMessage
from kvscope_telemetry.messages.sampling_params import ModelSampling, ResolvedSampling, SamplingParams

NEW_TITLE: Final = "New conversation"
MAX_TITLE: Final = 60
DEFAULT_SAMPLING: Final = SamplingParams(max_tokens=512)
"""Default options. Unset ones have the defaults of the model's generation config, or of `UNKNOWN_MODEL`."""
UNKNOWN_MODEL: Final = ModelSampling(temperature=0.7, top_p=0.95)
"""Defaults for a model without a generation config."""

Ending: TypeAlias = Literal["", "stop", "length", "stopped", "refused", "error", "interrupted"]
"""Reason for the end of an answer; empty while it is being written."""


class AnswerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of one answer, stored with it. None: unknown."""

    number: int = 0
    """Number of the request in its engine, 0 until it is accepted."""
    epoch: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    """Time from arrival to first token, as reported by the engine."""
    first_seen_s: float | None = None
    """Time from Submit to the first token received here, including transmission."""
    tokens_per_s: float | None = None
    """Tokens after the first per second of the engine's running time, excluding pauses."""
    total_s: float | None = None
    queue_s: float | None = None
    """Time before the engine started the request."""
    adapter: str = ""
    """Requested LoRA adapter; empty: none."""
    stopped_s: float = 0.0
    """Part of `total_s` in which the engine was paused or suspended."""

    @property
    def context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_tokens


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One version of one turn. `note` gives details of the ending beyond `ending`."""

    role: Literal["user", "assistant"]
    content: str = ""
    key: str = ""
    """Unique within the conversation; `Conversation` sets it if it is missing."""
    parent: str = ""
    """`key` of the previous message; empty for the first."""
    ending: Ending = ""
    note: str = ""
    stats: AnswerStats = AnswerStats()


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All messages of a chat, and the path through them that is shown. Only the chat controller modifies it; widgets
    read it.

    Messages without keys are chained in the given order.
    """

    key: str
    title: str = NEW_TITLE
    named: bool = False
    """Whether the user set the title."""
    system: str = ""
    sampling: SamplingParams = DEFAULT_SAMPLING
    adapter: str = ""
    """Name of the LoRA adapter for prompts; empty: none."""
    messages: list[Message] = []
    """Every version of every turn, in the order written. Messages are never removed."""
    last: str = ""
    """`key` of the last message of the shown path; empty: nothing is shown."""
    changed_s: float = 0.0
    """Seconds since 1970."""

    def __post_init__(self) -> None:
        for index, message in enumerate(self.messages):
            if not message.key:
                message.key, message.parent = str(index), self.last
                self.last = message.key

    @property
    def path(self) -> list[Message]:
        """Messages that are shown and sent, oldest first."""
        by_key = {message.key: message for message in self.messages}
        path: list[Message] = []
        key = self.last
        while (message := by_key.pop(key, None)) is not None:  # popped: a damaged file may have a cycle
            path.append(message)
            key = message.parent
        return path[::-1]

    @property
    def last_stats(self) -> AnswerStats | None:
        """Statistics of the newest shown answer that the engine accepted and that later prompts include."""
        path = self.path
        skipped = left_out(path)
        answered = (m.stats for m in reversed(path) if m.stats.num_prompt_tokens and m.key not in skipped)
        return next(answered, None)

    def append(self, role: Literal["user", "assistant"], content: str = "") -> Message:
        message = Message(role=role, content=content, key=secrets.token_hex(6), parent=self.last)
        self.messages.append(message)
        self.last = message.key
        return message

    def versions(self, message: Message) -> list[Message]:
        """Return all messages that follow the same one as `message`, including itself, oldest first."""
        return [other for other in self.messages if other.parent == message.parent]

    def newest_end(self, message: Message) -> str:
        """Return the key of the last message on the path that takes the newest version of each turn after `message`."""
        newest_after = {other.parent: other.key for other in self.messages}
        key = message.key
        while key in newest_after:
            key = newest_after.pop(key)
        return key


class Draft(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Unsent text of a conversation."""

    text: str = ""
    edited: str = ""
    """`key` of the prompt that is being edited; empty: none."""
    edited_text: str = ""
    """Current text of the edited prompt; `text` is kept until the edit is sent or cancelled."""

    @property
    def shown(self) -> str:
        return self.edited_text if self.edited else self.text


def new_conversation(like: Conversation | None = None) -> Conversation:
    fresh = Conversation(key=secrets.token_hex(8), changed_s=time.time())
    if like is not None:
        fresh.system, fresh.sampling, fresh.adapter = like.system, like.sampling, like.adapter
    return fresh


def title_from(prompt: str) -> str:
    """Return the start of a prompt as a title of at most `MAX_TITLE` characters."""
    line = " ".join(prompt.split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…"


def sampling_of(model: ModelSampling) -> ResolvedSampling:
    """Return the values in effect for options that the user leaves empty."""
    return SamplingParams().resolved(UNKNOWN_MODEL if model == ModelSampling() else model)


def sampling_to_send(conversation: Conversation, model: ModelSampling) -> SamplingParams:
    """Return the conversation's sampling options to send.

    Defaults of the model's generation config are left to the engine, so that they are applied only once.
    """
    sampling = conversation.sampling
    return sampling.resolved(UNKNOWN_MODEL) if model == ModelSampling() else sampling


def left_out(path: Sequence[Message]) -> set[str]:
    """Return the keys of the turns that later prompts omit: prompts whose answer ended without text, and those answers.

    Chat templates require alternating roles, so a prompt without an answer cannot be sent.
    """
    keys: set[str] = set()
    for message, answer in pairwise(path):
        if message.role == "user" and answer.role == "assistant" and answer.ending and not answer.content:
            keys |= {message.key, answer.key}
    return keys


def to_send(conversation: Conversation) -> tuple[ChatMessage, ...]:
    """Return the turns for the engine: the system prompt and the shown path, without those in `left_out`."""
    turns = [ChatMessage(role="system", content=conversation.system)] if conversation.system.strip() else []
    path = conversation.path
    skipped = left_out(path)
    turns += [ChatMessage(role=message.role, content=message.content) for message in path if message.key not in skipped]
    return tuple(turns)


def join_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> list[Message]:
    """Merge two windows' copies of a conversation. Each message is taken from the copy that has more of it.

    Equal messages remain the objects of `ours`, so that the cards that show them are kept.
    """
    own = {message.key: message for message in ours}
    joined = [_further(own.pop(message.key, message), message) for message in theirs]
    return [*joined, *own.values()]


def _further(ours: Message, theirs: Message) -> Message:
    """Return the copy of a message that has more content."""
    if len(ours.content) != len(theirs.content):
        return ours if len(ours.content) > len(theirs.content) else theirs
    return ours if ours == theirs or not theirs.ending else theirs
