"""Estimates the memory that a queued command takes: its contents and a constant per object.

The limits of queues are in these bytes, so that many small objects also reach them. Independent of the limits.
"""

from __future__ import annotations

import sys
from typing import Final

from kvscope_telemetry.messages.commands import (
    Abort,
    ChatMessage,
    Command,
    EstimatePrompt,
    Evict,
    GetBlockText,
    GetStatus,
    LoadAdapter,
    Pin,
    Submit,
    ToolCall,
    UnloadAdapter,
    Unpin,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams

COMMAND_BYTES: Final = 1_000
"""Memory of a queued command without its contents, in bytes: its Python objects and its queue entry."""
MESSAGE_BYTES: Final = 200
"""Bytes of a chat message without content."""
NUMBER_BYTES: Final = 40
"""Memory of one token id or block id in a tuple, in bytes."""


def command_bytes(command: Command) -> int:
    """Return the bytes that `command` takes while it is queued. Never much less than its size on the wire."""
    if isinstance(command, Submit):
        return COMMAND_BYTES + _submit_bytes(command)
    if isinstance(command, EstimatePrompt):
        texts = (command.cache_salt, command.tools, command.adapter)
        return COMMAND_BYTES + sum(map(_message_bytes, command.messages)) + sum(map(sys.getsizeof, texts))
    if isinstance(command, GetBlockText | Pin | Unpin | Evict):
        return COMMAND_BYTES + NUMBER_BYTES * len(command.blocks)
    if isinstance(command, LoadAdapter):
        return COMMAND_BYTES + sys.getsizeof(command.name) + sys.getsizeof(command.path)
    if isinstance(command, UnloadAdapter):
        return COMMAND_BYTES + sys.getsizeof(command.name)
    if isinstance(command, Abort):
        return COMMAND_BYTES + sys.getsizeof(command.request_id)
    if isinstance(command, GetStatus):
        return COMMAND_BYTES + sys.getsizeof(command.session) + _awaited_bytes(command)
    return COMMAND_BYTES


def _awaited_bytes(command: GetStatus) -> int:
    return sum(
        MESSAGE_BYTES + sys.getsizeof(request.request_id) + NUMBER_BYTES * len(request.heard)
        for request in command.awaited
    )


def _submit_bytes(submit: Submit) -> int:
    messages = submit.messages or ()
    return (
        sys.getsizeof(submit.request_id)
        + sys.getsizeof(submit.prompt)
        + sum(map(_message_bytes, messages))
        + NUMBER_BYTES * len(submit.prompt_token_ids or ())
        + sys.getsizeof(submit.cache_salt)
        + sys.getsizeof(submit.tools)
        + sys.getsizeof(submit.adapter)
        + sampling_bytes(submit.sampling)
    )


def sampling_bytes(sampling: SamplingParams) -> int:
    """Return the bytes of the sampling options with variable length."""
    structured = sampling.structured
    return (
        sum(map(sys.getsizeof, sampling.stop))
        + NUMBER_BYTES * len(sampling.stop_token_ids)
        + 3 * NUMBER_BYTES * len(sampling.logit_bias)
        + (MESSAGE_BYTES + sys.getsizeof(structured.text) if structured is not None else 0)
    )


def _message_bytes(message: ChatMessage) -> int:
    name_bytes = sum(map(sys.getsizeof, filter(None, (message.name, message.tool_call_id))))
    num_bytes = MESSAGE_BYTES + sys.getsizeof(message.content) + name_bytes + NUMBER_BYTES * len(message.token_ids)
    return num_bytes + sum(map(_call_bytes, message.tool_calls))


def _call_bytes(call: ToolCall) -> int:
    return MESSAGE_BYTES + sys.getsizeof(call.id) + sys.getsizeof(call.name) + sys.getsizeof(call.arguments)
