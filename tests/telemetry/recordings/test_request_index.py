"""The requests of a recording: all of them, with their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import recorded_requests


def test_requests_have_arrival_and_lengths(record: Callable[..., Any]) -> None:
    recorded = record(500)
    recording = Recording.open(recorded.path)
    requests = recorded_requests(recording)
    infos = {
        info.number: info
        for message in recorded.messages
        if isinstance(message, Frame | Snapshot)
        for info in (message.new_requests if isinstance(message, Frame) else message.requests_info)
    }
    assert {request.number for request in requests} == set(infos)
    mirror = recorded.mirror_after(len(recorded.messages))
    for request in requests:
        info = infos[request.number]
        assert (request.num_prompt_tokens, request.max_tokens) == (info.num_prompt_tokens, info.max_tokens)
        assert request.request_id == info.request_id
        row = mirror.requests.row_of(request.number)
        assert row is not None
        assert request.num_output_tokens == mirror.requests.num_output_tokens[row]
        assert request.is_finished == (mirror.requests.finished_ns[row] >= 0)
    assert sum(request.is_finished for request in requests) > 10
    first, last = requests[0], requests[-1]
    assert last.arrival_ns - first.arrival_ns == infos[last.number].arrival_ns - infos[first.number].arrival_ns


def test_requests_of_two_epochs_are_separate(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    recorded = record(make_messages(60, epoch=1) + make_messages(60, epoch=2))
    requests = recorded_requests(Recording.open(recorded.path))
    assert {request.epoch for request in requests} == {1, 2}
    assert len({(request.epoch, request.number) for request in requests}) == len(requests)
    arrivals = [request.arrival_ns for request in requests if request.epoch == 2]
    assert min(arrivals) >= max(request.arrival_ns for request in requests if request.epoch == 1) - 10**10
