"""A conversation: its messages with all their versions, its options, and the turns that are sent. No Qt.

Messages form a tree: each names the message that it follows. Regenerating an answer and editing a prompt add another
message after the same one, so that nothing is removed; the path that ends in `last` is what is shown and sent.
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
    """Tokens after the first per second of the engine's running time, without pauses."""
    total_s: float | None = None
    queue_s: float | None = None
    """Before the engine began with it."""
    adapter: str = ""
    """The LoRA adapter that was asked for; empty: none."""
    stopped_s: float = 0.0
    """How much of `total_s` the engine was paused or suspended."""

    @property
    def context_tokens(self) -> int:
        """Tokens of context in use after the answer."""
        return self.num_prompt_tokens + self.num_tokens


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One version of one turn. `note` says why an answer ended as it did, when there is more to say than `ending`."""

    role: Literal["user", "assistant"]
    content: str = ""
    key: str = ""
    """Unique within the conversation; `Conversation` sets it where it is missing."""
    parent: str = ""
    """`key` of the message before it, empty for the first."""
    ending: Ending = ""
    note: str = ""
    stats: AnswerStats = AnswerStats()


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All messages of a chat, and the path through them that is shown. Owned by the chat controller; widgets read it.

    Messages without keys are chained in the order given.
    """

    key: str
    title: str = NEW_TITLE
    named: bool = False
    """Whether a person gave the title."""
    system: str = ""
    sampling: SamplingParams = DEFAULT_SAMPLING
    adapter: str = ""
    """The LoRA adapter that prompts ask for, by name; empty: the model alone."""
    messages: list[Message] = []
    """Every version of every turn, in the order written. None is ever removed."""
    last: str = ""
    """`key` of the message that the shown path ends in; empty: nothing is shown."""
    changed_s: float = 0.0
    """Seconds since 1970."""

    def __post_init__(self) -> None:
        for index, message in enumerate(self.messages):
            if not message.key:
                message.key, message.parent = str(index), self.last
                self.last = message.key

    @property
    def path(self) -> list[Message]:
        """The messages that are shown and sent, the first prompt first."""
        by_key = {message.key: message for message in self.messages}
        path: list[Message] = []
        key = self.last
        while (message := by_key.pop(key, None)) is not None:  # popped: a damaged file may have a cycle
            path.append(message)
            key = message.parent
        return path[::-1]

    @property
    def last_stats(self) -> AnswerStats | None:
        """Numbers of the newest shown answer that the engine accepted and later prompts do not leave out."""
        path = self.path
        skipped = left_out(path)
        answered = (m.stats for m in reversed(path) if m.stats.num_prompt_tokens and m.key not in skipped)
        return next(answered, None)

    def append(self, role: Literal["user", "assistant"], content: str = "") -> Message:
        """Add a message at the end of the shown path."""
        message = Message(role=role, content=content, key=secrets.token_hex(6), parent=self.last)
        self.messages.append(message)
        self.last = message.key
        return message

    def versions(self, message: Message) -> list[Message]:
        """The messages that follow the same one as `message`, itself among them, the oldest first."""
        return [other for other in self.messages if other.parent == message.parent]

    def newest_end(self, message: Message) -> str:
        """Key of the last message of the path that takes the newest version of each turn after `message`."""
        newest_after = {other.parent: other.key for other in self.messages}
        key = message.key
        while key in newest_after:
            key = newest_after.pop(key)
        return key


class Draft(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Unsent text of a conversation."""

    text: str = ""
    edited: str = ""
    """`key` of the prompt that is being edited; empty: none is."""
    edited_text: str = ""
    """The edited prompt as it is now; `text` waits until it is sent or cancelled."""

    @property
    def shown(self) -> str:
        """The text in the composer."""
        return self.edited_text if self.edited else self.text


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


def left_out(path: Sequence[Message]) -> set[str]:
    """Keys of the turns that later prompts leave out: prompts whose answer ended without text, and those answers.

    Chat templates want roles to alternate, so a prompt without an answer cannot be sent.
    """
    keys: set[str] = set()
    for message, answer in pairwise(path):
        if message.role == "user" and answer.role == "assistant" and answer.ending and not answer.content:
            keys |= {message.key, answer.key}
    return keys


def to_send(conversation: Conversation) -> tuple[ChatMessage, ...]:
    """The turns that the engine gets: the system prompt and the shown path, without those `left_out`."""
    turns = [ChatMessage(role="system", content=conversation.system)] if conversation.system.strip() else []
    path = conversation.path
    skipped = left_out(path)
    turns += [ChatMessage(role=message.role, content=message.content) for message in path if message.key not in skipped]
    return tuple(turns)


def join_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> list[Message]:
    """All messages of two windows' copies of a conversation: every message once, as far as either window has it.

    Messages that are equal stay our objects, so that the cards that show them are kept.
    """
    own = {message.key: message for message in ours}
    joined = [_further(own.pop(message.key, message), message) for message in theirs]
    return [*joined, *own.values()]


def _further(ours: Message, theirs: Message) -> Message:
    """The copy of a message that has more of it."""
    if len(ours.content) != len(theirs.content):
        return ours if len(ours.content) > len(theirs.content) else theirs
    return ours if ours == theirs or not theirs.ending else theirs
