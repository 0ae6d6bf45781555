"""Tool calls in an answer, in every format: read only when complete, however the answer is split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope_engine.http.schemas.responses import CalledTool
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME, HARMONY_NAME
from kvscope_engine.http.tool_calling.tool_call_reader import ToolCallReader

CITY = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": CITY, "days": {"type": "integer"}}},
    "time": {},
}
ROME = ("weather", {"city": "Rome"})
DAYS = ("weather", {"city": "Rome", "days": 3})
NOW: tuple[str, dict[str, Any]] = ("time", {})
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QWEN = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
QWEN += "</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
V31 = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
K2 = '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>'
K2_TIME = "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"

GEMMA_QUOTE = '<|"|>'


def deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def kimi(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


CASES = [
    ("auto", "It is noon.", "It is noon.", []),
    ("auto", "", "", []),
    ("auto", "a < b <tool", "a < b <tool", []),
    ("auto", HERMES, "", [ROME]),
    ("auto", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ("auto", '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]', "", [ROME, NOW]),
    ("auto", "[weather(city='Rome')]", "", [ROME]),
    ("auto", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    ("auto", '{"name": "somebody", "parameters": {}}', '{"name": "somebody", "parameters": {}}', []),
    ("auto", '{"name": "weather", "parameters": {', '{"name": "weather", "parameters": {', []),
    ("auto", '{"name": {"a": 1}}', '{"name": {"a": 1}}', []),
    ("auto", "[1, 2]", "[1, 2]", []),
    ("auto", "[print('x')]", "[print('x')]", []),
    ("hermes", f"Let me see. {HERMES}", "Let me see. ", [ROME]),
    ("hermes", f"{HERMES}\n{HERMES}", "", [ROME, ROME]),
    ("hermes", f"One. {HERMES}\n\nTwo. {HERMES} Three.", "One. Two. Three.", [ROME, ROME]),
    ("hermes", HERMES.removesuffix("</tool_call>"), HERMES.removesuffix("</tool_call>"), []),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", "<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", []),
    ("hermes", f"<tool_call> {HERMES}", "<tool_call> ", [ROME]),
    ("hermes", "<tool_call>\n{", "<tool_call>\n{", []),
    ("hermes", '{"name": "weather"}', '{"name": "weather"}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    ("mistral", 'Yes. [TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]time[ARGS]{}', "Yes. ", [ROME, NOW]),
    ("mistral", 'weather[1] {"city": "Rome"}', 'weather[1] {"city": "Rome"}', []),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Rome"}', "", [ROME]),
    ("mistral", "[TOOL_CALLS] oh", "[TOOL_CALLS] oh", []),
    ("mistral", '[{"name": "Bob", "age": 3}]', '[{"name": "Bob", "age": 3}]', []),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time"}', "", [ROME, NOW]),
    ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
    ("pythonic", '[weather(city="Rome", days=3), time()]', "", [DAYS, NOW]),
    ("pythonic", "[weather(city='Rome'", "[weather(city='Rome'", []),
    ("pythonic", "[weather('Rome')]", "[weather('Rome')]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("pythonic", "[weather(**{})]", "[weather(**{})]", []),
    (
        "pythonic",
        "[time(a=[1, -2.5, None, true], b={'c': False})]",
        "",
        [("time", {"a": [1, -2.5, None, True], "b": {"c": False}})],
    ),
    ("pythonic", r"[time(a='\d')]", "", [("time", {"a": r"\d"})]),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    ("llama4_pythonic", "Well <|python_start|>[weather(city='Rome')]<|python_end|>", "Well ", [ROME]),
    ("olmo3", "<function_calls>weather(city='Rome')\ntime()\n</function_calls>", "", [ROME, NOW]),
    ("olmo3", "<function_calls>\n</function_calls>", "<function_calls>\n</function_calls>", []),
    ("qwen3_coder", f"I look.\n{QWEN}\n{QWEN}", "I look.\n", [DAYS, DAYS]),
    ("qwen3_coder", QWEN.removesuffix("\n</tool_call>"), "", [DAYS]),
    ("qwen3_coder", f"I look. {QWEN.removeprefix('<tool_call>')}", "I look. \n", [DAYS]),
    ("qwen3_coder", QWEN.replace("Rome", "a\n<b> </c>\n"), "", [("weather", {"city": "a\n<b> </c>\n", "days": 3})]),
    ("qwen3_coder", QWEN.replace("Rome", "7"), "", [("weather", {"city": "7", "days": 3})]),
    ("qwen3_coder", "<tool_call>\n<function=time>\n</function>\n</tool_call>", "", [NOW]),
    ("qwen3_coder", HERMES, HERMES, []),
    ("qwen3_xml", QWEN, "", [DAYS]),
    ("glm45", f"{GLM}\n<tool_call>time</tool_call>", "", [ROME, NOW]),
    ("glm45", GLM.replace("</arg_value>", ""), GLM.replace("</arg_value>", ""), []),
    ("deepseek_v3", f"Hm. {deepseek(V3, V3)}", "Hm. ", [ROME, ROME]),
    ("deepseek_v3", V3.replace("{", "("), V3.replace("{", "("), []),
    ("deepseek_v31", deepseek(V31, V31), "", [ROME, ROME]),
    ("kimi_k2", kimi(K2, K2_TIME), "", [ROME, NOW]),
    ("kimi_k2", K2.replace(":0", ""), K2.replace(":0", ""), []),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    ("phi4_mini_json", "functools.wraps helps", "functools.wraps helps", []),
    ("jamba", '<tool_calls>[{"name": "time"}]</tool_calls>', "", [NOW]),
    (
        "gemma4",
        '<|tool_call>call:time{a:[1,-2.5,None,true],b:{c:<|"|>x: "y", {z}<|"|>}}<tool_call|>',
        "",
        [("time", {"a": [1, -2.5, None, True], "b": {"c": 'x: "y", {z}'}})],
    ),
    ("gemma4", "<|tool_call>call:time{}<tool_call|><|tool_call>call:time{}<tool_call|>", "", [NOW, NOW]),
    ("gemma4", "<|tool_call>call:time{null:None,7:7}<tool_call|>", "", [("time", {"null": None, "7": 7})]),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="time"><｜DSML｜parameter name="a" string="true">7'
        '</｜DSML｜parameter><｜DSML｜parameter name="b" string="false">7</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "",
        [("time", {"a": "7", "b": 7})],
    ),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>', "", [NOW]),
    ("apertus", '<|tools_prefix|>[{"weather": {"city": "Rome"}}, {"time": {}}]<|tools_suffix|>', "", [ROME, NOW]),
]


def read(name: str, pieces: list[str], max_calls: int = 9) -> tuple[str, list[CalledTool]]:
    reader = ToolCallReader(FORMATS_BY_NAME[name], TOOLS, max_calls)
    said = [*map(reader.add, pieces), reader.flush()]
    calls = [call for _, calls in said for call in calls]
    assert reader.num_calls == len(calls)
    return "".join(piece for piece, _ in said), calls


def arguments_of(calls: list[CalledTool]) -> list[tuple[str, object]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def as_json(name: str, arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def call_text(name: str, arguments: Any) -> str:
    """Return a call of `weather` as models of the format `name` write it."""
    one, fields = as_json("weather", arguments), arguments if isinstance(arguments, dict) else {"city": arguments}
    plain = json.dumps(arguments, ensure_ascii=False)
    python = f"[weather({', '.join(f'{key}={value!r}' for key, value in fields.items())})]"
    parameters = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in fields.items())
    qwen = f"<tool_call>\n<function=weather>\n{parameters}\n</function>"
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in fields.items())
    invoke = "\n".join(f'<parameter name="{key}">{value}</parameter>' for key, value in fields.items())
    dsml = "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}</｜DSML｜parameter>'
        for key, value in fields.items()
    )
    return {
        "auto": f"<tool_call>{one}</tool_call>",
        "hermes": f"<tool_call>{one}</tool_call>",
        "mistral": f"[TOOL_CALLS]weather[ARGS]{plain}",
        "llama3_json": one,
        "llama4_json": f"<|python_tag|>{one}",
        "pythonic": python,
        "llama4_pythonic": f"<|python_start|>{python}<|python_end|>",
        "olmo3": f"<function_calls>{python[1:-1]}</function_calls>",
        "qwen3_coder": qwen,
        "qwen3_xml": qwen.removeprefix("<tool_call>\n"),
        "glm45": f"<tool_call>weather\n{pairs}</tool_call>",
        "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{plain}\n```<｜tool▁call▁end｜>",
        "deepseek_v31": f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{plain}<｜tool▁call▁end｜>",
        "kimi_k2": K2.replace('{"city": "Rome"}', plain),
        "granite": f"<|tool_call|>[{one}]",
        "phi4_mini_json": f"functools[{one}]",
        "jamba": f"<tool_calls>[{one}]</tool_calls>",
        "gemma4": f"<|tool_call>call:weather{gemma_values(arguments, GEMMA_QUOTE)}<tool_call|>",
        "functiongemma": f"<start_function_call>call:weather{gemma_values(arguments, '<escape>')}<end_function_call>",
        "deepseek_v32": f'<｜DSML｜invoke name="weather">\n{dsml}\n</｜DSML｜invoke>',
        "minimax_m2": f'<invoke name="weather">\n{invoke}\n</invoke>',
        "seed_oss": qwen.replace("<tool_call>", "<seed:tool_call>", 1),
        "lfm2": f"<|tool_call_start|>{python}<|tool_call_end|>",
        "apertus": f'<|tools_prefix|>[{{"weather": {plain}}}]<|tools_suffix|>',
        "cohere_command3": f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {plain}}}]<|END_ACTION|>',
    }[name]


def gemma_values(value: Any, quote: str) -> str:
    """Return arguments in the notation of Gemma's templates."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_values(one, quote)}" for key, one in value.items()) + "}"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


FORMATS = pytest.mark.parametrize("name", sorted(FORMATS_BY_NAME.keys() - {HARMONY_NAME}))
FIELD_FORMATS = {"qwen3_coder", "qwen3_xml", "glm45", "deepseek_v32", "minimax_m2", "seed_oss"}
PYTHON_FORMATS = {"pythonic", "llama4_pythonic", "olmo3", "lfm2"}
NOT_AN_OBJECT = pytest.mark.parametrize("arguments", ["ls -la", [1, 2], 5, True], ids=str)
WITHOUT_FIELDS = pytest.mark.parametrize(
    "name",
    sorted(FORMATS_BY_NAME.keys() - FIELD_FORMATS - PYTHON_FORMATS - {HARMONY_NAME}),
)


@FORMATS
def test_call_is_returned_once_it_is_complete(name: str) -> None:
    text = call_text(name, DAYS[1])
    content, calls = read(name, list(text))
    assert (content, arguments_of(calls)) == ("", [DAYS])


@FORMATS
def test_call_cut_by_the_end_of_the_answer_stays_text(name: str) -> None:
    text = call_text(name, {"city": "rm -rf /tmp/scratch"})
    for length in range(len(text)):
        assert read(name, [text[:length]]) == read(name, list(text[:length])) == (text[:length], [])


@FORMATS
def test_call_drafted_in_reasoning_stays_text(name: str) -> None:
    draft, call = call_text(name, ROME[1]), call_text(name, DAYS[1])
    text = f"<think>Perhaps {draft}</think>"
    for pieces in ([text], list(text)):
        assert read(name, pieces) == (text, [])
    content, calls = read(name, list(f"{text}\n\n{call}"))
    assert (content.rstrip(), arguments_of(calls)) == (text, [DAYS])
    cut_reasoning = f"<think>{draft}"
    assert read(name, [cut_reasoning]) == (cut_reasoning, [])


@FORMATS
def test_reasoning_that_the_prompt_began_contains_no_call(name: str) -> None:
    draft, call = call_text(name, ROME[1]), call_text(name, DAYS[1])
    reader = ToolCallReader(FORMATS_BY_NAME[name], TOOLS, reasoning_end="</think>")
    said = [*map(reader.add, f"{draft}</think>{call}"), reader.flush()]
    assert "".join(content for content, _ in said) == f"{draft}</think>"
    assert arguments_of([call for _, calls in said for call in calls]) == [DAYS]


def test_reasoning_marks_that_are_special_tokens_are_left_out_of_answer_text() -> None:
    reader = ToolCallReader(FORMATS_BY_NAME["mistral"], TOOLS, hidden={"[THINK]", "[/THINK]"})
    content, calls = reader.add("[THINK]so [TOOL_CALLS]time{}[/THINK]It is noon. ")
    assert (content, calls) == ("so [TOOL_CALLS]time{}It is noon. ", [])


@FORMATS
def test_marks_in_a_string_argument_belong_to_the_argument(name: str) -> None:
    marks = ["</tool_call>", "<tool_call>", "<parameter=x>", "</function>", "<think>", "</think>", "\"]}'", "\\"]
    tool_format = FORMATS_BY_NAME[name]
    marks += [mark for span in tool_format.spans for mark in (span.begin, span.end)]
    for value in [" ".join(marks), *(f"grep '{mark}' x" for mark in marks)]:
        text = call_text(name, {"city": value})
        for pieces in ([text], list(text)):
            content, calls = read(name, pieces)
            assert (content, arguments_of(calls)) == ("", [("weather", {"city": value})])


@FORMATS
def test_call_within_a_string_of_a_cut_call_stays_text(name: str) -> None:
    inner = f"{HERMES} {V31} {K2} [TOOL_CALLS]time{{}} [time()]"
    if name in ("glm45", "qwen3_coder", "qwen3_xml"):  # without quotes, a whole call in a value ends the value
        inner = "<tool_call>time"
    text = call_text(name, {"city": inner, "days": 3})
    text = text[: text.rindex("3")]
    assert read(name, [text]) == read(name, list(text)) == (text, [])


@WITHOUT_FIELDS
@NOT_AN_OBJECT
def test_arguments_that_are_no_object_are_no_call(name: str, arguments: object) -> None:
    text = call_text(name, arguments)
    assert read(name, [text]) == read(name, list(text)) == (text, [])


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "expected", "called"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_calls_are_the_same_however_the_answer_is_split(
    name: str, text: str, expected: str, called: list[object], data: st.DataObject
) -> None:
    content, calls = read(name, cut(text, data))
    assert content == expected
    assert arguments_of(calls) == called
    assert [call.index for call in calls] == list(range(len(called)))
    assert len({call.id for call in calls}) == len(calls)


PIECES = st.sampled_from(
    [
        *"{}[]()<>\"'=,:;\n x1\\",
        *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "weather", '"name"', "<arg_key>", "functools"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "[TOOL_CALLS]", "[ARGS]"),
        *("<think>", "</think>", "[{", "```", '"arguments":', "</function>", "</parameter>"),
        *("<|tool_call_begin|>", ":0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *(HERMES, QWEN, GLM, V3, V31, K2),
    ]
)


@settings(max_examples=25)
@pytest.mark.parametrize("name", sorted(FORMATS_BY_NAME))
@given(data=st.data())
def test_random_answer_text_gives_the_same_text_and_tool_calls_however_it_is_split(
    name: str, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12)))
    whole, calls = read(name, [text])
    again, same = read(name, cut(text, data))
    assert (whole, [call.function for call in calls]) == (again, [call.function for call in same])
    assert calls or set(whole) == set(text) or any(mark in text for mark in FORMATS_BY_NAME[name].silent)
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_calls_beyond_the_maximum_are_dropped() -> None:
    text, calls = read("hermes", [f"{HERMES}\n{HERMES} Done."], max_calls=1)
    assert (text, len(calls)) == ("Done.", 1)


def test_call_ids_have_the_form_that_templates_accept() -> None:
    (short,) = read("mistral", ["[TOOL_CALLS]time{}"])[1]
    assert len(short.id) == 9
    assert short.id.isalnum()
    first, second = read("kimi_k2", [kimi(K2, K2)])[1]
    assert first.id == "functions.weather:0" != second.id
