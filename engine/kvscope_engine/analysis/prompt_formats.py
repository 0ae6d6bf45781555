"""Recognises the format of a request by its keys, and extracts its prompts.

Accepted are the bodies of OpenAI's chat and completion endpoints (also within lines of its batch API), the custom
dataset of `vllm bench serve` (`prompt`), ShareGPT conversations, and lines of Mooncake traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvscope_telemetry.errors import BadInput

ACCEPTED: Final = "`messages`, `prompt`, `conversations`, or `hash_ids` and `input_length`"
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_MAX_SHOWN: Final = 60
_MAX_TOKEN_ID: Final = (1 << 31) - 1
_MAX_TOKENS: Final = 1 << 24

Message = dict[str, str]
"""`role` and `content` of a message."""


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt of a request file, in one of four forms."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    token_ids: tuple[int, ...] = ()
    hash_ids: tuple[int, ...] = ()
    """Mooncake: one id for each 512 tokens together with all tokens before them."""
    num_tokens: int = 0
    """Length of a prompt that is given by `hash_ids`."""
    num_images: int = 0

    @property
    def is_hashed(self) -> bool:
        return self.num_tokens > 0


def prompts_of(record: object) -> list[FilePrompt]:
    """Return the prompts of a decoded line. Raises BadInput if none of the formats fits.

    Each answer of a ShareGPT conversation is a request, with the conversation before the answer as its prompt.
    """
    if not isinstance(record, Mapping):
        raise BadInput(f"{_shown(record)} is not accepted: an object with {ACCEPTED} is")
    body = record.get("body")
    if isinstance(body, Mapping):  # OpenAI's batch API
        record = body
    if isinstance(record.get("messages"), Sequence):
        return [_chat(record["messages"])]
    for key in ("conversations", "conversation"):
        if isinstance(record.get(key), Sequence):
            return _conversation(record[key])
    if "hash_ids" in record and "input_length" in record:
        return [_hashed(record["hash_ids"], record["input_length"])]
    if "prompt" in record:
        return _completion(record["prompt"])
    keys = ", ".join(list(map(str, record))[:8])
    raise BadInput(f"an object with the keys {keys:.200} is not accepted: one with {ACCEPTED} is")


def _chat(messages: Sequence[Any]) -> FilePrompt:
    converted = [_message(each, "role", "content") for each in messages]
    if not converted:
        raise BadInput("messages is empty: at least one message is accepted")
    return FilePrompt(
        messages=tuple(message for message, _ in converted), num_images=sum(images for _, images in converted)
    )


def _conversation(turns: Sequence[Any]) -> list[FilePrompt]:
    converted = [
        _message(turn, *(("from", "value") if isinstance(turn, Mapping) and "from" in turn else ("role", "content")))
        for turn in turns
    ]
    prompts = [
        FilePrompt(
            messages=tuple(message for message, _ in converted[:index]),
            num_images=sum(images for _, images in converted[:index]),
        )
        for index, (message, _) in enumerate(converted)
        if message["role"] == "assistant" and index
    ]
    if not prompts:
        raise BadInput("a conversation without an answer is not accepted")
    return prompts


def _message(message: object, role_key: str, content_key: str) -> tuple[Message, int]:
    """Return the message, and its number of images."""
    if not isinstance(message, Mapping):
        raise BadInput(f"message {_shown(message)} is not accepted: an object with {role_key} and {content_key} is")
    role = _ROLES.get(str(message.get(role_key)))
    if role is None:
        raise BadInput(f"{role_key}={_shown(message.get(role_key))} is not accepted: use {', '.join(_ROLES)}")
    content, num_images = _content(message.get(content_key))
    return {"role": role, "content": content}, num_images


def _content(content: object) -> tuple[str, int]:
    """Return the text of a message, with a placeholder for each image, and the number of images."""
    if content is None:  # an assistant's message with tool calls alone
        return "", 0
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, Sequence):
        raise BadInput(f"content={_shown(content)} is not accepted: a text or a list of parts is")
    texts, num_images = list[str](), 0
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, Mapping) and "image" in str(part.get("type")):
            num_images += 1
            texts.append(f"<image {hashlib.sha256(repr(sorted(part.items())).encode()).hexdigest()[:16]}>")
        else:
            raise BadInput(f"part {_shown(part)} of a message is not accepted: texts and images are")
    return "".join(texts), num_images


def _completion(prompt: object) -> list[FilePrompt]:
    if isinstance(prompt, str):
        return [FilePrompt(text=prompt)]
    if isinstance(prompt, Sequence) and prompt:
        if all(isinstance(token, int) for token in prompt):
            if not all(0 <= token <= _MAX_TOKEN_ID for token in prompt):
                raise BadInput(f"prompt has a token id that is not from 0 to {_MAX_TOKEN_ID}")
            return [FilePrompt(token_ids=tuple(prompt))]
        if all(isinstance(each, str | list) and each for each in prompt):
            return [single for each in prompt for single in _completion(each)]
    raise BadInput(f"prompt={_shown(prompt)} is not accepted: a text, token ids or a list of these is")


def _hashed(hash_ids: object, num_tokens: object) -> FilePrompt:
    if not (isinstance(num_tokens, int) and 1 <= num_tokens <= _MAX_TOKENS):
        raise BadInput(f"input_length={_shown(num_tokens)} is not accepted: must be from 1 to {_MAX_TOKENS}")
    if not (isinstance(hash_ids, list) and all(isinstance(each, int) and 0 <= each < 1 << 63 for each in hash_ids)):
        raise BadInput(f"hash_ids={_shown(hash_ids)} is not accepted: a list of whole numbers from 0 is")
    return FilePrompt(hash_ids=tuple(hash_ids), num_tokens=num_tokens)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
