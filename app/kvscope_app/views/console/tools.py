"""Functions that the model may call: their definitions, and the results that the user types. Imports no Qt."""

from __future__ import annotations

import re
from types import NoneType
from typing import Any, Final

import msgspec

from kvscope_app.ui.number_text import count
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import MAX_PROMPT_CHARACTERS, ChatMessage, ToolCall

MAX_TOOLS: Final = 128
EXAMPLE: Final = (
    '[{"type": "function", "function": {"name": "weather", "parameters":'
    ' {"type": "object", "properties": {"city": {"type": "string"}}}}}]'
)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a called function returned, as the user typed it."""

    id: str = ""
    """`ToolCall.id` of the call."""
    name: str
    content: str = ""


def read_tools(text: str) -> str:
    """Return function definitions as the JSON array that is sent, in OpenAI's format; "" for a blank text.

    Definitions without the enclosing `{"type": "function", "function": …}`, and a single one without the array, are
    accepted too. Raises BadInput, with one line for the user, for anything else.
    """
    if not text.strip():
        return ""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"Tools: must be JSON, such as {EXAMPLE[:41]}… ({error})") from None
    definitions = document if isinstance(document, list) else [document]
    if len(definitions) > MAX_TOOLS:
        raise BadInput(f"Tools: {count(len(definitions))} functions are not accepted, at most {MAX_TOOLS} are")
    tools = [_tool(definition, number) for number, definition in enumerate(definitions, 1)]
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"Tools: two functions have the name {name!r:.64}")
    sent = msgspec.json.encode(tools).decode()
    if len(sent) > MAX_PROMPT_CHARACTERS:
        raise BadInput(f"Tools: {count(len(sent))} characters are not accepted, at most {count(MAX_PROMPT_CHARACTERS)}")
    return sent if tools else ""


def _tool(definition: Any, number: int) -> dict[str, Any]:
    if isinstance(definition, dict) and "function" in definition:
        if definition.get("type", "function") != "function":
            raise BadInput(
                f'Tools: type {definition["type"]!r:.40} of tool {number} is not accepted: only "function" is'
            )
        function = definition["function"]
    else:
        function = definition
    if not isinstance(function, dict):
        raise BadInput(f"Tools: tool {number} is not accepted: a function is an object with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(f"Tools: name {name!r:.40} of tool {number} is not accepted: 1 to 64 letters, digits, _, - or .")
    if not isinstance(function.get("description", ""), (str, NoneType)):
        raise BadInput(f"Tools: the description of {name} must be a text")
    if not isinstance(function.get("parameters", {}), (dict, NoneType)):
        raise BadInput(f'Tools: the parameters of {name} must be a JSON schema, such as {{"type": "object"}}')
    return {"type": "function", "function": function}


def arguments_text(call: ToolCall) -> str:
    """Return the arguments as indented JSON, or as they are if they are not JSON."""
    try:
        return msgspec.json.format(call.arguments.encode(errors="replace"), indent=2).decode()
    except msgspec.DecodeError:
        return call.arguments


def result_messages(results: list[ToolResult]) -> list[ChatMessage]:
    return [
        ChatMessage(role="tool", content=result.content, tool_call_id=result.id, name=result.name) for result in results
    ]
