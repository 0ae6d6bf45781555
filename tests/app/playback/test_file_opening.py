"""Opening a recording beside a window that goes on: it is told, can be given up, and leaves nothing behind."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtWidgets import QProgressDialog
from tests.app import window_driver as driver

from kvscope_app.playback.file_opening import FileOpening
from kvscope_app.playback.time_slider import TimeSlider
from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 120_000
DAY_S = 86_400.0


class SlowOpening:
    """Instead of `Recording.open`: goes on until it is let go or given up."""

    def __init__(self):
        self.thread = None
        self.let_go = threading.Event()

    def __call__(self, path, watch):
        self.thread = threading.current_thread()
        while not self.let_go.wait(0.01):
            if not watch(0.25):
                raise OpeningCancelled
        return ["the recording", path]


@pytest.fixture
def slow(monkeypatch):
    opening = SlowOpening()
    monkeypatch.setattr(Recording, "open", opening)
    yield opening
    opening.let_go.set()


def show(make_window, session):
    """A window, and what was opened from it."""
    opened = []
    window = make_window(session, open_recording=opened.append)
    return window, opened


def test_the_window_goes_on_while_a_file_is_opened(slow, session, make_window, qtbot):
    window, opened = show(make_window, session)
    opening = try_to_open(window, "/somewhere/big.mcap")
    with qtbot.waitSignal(opening.progressed, timeout=WAIT_MS) as signal:
        session.poll()
    assert 0.0 <= signal.args[0] <= 0.25
    assert slow.thread is not threading.main_thread()
    assert opened == []
    slow.let_go.set()
    qtbot.waitUntil(lambda: opened == [["the recording", "/somewhere/big.mcap"]], timeout=WAIT_MS)


def test_it_can_be_given_up(slow, session, make_window, qtbot):
    window, opened = show(make_window, session)
    opening = try_to_open(window, "/somewhere/big.mcap")
    (dialog,) = window.findChildren(QProgressDialog)
    assert "big.mcap" in dialog.labelText()
    with qtbot.waitSignal(opening.cancelled, timeout=WAIT_MS):
        dialog.canceled.emit()
    assert opened == []
    assert window.banner.text == ""
    qtbot.waitUntil(lambda: not slow.thread.is_alive(), timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not window.findChildren(QProgressDialog), timeout=WAIT_MS)
    assert not window.findChildren(FileOpening)


def test_a_window_that_closes_gives_it_up(slow, session, make_window, qtbot):
    window, opened = show(make_window, session)
    try_to_open(window, "/somewhere/big.mcap")
    window.close()
    qtbot.waitUntil(lambda: slow.thread is not None and not slow.thread.is_alive(), timeout=WAIT_MS)
    assert opened == []


def test_what_goes_wrong_is_told_in_one_line(session, make_window, qtbot, monkeypatch):
    def fails(path, watch):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Recording, "open", fails)
    window, _ = show(make_window, session)
    with qtbot.waitSignal(try_to_open(window, "/x.mcap").failed, timeout=WAIT_MS):
        pass
    assert window.banner.text == "The file cannot be opened"
    assert "out of luck" in driver.text(window.banner)


@pytest.mark.parametrize("days", [1.0, 24.8, 24.9, 208.0, 36_500.0])
def test_the_slider_is_as_long_as_any_recording(days, qtbot):
    """Qt counts in 32 bits: beyond 24.8 days of milliseconds there were none left."""
    slider = TimeSlider(days * DAY_S)
    qtbot.addWidget(slider)
    for share in (0.0, 0.3, 1.0):
        slider.show_seconds(share * days * DAY_S)
        assert slider.seconds == pytest.approx(share * days * DAY_S, abs=4.0)
    assert slider.value() == slider.maximum()
    assert slider.singleStep() >= 1
