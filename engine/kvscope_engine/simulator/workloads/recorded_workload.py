"""Converts a recording to a workload: arrivals, lengths, and shared prefixes of its requests.

Shared prefixes are found by the hashes of the prompts' full blocks. A block has no hash if its text was already cached
in another block when it was computed. That is usual for models with recurrent states, which resume only where a state
was saved. If earlier prompts have a single continuation of the text before such a block, it is the block's text.
Otherwise, and without prefix caching, and for requests that ended with their first token, shared prefixes are
underestimated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
Continuations = dict[EpochAndHash, set[EpochAndHash]]
"""Texts that follow a text; those that begin a prompt follow the hash 0."""


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
    names_by_request = _all_text_names(requests)
    counts = Counter(name for names in names_by_request for name in names)
    numbers: dict[EpochAndHash, int] = {}
    unshared_numbers = count(len(counts))
    return [
        tuple(
            numbers.setdefault(name, len(numbers)) if name[1] else next(unshared_numbers)
            for name in _shared_names(names, counts)
        )
        for names in names_by_request
    ]


def _all_text_names(requests: Sequence[RecordedRequest]) -> list[list[EpochAndHash]]:
    """Return the names of the texts in each request's first blocks. The hash of a text that remains unknown is 0."""
    names_by_request = [[(request.epoch, hash_) for hash_ in request.prefix_hashes] for request in requests]
    earlier: Continuations = defaultdict(set)
    for names in names_by_request:
        _complete(names, earlier)
        _add_continuations(names, earlier)
    for names in names_by_request:  # those computed at the same time, of which the later one was cached
        _complete(names, earlier)
    return names_by_request


def _add_continuations(names: Sequence[EpochAndHash], continuations: Continuations) -> None:
    for index, name in enumerate(names):
        before = names[index - 1] if index else (name[0], 0)
        if name[1] and (before[1] or not index):
            continuations[before].add(name)


def _complete(names: list[EpochAndHash], continuations: Continuations) -> None:
    """Replace unknown texts for which the texts before and after them leave one possibility."""
    for index, name in enumerate(names):
        before = names[index - 1] if index else (name[0], 0)
        if name[1] or (index and not before[1]):
            continue
        candidates = continuations.get(before, set())
        after = names[index + 1] if index + 1 < len(names) else (name[0], 0)
        if after[1] and len(candidates) > 1:
            candidates = {each for each in candidates if after in continuations.get(each, set())}
        if len(candidates) == 1:
            names[index] = next(iter(candidates))


def _shared_names(names: list[EpochAndHash], counts: Counter[EpochAndHash]) -> list[EpochAndHash]:
    shared = list(names)
    while shared and (not shared[-1][1] or counts[shared[-1]] == 1):
        shared.pop()
    return shared
