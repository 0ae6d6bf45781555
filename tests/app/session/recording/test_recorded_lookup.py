"""Tests of looking up values in a recording on a thread."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QTimer

from kvscope_app.session.recording.recorded_lookup import RecordedLookup
from kvscope_app.session.recording.recording_handle import RecordingHandle


class RecordedSession:
    """Session whose recording is never opened."""

    def new_recording_handle(self):
        return RecordingHandle(lambda watch: None, lambda: None)


@pytest.fixture
def read_keys():
    return []


@pytest.fixture
def may_read():
    """Event that reading waits for; set unless a test clears it."""
    made = threading.Event()
    made.set()
    return made


@pytest.fixture
def lookup(qtbot, may_read, read_keys):
    def read(recorded, key, at_ns, watch):
        may_read.wait(30)
        read_keys.append(key)
        return None if key < 0 else key * 10

    made = RecordedLookup(RecordedSession(), read, "kvscope-test-lookup", 2)
    yield made
    may_read.set()
    made.close()


def test_recorded_value_queried_more_often_than_the_lookup_polls_is_found(lookup, qtbot):
    """A view asks at each of its frames, more often than the lookup polls."""
    answers = []
    asking = QTimer(interval=1)
    asking.timeout.connect(lambda: answers.append(lookup.get(4, 0)))
    asking.start()
    qtbot.waitUntil(lambda: bool(answers) and answers[-1] == 40, timeout=30_000)
    asking.stop()
    assert not lookup.is_reading


def test_only_the_newest_query_made_during_a_read_is_looked_up(lookup, may_read, read_keys, qtbot):
    may_read.clear()
    assert lookup.get(1, 0) is None
    qtbot.waitUntil(lambda: lookup.is_reading, timeout=30_000)
    for key in (2, 3, 4):
        assert lookup.get(key, 0) is None
    may_read.set()
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert read_keys == [1, 4]
    assert (lookup.get(1, 0), lookup.get(4, 0)) == (10, 40)


def test_newest_answers_are_cached_including_missing_values(lookup, read_keys, qtbot):
    for key in (1, -2, 3):
        lookup.get(key, 0)
        qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert lookup.get(-2, 0) is None
    assert not lookup.is_reading
    assert lookup.get(3, 0) == 30
    assert lookup.get(1, 0) is None
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert read_keys == [1, -2, 3, 1]
