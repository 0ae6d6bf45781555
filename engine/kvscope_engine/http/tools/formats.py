"""The table of ways in which models write calls: by vLLM's names, and by what a chat template says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvscope_engine.http.tools import marked_calls as marked
from kvscope_engine.http.tools.calls import Call, Read, Tools, encoded, field_value, inside
from kvscope_engine.http.tools.json_calls import after, read_mistral
from kvscope_engine.http.tools.pythonic import read_pythonic
from kvscope_telemetry.errors import BadInput

Fields = Iterator[tuple[str, str] | None]
"""Names and values; None for what is no field."""


# Calls as XML's fields, without its quotes: Qwen3-Coder's `<function=…><parameter=…>` and GLM's `<arg_key>`.
#
# Cut by plain searches: what a model writes has no bound that a pattern's backtracking could live with.
def read_qwen3_coder(text: str, tools: Tools) -> list[Call] | None:
    """One, between `<tool_call>` and `</tool_call>`."""
    inner = inside(text, "<tool_call>", "</tool_call>")
    name, is_named, body = inner.removeprefix("<function=").partition(">")
    if not inner.startswith("<function=") or not is_named or "\n" in name.strip():
        return None
    return _call(name.strip(), _parameters(body.rstrip().removesuffix("</function>")), tools)


def read_glm(text: str, tools: Tools) -> list[Call] | None:
    """One, between `<tool_call>` and `</tool_call>`."""
    name, key, fields = inside(text, "<tool_call>", "</tool_call>").partition("<arg_key>")
    name = name.strip()
    return None if len(name.split()) != 1 or "<" in name else _call(name, _pairs(key + fields), tools)


def _call(name: str, fields: Fields, tools: Tools) -> list[Call] | None:
    schema, found = tools.get(name, {}), list(fields)
    pairs = [pair for pair in found if pair is not None]
    if not name or len(pairs) != len(found):
        return None
    return [Call(name, encoded({key: field_value(value, key, schema) for key, value in pairs}))]


def _parameters(body: str) -> Fields:
    before, *fields = body.split("<parameter=")
    if before.strip():
        yield None
    for field in fields:
        key, is_named, value = field.partition(">")
        whole, close, rest = value.rpartition("</parameter>")
        is_field = is_named and not (close and rest.strip())
        value = whole if close else value.rstrip()
        yield (key.strip(), value.removeprefix("\n").removesuffix("\n")) if is_field else None


def _pairs(body: str) -> Fields:
    before, *fields = body.split("<arg_key>")
    if before.strip():
        yield None
    for field in fields:
        key, _, rest = field.partition("</arg_key>")
        value, close, rest = rest.lstrip().partition("</arg_value>")
        is_field = close and value.startswith("<arg_value>") and not rest.strip()
        yield (key.strip(), value.removeprefix("<arg_value>")) if is_field else None


OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
NAME: Final = "NAME"
"""In `Forced`, where a function's name stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """How calls are written where they must be: what is around all, around each, and between two."""

    before: str = ""
    begin: str
    arguments: str = ""
    """Between a number and the arguments, where calls are numbered; else none is written."""
    end: str
    between: str
    after: str = ""
    style: str = "json"
    """XGrammar's word for how arguments are written."""


LIST: Final = Forced(before="[", begin=f'{{"name": "{NAME}", "arguments": ', end="}", between=", ", after="]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One of them. A span is from one of `begins` to `end` (empty: to the answer's end)."""

    name: str
    begins: tuple[str, ...] = ()
    end: str = ""
    read: Read
    """Of a span, or of an answer that is calls as a whole."""
    starts: tuple[str, ...] = ()
    """How an answer begins that may be calls as a whole, of tools that there are alone."""
    silent: tuple[str, ...] = ()
    """Marks around spans, which are no text."""
    forced: Forced = LIST
    inner: tuple[str, ...] = ()
    """Marks within a span."""
    has_short_ids: bool = False
    """Nine letters and digits: what Mistral's templates accept."""

    @property
    def marks(self) -> str:
        """All that is written around arguments, one after the other."""
        return "".join((*self.begins, self.end, *self.starts, *self.silent, *self.inner))

    @property
    def can_force(self) -> bool:
        """Whether calls can be forced as the model writes them."""
        return self.forced is not LIST


def _read_any(text: str, tools: Tools) -> list[Call] | None:
    return after(OPEN, "<|python_tag|>", "[TOOL_CALLS]", ends=(CLOSE,))(text, tools) or read_pythonic(text, tools)


_HERMES: Final = Forced(begin=f'{OPEN}\n{{"name": "{NAME}", "arguments": ', end=f"}}\n{CLOSE}", between="\n")
_LLAMA: Final = Forced(begin=f'{{"name": "{NAME}", "parameters": ', end="}", between="; ")
_QWEN_XML: Final = Forced(
    begin=f"{OPEN}\n<function={NAME}>\n", end=f"\n</function>\n{CLOSE}", between="\n", style="qwen_xml"
)
_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI: Final = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

UNKNOWN: Final = ToolFormat(
    name="auto", begins=(OPEN,), end=CLOSE, read=_read_any, starts=("{", "[", "<|python_tag|>", "[TOOL_CALLS]")
)
"""Where nothing is known of a model: what can be told from text safely."""
FORMATS: Final = (
    ToolFormat(name="hermes", begins=(OPEN,), end=CLOSE, read=after(OPEN, ends=(CLOSE,)), forced=_HERMES),
    ToolFormat(
        name="mistral",
        begins=("[TOOL_CALLS]",),
        read=read_mistral,
        starts=("[{",),
        inner=("[ARGS]", "[CALL_ID]"),
        has_short_ids=True,
    ),
    ToolFormat(name="llama3_json", read=after("<|python_tag|>"), starts=("{", "[", "<|python_tag|>"), forced=_LLAMA),
    ToolFormat(name="llama4_json", read=after("<|python_tag|>"), starts=("{", "[", "<|python_tag|>"), forced=_LLAMA),
    ToolFormat(name="pythonic", read=read_pythonic, starts=("[",)),
    ToolFormat(
        name="llama4_pythonic",
        begins=("<|python_start|>",),
        end="<|python_end|>",
        read=read_pythonic,
        starts=("[",),
    ),
    ToolFormat(name="olmo3", begins=("<function_calls>",), end="</function_calls>", read=read_pythonic),
    ToolFormat(name="qwen3_coder", begins=(OPEN,), end=CLOSE, read=read_qwen3_coder, forced=_QWEN_XML),
    ToolFormat(name="qwen3_xml", begins=(OPEN,), end=CLOSE, read=read_qwen3_coder, forced=_QWEN_XML),
    ToolFormat(
        name="glm45",
        begins=(OPEN,),
        end=CLOSE,
        read=read_glm,
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        forced=Forced(begin=f"{OPEN}{NAME}\n", end=f"\n{CLOSE}", between="\n", style="glm_xml"),
    ),
    ToolFormat(
        name="deepseek_v3",
        begins=marked.DEEPSEEK[:1],
        end=marked.DEEPSEEK[1],
        read=marked.read_deepseek_v3,
        silent=_DEEPSEEK,
        inner=(marked.DEEPSEEK_SEPARATOR,),
        forced=Forced(
            before=_DEEPSEEK[0],
            begin=f"{marked.DEEPSEEK[0]}function{marked.DEEPSEEK_SEPARATOR}{NAME}\n```json\n",
            end=f"\n```{marked.DEEPSEEK[1]}",
            between="\n",
            after=_DEEPSEEK[1],
        ),
    ),
    ToolFormat(
        name="deepseek_v31",
        begins=marked.DEEPSEEK[:1],
        end=marked.DEEPSEEK[1],
        read=marked.read_deepseek_v31,
        silent=_DEEPSEEK,
        inner=(marked.DEEPSEEK_SEPARATOR,),
        forced=Forced(
            before=_DEEPSEEK[0],
            begin=f"{marked.DEEPSEEK[0]}{NAME}{marked.DEEPSEEK_SEPARATOR}",
            end=marked.DEEPSEEK[1],
            between="",
            after=_DEEPSEEK[1],
        ),
    ),
    ToolFormat(
        name="kimi_k2",
        begins=marked.KIMI[:1],
        end=marked.KIMI[1],
        read=marked.read_kimi,
        silent=_KIMI,
        inner=(marked.KIMI_SEPARATOR,),
        forced=Forced(
            before=_KIMI[0],
            begin=f"{marked.KIMI[0]}functions.{NAME}:",
            arguments=marked.KIMI_SEPARATOR,
            end=marked.KIMI[1],
            between="",
            after=_KIMI[1],
        ),
    ),
    ToolFormat(
        name="granite", begins=("<|tool_call|>", OPEN), read=after("<|tool_call|>", OPEN, ends=(CLOSE,)), starts=("[{",)
    ),
    ToolFormat(name="phi4_mini_json", read=after("functools"), starts=("functools[", "[{")),
    ToolFormat(
        name="jamba",
        begins=("<tool_calls>",),
        end="</tool_calls>",
        read=after("<tool_calls>", ends=("</tool_calls>",)),
        forced=Forced(
            before="<tool_calls>[", begin=LIST.begin, end=LIST.end, between=LIST.between, after="]</tool_calls>"
        ),
    ),
)
BY_NAME: Final = {one.name: one for one in (UNKNOWN, *FORMATS)}
PLAIN: Final = ToolFormat(name="list", read=after(), starts=("[",))
"""A JSON list and nothing else: how calls are forced where a model's own marks cannot be."""

_SIGNS: Final = (
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>",), "glm45"),
    (("<|tool_call|>",), "granite"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool|>",), "phi4_mini_json"),
    ((OPEN,), "hermes"),
    (("[TOOL_CALLS]",), "mistral"),
    (("[func_name1(", "<|python_start|>"), "llama4_pythonic"),
    (("[func_name1(",), "pythonic"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("<|python_tag|>",), "llama3_json"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
)
"""What a template of each writes, in the order in which it is looked for: later ones are parts of earlier ones."""


def format_of(template: str | None, name: str = "") -> ToolFormat:
    """The one of this name, else the one that a model's chat template speaks of. Raises BadInput for no name."""
    if name:
        if name not in BY_NAME:
            raise BadInput(f"tool call parser {name!r:.40} is not accepted: {', '.join(BY_NAME)}")
        if name != UNKNOWN.name:
            return BY_NAME[name]
    found = (name for signs, name in _SIGNS if all(sign in (template or "") for sign in signs))
    return BY_NAME[next(found, UNKNOWN.name)]
