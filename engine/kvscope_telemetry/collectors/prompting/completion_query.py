"""Converts a `Submit` command to a request of an external engine's OpenAI API. Uses no sockets.

Sampling parameters are sent explicitly, because servers have different defaults (the model's generation_config).
Parameters that an engine does not support are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvscope_telemetry.collectors.external_engine import ExternalEngine, Fields
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_ALWAYS_SENT: Final = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_SENT_UNLESS_DEFAULT: Final = ("seed", "n", "min_tokens", "ignore_eos")
_DEFAULTS: Final = SamplingParams()


@dataclass(frozen=True, slots=True)
class CompletionQuery:
    """Path and JSON fields of an HTTP POST. The model's name is added later if `fields` has none."""

    request_id: str
    path: str
    fields: Fields
    num_completions: int


def make_completion_query(submit: Submit, engine: ExternalEngine) -> CompletionQuery:
    """Convert `submit` to a query for `engine`. Raises BadInput for parameters that the engine does not support."""
    path, fields = _prompt(submit)
    if submit.tools:
        fields["tools"] = parse_json(submit.tools, "tools")
    fields |= _sampling(submit.sampling, engine, path)
    if submit.priority:
        fields["priority"] = submit.priority
    if submit.adapter:
        fields |= engine.adapter_fields(submit.adapter)
    if submit.cache_salt:
        fields["cache_salt"] = submit.cache_salt
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return CompletionQuery(submit.request_id, path, fields, submit.sampling.n)


def _prompt(submit: Submit) -> tuple[str, Fields]:
    prompts = (submit.prompt, submit.messages, submit.prompt_token_ids)
    if sum(form is not None for form in prompts) != 1:
        raise BadInput("exactly one of prompt, messages and prompt_token_ids is accepted")
    if submit.messages is not None:
        return CHAT, {"messages": [message_fields(message) for message in submit.messages]}
    if submit.prompt_token_ids is not None:
        return COMPLETIONS, {"prompt": list(submit.prompt_token_ids)}
    if submit.raw:
        return COMPLETIONS, {"prompt": submit.prompt}
    return CHAT, {"messages": [{"role": "user", "content": submit.prompt}]}


def message_fields(message: ChatMessage) -> Fields:
    """Return the fields of one message of a chat completion."""
    fields: Fields = {"role": message.role, "content": message.content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name}
    return fields | {name: value for name, value in optional.items() if value}


def _sampling(sampling: SamplingParams, engine: ExternalEngine, path: str) -> Fields:
    if sampling.logprobs is not None:
        reason = "its API returns tokens as text, without ids"
        raise BadInput(f"logprobs={sampling.logprobs} is not accepted for {engine.name}: {reason}")
    fields: Fields = {name: value for name in _ALWAYS_SENT if (value := getattr(sampling, name)) is not None}
    if sampling.top_k is not None:
        fields["top_k"] = sampling.top_k or -1  # 0 keeps all tokens in kvscope, but some server versions refuse it
    for name in _SENT_UNLESS_DEFAULT:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            fields[name] = value
    if sampling.max_tokens is not None:
        fields["max_tokens"] = sampling.max_tokens
    elif path == COMPLETIONS:
        raise BadInput("max_tokens=None is not accepted for a raw prompt: it would get 16 tokens; say how many")
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.structured is not None:
        fields |= _structured_fields(sampling.structured, engine)
    return fields


def _structured_fields(structured: Structured, engine: ExternalEngine) -> Fields:
    kind, text = structured.kind, structured.text
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind == "json_schema":
        schema = {"name": "answer", "schema": parse_json(text, "json_schema")}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return engine.form_fields(structured)


def parse_json(text: str, name: str) -> Any:
    """Return the value of the JSON in `text`. Raises BadInput, which names it `name`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"{name}={text!r:.60} is not accepted: JSON ({error})") from None
