"""Counts the tokens of a prompt with an engine's own tokenizer and chat template, through its HTTP API.

Contains what the APIs expect and return; a `Post` function sends the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvscope_telemetry.errors import ProtocolError

Post = Callable[[str, dict[str, Any]], Any]
"""Function that posts JSON fields to a path of the server and returns the decoded JSON of the answer."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    num_prompt_tokens: int
    """Number of tokens of all messages, with those that the chat template adds."""
    num_draft_tokens: int
    """Number of tokens of the last message's text alone."""


CountTokens = Callable[[Post, dict[str, Any]], TokenCounts]
"""Function that counts the tokens of a prompt, given the fields `model` and `messages` of a chat completion.

Raises ProtocolError if the server's answer has another form, and the errors of `Post`.
"""


def count_messages(post: Post, fields: dict[str, Any]) -> TokenCounts:
    """Count with `/tokenize` of vLLM and SGLang, which accepts messages."""
    draft = {"model": fields["model"], "prompt": _draft_text(fields), "add_special_tokens": False}
    prompt = _value(post("/tokenize", fields), "count", int)
    return TokenCounts(prompt, _value(post("/tokenize", draft), "count", int))


def count_formatted(post: Post, fields: dict[str, Any]) -> TokenCounts:
    """Count with llama.cpp's `/apply-template` and `/tokenize`, as its chat completions tokenize."""
    text = _value(post("/apply-template", fields), "prompt", str)
    options = {"model": fields["model"], "parse_special": True}
    prompt = post("/tokenize", options | {"content": text, "add_special": True})
    draft = post("/tokenize", options | {"content": _draft_text(fields), "add_special": False})
    return TokenCounts(len(_value(prompt, "tokens", list)), len(_value(draft, "tokens", list)))


def _draft_text(fields: dict[str, Any]) -> str:
    text: str = fields["messages"][-1]["content"]
    return text


def _value(answer: object, name: str, kind: type) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ProtocolError(f"its answer has no {name!r}")
    return value
