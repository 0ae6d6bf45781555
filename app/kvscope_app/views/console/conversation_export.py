"""Conversations as Markdown to read and as JSON to import again. Imports no widgets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from kvscope_app.views.console.answer_text import ending_text, exact_time, stats_text
from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.tools import arguments_text
from kvscope_telemetry.messages.sampling_params import SamplingParams

FORMAT: Final = "kvscope-conversations"
VERSION: Final = 1
"""Version of the JSON format, which docs/guide/console.md describes. Increase it only if an earlier reader must refuse
the file; new fields with defaults do not need it.
"""


class ConversationsFile(msgspec.Struct, kw_only=True):
    format: str
    version: int
    exported_s: float = 0.0
    """Time of the export, in seconds since 1970; 0 if unknown."""
    conversations: list[Conversation]


def to_json(conversations: Sequence[Conversation]) -> bytes:
    """Return everything about the conversations, with all versions of each message, as indented JSON."""
    file = ConversationsFile(format=FORMAT, version=VERSION, exported_s=time.time(), conversations=list(conversations))
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def to_markdown(conversations: Sequence[Conversation]) -> str:
    """Return the shown path of each conversation as readable Markdown, with one line of figures per answer."""
    return "\n---\n\n".join(_conversation_markdown(conversation) for conversation in conversations)


def _conversation_markdown(conversation: Conversation) -> str:
    path = conversation.path
    models = list(dict.fromkeys(message.stats.model for message in path if message.stats.model))
    facts = [
        ("Last change", exact_time(conversation.changed_s)),
        ("Model", ", ".join(models)),
        ("LoRA adapter", conversation.adapter),
        ("Options", _options_text(conversation.sampling)),
    ]
    lines = [f"# {conversation.title}", ""]
    lines += [f"- {name}: {text}" for name, text in facts if text]
    if conversation.system.strip():
        lines += ["", "## System prompt", "", conversation.system]
    for message in path:
        lines += ["", *_message_lines(message)]
    return "\n".join(lines) + "\n"


def _message_lines(message: Message) -> list[str]:
    name = "You" if message.role == "user" else "Answer"
    if message.tool_results:
        name = f"Result of {', '.join(result.name for result in message.tool_results)}"
    written = exact_time(message.written_s)
    lines = [f"## {name}" + (f" ({written})" if written else ""), "", message.sent_text]
    for call in message.tool_calls:
        lines += ["", f"Calls {call.name}:", "", "```json", arguments_text(call), "```"]
    figures = "  ·  ".join(filter(None, [stats_text(message.stats), ending_text(message)]))
    return [*lines, "", f"*{figures}*"] if figures and message.role == "assistant" else lines


def _options_text(sampling: SamplingParams) -> str:
    options = msgspec.to_builtins(sampling)  # without the options that have their default
    return ", ".join(f"{name} {value}" for name, value in options.items())
