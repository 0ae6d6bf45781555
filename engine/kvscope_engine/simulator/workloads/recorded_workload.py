"""A recording as a workload: when its requests came, how long they were, and which of them began alike.

What two prompts share is told by the hashes of their full blocks. It is understated where the recording does not say:
without prefix caching, for requests that ended with their first token, and for a block whose text another block held
when it was computed.
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
"""Epoch and hash: each engine start has hashes of its own."""


def read_recording(path: Path, max_requests: int | None = None) -> Workload:
    """The first `max_requests` requests of a recording (all without it), as long as they were in the end.

    One without an output counts as one token, the prefill's. Raises BadInput for a file that is no recording, and for
    one without requests.
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
    """For each request, numbers of the blocks it begins with, up to the last that another one has too."""
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
