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
from kvscope_engine.simulator.workloads.workload import MeasuredTimes, Workload, WorkloadRequest
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestRecords, read_requests
from kvscope_telemetry.running_time import RunningTime

EpochAndHash = tuple[int, int]
"""Epoch and block hash. Hashes of different engine starts (epochs) are not comparable."""


def read_recording(path: Path, max_requests: int | None = None) -> Workload:
    """Return the first `max_requests` requests of a recording, or all if None, with their final lengths.

    A request without output tokens gets one, because the prefill always yields a token. Raises BadInput for a file that
    is no recording, and for a recording without requests.
    """
    recording = Recording.open(path)
    return recorded_workload(path, recording, read_requests(recording), max_requests)


def recorded_workload(
    path: Path, recording: Recording, records: RequestRecords, max_requests: int | None = None
) -> Workload:
    """Return the workload of a recording whose requests were read already, as `read_recording` does."""
    requests, running = records.requests[:max_requests], records.running
    texts, ids = _text_ids(requests), _shared_ids(requests)
    first_ns = min((request.arrival_ns for request in requests), default=0)
    workload_requests = [
        WorkloadRequest(
            arrival_ns=running.running_ns(first_ns, request.arrival_ns),
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=max(1, request.num_output_tokens),
            text_ids=text_ids,
            client=str(request.client) if request.client else "",
            priority=request.priority,
            request_id=request_id,
            index=request.index if request_id else 0,
            drafts=request.drafts,
            measured=_measured(request, running, first_ns),
        )
        for request, text_ids, request_id in zip(requests, texts, ids, strict=True)
    ]
    return Workload(path.name, from_first_arrival(path, workload_requests), recording.info.hello.cache.block_size)


def _measured(request: RecordedRequest, running: RunningTime, first_ns: int) -> MeasuredTimes:
    first_token_ns, ended_ns = request.first_token_ns, request.ended_ns
    ttft_s = None if first_token_ns is None else running.running_ns(request.arrival_ns, first_token_ns) / 1e9
    tpot_s = None
    if first_token_ns is not None and ended_ns is not None and request.num_output_tokens > 1 and not request.is_aborted:
        tpot_s = running.running_ns(first_token_ns, ended_ns) / 1e9 / (request.num_output_tokens - 1)
    ended_s = None if ended_ns is None else running.running_ns(first_ns, ended_ns) / 1e9
    return MeasuredTimes(ttft_s, tpot_s, ended_s, request.num_preemptions)


def _shared_ids(requests: Sequence[RecordedRequest]) -> list[str]:
    """Return, for each request, an id that it shares with the other completions of its prompt; "" if there is no
    other.
    """
    counts = Counter((request.epoch, request.request_id, request.arrival_ns) for request in requests)
    return [
        f"{request.epoch}/{request.request_id}"
        if counts[request.epoch, request.request_id, request.arrival_ns] > 1
        else ""
        for request in requests
    ]


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
