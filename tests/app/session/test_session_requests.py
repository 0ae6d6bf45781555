"""Tests of a session's requests: live, recorded, and in a recording that is still being written."""

from __future__ import annotations

import numpy as np
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.session.session_requests import LiveRequests, RecordedRequests
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.mirror.coalesce import coalesce, merge
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.request_log import RequestLog, RequestLogReader
from kvscope_telemetry.source import Update

WAIT_MS = 120_000


def make_engine():
    """Return a simulated engine with preemptions, whose clock advances by 1 ms with each call."""
    now_ns = [1_000_000_000]

    def clock():
        now_ns[0] += 1_000_000
        return now_ns[0]

    return SimulatedEngine(num_blocks=512, num_running=8, num_host_blocks=64, clock=clock)


def test_live_requests_equal_those_of_a_recording_of_the_same_frames():
    one = make_engine()
    snapshot, frames = one.snapshot(), [one.advance() for _ in range(700)]
    reader = RequestLogReader(recorded := RequestLog())
    for message in (snapshot, *frames):
        reader.add_message(message, message.time_ns)
    reader.flush()
    live = LiveRequests()
    live.add_update(Update(snapshot=snapshot), 0)
    for first in range(0, len(frames), 21):  # as many frames as one display frame may bring, read in three batches
        parts = [coalesce(frames[at : at + 7]) for at in range(first, min(first + 21, len(frames)), 7)]
        live.add_update(merge(parts), 0)
    expected, shown = recorded.columns(), live.log.columns()
    assert expected.num_preemptions.any()
    assert expected.has_ended.sum() > 20
    for name in expected.__slots__:
        np.testing.assert_array_equal(getattr(shown, name), getattr(expected, name), err_msg=name)
    assert [live.log.reason(key) for key in shown.key] == [recorded.reason(key) for key in expected.key]


def test_requests_of_a_growing_recording_are_added(tmp_path, qtbot):
    one = make_engine()
    messages = [one.hello, one.snapshot(), *(one.advance() for _ in range(900))]
    with RecordingWriter(tmp_path / "growing.mcap") as writer:
        for message in messages[:400]:
            writer.write(message)
        qtbot.waitUntil(lambda: writer.part.exists() and has_snapshot(writer.part), timeout=WAIT_MS)
        requests = RecordedRequests(lambda watch: Recording.open(writer.part, watch=watch))
        try:
            qtbot.waitUntil(lambda: requests.share == 1.0, timeout=WAIT_MS)
            for message in messages[400:]:
                writer.write(message)
            newest = max(info.number for message in messages[2:] for info in message.new_requests)
            qtbot.waitUntil(lambda: requests.log.columns().number.max(initial=0) >= newest - 8, timeout=WAIT_MS)
        finally:
            requests.close()


def has_snapshot(part):
    try:
        return any(isinstance(message, Snapshot) for _, message in Recording.open(part).messages(keyframes=True))
    except BadInput:  # nothing has been written yet
        return False
