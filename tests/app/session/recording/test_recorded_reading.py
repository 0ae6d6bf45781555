"""Tests of reading from a recording on a thread, one read at a time: results, failures and retries."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvscope_app.session.recording.recorded_lookup import RecordedLookup
from kvscope_app.session.recording.recording_handle import RecordingHandle
from kvscope_app.session.recording.recording_reader import RecordingReader
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.timeline import step_feed
from kvscope_app.views.timeline.step_feed import StepFeed
from kvscope_app.views.timeline.steps import NO_STEPS
from kvscope_telemetry.errors import BadInput

WAIT_MS = 60_000


class RecordedSession:
    """Session whose recording cannot be opened while `is_broken`; counts the attempts."""

    def __init__(self):
        self.num_opened = 0
        self.is_broken = True
        self.timeline = SimpleNamespace(is_file=True)

    def new_recording_handle(self):
        return RecordingHandle(self._open, lambda: None)

    def _open(self, watch):
        self.num_opened += 1
        if self.is_broken:
            raise BadInput("it is gone")
        return "what was recorded"


@pytest.fixture
def recorded_session(qapp):
    return RecordedSession()


@pytest.fixture
def reading(recorded_session):
    made = RecordingReader(recorded_session, "kvscope-test-reading")
    yield made
    made.close()


def test_result_of_a_recording_read_is_available_when_finished_is_emitted(reading, recorded_session, qtbot):
    recorded_session.is_broken = False
    with qtbot.waitSignal(reading.finished, timeout=WAIT_MS):
        assert reading.start(lambda recorded, watch: recorded.upper())
        assert reading.is_reading
    assert not reading.is_reading
    assert (reading.result, reading.failure) == ("WHAT WAS RECORDED", "")


def test_failed_recording_read_emits_finished_and_has_a_failure_reason(reading, recorded_session, qtbot):
    with qtbot.waitSignal(reading.finished, timeout=WAIT_MS):
        reading.start(lambda recorded, watch: recorded)
    assert not reading.is_reading
    assert (reading.result, reading.failure) == (None, "it is gone")


def test_recording_read_that_is_closed_does_not_emit_finished(reading, recorded_session, qtbot):
    received = []
    reading.finished.connect(lambda: received.append(True))
    reading.start(lambda recorded, watch: recorded)
    reading.close()
    qtbot.waitUntil(lambda: not reading.is_reading, timeout=WAIT_MS)
    assert not received


def test_recording_reader_does_not_start_if_there_is_no_recording(qapp):
    class Nothing:
        def new_recording_handle(self):
            return None

    reading = RecordingReader(Nothing(), "kvscope-test-reading")
    assert not reading.start(lambda recorded, watch: recorded)
    assert not reading.is_reading


def test_failed_recording_lookup_has_a_reason_that_the_next_successful_lookup_clears(recorded_session, qtbot):
    lookup = RecordedLookup(recorded_session, lambda recorded, key, at_ns, watch: key, "kvscope-test-lookup", 2)
    lookup.get(1, 0)
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=WAIT_MS)
    assert (lookup.get(1, 0), lookup.failure) == (None, "it is gone")
    recorded_session.is_broken = False
    lookup.get(2, 0)
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=WAIT_MS)
    assert (lookup.get(2, 0), lookup.failure) == (2, "")
    lookup.close()


def test_failed_step_reading_is_not_retried_immediately(recorded_session, qtbot, monkeypatch):
    """A view asks again whenever `changed` is emitted."""
    monkeypatch.setattr(step_feed, "RETRY_DELAY_S", 1e9)
    monkeypatch.setattr(step_feed, "read_steps", lambda *_: NO_STEPS)
    feed, span, received = StepFeed(recorded_session), TimeSpan(0, 10**9), []

    def ask():
        received.append(feed.failure)
        feed.request(span, span)

    feed.changed.connect(ask)
    feed.request(span, span)
    qtbot.waitUntil(lambda: bool(received) and not feed.is_reading, timeout=WAIT_MS)
    assert received == ["it is gone"]
    assert recorded_session.num_opened == 1
    monkeypatch.setattr(step_feed, "RETRY_DELAY_S", 0.0)
    recorded_session.is_broken = False
    with qtbot.waitSignal(feed.changed, timeout=WAIT_MS):
        feed.request(span, span)
    assert feed.failure == ""
    feed.close()


def test_recorded_steps_are_not_read_again_while_the_engine_reports_nothing_new(recorded_session, qtbot, monkeypatch):
    """While an engine is idle, time passes without new steps."""
    monkeypatch.setattr(step_feed, "_MIN_INTERVAL_S", 0.0)
    read = []

    def read_steps(_recorded, first_ns, last_ns, _watch):
        read.append((first_ns, last_ns))
        return replace(NO_STEPS, first_ns=first_ns, last_ns=last_ns)

    monkeypatch.setattr(step_feed, "read_steps", read_steps)
    recorded_session.is_broken, recorded_session.timeline.is_file, recorded_session.live_mirror = (
        False,
        False,
        SimpleNamespace(epoch=7, seq=5),
    )
    monkeypatch.setattr(recorded_session, "_open", lambda watch: SimpleNamespace(may_grow=False))
    feed = StepFeed(recorded_session)

    def num_read(begin_ns, end_ns, whole_ns):
        read.clear()
        feed.request(TimeSpan(begin_ns, end_ns), TimeSpan(0, whole_ns))
        qtbot.waitUntil(lambda: not feed.is_reading, timeout=WAIT_MS)
        assert not feed.failure
        return len(read)

    assert num_read(0, 100, 1000) == 1
    assert num_read(100, 500, 1000) == 1, "this range has not been read yet"
    assert num_read(500, 1000, 1000) == 1
    assert num_read(500, 2000, 2000) == 0, "there is no new step"
    recorded_session.live_mirror.seq = 6
    assert num_read(500, 3000, 3000) == 1
    recorded_session.live_mirror.seq, recorded_session.live_mirror.epoch = 1, 8
    assert num_read(500, 4000, 4000) == 1
    assert num_read(500, 5000, 5000) == 0
    recorded_session.timeline.is_file = True
    assert num_read(500, 6000, 6000) == 1, "a file may have grown"
    feed.close()
