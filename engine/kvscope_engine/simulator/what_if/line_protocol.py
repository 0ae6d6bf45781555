"""Protocol of the what-if process: reads JSON lines with the engine's memory and running requests, or with a question
about a recording, and answers each.

The format of a line is `messages.what_if.WhatIfLine`. An invalid line changes nothing and is answered with an error
text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import BinaryIO

import msgspec

from kvscope_engine.simulator.what_if.comparison import PolicyComparison
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.what_if import MAX_LINE_BYTES, Complaint, Running, WhatIfAnswer, WhatIfLine
from kvscope_telemetry.messages.what_if_question import WhatIfComparison, WhatIfProgress, WhatIfQuestion

AnswerQuestion = Callable[[WhatIfQuestion, Callable[[float], object]], WhatIfComparison]
"""Answers a question about a recording, and calls its second argument with the share done."""


class _LineHandler:
    """Answers the lines of one input. Keeps the simulation that the last `setup` line started."""

    def __init__(self, answer_question: AnswerQuestion, write: Callable[[object], object]) -> None:
        self._answer_question = answer_question
        self._write = write
        self._decoder = msgspec.json.Decoder(WhatIfLine)
        self._comparison: PolicyComparison | None = None

    def reply(self, line: bytes) -> WhatIfAnswer | WhatIfComparison | None:
        """Return the answer to a `now` or `question` line; None for a `setup` line.

        Raises BadInput for an invalid line, or a `now` line before the first setup, and KvscopeError if a question
        cannot be answered.
        """
        if len(line) > MAX_LINE_BYTES:
            raise BadInput(f"longer than {MAX_LINE_BYTES} bytes")
        query = self._decode(line)
        if query.question is not None:
            return self._answer_question(query.question, lambda share: self._write(WhatIfProgress(share)))
        if query.setup is not None:
            self._comparison = PolicyComparison(query.setup)
            return None
        if self._comparison is None:
            raise BadInput("`now` came before `setup`")
        return self._comparison.update(_in_order(query.now or []))

    def _decode(self, line: bytes) -> WhatIfLine:
        try:
            query = self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(str(error)) from None
        if [query.setup, query.now, query.question].count(None) != 2:
            raise BadInput("one of `setup`, `now` and `question` is accepted")
        return query


def no_questions(question: WhatIfQuestion, report: Callable[[float], object]) -> WhatIfComparison:
    raise BadInput("questions about recordings are not accepted here")


def answer_lines(source: BinaryIO, output: BinaryIO, answer_question: AnswerQuestion = no_questions) -> None:
    """Answer each line of `source` on `output`, until the end of `source`."""

    def write(message: object) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    handler = _LineHandler(answer_question, write)
    for number, line in enumerate(_lines(source), 1):
        if not line.strip():
            continue
        try:
            answer: WhatIfAnswer | WhatIfComparison | Complaint | None = handler.reply(line)
        except KvscopeError as refusal:
            answer = Complaint(f"line {number}: {refusal}")
        if answer is not None:
            write(answer)


def _lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the input's lines. A line longer than `MAX_LINE_BYTES` is truncated to one byte more than that."""
    while line := source.readline(MAX_LINE_BYTES + 1):
        chunk = line
        while chunk and not chunk.endswith(b"\n"):
            chunk = source.readline(MAX_LINE_BYTES)
        yield line


def _in_order(requests: list[Running]) -> list[Running]:
    """Return the requests ordered by number. Raises BadInput if a number appears twice."""
    ordered = sorted(requests, key=lambda running: running.number)
    for earlier, later in pairwise(ordered):
        if earlier.number == later.number:
            raise BadInput(f"request {later.number} is there twice")
    return ordered
