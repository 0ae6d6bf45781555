"""Tests of opening a recording in the background: progress, cancellation and failure."""

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
    """Replacement of `Recording.open` that blocks until the test releases or cancels it."""

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
def slow_opening(monkeypatch):
    opening = SlowOpening()
    monkeypatch.setattr(Recording, "open", opening)
    yield opening
    opening.let_go.set()


def make_window_with_opened(make_window, session):
    """Return a window and the list of recordings opened from it."""
    opened = []
    window = make_window(session, open_recording=opened.append)
    return window, opened


def test_window_stays_responsive_while_a_recording_is_opened(slow_opening, session, make_window, qtbot):
    window, opened = make_window_with_opened(make_window, session)
    opening = try_to_open(window, "/somewhere/big.mcap")
    with qtbot.waitSignal(opening.progressed, timeout=WAIT_MS) as signal:
        session.poll()
    assert 0.0 <= signal.args[0] <= 0.25
    assert slow_opening.thread is not threading.main_thread()
    assert opened == []
    slow_opening.let_go.set()
    qtbot.waitUntil(lambda: opened == [["the recording", "/somewhere/big.mcap"]], timeout=WAIT_MS)


def test_opening_can_be_cancelled_in_the_progress_dialog(slow_opening, session, make_window, qtbot):
    window, opened = make_window_with_opened(make_window, session)
    opening = try_to_open(window, "/somewhere/big.mcap")
    (dialog,) = window.findChildren(QProgressDialog)
    assert "big.mcap" in dialog.labelText()
    with qtbot.waitSignal(opening.cancelled, timeout=WAIT_MS):
        dialog.canceled.emit()
    assert opened == []
    assert window.banner.text == ""
    qtbot.waitUntil(lambda: not slow_opening.thread.is_alive(), timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not window.findChildren(QProgressDialog), timeout=WAIT_MS)
    assert not window.findChildren(FileOpening)


def test_closing_the_window_cancels_the_opening(slow_opening, session, make_window, qtbot):
    window, opened = make_window_with_opened(make_window, session)
    try_to_open(window, "/somewhere/big.mcap")
    window.close()
    qtbot.waitUntil(lambda: slow_opening.thread is not None and not slow_opening.thread.is_alive(), timeout=WAIT_MS)
    assert opened == []


def test_failure_to_open_is_shown_in_the_banner(session, make_window, qtbot, monkeypatch):
    def fails(path, watch):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Recording, "open", fails)
    window, _ = make_window_with_opened(make_window, session)
    with qtbot.waitSignal(try_to_open(window, "/x.mcap").failed, timeout=WAIT_MS):
        pass
    assert window.banner.text == "The file cannot be opened"
    assert "out of luck" in driver.visible_text(window.banner)


@pytest.mark.parametrize("days", [1.0, 24.8, 24.9, 208.0, 36_500.0])
def test_time_slider_covers_recordings_of_any_length(days, qtbot):
    """Qt sliders count in 32 bits, which holds only 24.8 days of milliseconds."""
    slider = TimeSlider(days * DAY_S)
    qtbot.addWidget(slider)
    for share in (0.0, 0.3, 1.0):
        slider.show_seconds(share * days * DAY_S)
        assert slider.seconds == pytest.approx(share * days * DAY_S, abs=4.0)
    assert slider.value() == slider.maximum()
    assert slider.singleStep() >= 1
