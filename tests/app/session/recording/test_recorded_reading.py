"""One reading at a time, told when it is over: also one that fails, which nobody waits for for ever."""

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


class KeptSession:
    """What it has recorded cannot be opened while `is_broken`; counts who tries."""

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
def kept(qapp):
    return KeptSession()


@pytest.fixture
def reading(kept):
    made = RecordingReader(kept, "kvscope-test-reading")
    yield made
    made.close()


def test_what_was_read_is_told(reading, kept, qtbot):
    kept.is_broken = False
    with qtbot.waitSignal(reading.finished, timeout=WAIT_MS):
        assert reading.start(lambda recorded, watch: recorded.upper())
        assert reading.is_reading
    assert not reading.is_reading
    assert (reading.result, reading.failure) == ("WHAT WAS RECORDED", "")


def test_one_that_fails_is_over_and_says_why(reading, kept, qtbot):
    with qtbot.waitSignal(reading.finished, timeout=WAIT_MS):
        reading.start(lambda recorded, watch: recorded)
    assert not reading.is_reading
    assert (reading.result, reading.failure) == (None, "it is gone")


def test_one_that_is_closed_tells_nothing(reading, kept, qtbot):
    received = []
    reading.finished.connect(lambda: received.append(True))
    reading.start(lambda recorded, watch: recorded)
    reading.close()
    qtbot.waitUntil(lambda: not reading.is_reading, timeout=WAIT_MS)
    assert not received


def test_where_nothing_was_recorded_nothing_begins(qapp):
    class Nothing:
        def new_recording_handle(self):
            return None

    reading = RecordingReader(Nothing(), "kvscope-test-reading")
    assert not reading.start(lambda recorded, watch: recorded)
    assert not reading.is_reading


def test_a_lookup_that_fails_says_why_and_goes_on_with_the_next(kept, qtbot):
    lookup = RecordedLookup(kept, lambda recorded, key, at_ns, watch: key, "kvscope-test-lookup", 2)
    lookup.get(1, 0)
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=WAIT_MS)
    assert (lookup.get(1, 0), lookup.failure) == (None, "it is gone")
    kept.is_broken = False
    lookup.get(2, 0)
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=WAIT_MS)
    assert (lookup.get(2, 0), lookup.failure) == (2, "")
    lookup.close()


def test_steps_that_cannot_be_read_are_not_asked_for_without_end(kept, qtbot, monkeypatch):
    """Whoever draws asks again as soon as it is told."""
    monkeypatch.setattr(step_feed, "AFTER_FAILURE_S", 1e9)
    monkeypatch.setattr(step_feed, "read_steps", lambda *_: NO_STEPS)
    feed, span, received = StepFeed(kept), TimeSpan(0, 10**9), []

    def ask():
        received.append(feed.failure)
        feed.want(span, span)

    feed.changed.connect(ask)
    feed.want(span, span)
    qtbot.waitUntil(lambda: bool(received) and not feed.is_reading, timeout=WAIT_MS)
    assert received == ["it is gone"]
    assert kept.num_opened == 1
    monkeypatch.setattr(step_feed, "AFTER_FAILURE_S", 0.0)
    kept.is_broken = False
    with qtbot.waitSignal(feed.changed, timeout=WAIT_MS):
        feed.want(span, span)
    assert feed.failure == ""
    feed.close()


def test_steps_are_read_again_once_there_are_more(kept, qtbot, monkeypatch):
    """While an engine idles time goes on, and no step with it; who looks elsewhere is shown what is there."""
    monkeypatch.setattr(step_feed, "_AGAIN_S", 0.0)
    read = []

    def read_steps(_recorded, first_ns, last_ns, _watch):
        read.append((first_ns, last_ns))
        return replace(NO_STEPS, first_ns=first_ns, last_ns=last_ns)

    monkeypatch.setattr(step_feed, "read_steps", read_steps)
    kept.is_broken, kept.timeline.is_file, kept.live_mirror = False, False, SimpleNamespace(epoch=7, seq=5)
    monkeypatch.setattr(kept, "_open", lambda watch: SimpleNamespace(may_grow=False))
    feed = StepFeed(kept)

    def num_read(begin_ns, end_ns, whole_ns):
        read.clear()
        feed.want(TimeSpan(begin_ns, end_ns), TimeSpan(0, whole_ns))
        qtbot.waitUntil(lambda: not feed.is_reading, timeout=WAIT_MS)
        assert not feed.failure
        return len(read)

    assert num_read(0, 100, 1000) == 1
    assert num_read(100, 500, 1000) == 1, "not all was read"
    assert num_read(500, 1000, 1000) == 1
    assert num_read(500, 2000, 2000) == 0, "only time went on"
    kept.live_mirror.seq = 6
    assert num_read(500, 3000, 3000) == 1
    kept.live_mirror.seq, kept.live_mirror.epoch = 1, 8
    assert num_read(500, 4000, 4000) == 1
    assert num_read(500, 5000, 5000) == 0
    kept.timeline.is_file = True
    assert num_read(500, 6000, 6000) == 1, "a file may grow beyond what is shown"
    feed.close()
