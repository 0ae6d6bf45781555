"""Format of the answers to one chat request: which functions may or must be called, and how the text is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from kvscope_engine.http.schemas.api_errors import ApiError
from kvscope_engine.http.schemas.request_bodies import ChatBody, Function
from kvscope_engine.http.tool_calling.answer_reader import AnswerReader, MarkedAnswerReader, ReasoningSplitter
from kvscope_engine.http.tool_calling.harmony_reader import HarmonyReader
from kvscope_engine.http.tool_calling.structural_tags import forced_format, structural_tag
from kvscope_engine.http.tool_calling.tool_call_formats import (
    HARMONY_NAME,
    REASONING,
    UNKNOWN_FORMAT,
    ToolFormat,
    format_of,
    reasoning_marks,
)
from kvscope_engine.http.tool_calling.tool_call_reader import MAX_CALLS, ToolCallReader
from kvscope_engine.tokenization.chat_template import TOOLS_VARIABLE
from kvscope_engine.tokenization.tokenizer import IncrementalDecoder, Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Tokens
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.structured import Structured

REASONING_MARKS: Final = frozenset((*REASONING, *REASONING.values()))
_REASONING_TEXT: Final = "\n".join(sorted(REASONING_MARKS))
PROMPT_END_TOKENS: Final = 16
"""Number of tokens at the end of a prompt that are searched for an opening tag of reasoning, such as `<think>`."""
ACCEPTED_CHOICES: Final = "none, auto, required or a function by its name"


class _NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    function: _NamedFunction
    type: str = "function"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one request are written.

    Marks are texts such as `<tool_call>` or `<think>` around a call or the reasoning. `hidden`: special tokens to leave
    out of an answer's text; None if no mark is a special token. `reasoning_marks`: closing mark by opening mark of the
    reasoning that is returned in a separate field; empty if reasoning stays in the content.
    """

    functions: Sequence[Function]
    tool_format: ToolFormat = UNKNOWN_FORMAT
    structural_tag_json: str = ""
    """Structural tag that answers must match; "" if answers are not constrained."""
    max_calls: int = MAX_CALLS
    hidden: frozenset[int] | None = None
    reasoning_marks: Mapping[str, str] = field(default_factory=dict)

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with the structural tag. Raises ApiError if they already request structured output."""
        if not self.structural_tag_json:
            return sampling
        if sampling.structured is not None:
            message = "a form of the answer is not accepted with a tool_choice that makes it calls"
            raise ApiError(400, message, param="tool_choice")
        try:
            return replace(sampling, structured=Structured(kind="structural_tag", text=self.structural_tag_json))
        except BadInput as error:
            raise ApiError(400, str(error), param="tools") from error

    def reader(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> AnswerReader | None:
        """Return a reader for one answer to `prompt`; None if all of its text is content."""
        if self.tool_format.name == HARMONY_NAME:
            return HarmonyReader(self.max_calls if self.functions else 0) if self.hidden is not None else None
        # The structural tag of forced calls does not permit reasoning.
        end = "" if self.structural_tag_json or tokenizer is None else _reasoning_end(tokenizer, prompt)
        splitter = None
        if self.reasoning_marks:
            field_end = end if end in self.reasoning_marks.values() else ""
            splitter = ReasoningSplitter(self.reasoning_marks, field_end)
            end = "" if field_end else end
        if not self.functions:
            return MarkedAnswerReader(splitter, None) if splitter is not None else None
        tools = {function.name: function.parameters or {} for function in self.functions}
        hidden = REASONING_MARKS & tokenizer.special_texts.keys() if tokenizer is not None else ()
        calls = ToolCallReader(self.tool_format, tools, self.max_calls, reasoning_end=end, hidden=hidden)
        return MarkedAnswerReader(splitter, calls)

    def marked_text(self, tokenizer: Tokenizer | None) -> MarkedText | None:
        """Return a decoder for one answer that keeps the marks of calls in the text. Returns None if the text
        from the engine contains these marks already.
        """
        return None if self.hidden is None or tokenizer is None else MarkedText(tokenizer, self.hidden)


def answer_format(
    body: ChatBody, tokenizer: Tokenizer | None, parser: str, *, is_structured: bool = False
) -> AnswerFormat:
    """Return the format of answers to `body`. Raises ApiError.

    `parser`: name of the format of tool calls; empty to detect it from the chat template. `is_structured`: the answers
    must match a grammar, and so contain no reasoning.
    """
    template = tokenizer.chat_template if tokenizer is not None else None
    tool_format = format_of(template, parser)
    functions = [tool.function for tool in body.tools or ()] if body.tool_choice != "none" else []
    if forced := _forced(body, functions):
        is_one = _is_one(body)
        used_format = forced_format(tool_format, forced, () if tokenizer is None else tokenizer.special_texts)
        tag = structural_tag(used_format.forced, forced, is_one=is_one)
        return AnswerFormat(functions, used_format, tag, 1 if is_one else MAX_CALLS)
    if functions and template and not TOOLS_VARIABLE.search(template):
        message = 'tools are only accepted with tool_choice "required" or a function: the model\'s chat template'
        raise ApiError(400, f"{message} does not show them to it", param="tools")
    marks = reasoning_marks(template)
    hidden = None
    if tokenizer is not None and (functions or marks or tool_format.name == HARMONY_NAME):
        has_ends = bool(body.stop or body.stop_token_ids)  # only the engine knows where a stop string ends the text
        hidden = None if has_ends else hidden_tokens(tool_format, tokenizer)
        if has_ends and not tokenizer.special_texts.keys().isdisjoint((*marks, *marks.values())):
            marks = {}  # the engine's text lacks them
    return AnswerFormat(
        functions,
        tool_format,
        max_calls=1 if _is_one(body) else MAX_CALLS,
        hidden=hidden,
        reasoning_marks={} if is_structured else marks,
    )


def _is_one(body: ChatBody) -> bool:
    """Whether an answer may contain only one call."""
    return body.parallel_tool_calls is False or isinstance(body.tool_choice, dict)


def check_tool_choice(body: ChatBody) -> None:
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise ApiError(
            400, f"tool_choice={choice!r:.60} is not accepted: must be {ACCEPTED_CHOICES}", param="tool_choice"
        )
    if choice not in (None, "none") and not body.tools:
        raise ApiError(400, f"tool_choice={choice!r:.60} is not accepted without tools", param="tool_choice")
    _forced(body, [tool.function for tool in body.tools or ()])


def _forced(body: ChatBody, functions: Sequence[Function]) -> list[Function]:
    """Return the functions of which an answer must call one; empty if an answer need not call any."""
    if body.tool_choice == "required":
        return list(functions)
    if not isinstance(body.tool_choice, dict):
        return []
    name = _name(body.tool_choice)
    matching = [function for function in functions if function.name == name]
    if not matching:
        raise ApiError(
            400, f"tool_choice={name!r:.60} is not accepted: there is no tool of this name", param="tool_choice"
        )
    return matching[:1]


def _name(choice: dict[str, Any]) -> str:
    try:
        return msgspec.convert(choice, _ToolChoice).function.name
    except msgspec.ValidationError as error:
        message = f"tool_choice={choice!r:.60} is not accepted: must be {ACCEPTED_CHOICES} ({error})"
        raise ApiError(400, message, param="tool_choice") from None


class MarkedText:
    """Decodes one completion's text, including the marks of calls, such as `<tool_call>`. The engine's own text
    lacks these marks, because they are special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        def decode(ids: Sequence[int]) -> str:
            return tokenizer.decode([token for token in ids if token not in hidden])

        self._decoder = IncrementalDecoder(decode)

    def add(self, reply: Tokens | Finished) -> str:
        if isinstance(reply, Finished):
            return self._decoder.flush()
        return "".join(map(self._decoder.add_token, reply.token_ids))


def _reasoning_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the mark that will end the reasoning, such as `</think>`, if the prompt ends with an opening mark.
    Returns "" for other prompts.
    """
    begin = tokenizer.decode(prompt[-PROMPT_END_TOKENS:]).rstrip()
    return next((end for mark, end in REASONING.items() if begin.endswith(mark)), "")


def hidden_tokens(tool_format: ToolFormat, tokenizer: Tokenizer) -> frozenset[int] | None:
    """Return the special tokens to leave out of an answer's text: all except the marks of calls and reasoning.
    Returns None if no mark is a special token.
    """
    special = tokenizer.special_texts.items()
    visible = {token for text, token in special if text and (text in tool_format.marks or text in _REASONING_TEXT)}
    return tokenizer.special_token_ids - visible if visible else None
