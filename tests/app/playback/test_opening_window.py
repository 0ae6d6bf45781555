"""Tests of the window that is shown while a recording of the command line is opened."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtCore import QSettings

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.main import main
from kvscope_app.playback.opening_window import OpeningWindow
from kvscope_app.playback.recording_opening import RecordingOpening
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.read_budget import OpeningCancelled
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 120_000


class BlockedOpening:
    """Replacement of `Recording.open` that blocks until the test releases, cancels or fails it."""

    def __init__(self):
        self.let_go = threading.Event()
        self.failure = None

    def __call__(self, path, watch):
        while not self.let_go.wait(0.01):
            if not watch(0.25):
                raise OpeningCancelled
        if self.failure is not None:
            raise self.failure
        return f"the recording of {path}"


@pytest.fixture
def blocked_opening(monkeypatch):
    made = BlockedOpening()
    monkeypatch.setattr(Recording, "open", made)
    yield made
    made.let_go.set()


@pytest.fixture
def show_opening_window(qtbot):
    def make(path):
        window = OpeningWindow(RecordingOpening(path))
        window.show()
        return window

    return make


def test_opening_window_shows_progress_and_closes_when_the_file_is_open(blocked_opening, show_opening_window, qtbot):
    window = show_opening_window("/somewhere/big.mcap")
    opened, gone = [], []
    window.opened.connect(opened.append)
    window.destroyed.connect(lambda: gone.append(True))
    assert "big.mcap" in window.heading.text()
    qtbot.waitUntil(lambda: window.bar.value() == 250, timeout=WAIT_MS)
    blocked_opening.let_go.set()
    qtbot.waitUntil(lambda: bool(gone), timeout=WAIT_MS)
    assert opened == ["the recording of /somewhere/big.mcap"]


def test_cancel_button_cancels_the_opening(blocked_opening, qtbot):
    opening = RecordingOpening("/somewhere/big.mcap")
    window = OpeningWindow(opening)
    window.show()
    window.button.click()
    qtbot.waitUntil(lambda: opening.is_finished, timeout=WAIT_MS)
    assert opening.recording is None


def test_late_failure_is_shown_in_the_window_and_on_the_terminal(blocked_opening, qapp, qtbot, tmp_path, capsys):
    blocked_opening.failure = BadInput("recording 'x.mcap' is damaged")
    desktop = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    window = desktop.open_when_ready(RecordingOpening("x.mcap"))
    blocked_opening.let_go.set()
    qtbot.waitUntil(lambda: desktop.failures == ["recording 'x.mcap' is damaged"], timeout=WAIT_MS)
    assert window.reason.isVisible()
    assert window.reason.text() == "recording 'x.mcap' is damaged"
    assert capsys.readouterr().err == "kvscope: recording 'x.mcap' is damaged\n"
    window.close()
    desktop.close()
    desktop.deleteLater()


def test_missing_file_is_reported_without_a_window(tmp_path, capsys):
    assert main(["--open", str(tmp_path / "nowhere.mcap")]) == 2
    assert "nowhere.mcap" in capsys.readouterr().err
