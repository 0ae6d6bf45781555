"""Mooncake traces (FAST'25): JSONL, a request a line, with the blocks of 512 tokens that its prompt is made of.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}`: the timestamp is in
ms, each hash id stands for 512 tokens after the same beginning (the last for what is left), equal ids for
equal tokens. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvscope_engine.simulator.workloads.trace_lines import complaints, from_first_arrival, trace_lines, whole
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

TOKENS_PER_HASH: Final = 512


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the trace; keys that are not known are left alone."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path, max_requests: int | None = None) -> Workload:
    """The first `max_requests` of a trace (all without it). An output of 0 tokens counts as 1: the prefill's.

    Raises BadInput, with the number of the line, for one that cannot be read, and for a trace without any.
    """
    requests: list[WorkloadRequest] = []
    decoder = msgspec.json.Decoder(MooncakeLine)
    numbers: dict[int, int] = {}
    for number, text in islice(trace_lines(path), max_requests):
        with complaints(path, number):
            requests.append(_request(decoder.decode(text), numbers))
    return Workload(path.name, from_first_arrival(path, requests), TOKENS_PER_HASH)


def _request(line: MooncakeLine, numbers: dict[int, int]) -> WorkloadRequest:
    """`numbers` gives each hash id a number from 0 that fits a token id."""
    length = whole("input_length", line.input_length, 1)
    blocks = len(line.hash_ids)
    if blocks and not length // TOKENS_PER_HASH <= blocks <= -(-length // TOKENS_PER_HASH):
        raise BadInput(
            f"input_length {length} is not accepted with {blocks} hash ids: each stands for {TOKENS_PER_HASH} tokens"
        )
    return WorkloadRequest(
        arrival_ns=round(line.timestamp * 1e6),
        num_prompt_tokens=length,
        num_output_tokens=max(1, whole("output_length", line.output_length, 0)),
        text_ids=tuple(numbers.setdefault(hash_id, len(numbers)) for hash_id in line.hash_ids),
    )
