"""Reasoning, content and calls of an answer, however it is split into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_engine.http.schemas.request_bodies import ChatBody, Function, MessageBody
from kvscope_engine.http.tool_calling.answer_format import AnswerFormat, answer_format
from kvscope_engine.http.tool_calling.answer_reader import AnswerReader, MarkedAnswerReader, ReasoningSplitter
from kvscope_engine.http.tool_calling.harmony_reader import HarmonyReader
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME, reasoning_marks

Parts: TypeAlias = tuple[str, str, list[tuple[str, object]]]
"""Reasoning, content, and calls as (name, arguments)."""
THINK = reasoning_marks("{{ '<think>' }}")
HERMES_CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>So it is noon.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Noon.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.time <|constrain|>json<|message|>{"zone": "CET"}<|call|>'


def marked(end: str = "") -> AnswerReader:
    use = AnswerFormat([Function(name="time")], FORMATS_BY_NAME["hermes"], reasoning_marks=THINK)
    reader = use.reader(None, ())
    assert reader is not None
    return MarkedAnswerReader(ReasoningSplitter(THINK, end), None) if end else reader


def harmony() -> AnswerReader:
    return HarmonyReader(9)


def read(reader: AnswerReader, pieces: Iterable[str]) -> Parts:
    parts = [*(reader.read(piece, is_last=False) for piece in pieces), reader.read("", is_last=True)]
    calls = [(call.function.name, json.loads(call.function.arguments)) for part in parts for call in part.calls]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls


CASES: list[tuple[Callable[[], AnswerReader], str, Parts]] = [
    (marked, "It is noon.", ("", "It is noon.", [])),
    (marked, "", ("", "", [])),
    (marked, "<thin", ("", "<thin", [])),
    (marked, "\n<think>\nNoon?</think>\n\nIt is noon.", ("Noon?", "It is noon.", [])),
    (marked, "<think></think>It is noon.", ("", "It is noon.", [])),
    (marked, "<think>cut off", ("cut off", "", [])),
    (marked, "<think>cut off</th", ("cut off</th", "", [])),
    (marked, "Write <think> like this.", ("", "Write <think> like this.", [])),
    (marked, f"<think>{HERMES_CALL}?</think>{HERMES_CALL}", (f"{HERMES_CALL}?", "", [("time", {})])),
    (lambda: marked("</think>"), "Noon?\n</think>\n\nIt is noon.", ("Noon?\n", "It is noon.", [])),
    (lambda: marked("</think>"), "cut", ("cut", "", [])),
    (harmony, ANALYSIS + FINAL, ("So it is noon.", "Noon.", [])),
    (harmony, (ANALYSIS + FINAL).removesuffix("<|return|>"), ("So it is noon.", "Noon.", [])),
    (harmony, ANALYSIS + CALL, ("So it is noon.", "", [("time", {"zone": "CET"})])),
    (harmony, (ANALYSIS + CALL).removesuffix("<|call|>"), ("So it is noon.", "", [("time", {"zone": "CET"})])),
    (harmony, (ANALYSIS + CALL).removesuffix("}<|call|>"), ("So it is noon.", '{"zone": "CET"', [])),
    (harmony, "<|channel|>commentary<|message|>I look.<|end|>" + CALL, ("", "I look.", [("time", {"zone": "CET"})])),
    (harmony, "<|channel|>analysis<|message|>cut off", ("cut off", "", [])),
    (harmony, "<|channel|>ana", ("", "", [])),
    (harmony, "No channels < here.", ("", "No channels < here.", [])),
    (harmony, "to=day", ("", "to=day", [])),
    (harmony, "assistant for maps", ("", "assistant for maps", [])),
    (harmony, "", ("", "", [])),
]


@pytest.mark.parametrize(("reader", "text", "expected"), CASES)
@given(data=st.data())
def test_parts_are_the_same_however_the_answer_is_split(
    reader: Callable[[], AnswerReader],
    text: str,
    expected: tuple[str, str, list[tuple[str, object]]],
    data: st.DataObject,
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(reader(), pieces) == expected


def test_reader_is_reasoning_until_the_end_mark() -> None:
    for reader, pieces in ((marked(), ["<think>a", "</think>b"]), (harmony(), [ANALYSIS[:40], ANALYSIS[40:] + FINAL])):
        states = []
        for piece in pieces:
            reader.read(piece, is_last=False)
            states.append(reader.is_reasoning)
        assert states == [True, False]


def test_only_templates_with_marks_have_a_reasoning_field() -> None:
    assert reasoning_marks(None) == reasoning_marks("{{ messages }}") == {}
    assert reasoning_marks("{{ content.split('</think>')[-1] }}") == {"<think>": "</think>"}
    assert set(reasoning_marks("[THINK]{{ x }}[/THINK]")) == {"[THINK]"}


def test_answer_of_a_model_without_tools_and_reasoning_is_not_read() -> None:
    body = ChatBody(messages=[MessageBody(role="user", content="Hi")])
    assert answer_format(body, None, "").reader(None, ()) is None
