"""Calls in an answer: the same however its text is cut, and what is none is told as it is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_engine.http.shapes.tool_calls import ToolCallReader

NAMES = ("weather", "time")
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", {"city": "Rome"})
CASES = [
    ("It is noon.", "It is noon.", []),
    ("", "", []),
    ("a < b <tool", "a < b <tool", []),
    (HERMES, "", [ROME]),
    (f"Let me see. {HERMES}", "Let me see. ", [ROME]),
    (f"{HERMES}\n{HERMES}", "", [ROME, ROME]),
    (f"One. {HERMES}\n\nTwo. {HERMES} Three.", "One. Two. Three.", [ROME, ROME]),
    (HERMES.removesuffix("</tool_call>"), "", [ROME]),
    ("<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", []),
    ("<tool_call>\n{", "<tool_call>\n{", []),
    ('{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    ('[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "time"}]', "", [ROME, ("time", {})]),
    ('{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "time"}', "", [ROME, ("time", {})]),
    ('{"name": "somebody", "parameters": {}}', '{"name": "somebody", "parameters": {}}', []),
    ('{"name": "weather", "parameters": {', '{"name": "weather", "parameters": {', []),
    ('{"name": {"a": 1}}', '{"name": {"a": 1}}', []),
    ("[1, 2]", "[1, 2]", []),
    ("[weather(city='Rome')]", "[weather(city='Rome')]", []),
]


@pytest.mark.parametrize(("text", "told", "called"), CASES)
@given(data=st.data())
def test_an_answer_in_pieces(text: str, told: str, called: list[object], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    reader = ToolCallReader(NAMES)
    pieces = [reader.add(text[start:end]) for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    pieces.append(reader.flush())
    calls = [call for _, calls in pieces for call in calls]
    assert "".join(piece for piece, _ in pieces) == told
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == called
    assert [call.index for call in calls] == list(range(len(called)))
    assert len({call.id for call in calls}) == len(calls)
    assert reader.num_calls == len(called)
