"""Bodies, output items and stream events of OpenAI's Responses API. Types, and their conversion to a chat.

Nothing is stored between requests: a client sends the whole conversation as `input` items. Source:
https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.chat_rendering import content_text
from kvscope_engine.http.schemas.request_bodies import (
    ChatBody,
    ContentPart,
    Function,
    FunctionCall,
    IgnoredFields,
    Int,
    JsonSchema,
    MessageBody,
    ResponseFormat,
    StreamOptions,
    Text,
    TokenId,
    Tool,
    ToolCallBody,
)
from kvscope_engine.http.schemas.responses import TokenLogprob

MAX_ITEMS: Final = 4096
LOGPROBS_INCLUDE: Final = "message.output_text.logprobs"
STATEFUL_FIELDS: Final = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that refer to state on the server, or ask for it."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class InputItem(_Part, frozen=True, kw_only=True):
    """Item of `input`. `type` is absent in messages that have only a role and content."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    name: Text = None
    arguments: str = ""
    call_id: Text = None
    output: str | list[ContentPart] | None = None
    id: Text = None
    """Accepted without effect, as are the following fields: clients send items back as they were returned."""
    status: Text = None
    phase: Text = None
    encrypted_content: Text = None


class ResponsesTool(_Part, frozen=True, kw_only=True):
    """Function that the model may call. Other types are built-in tools of OpenAI, and refused."""

    type: str
    name: Text = None
    description: Text = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(_Part, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text = None
    description: Text = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(_Part, frozen=True, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(_Part, frozen=True, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Text = None
    """Accepted without effect: the whole reasoning is returned."""
    generate_summary: Text = None


class ResponsesBody(IgnoredFields, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`. The sampling fields that OpenAI lacks are those of chat completions."""

    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    model: Text = None
    instructions: Text = None
    tools: Annotated[list[ResponsesTool], msgspec.Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs` returns log-probabilities. Other values have no effect."""
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Must be "disabled" or null."""
    max_tool_calls: Int | None = None
    """Accepted without effect: it limits built-in tools."""
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    priority: Int | None = None
    cache_salt: Text = None
    chat_template_kwargs: dict[str, Any] | None = None


SAME_NAME_FIELDS: Final = tuple(
    name
    for name in ResponsesBody.__struct_fields__
    if name in ChatBody.__struct_fields__
    and name
    not in (*IgnoredFields.__struct_fields__, "tools", "tool_choice", "top_logprobs", "stream_options", "prompt")
)
"""Fields that chat completions have with the same name and meaning."""


def chat_body(body: ResponsesBody) -> ChatBody:
    """Return the chat completion with the same answer. Raises ApiError for what is not supported."""
    for name in STATEFUL_FIELDS:
        if value := getattr(body, name):
            raise ApiError(400, f"{name}={value!r:.60} is not accepted: responses are not stored", param=name)
    if body.store:
        raise ApiError(400, "store=true is not accepted: responses are not stored (use false)", param="store")
    if body.truncation == "auto":
        message = "truncation='auto' is not accepted: a prompt that is too long is refused (use 'disabled')"
        raise ApiError(400, message, param="truncation")
    fields: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAME_FIELDS}
    has_logprobs = bool(body.top_logprobs) or LOGPROBS_INCLUDE in (body.include or ())
    return ChatBody(
        messages=list(_messages(body)),
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_tool_choice(body.tool_choice) if body.tools else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_response_format(body.text),
        logprobs=has_logprobs or None,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        **fields,
    )


def _messages(body: ResponsesBody) -> Iterator[MessageBody]:
    """Yield the conversation. An assistant's reasoning, text and calls are one message, as chat templates expect."""
    if body.instructions:
        yield MessageBody(role="system", content=body.instructions)
    if isinstance(body.input, str):
        yield MessageBody(role="user", content=body.input)
        return
    turn: list[InputItem] = []
    for index, item in enumerate(body.input):
        if item.type in ("reasoning", "function_call") or item.role == "assistant":
            turn.append(item)
            continue
        yield from _assistant_message(turn)
        turn = []
        if item.type == "function_call_output":
            yield MessageBody(
                role="tool", tool_call_id=item.call_id, content=content_text(item.output or "", param="input")
            )
        elif item.type == "message" and item.role is not None:
            yield MessageBody(role=item.role, content=item.content if item.content is not None else "")
        else:
            what = f"an item of type {item.type!r:.40}" if item.type != "message" else "a message without a role"
            message = f"{what} is not accepted: messages, reasoning, function calls and their outputs are"
            raise ApiError(400, message, param=f"input[{index}]")
    yield from _assistant_message(turn)


def _assistant_message(items: Sequence[InputItem]) -> Iterator[MessageBody]:
    if not items:
        return
    texts = [content_text(item.content or "", param="input") for item in items if item.role == "assistant"]
    reasoning = [
        content_text(item.content or item.summary or "", param="input") for item in items if item.type == "reasoning"
    ]
    calls = [
        ToolCallBody(id=item.call_id, function=FunctionCall(name=item.name or "", arguments=item.arguments))
        for item in items
        if item.type == "function_call"
    ]
    yield MessageBody(
        role="assistant",
        content="".join(texts) if texts else None,
        reasoning="\n".join(filter(None, reasoning)) or None,
        tool_calls=calls or None,
    )


def _tool(tool: ResponsesTool) -> Tool:
    if tool.type != "function" or not tool.name:
        message = f"a tool of type {tool.type!r:.40} is not accepted: only functions with a name are"
        raise ApiError(400, message, param="tools")
    return Tool(
        function=Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    )


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(options: TextOptions | None) -> ResponseFormat | None:
    text_format = options.format if options is not None else None
    if text_format is None:
        return None
    if text_format.type != "json_schema":
        return ResponseFormat(type=text_format.type)
    if text_format.schema is None:
        raise ApiError(400, "text.format of type json_schema has no schema", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=text_format.schema, name=text_format.name))


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: ItemStatus = "completed"


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "completed"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


OutputItem: TypeAlias = ReasoningItem | MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """Response of `/v1/responses`, also in the first and last events of its stream. Options are as requested."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: ReasoningOptions | None = None
    store: Literal[False] = False
    temperature: float | None = None
    text: TextOptions = TextOptions(format=TextFormat())
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[ResponsesTool] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a stream. `type` decides which of the other fields are set."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
