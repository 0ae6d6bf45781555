"""Reads trace files line by line, with the line number in every error. Independent of the format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from kvscope_engine.simulator.workloads.workload import WorkloadRequest
from kvscope_telemetry.errors import BadInput

MAX_REQUEST_TOKENS: Final = 1 << 24
MAX_LINE_BYTES: Final = 1 << 24
NumberedLine = tuple[int, str]


def trace_lines(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines that are not blank, with their line numbers from 1. Raises BadInput for a file that
    cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                with line_errors(path, number):
                    if text := _decoded(line).strip():
                        yield number, text
    except OSError as error:
        raise BadInput(f"trace {str(path)!r} cannot be read: {error.strerror}") from None


@contextmanager
def line_errors(path: Path, number: int) -> Iterator[None]:
    """Convert errors raised while parsing a line to BadInput with the file and the line number."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(f"{path}, line {number}: {error}") from None


def checked_count(name: str, value: int, low: int) -> int:
    """Return `value` if it is from `low` to `MAX_REQUEST_TOKENS`; otherwise raise BadInput."""
    if not low <= value <= MAX_REQUEST_TOKENS:
        raise BadInput(f"{name} {value} is not accepted: must be a whole number from {low} to {MAX_REQUEST_TOKENS}")
    return value


def from_first_arrival(path: Path, requests: list[WorkloadRequest]) -> tuple[WorkloadRequest, ...]:
    """Return the requests in order of arrival, with the first arrival at 0. Raises BadInput if there are none."""
    if not requests:
        raise BadInput(f"trace {str(path)!r} contains no requests")
    requests.sort(key=lambda request: request.arrival_ns)  # stable: equal times keep the file's order
    start_ns = requests[0].arrival_ns
    return tuple(replace(request, arrival_ns=request.arrival_ns - start_ns) for request in requests)


def _decoded(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise BadInput(f"longer than {MAX_LINE_BYTES} bytes")
    return line.decode()
