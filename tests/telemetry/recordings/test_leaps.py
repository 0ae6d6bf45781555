"""Seeking by leaps: the same state as by every frame, with damage and holes in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.leap import Leap, decode_leap, encode_leap
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.request_mirror import REQUEST_COLUMNS, equal_requests

LONG_NS = 1 << 60
NOT_TIMES = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
"""When something was seen is as fine as what is seen at once."""


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


def test_any_moment_is_as_it_was(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    assert len(recording._chunks.leaps) >= 15
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    for seq in random.sample(range(1, 901), 40):
        num_read = sum(1 for _ in recording.run_up(times[seq]))
        assert num_read < 150, "a seek goes by leaps"
        assert_same(recording.state_at(times[seq]), recorded.mirror_after(seq + 2))


def test_where_no_leap_is_whole_bundles_are_gone_over(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    recording._chunks.leaps.clear()
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    for seq in (*random.sample(range(200, 900), 8), 900):
        leaps = [message for _, message in recording.run_up(times[seq]) if isinstance(message, Leap)]
        assert sum(leap.seq - leap.since_seq for leap in leaps) > seq - 150
        *_, (_, last) = recording.run_up(times[seq])
        assert isinstance(last, Frame), "the last step is told"
        assert (type(last), last.seq) == (Frame, seq), "as it was"
        assert_same(recording.state_at(times[seq]), recorded.mirror_after(seq + 2))
    told = next(chunk for chunk in recording.chunks.told[5:] if chunk.num_bundled)
    told.crc ^= 1
    recording._chunks._unbundled_last = (0, [])
    before = recording.state_at(1e9).seq
    assert 0 < before < 900, "what is behind the hole is not the state"
    assert recording.num_damaged == 1
    assert_same(recording.state_at(1e9), recorded.mirror_after(before + 2))


def test_a_damaged_leap_costs_time_and_nothing_else(record: Callable[..., Any]) -> None:
    recorded = record(600, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    recording._chunks.leaps[4].crc ^= 1
    assert_same(recording.state_at(1e9), recorded.mirror_after(602))
    assert recording.num_damaged == 1


def test_no_leap_is_over_a_hole(record: Callable[..., Any], make_messages: Callable[..., Any]) -> None:
    messages = make_messages(600)
    lost = [m for m in messages if not (isinstance(m, Frame) and m.seq == 300)]
    recorded = record(lost, keyframe_interval_ns=LONG_NS)
    recording = Recording.open(recorded.path)
    assert recording.state_at(1e9).seq == 299
    other = record([*lost[:400], *make_messages(300, epoch=2, seed=5)], "two.mcap", keyframe_interval_ns=LONG_NS)
    assert_same(Recording.open(other.path).state_at(1e9), other.mirror_after(len(other.messages)))


def test_a_leap_is_smaller_than_its_frames(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=LONG_NS)
    leaps = [m for _, m in Recording.open(recorded.path).run_up(1e9) if isinstance(m, Leap)]
    covered = sum(leap.seq - leap.since_seq for leap in leaps)
    assert covered > 700
    whole = sum(len(encode(frame)) for frame in recorded.frames[:covered])
    assert sum(len(encode_leap(leap)) for leap in leaps) < whole / 2


@pytest.mark.parametrize("since", [3, 4, -1])
def test_a_leap_that_goes_nowhere_is_refused(since: int) -> None:
    with pytest.raises(ProtocolError):
        decode_leap(encode_leap(Leap(epoch=1, seq=3, step=3, time_ns=1, since_seq=since)))
    with pytest.raises(ProtocolError):
        decode_leap(b"\xc1")
