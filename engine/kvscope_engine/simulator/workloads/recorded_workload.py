"""Converts a recording to a workload: arrivals, lengths, and shared prefixes of its requests.

Shared prefixes are found by the hashes of the prompts' full blocks. They are underestimated where the recording has no
hash: without prefix caching, for requests that ended with their first token, and for blocks whose text was already
cached in another block when they were computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from kvscope_engine.simulator.workloads.trace_lines import from_first_arrival
from kvscope_engine.simulator.workloads.workload import Workload, WorkloadRequest
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import RecordedRequest, recorded_requests

EpochAndHash = tuple[int, int]
"""Epoch and block hash. Hashes of different engine starts (epochs) are not comparable."""


def read_recording(path: Path, max_requests: int | None = None) -> Workload:
    """Return the first `max_requests` requests of a recording, or all if None, with their final lengths.

    A request without output tokens gets one, because the prefill always yields a token. Raises BadInput for a file that
    is no recording, and for a recording without requests.
    """
    recording = Recording.open(path)
    requests = recorded_requests(recording)[:max_requests]
    texts = _text_ids(requests)
    workload_requests = [
        WorkloadRequest(request.arrival_ns, request.num_prompt_tokens, max(1, request.num_output_tokens), text_ids)
        for request, text_ids in zip(requests, texts, strict=True)
    ]
    return Workload(path.name, from_first_arrival(path, workload_requests), recording.info.hello.cache.block_size)


def _text_ids(requests: Sequence[RecordedRequest]) -> list[tuple[int, ...]]:
    """Return, for each request, the ids of the texts in its first blocks, up to the last block whose text
    another request has too.
    """
    counts = Counter(name for request in requests for name in _text_names(request))
    numbers: dict[EpochAndHash, int] = {}
    unshared_numbers = count(len(counts))
    return [
        tuple(
            numbers.setdefault(name, len(numbers)) if name[1] else next(unshared_numbers)
            for name in _shared_names(request, counts)
        )
        for request in requests
    ]


def _text_names(request: RecordedRequest) -> list[EpochAndHash]:
    return [(request.epoch, hash_) for hash_ in request.prefix_hashes]


def _shared_names(request: RecordedRequest, counts: Counter[EpochAndHash]) -> list[EpochAndHash]:
    names = _text_names(request)
    while names and (not names[-1][1] or counts[names[-1]] == 1):
        names.pop()
    return names
