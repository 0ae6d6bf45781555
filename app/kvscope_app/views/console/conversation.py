"""Conversation: its messages with all versions, its options, and the messages to send. Imports no Qt.

Messages form a tree: each has the key of the message before it. Regenerating an answer or editing a prompt adds another
message with the same predecessor and removes nothing. The path that ends in `last` is shown and sent.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, TypeAlias

import msgspec

from kvscope_app.views.console.attachments import Attachment, with_attachments
from kvscope_app.views.console.scored_token import ScoredToken
from kvscope_app.views.console.tools import ToolResult, read_tools, result_messages
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, EstimatePrompt, ToolCall
from kvscope_telemetry.messages.sampling_params import ModelSampling, ResolvedSampling, SamplingParams

NEW_TITLE: Final = "New conversation"
MAX_ANSWERS: Final = 4
"""Maximum number of answers to one prompt that are generated together."""
MAX_TITLE_CHARS: Final = 60
DEFAULT_SAMPLING: Final = SamplingParams(max_tokens=512)
"""Sampling options of a new conversation. Options that are unset have the values in the model's generation config.

If the model has no generation config, they have the values in `UNKNOWN_MODEL`.
"""
UNKNOWN_MODEL: Final = ModelSampling(temperature=0.7, top_p=0.95)

Ending: TypeAlias = Literal["", "stop", "length", "stopped", "refused", "error", "interrupted"]
"""Reason why an answer ended; empty while it is being written."""


class AnswerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of one answer, stored with it. None means unknown."""

    number: int = 0
    """Request number in the engine, 0 until the request is accepted."""
    epoch: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    ttft_s: float | None = None
    """Seconds from the request's arrival to its first token, as reported by the engine."""
    first_seen_s: float | None = None
    """Seconds from sending the prompt to receiving the first token, including transmission."""
    tokens_per_s: float | None = None
    """Decode speed: tokens after the first token, per second in which the engine ran."""
    total_s: float | None = None
    queue_s: float | None = None
    model: str = ""
    """Short name of the model that wrote the answer; "" if unknown."""
    adapter: str = ""
    stopped_s: float = 0.0
    """Part of `total_s` in which the engine was paused or suspended."""
    system: str = ""
    """Digest of the system prompt that was sent, "" if unknown; see `system_digest`."""

    @property
    def context_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_tokens


class BlockHashes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hashes of the blocks of an answer's request."""

    num_earlier: int = 0
    """Number of leading blocks that the previous answer has, too, and which are stored with it."""
    own: bytes = b""
    """Hashes of the other blocks, 8 bytes each, little-endian."""


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One version of a prompt or answer. `note` describes the ending for the user."""

    role: Literal["user", "assistant"]
    content: str = ""
    key: str = ""
    """Identifier within the conversation. The conversation sets it if it is empty."""
    parent: str = ""
    """`key` of the previous message, "" for the first message."""
    ending: Ending = ""
    note: str = ""
    stats: AnswerStats = AnswerStats()
    is_too_long: bool = False
    """Whether an answer was refused because its prompt was too long."""
    starts_at: str = ""
    """`key` of the first message that is sent with this prompt and with later ones, because the turns before it did not
    fit; "" if all are sent.
    """
    token_ids: list[int] = []
    """Tokens of an answer as the engine generated them; empty if the engine reported none."""
    scored_tokens: list[ScoredToken] = []
    """Log-probabilities of an answer's tokens; empty if they were not requested."""
    attachments: list[Attachment] = []
    """Files sent before the text of a prompt."""
    written_s: float = 0.0
    """Time when the prompt was sent, also for its answer, in seconds since 1970; 0 if unknown."""
    batch: str = ""
    """Identifier that is common to the answers requested together, side by side; "" for a single answer."""
    block_hashes: BlockHashes | None = None
    """Blocks of an answer's request; None if they are unknown."""
    tool_calls: list[ToolCall] = []
    """Functions that an answer calls."""
    tool_results: list[ToolResult] = []
    """Results of the calls in the previous answer. Such a message is sent as them instead of a prompt."""

    @property
    def sent_text(self) -> str:
        """Text that the engine receives: attached files and `content`."""
        return with_attachments(self.content, self.attachments) if self.attachments else self.content


class Conversation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All messages of a chat, and the shown path through them. Only the chat controller modifies conversations.

    Messages without keys are chained in the given order.
    """

    key: str
    title: str = NEW_TITLE
    named: bool = False
    """Whether the user has set the title."""
    system: str = ""
    sampling: SamplingParams = DEFAULT_SAMPLING
    adapter: str = ""
    tools: str = ""
    """Definitions of the functions that the model may call, as the user typed them; see `tools.read_tools`."""
    num_answers: int = 1
    """Number of answers requested for each new prompt, 1 to `MAX_ANSWERS`."""
    messages: list[Message] = []
    """Every version of every prompt and answer, in the order written. Messages are never removed."""
    last: str = ""
    """`key` of the last message of the shown path; "" if nothing is shown."""
    changed_s: float = 0.0
    """Time of the last change, in seconds since 1970."""

    def __post_init__(self) -> None:
        self.num_answers = min(max(self.num_answers, 1), MAX_ANSWERS)
        for index, message in enumerate(self.messages):
            if not message.key:
                message.key, message.parent = str(index), self.last
                self.last = message.key

    @property
    def path(self) -> list[Message]:
        """Shown messages, oldest first."""
        return self.path_to(self.last)

    def find(self, key: str) -> Message | None:
        return next((message for message in self.messages if message.key == key), None)

    def path_to(self, key: str) -> list[Message]:
        """Return the messages up to the one with this key, oldest first; empty for ""."""
        by_key = {message.key: message for message in self.messages}
        path: list[Message] = []
        while (message := by_key.pop(key, None)) is not None:  # popped: a damaged file may have a cycle
            path.append(message)
            key = message.parent
        return path[::-1]

    @property
    def last_stats(self) -> AnswerStats | None:
        """Statistics of the newest shown answer that the engine accepted and that later prompts include, or None."""
        path = self.path
        skipped = omitted_keys(path)
        answered = (m.stats for m in reversed(path) if m.stats.num_prompt_tokens and m.key not in skipped)
        return next(answered, None)

    def append(
        self, role: Literal["user", "assistant"], content: str = "", attachments: Sequence[Attachment] = ()
    ) -> Message:
        message = Message(
            role=role,
            content=content,
            key=secrets.token_hex(6),
            parent=self.last,
            attachments=list(attachments),
            written_s=time.time(),
        )
        self.messages.append(message)
        self.last = message.key
        return message

    def append_answers(self, num_answers: int) -> list[Message]:
        """Append unfinished answers to the last message, as versions of each other. The path continues with the
        first.
        """
        prompt, batch = self.last, secrets.token_hex(6) if num_answers > 1 else ""
        answers = []
        for _ in range(num_answers):
            self.last = prompt
            answers.append(self.append("assistant"))
            answers[-1].batch = batch
        self.last = answers[0].key
        return answers

    def batch_of(self, message: Message) -> list[Message]:
        """Return the answers that were requested together with `message`, including itself, oldest first."""
        return [
            each for each in self.versions(message) if each is message or (each.batch and each.batch == message.batch)
        ]

    def versions(self, message: Message) -> list[Message]:
        """Return all versions of `message`, including itself, oldest first."""
        return [other for other in self.messages if other.parent == message.parent]

    def newest_end(self, message: Message) -> str:
        """Return the key of the message written last among those that follow `message`, on any path. Of answers that
        were requested together, it is the first.
        """
        following, last = {message.key}, message
        for other in self.messages:
            if other.parent in following:
                following.add(other.key)
                last = other
        return self.batch_of(last)[0].key if last is not message else last.key


class Draft(msgspec.Struct, kw_only=True, omit_defaults=True):
    text: str = ""
    edited: str = ""
    """`key` of the prompt being edited, "" if no prompt is edited."""
    edited_text: str = ""
    """Text of the prompt being edited. The unsent new prompt in `text` is kept until the edit is sent or cancelled."""

    attachments: list[Attachment] = []
    edited_attachments: list[Attachment] = []

    @property
    def shown(self) -> str:
        return self.edited_text if self.edited else self.text

    @property
    def shown_attachments(self) -> list[Attachment]:
        return self.edited_attachments if self.edited else self.attachments

    def begin_edit(self, prompt: Message) -> None:
        self.edited, self.edited_text = prompt.key, prompt.content
        self.edited_attachments = list(prompt.attachments)

    def clear_shown(self) -> None:
        """Clear what was sent or cancelled: the edit if a prompt is edited, otherwise the new prompt."""
        if self.edited:
            self.edited = self.edited_text = ""
            self.edited_attachments = []
        else:
            self.text, self.attachments = "", []


def new_conversation(template: Conversation | None = None) -> Conversation:
    conversation = Conversation(key=secrets.token_hex(8), changed_s=time.time())
    if template is not None:
        conversation.system, conversation.sampling = template.system, template.sampling
        conversation.adapter, conversation.num_answers = template.adapter, template.num_answers
        conversation.tools = template.tools
    return conversation


def title_from(prompt: str) -> str:
    """Return the start of a prompt as a title of at most `MAX_TITLE_CHARS` characters."""
    line = " ".join(prompt.split())
    return line if len(line) <= MAX_TITLE_CHARS else line[: MAX_TITLE_CHARS - 1].rstrip() + "…"


def sampling_defaults(model: ModelSampling) -> ResolvedSampling:
    return SamplingParams().resolved(UNKNOWN_MODEL if model == ModelSampling() else model)


def sampling_to_send(conversation: Conversation, model: ModelSampling) -> SamplingParams:
    """Return the sampling options to send.

    If the model has a generation config, unset options stay unset, because the engine applies the config. Otherwise,
    they get the values in `UNKNOWN_MODEL`.
    """
    sampling = conversation.sampling
    return sampling.resolved(UNKNOWN_MODEL) if model == ModelSampling() else sampling


def system_digest(system: str) -> str:
    """Return a digest by which system prompts of requests are compared."""
    return hashlib.blake2b(system.encode(errors="replace"), digest_size=8).hexdigest()


def omitted_keys(path: Sequence[Message]) -> set[str]:
    """Return the keys of messages that later prompts omit.

    These are the oldest turns, if the newest `Message.starts_at` leaves them out, and answers that ended without text
    and calls, with their prompts: chat templates require alternating roles, so a prompt without an answer
    cannot be sent.
    """
    keys = _keys_before(path, next((message.starts_at for message in reversed(path) if message.starts_at), ""))
    for message, answer in pairwise(path):
        is_answered = answer.content or answer.tool_calls or not answer.ending
        if message.role == "user" and answer.role == "assistant" and not is_answered:
            keys |= {message.key, answer.key}
    return keys


def _keys_before(path: Sequence[Message], first: str) -> set[str]:
    """Return the keys of the messages before the one with key `first`; empty if it is not in the path."""
    keys = [message.key for message in path]
    return set(keys[: keys.index(first)]) if first in keys else set()


def messages_to_send(
    conversation: Conversation, *, with_token_ids: bool = False, last: str | None = None, starts_at: str = ""
) -> tuple[ChatMessage, ...]:
    """Return the system prompt and the messages up to `last` for the engine, without those in `omitted_keys`.

    `with_token_ids`: the engine accepts the tokens of its earlier answers. `last` is the key of a message, or None for
    the last shown one. The messages before the one with key `starts_at` are left out too.
    """
    messages = [ChatMessage(role="system", content=conversation.system)] if conversation.system.strip() else []
    path = conversation.path_to(conversation.last if last is None else last)
    skipped = omitted_keys(path) | _keys_before(path, starts_at)
    for message in path:
        if message.key not in skipped:
            messages += _sent_messages(message, with_token_ids=with_token_ids)
    return tuple(messages)


def _sent_messages(message: Message, *, with_token_ids: bool) -> list[ChatMessage]:
    if message.tool_results:
        return result_messages(message.tool_results)
    # The template writes calls itself, so that the tokens of an answer with calls do not occur in the prompt.
    token_ids = tuple(message.token_ids) if with_token_ids and not message.tool_calls else ()
    calls = tuple(message.tool_calls)
    return [ChatMessage(role=message.role, content=message.sent_text, tool_calls=calls, token_ids=token_ids)]


def tools_to_send(conversation: Conversation) -> str:
    """Return the definitions of functions for the engine, "" if there are none or they are invalid."""
    try:
        return read_tools(conversation.tools)
    except BadInput:
        return ""


def estimate_of_draft(conversation: Conversation, draft: Draft, *, with_token_ids: bool) -> EstimatePrompt | None:
    """Return the question what sending `draft` would cost, or None if the draft is empty."""
    prompt = with_attachments(draft.shown, draft.shown_attachments) if draft.shown_attachments else draft.shown
    if not prompt.strip():
        return None
    edited = next((message for message in conversation.messages if message.key == draft.edited), None)
    last = conversation.last if edited is None else edited.parent
    messages = messages_to_send(conversation, with_token_ids=with_token_ids, last=last)
    return EstimatePrompt(
        messages=(*messages, ChatMessage(role="user", content=prompt)),
        adapter=conversation.adapter,
        tools=tools_to_send(conversation),
    )


def merge_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> list[Message]:
    """Merge two windows' copies of a conversation's messages, keeping the longer copy of each.

    Equal messages stay the objects in `ours`, so that their cards are kept.
    """
    own_by_key = {message.key: message for message in ours}
    merged = [_longer_copy(own_by_key.pop(message.key, message), message) for message in theirs]
    return [*merged, *own_by_key.values()]


def _longer_copy(ours: Message, theirs: Message) -> Message:
    if bool(ours.tool_calls) != bool(theirs.tool_calls):
        return ours if ours.tool_calls else theirs  # calls are removed from the text of the complete answer
    if len(ours.content) != len(theirs.content):
        return ours if len(ours.content) > len(theirs.content) else theirs
    return ours if ours == theirs or not theirs.ending else theirs
