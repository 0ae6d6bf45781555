"""Maps OpenAI's and vLLM's request fields to the engine's `SamplingParams` and `Submit`.

No other module depends on both the request fields and the engine's messages. Fields that the engine's messages lack are
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    NEUTRAL,
    ChatBody,
    CompletionBody,
    SamplingBody,
)
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS: Final = 16
"""Default `max_tokens` of `/v1/completions`, as in OpenAI's API. For a chat, the default is all tokens that the model's
limit leaves.
"""
UNLIMITED: Final = -1
"""Value of `max_tokens` with which a client requests all tokens that the model's limit leaves. llama.cpp uses
the same value.
"""
SAME_NAME_FIELDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop_token_ids",
    "prompt_logprobs",
)
"""Fields with the same name and meaning in request bodies and in `SamplingParams`."""
MAX_PRIORITY: Final = 1000


def completion_sampling(body: CompletionBody) -> SamplingParams:
    if body.suffix:
        raise ApiError(400, "suffix is not accepted: text can only be continued", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, f"best_of={body.best_of} is not accepted: all n completions are returned", param="best_of")
    _check_neutral(body, COMPLETION_NEUTRAL)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # the engine computes at least one token; the answer leaves it out
    sampling = _sampling(body, max_tokens, body.logprobs, "logprobs")
    if body.echo and body.logprobs is not None:
        sampling = replace(sampling, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return sampling


def chat_sampling(body: ChatBody) -> SamplingParams:
    if body.modalities not in (None, ["text"]):
        raise ApiError(400, f"modalities={body.modalities!r:.60} is not accepted: ['text']", param="modalities")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is not accepted without logprobs=true", param="top_logprobs")
    _check_neutral(body, CHAT_NEUTRAL)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _sampling(body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")


def submission(request_id: str, body: SamplingBody, sampling: SamplingParams, *, raw: bool, **prompt: Any) -> Submit:
    """Return the engine's command. `prompt` is one of the three prompt fields of `Submit`. Raises ApiError."""
    fields: dict[str, Any] = {"priority": body.priority or 0}
    if abs(fields["priority"]) > MAX_PRIORITY:
        accepted = f"a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ApiError(400, f"priority={body.priority} is not accepted: must be {accepted}", param="priority")
    if body.cache_salt:
        _require_field(Submit, "cache_salt")
        if len(body.cache_salt) > 1024:
            raise ApiError(400, "cache_salt is not accepted: must be at most 1024 characters", param="cache_salt")
        fields["cache_salt"] = body.cache_salt
    return Submit(request_id=request_id, sampling=sampling, raw=raw, **fields, **prompt)


class StreamUsage(Enum):
    NONE = "none"
    LAST = "last"
    EACH = "each"


def stream_usage(body: SamplingBody) -> StreamUsage:
    """Return which events of a stream report usage. Raises ApiError for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is not accepted without stream=true", param="stream_options")
    if body.stream_options is None or not body.stream_options.include_usage:
        return StreamUsage.NONE
    return StreamUsage.EACH if body.stream_options.continuous_usage_stats else StreamUsage.LAST


def _check_neutral(body: SamplingBody, accepted: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in accepted.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            accepted_text = " or ".join(msgspec.json.encode(one).decode() for one in (*values, None))
            raise ApiError(400, f"{name}={value!r:.60} is not accepted: must be {accepted_text}", param=name)


def _sampling(body: SamplingBody, max_tokens: int | None, logprobs: int | None, logprobs_field: str) -> SamplingParams:
    """Return the engine's sampling parameters. `logprobs_field` is the name of the body's field for logprobs, for
    errors.
    """
    _check_neutral(body, NEUTRAL)
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is not accepted with stream=true", param="prompt_logprobs")
    fields: dict[str, Any] = {"max_tokens": None if max_tokens == UNLIMITED else max_tokens, "logprobs": logprobs}
    for name in SAME_NAME_FIELDS:
        value = getattr(body, name)
        if value is not None and value != []:
            _require_field(SamplingParams, name)
            fields[name] = value
    if fields.get("top_p") == 0:  # only the most probable token is left
        fields |= {"top_p": 1.0, "temperature": 0.0}
    if body.stop is not None:
        fields["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        _require_field(SamplingParams, "logit_bias")
        fields["logit_bias"] = _logit_bias(body.logit_bias)
    structured = _structured(body)
    if structured is not None:
        _require_field(SamplingParams, "structured")
        fields["structured"] = structured
    try:
        return msgspec.convert(fields, SamplingParams, str_keys=False)
    except (BadInput, msgspec.ValidationError) as error:
        message = str(error)
        if message.startswith("logprobs="):
            message = logprobs_field + message.removeprefix("logprobs")
        raise ApiError(400, message, param=message.partition("=")[0].partition(" ")[0]) from error


def _require_field(kind: type[msgspec.Struct], name: str) -> None:
    if name not in kind.__struct_fields__:
        raise ApiError(400, f"{name} is not accepted: this engine has no such option", param=name)


def _logit_bias(logit_bias: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise ApiError(400, f"logit_bias: {token!r:.40} must be a token id", param="logit_bias")
        biases[int(token)] = bias
    return biases


def _structured(body: SamplingBody) -> dict[str, str] | None:
    """Return the structured output that the body requests with `response_format`, `structured_outputs` or a
    `guided_` field; None without such a request. Raises ApiError for several requests.
    """
    constraints = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if len(constraints) > 1:
        names = " and ".join(kind for kind, _ in constraints)
        raise ApiError(400, f"{names} are not accepted together: one form of the answer is", param="response_format")
    if not constraints:
        return None
    kind, text = constraints[0]
    return {"kind": kind, "text": text}


def _response_format(body: SamplingBody) -> list[tuple[str, str]]:
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return []
    if response_format.type == "json_object":
        schema = response_format.schema
        return [("json_object", "")] if schema is None else [("json_schema", _json(schema))]
    if response_format.json_schema is None:
        raise ApiError(400, "response_format of type json_schema has no json_schema", param="response_format")
    return [("json_schema", _json(response_format.json_schema.schema))]


def _structured_outputs(body: SamplingBody) -> list[tuple[str, str]]:
    options = body.structured_outputs
    if options is None:
        return []
    constraints = _constraints(options.json, options.regex, options.choice, options.grammar)
    return [*constraints, ("json_object", "")] if options.json_object else constraints


def _guided(body: SamplingBody) -> list[tuple[str, str]]:
    return _constraints(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _constraints(
    schema: str | dict[str, Any] | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> list[tuple[str, str]]:
    constraints: list[tuple[str, str]] = []
    if schema is not None:
        constraints.append(("json_schema", schema if isinstance(schema, str) else _json(schema)))
    if regex is not None:
        constraints.append(("regex", regex))
    if choice is not None:
        constraints.append(("choice", _json(choice)))
    if grammar is not None:
        constraints.append(("grammar", grammar))
    return constraints


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
