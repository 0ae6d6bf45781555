"""Trace files line by line, with the line's number in every complaint. Knows no format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvscope_engine.simulator.workloads.workload import WorkloadRequest
from kvscope_telemetry.errors import BadInput

MAX_REQUEST_TOKENS: Final = 1 << 24
MAX_LINE_BYTES: Final = 1 << 24
NumberedLine = tuple[int, str]


def trace_lines(path: Path) -> Iterator[NumberedLine]:
    """Lines that are not blank, with their numbers from 1. Raises BadInput for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                with complaints(path, number):
                    if text := _decoded(line).strip():
                        yield number, text
    except OSError as error:
        raise BadInput(f"trace {str(path)!r} cannot be read: {error.strerror}") from None


@contextmanager
def complaints(path: Path, number: int) -> Iterator[None]:
    """What is wrong with a line is said with the file and the line's number."""
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadInput(f"{path}, line {number}: {error}") from None


def whole(name: str, value: int, low: int) -> int:
    """The value, when it is a number of tokens from `low` on; raises BadInput when not."""
    if not low <= value <= MAX_REQUEST_TOKENS:
        raise BadInput(f"{name} {value} is not accepted: a whole number from {low} to {MAX_REQUEST_TOKENS}")
    return value


def from_first_arrival(path: Path, requests: list[WorkloadRequest]) -> tuple[WorkloadRequest, ...]:
    """Requests in the order they come, the first at 0. Raises BadInput when there is none."""
    if not requests:
        raise BadInput(f"trace {str(path)!r} contains no requests")
    requests.sort(key=lambda request: request.arrival_ns)  # stable: equal times keep the file's order
    start_ns = requests[0].arrival_ns
    return tuple(
        WorkloadRequest(
            request.arrival_ns - start_ns, request.num_prompt_tokens, request.num_output_tokens, request.text_ids
        )
        for request in requests
    )


def _decoded(line: bytes) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise BadInput(f"longer than {MAX_LINE_BYTES} bytes")
    return line.decode()
