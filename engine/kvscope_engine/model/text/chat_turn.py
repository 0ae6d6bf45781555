"""One turn of a conversation as chat templates read it: a plain dictionary, with what the turn does not have left out.

Owns the form of tool calls: that of OpenAI, with arguments as an object, which is what templates write out as JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage, ToolCall


def as_template_reads(message: ChatMessage) -> dict[str, Any]:
    """Raises BadInput for text that is no text, and for arguments of a call that are no JSON object."""
    turn: dict[str, Any] = {"role": message.role, "content": valid_text(message.content)}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            turn[name] = valid_text(value)
    return turn


def valid_text(text: str) -> str:
    """Raises BadInput for half a surrogate pair: it has no bytes, so no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"text is not accepted: {text[error.start]!r} at {error.start} is no character") from error
    return text


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = f"a JSON object ({error})"
        raise BadInput(f"arguments={call.arguments!r:.60} of {call.name!r:.40} are not accepted: {reason}") from None
    return {"id": call.id, "type": "function", "function": {"name": valid_text(call.name), "arguments": arguments}}
