"""A recording as a workload: arrivals, lengths, and shared prefixes of its requests.

Shared prefixes are found by the hashes of the prompts' full blocks. They are underestimated if the recording lacks
them: without prefix caching, for requests that ended with their first token, and for a block whose text another block
held when it was computed.
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

TextName = tuple[int, int]
"""Epoch and hash: each start of an engine has its own hashes."""


def read_recording(path: Path, max_requests: int | None = None) -> Workload:
    """Return the first `max_requests` requests of a recording (default: all), with their final lengths.

    A request without output counts as one token, that of the prefill. Raises BadInput for a file that is no recording,
    and for one without requests.
    """
    recording = Recording.open(path)
    requests = recorded_requests(recording)[:max_requests]
    texts = _texts(requests)
    made = [
        WorkloadRequest(request.arrival_ns, request.num_prompt_tokens, max(1, request.num_output_tokens), text_ids)
        for request, text_ids in zip(requests, texts, strict=True)
    ]
    return Workload(path.name, from_first_arrival(path, made), recording.info.hello.cache.block_size)


def _texts(requests: Sequence[RecordedRequest]) -> list[tuple[int, ...]]:
    """Return, for each request, numbers of its first blocks, up to the last one that another request has, too."""
    found = Counter(name for request in requests for name in _names(request))
    numbers: dict[TextName, int] = {}
    fresh = count(len(found))
    return [
        tuple(numbers.setdefault(name, len(numbers)) if name[1] else next(fresh) for name in _shared(request, found))
        for request in requests
    ]


def _names(request: RecordedRequest) -> list[TextName]:
    return [(request.epoch, hash_) for hash_ in request.prefix_hashes]


def _shared(request: RecordedRequest, found: Counter[TextName]) -> list[TextName]:
    names = _names(request)
    while names and (not names[-1][1] or found[names[-1]] == 1):
        names.pop()
    return names
