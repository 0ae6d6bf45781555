"""Table of the formats in which models write tool calls, by vLLM's names and by strings in the chat template.

A format is data: the marks around its calls, and one of the parsers of `call_parsers.py` for the text between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from kvscope_engine.http.tool_calling.call_parsers import (
    CallParser,
    NamedFields,
    NamedJson,
    NamedValues,
    any_of,
    read_json,
    read_json_value,
    read_keyed_json,
    read_python,
)
from kvscope_telemetry.errors import BadInput

OPEN_TAG: Final = "<tool_call>"
CLOSE_TAG: Final = "</tool_call>"
HARMONY_NAME: Final = "openai"
"""vLLM's name for the format of gpt-oss, which `HarmonyReader` reads."""
NAME_PLACEHOLDER: Final = "NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedFormat:
    """Texts that a forced answer has around its tool calls.

    `before` and `after` surround all calls, `begin` and `end` surround each call, and `between` separates two calls.
    """

    before: str = ""
    begin: str
    arguments: str = ""
    """Text between a call's number and its arguments; "" if calls are not numbered."""
    end: str
    between: str
    after: str = ""
    style: str = "json"
    """XGrammar's name for the format of the arguments."""


JSON_LIST: Final = ForcedFormat(
    before="[", begin=f'{{"name": "{NAME_PLACEHOLDER}", "arguments": ', end="}", between=", ", after="]"
)


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Tool calls between the marks `begin` and `end`. If `end` is empty, they end where the parser `body` stops."""

    begin: str
    body: CallParser
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    spans: tuple[CallSpan, ...] = ()
    starts: tuple[str, ...] = ()
    """Possible beginnings of an answer that may consist only of calls to functions in the request."""
    prefixes: tuple[str, ...] = ()
    """Marks at the beginning of an answer that consists only of calls. Unlike `starts`, they are not part of the calls.
    """
    whole: tuple[CallParser, ...] = ()
    """Parsers for an answer that consists only of calls; the first that succeeds is used."""
    silent: tuple[str, ...] = ()
    """Marks around `spans` that are not part of the answer's text."""
    closers: tuple[str, ...] = ()
    """Marks that are not part of the answer's text if they follow a call."""
    forced: ForcedFormat = JSON_LIST
    inner: tuple[str, ...] = ()
    """Special tokens within a `CallSpan`, for example around arguments. They are kept in the text that the
    parser reads.
    """
    has_short_ids: bool = False
    """Whether call ids have nine letters and digits, the only ids that Mistral's templates accept."""

    @property
    def marks(self) -> str:
        spans = [mark for span in self.spans for mark in (span.begin, span.end)]
        return "".join((*spans, *self.starts, *self.prefixes, *self.silent, *self.closers, *self.inner))

    @property
    def can_force(self) -> bool:
        return self.forced is not JSON_LIST


_HERMES: Final = ForcedFormat(
    begin=f'{OPEN_TAG}\n{{"name": "{NAME_PLACEHOLDER}", "arguments": ', end=f"}}\n{CLOSE_TAG}", between="\n"
)
_LLAMA: Final = ForcedFormat(begin=f'{{"name": "{NAME_PLACEHOLDER}", "parameters": ', end="}", between="; ")
_QWEN_XML: Final = ForcedFormat(
    begin=f"{OPEN_TAG}\n<function={NAME_PLACEHOLDER}>\n",
    end=f"\n</function>\n{CLOSE_TAG}",
    between="\n",
    style="qwen_xml",
)
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_SEPARATOR: Final = "<｜tool▁sep｜>"
_KIMI: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL: Final = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_SEPARATOR: Final = "<|tool_call_argument_begin|>"

_DEEPSEEK_V3_BODY: Final = NamedJson(
    re.compile(rf"\s*\w*\s*{_DEEPSEEK_SEPARATOR}[ \t]*(?P<name>\S+)[ \t]*\n```(?:json)?\s*(?={{)")
)
_DEEPSEEK_V31_BODY: Final = NamedJson(re.compile(rf"\s*(?P<name>[^\s<]+)\s*{_DEEPSEEK_SEPARATOR}\s*(?={{)"))
_KIMI_BODY: Final = NamedJson(
    re.compile(rf"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+):\d+)\s*{re.escape(_KIMI_SEPARATOR)}\s*(?={{)")
)
"""Parser for calls with ids such as `functions.NAME:3`. The model expects the same id in the message with the result.
"""
_MISTRAL_BODY: Final = NamedJson(
    re.compile(r"\s*(?P<name>[^\W\d][\w.-]*)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)")
)
_QWEN_BODY: Final = NamedFields(
    head=re.compile(r"\s*<function=(?P<name>[^>\n]+)>"),
    field_begin="<parameter=",
    field=re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
    close="</parameter>",
    tail="</function>",
    has_value_lines=True,
)
_GLM_BODY: Final = NamedFields(
    head=re.compile(r"\s*(?P<name>[^\s<{]+)\s*(?=<)"),
    field_begin="<arg_key>",
    field=re.compile(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>"),
    close="</arg_value>",
    tail=CLOSE_TAG,
)
_INVOKE_BODY: Final = NamedFields(
    head=re.compile(r"(?P<name>[^\">\n]+)\">"),
    field_begin="<parameter name=",
    field=re.compile(r"<parameter name=\"?(?P<key>[^\">\n]+)\"?>"),
    close="</parameter>",
    tail="</invoke>",
)
_DSML_BODY: Final = NamedFields(
    head=re.compile(r"(?P<name>[^\">\n]+)\">"),
    field_begin="<｜DSML｜parameter name=",
    field=re.compile(r"<｜DSML｜parameter name=\"(?P<key>[^\">\n]+)\"(?:\s+string=\"(?:(?P<text>true)|false)\")?\s*>"),
    close="</｜DSML｜parameter>",
    tail="</｜DSML｜invoke>",
)
_HERMES_SPAN: Final = CallSpan(OPEN_TAG, read_json, CLOSE_TAG)
_QWEN_SPANS: Final = (
    CallSpan(OPEN_TAG, _QWEN_BODY),
    # Qwen3-Coder often leaves out the opening mark, and then the body's head is the first that shows the call.
    CallSpan("<function=", replace(_QWEN_BODY, head=re.compile(r"(?P<name>[^>\n]+)>"))),
)

REASONING: Final = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Closing mark by opening mark of a model's reasoning. Text between them is never parsed as tool calls."""

UNKNOWN_FORMAT: Final = ToolFormat(
    name="auto",
    spans=(_HERMES_SPAN,),
    starts=("{", "["),
    prefixes=("<|python_tag|>", "[TOOL_CALLS]"),
    whole=(read_json, read_python),
)
"""Format for unknown models. It accepts only text that can safely be interpreted as a call."""
FORMATS: Final = (
    ToolFormat(name="hermes", spans=(_HERMES_SPAN,), forced=_HERMES),
    ToolFormat(
        name="mistral",
        spans=(CallSpan("[TOOL_CALLS]", any_of(read_json_value, _MISTRAL_BODY)),),
        starts=("[{",),
        whole=(read_json,),
        inner=("[ARGS]", "[CALL_ID]"),
        has_short_ids=True,
    ),
    *(
        ToolFormat(name=name, starts=("{", "["), prefixes=("<|python_tag|>",), whole=(read_json,), forced=_LLAMA)
        for name in ("llama3_json", "llama4_json")
    ),
    ToolFormat(name="pythonic", starts=("[",), whole=(read_python,)),
    ToolFormat(
        name="llama4_pythonic",
        spans=(CallSpan("<|python_start|>", read_python, "<|python_end|>"),),
        starts=("[",),
        whole=(read_python,),
    ),
    ToolFormat(name="olmo3", spans=(CallSpan("<function_calls>", read_python, "</function_calls>"),)),
    *(
        ToolFormat(name=name, spans=_QWEN_SPANS, closers=(CLOSE_TAG,), forced=_QWEN_XML)
        for name in ("qwen3_coder", "qwen3_xml")
    ),
    ToolFormat(
        name="glm45",
        spans=(CallSpan(OPEN_TAG, _GLM_BODY),),
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", CLOSE_TAG),
        forced=ForcedFormat(
            begin=f"{OPEN_TAG}{NAME_PLACEHOLDER}\n", end=f"\n{CLOSE_TAG}", between="\n", style="glm_xml"
        ),
    ),
    ToolFormat(
        name="deepseek_v3",
        spans=(CallSpan(_DEEPSEEK_CALL[0], _DEEPSEEK_V3_BODY, f"```{_DEEPSEEK_CALL[1]}"),),
        silent=_DEEPSEEK,
        inner=(_DEEPSEEK_SEPARATOR,),
        forced=ForcedFormat(
            before=_DEEPSEEK[0],
            begin=f"{_DEEPSEEK_CALL[0]}function{_DEEPSEEK_SEPARATOR}{NAME_PLACEHOLDER}\n```json\n",
            end=f"\n```{_DEEPSEEK_CALL[1]}",
            between="\n",
            after=_DEEPSEEK[1],
        ),
    ),
    ToolFormat(
        name="deepseek_v31",
        spans=(CallSpan(_DEEPSEEK_CALL[0], _DEEPSEEK_V31_BODY, _DEEPSEEK_CALL[1]),),
        silent=_DEEPSEEK,
        inner=(_DEEPSEEK_SEPARATOR,),
        forced=ForcedFormat(
            before=_DEEPSEEK[0],
            begin=f"{_DEEPSEEK_CALL[0]}{NAME_PLACEHOLDER}{_DEEPSEEK_SEPARATOR}",
            end=_DEEPSEEK_CALL[1],
            between="",
            after=_DEEPSEEK[1],
        ),
    ),
    ToolFormat(
        name="kimi_k2",
        spans=(CallSpan(_KIMI_CALL[0], _KIMI_BODY, _KIMI_CALL[1]),),
        silent=_KIMI,
        inner=(_KIMI_SEPARATOR,),
        forced=ForcedFormat(
            before=_KIMI[0],
            begin=f"{_KIMI_CALL[0]}functions.{NAME_PLACEHOLDER}:",
            arguments=_KIMI_SEPARATOR,
            end=_KIMI_CALL[1],
            between="",
            after=_KIMI[1],
        ),
    ),
    ToolFormat(
        name="granite",
        spans=(CallSpan("<|tool_call|>", read_json_value), _HERMES_SPAN),
        starts=("[{",),
        whole=(read_json,),
    ),
    ToolFormat(name="phi4_mini_json", starts=("[{",), prefixes=("functools",), whole=(read_json,)),
    ToolFormat(
        name="jamba",
        spans=(CallSpan("<tool_calls>", read_json, "</tool_calls>"),),
        forced=ForcedFormat(
            before="<tool_calls>[",
            begin=JSON_LIST.begin,
            end=JSON_LIST.end,
            between=JSON_LIST.between,
            after="]</tool_calls>",
        ),
    ),
    ToolFormat(
        name="gemma4",
        spans=(CallSpan("<|tool_call>", NamedValues('<|"|>'), "<tool_call|>"),),
        inner=('<|"|>',),
    ),
    ToolFormat(
        name="functiongemma",
        spans=(CallSpan("<start_function_call>", NamedValues("<escape>"), "<end_function_call>"),),
        inner=("<escape>",),
    ),
    ToolFormat(
        name="deepseek_v32",
        spans=(CallSpan('<｜DSML｜invoke name="', _DSML_BODY),),
        silent=tuple(f"<{slash}｜DSML｜{name}>" for slash in ("", "/") for name in ("function_calls", "tool_calls")),
        inner=("</｜DSML｜invoke>", "<｜DSML｜parameter", "</｜DSML｜parameter>"),
    ),
    ToolFormat(
        name="minimax_m2",
        spans=(CallSpan('<invoke name="', _INVOKE_BODY),),
        silent=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolFormat(name="seed_oss", spans=(CallSpan("<seed:tool_call>", _QWEN_BODY),), closers=("</seed:tool_call>",)),
    ToolFormat(name="lfm2", spans=(CallSpan("<|tool_call_start|>", read_python, "<|tool_call_end|>"),)),
    ToolFormat(name="apertus", spans=(CallSpan("<|tools_prefix|>", read_keyed_json, "<|tools_suffix|>"),)),
    ToolFormat(name="cohere_command3", spans=(CallSpan("<|START_ACTION|>", read_json_value, "<|END_ACTION|>"),)),
    ToolFormat(name=HARMONY_NAME, inner=("<|start|><|channel|><|message|><|constrain|><|end|><|call|><|return|>",)),
)
FORMATS_BY_NAME: Final = {one.name: one for one in (UNKNOWN_FORMAT, *FORMATS)}
JSON_LIST_FORMAT: Final = ToolFormat(name="list", starts=("[",), whole=(read_json,))
"""Format of a bare JSON list, in which calls are forced if they cannot be forced in the model's own format."""

_TEMPLATE_SIGNS: Final = (
    (("<|channel|>", "<|message|>"), HARMONY_NAME),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<|tool_call|>",), "granite"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool|>",), "phi4_mini_json"),
    ((OPEN_TAG,), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("[func_name1(", "<|python_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
)
"""Strings that identify a tool call format if all of them occur in the chat template, with the format's name.

The first match counts, because later strings also occur in templates of earlier formats.
"""


@lru_cache(maxsize=64)
def format_of(template: str | None, name: str = "") -> ToolFormat:
    """Return the format called `name`; if `name` is "" or "auto", the one that the chat template indicates.

    Raises BadInput for an unknown name.
    """
    if name:
        if name not in FORMATS_BY_NAME:
            raise BadInput(
                f"tool call parser {name!r:.40} is not accepted: must be one of {', '.join(FORMATS_BY_NAME)}"
            )
        if name != UNKNOWN_FORMAT.name:
            return FORMATS_BY_NAME[name]
    names = (name for signs, name in _TEMPLATE_SIGNS if all(sign in (template or "") for sign in signs))
    return FORMATS_BY_NAME[next(names, UNKNOWN_FORMAT.name)]


@lru_cache(maxsize=64)
def reasoning_marks(template: str | None) -> Mapping[str, str]:
    """Return the entries of `REASONING` whose marks occur in the chat template. If there are none, the model's
    reasoning is not separated from its answer.
    """
    found = {begin: end for begin, end in REASONING.items() if begin in (template or "") or end in (template or "")}
    return MappingProxyType(found)
