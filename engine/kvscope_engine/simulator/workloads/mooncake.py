"""Mooncake traces (FAST'25): JSONL, a request per line, with the hashes of the 512-token blocks of its prompt.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}`: the timestamp is in ms. Each
hash id stands for 512 tokens together with the prefix before them (the last id for the remaining tokens); equal ids
mean equal tokens. Source: github.com/kvcache-ai/Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvscope_engine.simulator.workloads.trace_lines import checked_count, from_first_arrival, line_errors, trace_lines
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.errors import BadInput

TOKENS_PER_HASH: Final = 512


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of the trace; unknown keys are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """Arrival time in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(path: Path, max_requests: int | None = None) -> Workload:
    """Return the first `max_requests` requests of a trace, or all if None. An output of 0 tokens counts as 1, the token
    that the prefill yields.

    Raises BadInput, with the line number, for a line that cannot be read, and for a trace without requests.
    """
    requests: list[WorkloadRequest] = []
    decoder = msgspec.json.Decoder(MooncakeLine)
    numbers: dict[int, int] = {}
    for number, text in islice(trace_lines(path), max_requests):
        with line_errors(path, number):
            requests.append(_request(decoder.decode(text), numbers))
    return Workload(path.name, from_first_arrival(path, requests), TOKENS_PER_HASH)


def check_num_hashes(num_tokens: int, num_hashes: int) -> None:
    """Raise BadInput if a prompt of `num_tokens` cannot have this number of hash ids. A prompt without any is accepted.

    The remaining tokens after the last whole block may have an id or not.
    """
    if num_hashes and not num_tokens // TOKENS_PER_HASH <= num_hashes <= -(-num_tokens // TOKENS_PER_HASH):
        raise BadInput(
            f"input_length {num_tokens} is not accepted with {num_hashes} hash ids: each stands for"
            f" {TOKENS_PER_HASH} tokens"
        )


def _request(line: MooncakeLine, numbers: dict[int, int]) -> WorkloadRequest:
    """Convert a line of the trace. `numbers` maps each hash id to a small number that can be used as a token
    id, and is extended for new ids.
    """
    length = checked_count("input_length", line.input_length, 1)
    check_num_hashes(length, len(line.hash_ids))
    return WorkloadRequest(
        arrival_ns=round(line.timestamp * 1e6),
        num_prompt_tokens=length,
        num_output_tokens=max(1, checked_count("output_length", line.output_length, 0)),
        text_ids=tuple(numbers.setdefault(hash_id, len(numbers)) for hash_id in line.hash_ids),
    )
