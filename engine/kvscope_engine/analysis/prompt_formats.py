"""Recognises the format of a request by its keys, and extracts its prompts.

Accepted are the bodies of OpenAI's chat and completion endpoints (also within lines of its batch API), the custom
dataset of `vllm bench serve` (`prompt`), ShareGPT conversations, and lines of Mooncake traces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from kvscope_engine.simulator.workloads.mooncake import check_num_hashes
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
_DEFINITION_KEYS: Final = ("tools", "functions")
_CALL_KEYS: Final = ("tool_calls", "function_call")
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
    has_functions: bool = False
    """Whether the request defines functions or its messages call some; neither is part of the prompt."""

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
    has_functions = any(record.get(key) for key in _DEFINITION_KEYS)
    if isinstance(record.get("messages"), Sequence):
        return [_chat(record["messages"], has_functions)]
    for key in ("conversations", "conversation"):
        if isinstance(record.get(key), Sequence):
            return _conversation(record[key], has_functions)
    if "hash_ids" in record and "input_length" in record:
        return [_hashed(record["hash_ids"], record["input_length"])]
    if "prompt" in record:
        return _completion(record["prompt"])
    keys = ", ".join(list(map(str, record))[:8])
    raise BadInput(f"an object with the keys {keys:.200} is not accepted: one with {ACCEPTED} is")


def _chat(messages: Sequence[Any], has_functions: bool) -> FilePrompt:
    converted = [_message(each, "role", "content") for each in messages]
    if not converted:
        raise BadInput("messages is empty: at least one message is accepted")
    return FilePrompt(
        messages=tuple(message for message, _ in converted),
        num_images=sum(images for _, images in converted),
        has_functions=has_functions or any(map(_calls_functions, messages)),
    )


def _conversation(turns: Sequence[Any], has_functions: bool) -> list[FilePrompt]:
    converted = [
        _message(turn, *(("from", "value") if isinstance(turn, Mapping) and "from" in turn else ("role", "content")))
        for turn in turns
    ]
    prompts = [
        FilePrompt(
            messages=tuple(message for message, _ in converted[:index]),
            num_images=sum(images for _, images in converted[:index]),
            has_functions=has_functions or any(map(_calls_functions, turns[:index])),
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


def _calls_functions(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) for key in _CALL_KEYS)


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
    if _are_numbers(prompt):
        return [_tokens(prompt)]
    if (
        isinstance(prompt, list)
        and prompt
        and all((isinstance(each, str) and each) or _are_numbers(each) for each in prompt)
    ):
        return [FilePrompt(text=each) if isinstance(each, str) else _tokens(each) for each in prompt]
    raise BadInput(f"prompt={_shown(prompt)} is not accepted: a text, token ids or a list of these is")


def _are_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _tokens(token_ids: list[int]) -> FilePrompt:
    if not all(0 <= token <= _MAX_TOKEN_ID for token in token_ids):
        raise BadInput(f"prompt has a token id that is not from 0 to {_MAX_TOKEN_ID}")
    return FilePrompt(token_ids=tuple(token_ids))


def _hashed(hash_ids: object, num_tokens: object) -> FilePrompt:
    if not (isinstance(num_tokens, int) and 1 <= num_tokens <= _MAX_TOKENS):
        raise BadInput(f"input_length={_shown(num_tokens)} is not accepted: must be from 1 to {_MAX_TOKENS}")
    if not (isinstance(hash_ids, list) and all(isinstance(each, int) and 0 <= each < 1 << 63 for each in hash_ids)):
        raise BadInput(f"hash_ids={_shown(hash_ids)} is not accepted: a list of whole numbers from 0 is")
    if len(set(hash_ids)) < len(hash_ids):
        raise BadInput("hash_ids has an id twice: each is a block with all blocks before it")
    check_num_hashes(num_tokens, len(hash_ids))
    return FilePrompt(hash_ids=tuple(hash_ids), num_tokens=num_tokens)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
