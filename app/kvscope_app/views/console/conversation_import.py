"""Reads conversations from JSON files of kvscope and of other chat applications, and checks them. Imports no Qt."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvscope_app.ui.number_text import count, num_bytes
from kvscope_app.views.console.conversation import Conversation, Message, new_conversation, title_from
from kvscope_app.views.console.conversation_export import FORMAT, VERSION, ConversationsFile
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.whole_file import require_regular

MAX_IMPORT_BYTES: Final = 64 << 20
MAX_IMPORTED: Final = 20_000
"""Maximum number of conversations in a file."""
MAX_IMPORTED_MESSAGES: Final = 20_000
"""Maximum number of messages in a conversation."""
_MAX_TITLE: Final = 200
_LAST_TIME_S: Final = 253_402_300_799.0
"""End of the year 9999, in seconds since 1970."""
_MAX_INTEGER: Final = (1 << 63) - 1
_MAX_TOKEN_ID: Final = (1 << 31) - 1
_MAX_LOGPROB: Final = 0.01
"""Above 0 by what rounding may add."""
_KEY: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ROLES: Final[dict[str, Literal["user", "assistant"]]] = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


class _Header(msgspec.Struct):
    format: str = ""
    version: int = 0


class _ForeignPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _ForeignMessage(msgspec.Struct):
    """Message of a chat completion request (`role`, `content`) or of ShareGPT (`from`, `value`)."""

    role: str = ""
    content: str | list[_ForeignPart] | None = None
    sender: str = msgspec.field(name="from", default="")
    value: str | None = None


class _ForeignChat(msgspec.Struct):
    title: str = ""
    messages: list[_ForeignMessage] = []
    conversations: list[_ForeignMessage] = []


def read_conversations(path: Path) -> list[Conversation]:
    """Read and check all conversations in a file.

    Raises BadInput, with one line that names the file and the reason, if any part of the file is not accepted.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            data = file.read(MAX_IMPORT_BYTES + 1)
        if len(data) > MAX_IMPORT_BYTES:
            raise BadInput(f"it is larger than {num_bytes(MAX_IMPORT_BYTES)}")
        conversations = _decode(data.removeprefix(b"\xef\xbb\xbf"))
        if not conversations:
            raise BadInput("it has no conversations")
        if len(conversations) > MAX_IMPORTED:
            raise BadInput(f"it has more than {count(MAX_IMPORTED)} conversations")
        for number, conversation in enumerate(conversations, 1):
            _check(conversation, number)
    except OSError as error:
        raise BadInput(f"{path.name} was not imported: {error.strerror or error}") from error
    except RecursionError as error:
        raise BadInput(f"{path.name} was not imported: it is nested too deeply") from error
    except (ValueError, msgspec.MsgspecError) as error:  # BadInput is a ValueError
        raise BadInput(f"{path.name} was not imported: {error}") from error
    return conversations


def unused_key() -> str:
    return secrets.token_hex(8)


def is_same(ours: Conversation, theirs: Conversation) -> bool:
    """Whether two conversations differ at most in the time of their last change."""
    return msgspec.structs.replace(ours, changed_s=0.0) == msgspec.structs.replace(theirs, changed_s=0.0)


def _decode(data: bytes) -> list[Conversation]:
    if data.lstrip()[:1] == b"{":
        header = msgspec.json.decode(data, type=_Header)
        if header.format == FORMAT:
            if header.version != VERSION:
                raise BadInput(
                    f"it has version {header.version!r:.20} of the format, and version {VERSION} is accepted"
                )
            return msgspec.json.decode(data, type=ConversationsFile).conversations
        if header.format:
            raise BadInput(f"its format is {header.format!r:.60}, and {FORMAT!r} is accepted")
        return [_from_foreign(msgspec.json.decode(data, type=_ForeignChat), 1)]
    chats = msgspec.json.decode(data, type=list[_ForeignChat])
    return [_from_foreign(chat, number) for number, chat in enumerate(chats, 1)]


def _from_foreign(chat: _ForeignChat, number: int) -> Conversation:
    messages = chat.messages or chat.conversations
    if not messages:
        raise BadInput(f"conversation {number} has neither “messages” nor “conversations”")
    conversation = new_conversation()
    for message in messages:
        role, text = message.role or message.sender, _text_of(message, number)
        if role == "system" and not conversation.messages:
            conversation.system = "\n\n".join(filter(None, [conversation.system, text]))
        elif role in _ROLES:
            added = conversation.append(_ROLES[role], text)
            added.written_s = 0.0
            added.ending = "stop" if added.role == "assistant" else ""
        else:
            raise BadInput(f"conversation {number}: role {role!r:.40} is not accepted here, only user and assistant")
    prompt = next((message.content for message in conversation.messages if message.role == "user"), "")
    conversation.title = chat.title or title_from(prompt) or conversation.title
    return conversation


def _text_of(message: _ForeignMessage, number: int) -> str:
    content = message.content if message.content is not None else message.value
    if isinstance(content, list):
        if any(part.type != "text" or part.text is None for part in content):
            raise BadInput(f"conversation {number}: only text is accepted as the content of a message")
        return "\n".join(part.text or "" for part in content)
    if content is None:
        raise BadInput(f"conversation {number}: a message has no text")
    return content


def _check(conversation: Conversation, number: int) -> None:
    """Replace what only this machine can know, and raise BadInput for what the console could not show."""
    if len(conversation.messages) > MAX_IMPORTED_MESSAGES:
        raise BadInput(f"conversation {number} has more than {count(MAX_IMPORTED_MESSAGES)} messages")
    if not _KEY.fullmatch(conversation.key):
        conversation.key = unused_key()
    conversation.title = " ".join(conversation.title.split())[:_MAX_TITLE] or "Imported conversation"
    if not _is_time(conversation.changed_s) or not conversation.changed_s:
        conversation.changed_s = time.time()
    _check_tree(conversation, number)
    for message in conversation.messages:
        _check_message(message, number)


def _check_tree(conversation: Conversation, number: int) -> None:
    parents = {message.key: message.parent for message in conversation.messages}
    if len(parents) != len(conversation.messages):
        raise BadInput(f"conversation {number}: two messages have the same key")
    for key in (conversation.last, *parents.values()):
        if key and key not in parents:
            raise BadInput(f"conversation {number}: there is no message with key {key!r:.40}")
    rooted: set[str] = {""}
    for key in parents:
        seen = list(_up_to(rooted, key, parents))
        if seen[-1] not in rooted:
            raise BadInput(f"conversation {number}: messages follow each other in a circle")
        rooted.update(seen)


def _up_to(rooted: set[str], key: str, parents: dict[str, str]) -> Iterator[str]:
    """Yield `key` and the messages before it, up to one in `rooted` or, in a circle, up to the second visit of one."""
    seen: set[str] = set()
    while True:
        yield key
        if key in rooted or key in seen:
            return
        seen.add(key)
        key = parents[key]


def _check_message(message: Message, number: int) -> None:
    if message.role == "assistant" and not message.ending:
        message.ending, message.note = "interrupted", "exported while it was being written"
    if not _is_time(message.written_s):
        raise BadInput(f"conversation {number}: time {message.written_s!r:.40} is not between 1970 and 9999")
    if any(not 0 <= token <= _MAX_TOKEN_ID for token in message.token_ids):
        raise BadInput(f"conversation {number}: a token id is not between 0 and {count(_MAX_TOKEN_ID)}")
    for scored in message.scored_tokens:
        logprobs = (scored.logprob, *(logprob for _, logprob in scored.top))
        if not 0 <= scored.start <= len(message.content) or not all(_is_logprob(each) for each in logprobs):
            raise BadInput(f"conversation {number}: log-probabilities {scored!r:.80} are not accepted")
    for name, value in _figures(message):
        if not 0 <= value <= _MAX_INTEGER or not math.isfinite(value):
            raise BadInput(f"conversation {number}: {name} {value!r:.40} is not accepted")


def _figures(message: Message) -> Sequence[tuple[str, float]]:
    stats = msgspec.structs.asdict(message.stats)
    return [(name, value) for name, value in stats.items() if isinstance(value, int | float)]


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= _MAX_LOGPROB


def _is_time(time_s: float) -> bool:
    return 0 <= time_s <= _LAST_TIME_S
