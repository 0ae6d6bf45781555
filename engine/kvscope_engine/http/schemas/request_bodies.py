"""Request bodies as msgspec structs, used for decoding and for `/openapi.json`.

They define only types; `SamplingParams` checks ranges. `IgnoredFields` are accepted without effect. Fields in
`NEUTRAL`, `COMPLETION_NEUTRAL` and `CHAT_NEUTRAL` are accepted only with values that change nothing. `lenient_body.py`
ignores and logs fields that no struct has. docs/reference/openai-api.md lists all.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from kvscope_telemetry.messages.commands import MAX_ADAPTER_CHARACTERS, MAX_PATH_CHARACTERS

MAX_PROMPTS = 256
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Text: TypeAlias = str | None


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class StreamOptions(_Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether each event contains the usage so far (vLLM's option; needs `include_usage`)."""
    include_obfuscation: bool | None = None
    """Accepted without effect: no obfuscation is added."""


class JsonSchema(_Body, frozen=True, kw_only=True):
    schema: dict[str, Any]
    name: Text = None
    description: Text = None
    strict: bool | None = None
    """Accepted without effect: the schema is always enforced."""


class ResponseFormat(_Body, frozen=True, kw_only=True):
    """Structured output in OpenAI's format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """JSON schema for the type `json_object`. This field is an extension of llama.cpp."""


class StructuredOutputs(_Body, frozen=True, kw_only=True):
    """Structured output in vLLM's format. At most one field may be set."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: Text = None
    grammar: Text = None
    choice: list[str] | None = None


class IgnoredFields(_Body, frozen=True, kw_only=True):
    """Fields that are accepted but affect no token: identification, storage, billing, caching and speed."""

    user: Text = None
    safety_identifier: Text = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Text = None
    session_id: Text = None
    prompt_cache_key: Text = None
    prompt_cache_retention: Text = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    """A predicted answer, which OpenAI uses to respond faster."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted without effect: no supported model was trained to read it."""
    spaces_between_special_tokens: bool | None = None
    """Accepted without effect: special tokens are never shown."""
    length_penalty: float | None = None
    """Accepted without effect. `length_penalty` and `early_stopping` are options of beam search, which is refused."""
    early_stopping: bool | str | None = None
    guided_decoding_backend: Text = None
    cache_prompt: bool | None = None
    """Option of llama.cpp. The prefix cache is always used, unless the engine was started without it."""
    id_slot: Int | None = None


class NeutralFields(IgnoredFields, frozen=True, kw_only=True):
    """Fields of vLLM that are accepted only if they are null or have a value in `NEUTRAL`, the default of vLLM's
    clients.
    """

    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    use_beam_search: Any = None
    detokenize: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logprob_token_ids: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    prompt_embeds: Any = None
    typical_p: Any = None
    """This field and all fields after it are options of llama.cpp."""
    mirostat: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    n_probs: Any = None
    grammar: Any = None
    json_schema: Any = None


NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "detokenize": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "prompt_embeds": (),
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "n_probs": (0,),
    "grammar": ("",),
    "json_schema": (),
}
"""Values, by field, that have no effect on completions and chats. Null is always accepted in addition."""
COMPLETION_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {"add_special_tokens": (True,)}
CHAT_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "functions": (),
    "function_call": (),
    "web_search_options": (),
    "moderation": (),
    "audio": (),
}


class SamplingBody(NeutralFields, frozen=True, kw_only=True):
    model: Text = None
    temperature: float | None = None
    top_p: float | None = None
    n: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    max_tokens: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Int | None = None
    ignore_eos: bool | None = None
    priority: Int | None = None
    cache_salt: Text = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Text = None
    guided_choice: list[str] | None = None
    guided_grammar: Text = None
    prompt_logprobs: Int | None = None
    """Number of most likely tokens at each position of the prompt for which log-probabilities are returned (vLLM). Not
    with a stream.
    """


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int | None = None
    best_of: Int | None = None
    """Accepted only if it equals `n`."""
    echo: bool | None = None
    """Whether the prompt precedes the completion, with its log-probabilities if `logprobs` is set."""
    suffix: Text = None
    """Must be null or an empty string."""


class ContentPart(_Body, frozen=True, kw_only=True):
    """Part of a message's content. Only text is supported; other types of parts are refused with an error that names
    the type.
    """

    type: str
    text: Text = None
    refusal: Text = None
    image_url: Any = None
    video_url: Any = None
    audio_url: Any = None
    input_audio: Any = None
    file: Any = None
    annotations: Any = None
    """Accepted without effect, as are `logprobs`: parts of the Responses API are sent back with them."""
    logprobs: Any = None


class FunctionCall(_Body, frozen=True, kw_only=True):
    """A function call made by the model in an earlier turn."""

    name: str
    arguments: str = "{}"
    """A JSON object as text. Text that is no JSON object, such as truncated arguments, is passed to the chat template
    unchanged.
    """


class ToolCallBody(_Body, frozen=True, kw_only=True):
    function: FunctionCall
    id: Text = None
    type: Literal["function"] = "function"
    index: Int | None = None


class MessageBody(_Body, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Text = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: Text = None
    refusal: Text = None
    reasoning: Text = None
    """The model's reasoning in an earlier turn. Some clients call this field `reasoning_content`."""
    reasoning_content: Text = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class Function(_Body, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    description: Text = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body, frozen=True, kw_only=True):
    function: Function
    type: Literal["function"] = "function"


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    messages: Annotated[list[MessageBody], msgspec.Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """One of "none", "auto" and "required", or an object that names a function."""
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    modalities: list[str] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable for the chat template; most templates ignore it."""
    include_reasoning: bool | None = None
    """Whether the answer contains its reasoning; true by default."""
    add_generation_prompt: Any = None
    """This field and all fields after it are accepted only with the values in `CHAT_NEUTRAL`."""
    continue_final_message: Any = None
    echo: Any = None
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
    audio: Any = None


class LoadAdapterBody(_Body, frozen=True, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`, as in vLLM."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_CHARACTERS)]
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]


class UnloadAdapterBody(_Body, frozen=True, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`, as in vLLM."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ADAPTER_CHARACTERS)]
    lora_int_id: Int | None = None
    """Accepted without effect: adapters are identified by name."""


class TokenizeBody(_Body, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: either a prompt, or messages for the chat template."""

    model: Text = None
    prompt: Text = None
    messages: Annotated[list[MessageBody], msgspec.Meta(max_length=4096)] | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=128)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(_Body, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=2 << 20)]
    model: Text = None
