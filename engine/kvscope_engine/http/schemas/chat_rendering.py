"""Renders a chat's messages and tools with the model's chat template.

The template comes with the model and the messages come from a client. Neither is trusted, so the rendering time is
bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import ContentPart, MessageBody, Tool
from kvscope_engine.tokenization import chat_template
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput

TEXT_PARTS: Final = ("text", "refusal", "input_text", "output_text", "summary_text", "reasoning_text")
"""Types of the content parts of chat completions and of the Responses API that contain text."""
RESERVED_VARIABLES: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Template variables that are always set, and are therefore refused in `chat_template_kwargs`."""


def conversation_text(
    tokenizer: Tokenizer,
    messages: Sequence[MessageBody],
    tools: Sequence[Tool] = (),
    extra: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Render the conversation. Raises BadInput if the model has no chat template or the template fails."""

    def rendered(*, raw_arguments: bool) -> str:
        given = [template_message(message, raw_arguments=raw_arguments) for message in messages]
        return _rendered(tokenizer, given, tools, extra or {}, add_generation_prompt)

    if all(_is_object(call.function.arguments) for message in messages for call in message.tool_calls or ()):
        return rendered(raw_arguments=True)
    try:
        return rendered(raw_arguments=True)
    except BadInput:  # many templates list the arguments' names, and fail if they are text
        return rendered(raw_arguments=False)


def template_message(message: MessageBody, *, raw_arguments: bool = True) -> dict[str, Any]:
    """Return one message in the form that templates expect: content as text, and arguments of calls as objects.

    Arguments that are no JSON object, because they were truncated or another server wrote them, are passed as text;
    without `raw_arguments`, they become `{"arguments": TEXT}`.
    """
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message_text(message),
    }
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "type": "function",
                "id": call.id or "",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, raw_arguments),
                },
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            rendered[name] = value
    if reasoning := message.reasoning_content or message.reasoning:
        rendered |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)  # templates differ
    return rendered


def message_text(message: MessageBody) -> str:
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise ApiError(400, f"{name} of a message is not accepted: content and tool_calls are", param="messages")
    if message.content is None:
        if message.role not in ("assistant", "tool"):
            raise ApiError(400, f"a message of role {message.role!r} has no content", param="messages")
        return message.refusal or ""
    return content_text(message.content)


def content_text(content: str | Sequence[ContentPart], *, param: str = "messages") -> str:
    """Return the text of a message's content. Raises ApiError, which names the field `param`, for other content."""
    return content if isinstance(content, str) else "".join(_part_text(part, param) for part in content)


def _part_text(part: ContentPart, param: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in TEXT_PARTS or text is None:
        raise ApiError(400, f"content of type {part.type!r:.40} is not accepted: only text is read", param=param)
    return text


def _arguments(text: str, raw: bool) -> Any:
    if _is_object(text):
        return msgspec.json.decode(text or "{}")
    return text if raw else {"arguments": text}


def _is_object(text: str) -> bool:
    """Whether `text` is a JSON object, or empty."""
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    extra: Mapping[str, Any],
    add_generation_prompt: bool,
) -> str:
    if tokenizer.chat_template is None:
        raise BadInput("this model has no chat template: /v1/completions takes its prompts as they are")
    if reserved := RESERVED_VARIABLES & extra.keys():
        raise BadInput(f"chat_template_kwargs may not have {sorted(reserved)}: they are fields of the request")
    try:
        variables = {
            "messages": list(tokenizer.to_template_content(messages)),
            "tools": [_template_tool(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return chat_template.render(tokenizer.chat_template, {**tokenizer.special_tokens, **extra, **variables})
    except Exception as error:  # the template is a program of the model and may raise anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the model's chat template refuses the conversation: {line:.200}") from error


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.function.name, "description": tool.function.description or ""}
    return {
        "type": "function",
        "function": function | {"parameters": tool.function.parameters or {"type": "object", "properties": {}}},
    }
