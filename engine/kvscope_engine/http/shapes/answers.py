"""What clients get, in OpenAI's shapes and vLLM's where OpenAI has none. Data alone.

A field that OpenAI leaves out in a stream is UNSET there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """Of a prompt."""

    cached_tokens: int = 0


class UsageInfo(msgspec.Struct, frozen=True):
    """Tokens of a request, all its completions together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns by token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `/v1/completions`, and a piece of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have come, or did."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that came, and those most likely there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """Name, and arguments as a JSON object in text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the model made; `index` in a stream alone."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ChatCompletionMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a chat completion's choice."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of its stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "kvscope"
    root: str = ""
    """What is served under this name: of an adapter its folder."""
    parent: str | None = None
    """Of an adapter: the model that it is for."""
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: the one, and its LoRA adapters."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Answer to `/detokenize`."""

    prompt: str


class Health(msgspec.Struct, frozen=True):
    """Answer to `/health` of an engine that serves."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """Answer to `/version`."""

    version: str
    engine_version: str


Document = dict[str, Any]
