"""Looking things up in a recording on a thread: found also for who asks without a rest, the newest question first."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QTimer

from kvscope_app.session.recording.recorded_lookup import RecordedLookup
from kvscope_app.session.recording.recording_handle import RecordingHandle


class KeptSession:
    """Has a recording that nobody looks into."""

    def new_recording_handle(self):
        return RecordingHandle(lambda watch: None, lambda: None)


@pytest.fixture
def looked_up():
    return []


@pytest.fixture
def gate():
    """Reading waits for it."""
    made = threading.Event()
    made.set()
    return made


@pytest.fixture
def lookup(qtbot, gate, looked_up):
    def read(recorded, key, at_ns, watch):
        gate.wait(30)
        looked_up.append(key)
        return None if key < 0 else key * 10

    made = RecordedLookup(KeptSession(), read, "kvscope-test-lookup", 2)
    yield made
    gate.set()
    made.close()


def test_who_asks_again_and_again_gets_the_answer(lookup, qtbot):
    """A view asks at each of its frames, sooner one after the other than the lookup looks."""
    answers = []
    asking = QTimer(interval=1)
    asking.timeout.connect(lambda: answers.append(lookup.get(4, 0)))
    asking.start()
    qtbot.waitUntil(lambda: bool(answers) and answers[-1] == 40, timeout=30_000)
    asking.stop()
    assert not lookup.is_reading


def test_of_what_is_asked_meanwhile_only_the_last_is_looked_up(lookup, gate, looked_up, qtbot):
    gate.clear()
    assert lookup.get(1, 0) is None
    qtbot.waitUntil(lambda: lookup.is_reading, timeout=30_000)
    for key in (2, 3, 4):
        assert lookup.get(key, 0) is None
    gate.set()
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert looked_up == [1, 4]
    assert (lookup.get(1, 0), lookup.get(4, 0)) == (10, 40)


def test_only_the_newest_answers_are_kept_and_what_is_not_there_is_known(lookup, looked_up, qtbot):
    for key in (1, -2, 3):
        lookup.get(key, 0)
        qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert lookup.get(-2, 0) is None
    assert not lookup.is_reading
    assert lookup.get(3, 0) == 30
    assert lookup.get(1, 0) is None
    qtbot.waitUntil(lambda: not lookup.is_reading, timeout=30_000)
    assert looked_up == [1, -2, 3, 1]
