"""Seeking by delta checkpoints gives the same state as applying every frame, also with damage and gaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame
from kvscope_telemetry.messages.validity import check_delta_checkpoint
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.recordings.reader import Recording

LONG_NS = 1 << 60
NOT_TIMES = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
"""Columns whose times are only as fine as the updates that are applied together."""


def assert_same(found: Mirror, expected: Mirror) -> None:
    assert found.seq == expected.seq
    assert found.ledger.differences(expected.ledger) == []
    assert equal_requests(found.requests, expected.requests, NOT_TIMES)
    assert found.counters == expected.counters
    assert (found.num_active, found.num_cached, found.num_free) == (
        expected.num_active,
        expected.num_cached,
        expected.num_free,
    )


def test_seek_gives_the_state_of_any_frame(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    for seq in random.sample(range(1, 901), 40):
        num_read = sum(1 for _ in recording.state_messages(times[seq]))
        assert num_read < 150, "a seek must use delta checkpoints"
        assert_same(recording.state_at(times[seq]), recorded.mirror_after(seq + 2))


def damaged(path: Path, chunk: Any) -> Recording:
    """Return the same recording with one byte of a chunk changed."""
    data = bytearray(path.read_bytes())
    data[chunk.offset + chunk.stored_bytes // 2] ^= 1
    path.write_bytes(data)
    return Recording.open(path)


@pytest.mark.parametrize("which", [slice(4, 5), slice(2, 9), slice(0, None)])
def test_damaged_delta_checkpoints_only_cost_time(record: Callable[..., Any], which: slice) -> None:
    recorded = record(600, keyframe_interval_ns=LONG_NS)
    chunks = Recording.open(recorded.path).segments[0].checkpoints[which]
    recording = [damaged(recorded.path, chunk) for chunk in chunks][-1]
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    assert_same(recording.state_at(1e9), recorded.mirror_after(602))
    assert recording.num_damaged == len(chunks)
    for seq in random.sample(range(200, 600), 8):
        assert_same(recording.state_at(times[seq]), recorded.mirror_after(seq + 2))


def test_seek_without_delta_checkpoints_joins_the_frames_of_a_batch(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    for chunk in Recording.open(recorded.path).segments[0].checkpoints:
        recording = damaged(recorded.path, chunk)
    messages = [message for _, message in recording.state_messages(1e9)]
    joined = [message for message in messages if isinstance(message, DeltaCheckpoint)]
    assert sum(checkpoint.seq - checkpoint.since_seq for checkpoint in joined) > 900 - 150
    assert (type(messages[-1]), messages[-1].seq) == (Frame, 900), "the last step must be a frame"


def test_seek_past_a_gap_gives_the_state_before_it(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    whole = Recording.open(recorded.path)
    for chunk in whole.segments[0].checkpoints:
        damaged(recorded.path, chunk)
    recording = damaged(recorded.path, next(each for each in whole.segments[0].message_chunks[5:] if each.num_frames))
    before = recording.state_at(1e9).seq
    assert 0 < before < 900
    assert_same(recording.state_at(1e9), recorded.mirror_after(before + 2))


def test_delta_checkpoint_never_spans_a_gap(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    messages = make_messages(600)
    lost = [m for m in messages if not (isinstance(m, Frame) and m.seq == 300)]
    recorded = record(lost, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    assert recording.state_at(1e9).seq == 299
    other = record([*lost[:400], *make_messages(300, epoch=2, seed=5)], "two.mcap", keyframe_interval_ns=LONG_NS)
    assert_same(Recording.open(other.path).state_at(1e9), other.mirror_after(len(other.messages)))


@pytest.mark.parametrize("since", [3, 4, -1])
def test_delta_checkpoint_without_progress_is_refused(since: int) -> None:
    with pytest.raises(ProtocolError):
        check_delta_checkpoint(DeltaCheckpoint(epoch=1, seq=3, step=3, time_ns=1, since_seq=since))
