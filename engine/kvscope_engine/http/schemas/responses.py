"""Response bodies in OpenAI's format, or in vLLM's where OpenAI has none. Data only.

Fields that OpenAI omits in a stream are UNSET there.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class UsageInfo(msgspec.Struct, frozen=True):
    """Token counts of a request, summed over its completions."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: CachedTokens = CachedTokens()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as columns with one entry per token. The first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each position of the prompt: the prompt's token and the most likely ones, by token id. None for the first."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or the new part of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/completions`, and an event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call made by the model. `index` is set only in a stream."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET


class ChatCompletionMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    """Reasoning that the model wrote before its answer. Unset if the model's chat template has no tags around
    reasoning, such as `<think>`. `reasoning_content` is a copy for clients of DeepSeek's API.
    """
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatCompletionMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New part of a chat message in a stream."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """New part of one of the `n` answers in a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of the stream of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "kvscope"
    root: str = ""
    """Name of the model in the engine; for an adapter, its folder."""
    parent: str | None = None
    """Base model of an adapter; None for a model."""
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, followed by its LoRA adapters."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class Health(msgspec.Struct, frozen=True):
    """Response of `/health` while the engine serves."""

    status: str


class Root(msgspec.Struct, frozen=True):
    """Response of `/`, which some clients request to check that a server is running."""

    name: str = "kvscope"
    openapi: str = "/openapi.json"


class Version(msgspec.Struct, frozen=True):
    version: str
    engine_version: str


Document = dict[str, Any]
