"""Comparison requests are read line by line; invalid lines are reported by number and change nothing."""

from __future__ import annotations

import io

import msgspec
import pytest

from kvscope_engine.simulator.what_if.line_protocol import answer_lines
from kvscope_telemetry.messages.what_if import MAX_LINE_BYTES, MAX_REQUESTS, WhatIfAnswer

SETUP = b'{"setup": {"num_blocks": 8, "block_size": 4, "max_model_len": 16}}'


def converse_lines(*lines: bytes) -> list[dict]:  # type: ignore[type-arg]
    output = io.BytesIO()
    answer_lines(io.BytesIO(b"\n".join(lines)), output)
    return [msgspec.json.decode(line) for line in output.getvalue().splitlines()]


def test_what_if_process_answers_each_now_line_but_no_setup_line() -> None:
    answers = converse_lines(SETUP, b'{"now": [[2, 5, 9], [1, 3, 9, 2]]}', b"", b'{"now": []}')
    assert len(answers) == 2
    first, second = (msgspec.convert(answer, WhatIfAnswer) for answer in answers)
    assert {use.num_used for use in first.policies if not use.refused} == {8, 3}, (
        "a block of 32 slots serves one request"
    )
    assert {use.num_used for use in second.policies} == {0}


def test_second_setup_line_starts_a_new_what_if_comparison() -> None:
    larger = SETUP.replace(b"8,", b"16,")
    (answer,) = converse_lines(SETUP, larger, b'{"now": [[1, 64, 64]]}')
    assert {use["num_slots"] for use in answer["policies"]} == {64}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"nonsense", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"{}", "one of `setup`, `now` and `question`"),
        (b'{"then": []}', "then"),
        (b'{"now": [[1, 2]]}', "length"),
        (b'{"now": [[1, -2, 9]]}', ">= 0"),
        (b'{"now": [[1, 2, 9], [1, 2, 9]]}', "request 1 is there twice"),
        (b'{"now": [[1, 2, 9.5]]}', "float"),
        (b'{"setup": {"num_blocks": 0, "block_size": 4}}', ">= 1"),
        (b'{"setup": {"num_blocks": 8, "block_size": 4, "colour": 1}}', "colour"),
        (b'{"setup": {"num_blocks": 99999999, "block_size": 16}}', "1599999984 slots is too large"),
        (b"[" * 100_000, "line 2"),
        (b'{"now": ["' + b"x" * MAX_LINE_BYTES + b'"]}', "longer than"),
        (b'{"now": [' + b"[1,1,1]," * MAX_REQUESTS + b"[1,1,1]]}", str(MAX_REQUESTS)),
    ],
)
def test_invalid_line_is_reported_and_changes_nothing(line: bytes, named: str) -> None:
    complaint, answer = converse_lines(SETUP, line, b'{"now": [[1, 5, 9]]}')
    assert complaint["error"].startswith("line 2: ")
    assert named in complaint["error"]
    assert {use["num_used"] for use in answer["policies"] if not use["refused"]} == {5}


def test_now_line_before_the_setup_is_reported() -> None:
    assert converse_lines(b'{"now": []}') == [{"error": "line 1: `now` came before `setup`"}]
