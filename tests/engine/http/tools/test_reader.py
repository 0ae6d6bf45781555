"""Calls in an answer, in every format: the same however its text is cut, and what is none is told as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope_engine.http.shapes.answers import CalledTool
from kvscope_engine.http.tools.formats import BY_NAME
from kvscope_engine.http.tools.reader import ToolCallReader

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
    ("hermes", HERMES.removesuffix("</tool_call>"), "", [ROME]),
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
    ("qwen3_coder", QWEN.removesuffix("\n</function>\n</tool_call>"), "", [DAYS]),
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
]


def read(name: str, pieces: list[str], max_calls: int = 9) -> tuple[str, list[CalledTool]]:
    reader = ToolCallReader(BY_NAME[name], TOOLS, max_calls)
    said = [*map(reader.add, pieces), reader.flush()]
    calls = [call for _, calls in said for call in calls]
    assert reader.num_calls == len(calls)
    return "".join(piece for piece, _ in said), calls


def cut(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "expected", "called"), CASES)
@settings(max_examples=25)
@given(data=st.data())
def test_an_answer_in_pieces(name: str, text: str, expected: str, called: list[object], data: st.DataObject) -> None:
    content, calls = read(name, cut(text, data))
    assert content == expected
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == called
    assert [call.index for call in calls] == list(range(len(called)))
    assert len({call.id for call in calls}) == len(calls)


PIECES = st.sampled_from(
    [
        *"{}[]()<>\"'=,:;\n x1\\",
        *("<tool_call>", "</tool_call>", "<function=", "<parameter=", "weather", '"name"', "<arg_key>", "functools"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "[TOOL_CALLS]", "[ARGS]"),
        *("<|tool_call_begin|>", ":0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        *(HERMES, QWEN, GLM, V3, V31, K2),
    ]
)


@settings(max_examples=25)
@pytest.mark.parametrize("name", sorted(BY_NAME))
@given(data=st.data())
def test_nonsense_is_told_and_cuts_change_nothing(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12)))
    whole, calls = read(name, [text])
    again, same = read(name, cut(text, data))
    assert (whole, [call.function for call in calls]) == (again, [call.function for call in same])
    assert calls or set(whole) == set(text) or any(mark in text for mark in BY_NAME[name].silent)
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_calls_beyond_those_that_may_be_are_dropped() -> None:
    text, calls = read("hermes", [f"{HERMES}\n{HERMES} Done."], max_calls=1)
    assert (text, len(calls)) == ("Done.", 1)


def test_ids_are_those_that_templates_accept() -> None:
    (short,) = read("mistral", ["[TOOL_CALLS]time{}"])[1]
    assert len(short.id) == 9
    assert short.id.isalnum()
    first, second = read("kimi_k2", [kimi(K2, K2)])[1]
    assert first.id == "functions.weather:0" != second.id
