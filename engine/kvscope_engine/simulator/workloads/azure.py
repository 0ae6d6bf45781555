"""Azure LLM inference traces (2023 and 2024): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.

A timestamp is `2023-11-16 18:15:46.6805900` or, from 2024 on, has a time zone; it is truncated to microseconds. Prompts
share no prefixes, because the trace has no such information. Source: github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Final

from kvscope_engine.simulator.workloads.trace_lines import checked_count, from_first_arrival, line_errors, trace_lines
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
HEADER: Final = ",".join(COLUMNS)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def read_azure(path: Path, max_requests: int | None = None) -> Workload:
    """Return the first `max_requests` requests of a trace, or all if None. An output of 0 tokens counts as 1, the token
    that the prefill yields.

    Raises BadInput, with the line number, for a line that cannot be read, and for a trace without requests.
    """
    lines = trace_lines(path)
    number, header = next(lines, (1, ""))
    with line_errors(path, number):
        columns = _column_indices(header)
    requests: list[WorkloadRequest] = []
    for number, text in islice(lines, max_requests):
        with line_errors(path, number):
            requests.append(_request(text.split(","), columns))
    return Workload(path.name, from_first_arrival(path, requests))


def _column_indices(header: str) -> tuple[int, ...]:
    names = [name.strip() for name in header.removeprefix("\ufeff").split(",")]
    if not set(COLUMNS) <= set(names):
        raise BadInput(f"{header!r:.80} is not accepted: the first line is {HEADER}")
    return tuple(names.index(name) for name in COLUMNS)


def _request(cells: list[str], columns: tuple[int, ...]) -> WorkloadRequest:
    if len(cells) <= max(columns):
        raise BadInput(f"{','.join(cells)!r:.80} is not accepted: {HEADER}")
    timestamp, context, generated = (cells[column].strip() for column in columns)
    return WorkloadRequest(
        arrival_ns=_time_ns(timestamp),
        num_prompt_tokens=checked_count("ContextTokens", _count(context), 1),
        num_output_tokens=max(1, checked_count("GeneratedTokens", _count(generated), 0)),
    )


def _time_ns(text: str) -> int:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"TIMESTAMP {text!r:.60} is not accepted: such as 2023-11-16 18:15:46.6805900") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return (time - EPOCH) // timedelta(microseconds=1) * 1000


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"{text!r:.60} is not accepted: must be a whole number of tokens") from None
