"""Tests of the desktop on a recording: state after seeks, playback bar, actions, and opening files."""

from __future__ import annotations

import time

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QSettings, Qt
from PySide6.QtWidgets import QLabel, QToolButton
from tests.app import window_driver as driver
from tests.app.window_driver import load_only_views
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.main import main
from kvscope_app.playback.playback import SPEEDS, time_text
from kvscope_app.playback.playback_actions import EventJumps
from kvscope_app.recent_recordings.open_file import try_to_open
from kvscope_app.session.session import Session
from kvscope_app.ui.clock_text import clock_text
from kvscope_telemetry.messages.commands import Control
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import MemoryBreakdown
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.source import SourceState

WAIT_MS = 120_000
NUM_FRAMES = 600


class SteppedClock:
    """Clock that advances by 10 ms with each call. It starts long before this machine did."""

    def __init__(self):
        self.now_ns = 1_000_000_000

    def __call__(self):
        self.now_ns += 10_000_000
        return self.now_ns


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Path of a recording of several seconds from a simulated engine."""
    engine = SimulatedEngine(num_blocks=120, num_running=6, epoch=9, clock=SteppedClock())
    path = tmp_path_factory.mktemp("recordings") / "day.mcap"
    with RecordingWriter(path, keyframe_interval_ns=1_000_000_000) as writer:
        for message in (engine.hello, MemoryBreakdown(epoch=9, time_ns=1, kv_bytes=5), engine.snapshot()):
            writer.write(message, wait=True)
        for _ in range(NUM_FRAMES):
            writer.write(engine.advance(), wait=True)
    return path


@pytest.fixture
def session(path, qapp):
    """Session on a recording that is paused at its start."""
    made = Session(PlaybackSource(Recording.open(path), is_playing=False))
    settle(made)
    yield made
    made.close()
    made.deleteLater()


def settle(session):
    """Wait until the overview is read and the state at the cursor is applied."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not session.is_overview_complete:
        assert time.monotonic() < deadline
        session.extend_overview()
    assert session.source.wait(lambda: not session.source.is_seeking, WAIT_MS / 1000)
    session.poll()


def seek(session, seconds):
    session.timeline.go_to(session.timeline.origin_ns + round(seconds * 1e9))
    settle(session)


def frames_until(session, seconds):
    return len(list(session.source.recording.frames(0.0, seconds)))


def num_steps(session, seconds=600):
    """Return the number of steps in the history, from which charts are drawn."""
    window = session.history.window(seconds, session.timeline.shown_monotonic_ns)
    return int(np.nansum(window.columns["num_steps"]))


def test_session_shows_the_recorded_state_after_each_seek(session):
    assert session.timeline.player is not None
    assert not session.accepts_commands
    assert not session.send(Control(action="pause"))
    for seconds in (3.0, 9.0, 2.5):
        seek(session, seconds)
        expected = session.source.recording.state_at(seconds)
        assert session.mirror.ledger.differences(expected.ledger) == []
        assert session.mirror.seq == expected.seq == frames_until(session, seconds)
        assert session.history.memory.kv_bytes == 5


def test_charts_contain_only_what_precedes_the_seek_position(session):
    for seconds in (9.0, 3.0, 12.0, 6.0):
        seek(session, seconds)
        # the history has whole seconds: the second in progress is estimated from the usual rate
        assert num_steps(session) == pytest.approx(
            frames_until(session, seconds), abs=NUM_FRAMES / session.timeline.player.duration
        )
        last_s = session.history.window(600, session.timeline.shown_monotonic_ns).time_s[-1]
        assert abs(last_s) <= 0.1
        events = [entry.event for entry in session.history.events]
        assert events == [event for frame in session.source.recording.frames(0.0, seconds) for event in frame.events]
        assert all(entry.time_ns <= session.timeline.shown_monotonic_ns for entry in session.history.events)


def test_curves_show_recorded_rates_at_any_speed(session, qtbot):
    session.timeline.set_speed(64.0)
    session.timeline.play()
    # The cursor may reach the end before the last frames are read.
    qtbot.waitUntil(lambda: (session.poll(), session.mirror.seq == NUM_FRAMES)[1], timeout=WAIT_MS)
    qtbot.waitUntil(lambda: not session.timeline.player.is_playing, timeout=WAIT_MS)
    settle(session)
    # The second in which playback began is filled as a whole, so its frames may be counted twice.
    assert abs(num_steps(session) - NUM_FRAMES) <= NUM_FRAMES // 10
    assert session.status.state is SourceState.PLAYBACK


def test_request_that_finishes_later_is_unfinished_after_seeking_back(session):
    seek(session, session.timeline.player.duration)
    seek(session, 3.0)
    shown, expected = session.mirror.requests, session.source.recording.state_at(3.0).requests
    going_on = [requests.number[requests.state != RequestState.FINISHED].tolist() for requests in (shown, expected)]
    assert going_on[0] == going_on[1]
    assert int(shown.number.max()) == int(expected.number.max())
    assert int(shown.finished_ns.max()) <= session.mirror.time_ns


def test_window_shows_the_recording_and_disables_engine_commands(session, make_window):
    window = make_window(session, with_views=("console",))
    settle(session)
    assert "day.mcap" in window.windowTitle()
    assert driver.current_view_text(window) == "PLAYBACK"
    assert driver.status_label(window, "state").text() == "Playback: paused"
    assert driver.status_label(window, "frames").text() == "600 frames recorded"
    for name in ("pause_engine", "resume", "reset_cache"):
        assert not window.actions_by_name[name].isEnabled()
    assert not window.docks["console"].isVisible()
    window.docks["console"].show()
    sentences = [label.text() for label in window.views["console"].findChildren(QLabel) if label.isVisible()]
    assert sentences == ["This is a recording: there is no engine to prompt."]


def test_truncated_recording_is_marked_in_the_status_bar(path, make_window, tmp_path):
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    session = Session(PlaybackSource(Recording.open(cut), is_playing=False))
    window = make_window(session)
    settle(session)
    assert "frames recorded, truncated" in driver.status_label(window, "frames").text()
    session.close()


def test_layout_of_a_playback_window_is_saved_separately(session, make_window, settings):
    window = make_window(session)
    window.close()
    assert settings.contains("playback/state")
    assert not settings.contains("window/state")


def test_space_toggles_playback(session, make_window, qtbot):
    window = make_window(session)
    window.page_map.canvas.setFocus()
    play = window.actions_by_name["play"]
    play.trigger()
    assert session.timeline.player.is_playing
    assert play.text() == "Play"  # the bar has not been refreshed yet
    window.playback.refresh()
    assert play.text() == "Pause"
    assert not driver.has_no_running_timer(window.playback)
    qtbot.keyClick(window.playback.slider, Qt.Key.Key_Space)
    assert not session.timeline.player.is_playing
    assert [key.toString() for key in play.shortcuts()] == ["Space"]


def test_slider_follows_the_position_and_seeks(session, make_window, qtbot):
    window = make_window(session)
    bar, player = window.playback, session.timeline.player
    seek(session, 4.0)
    bar.refresh()
    assert bar.slider.value() == 4000
    assert bar.time.text().startswith("0:04.0 / ")
    x = round(bar.slider.width() * 0.75)
    qtbot.mousePress(bar.slider, Qt.MouseButton.LeftButton, pos=QPoint(x, 5))
    assert player.position == pytest.approx(player.duration * 0.75, rel=0.03)
    qtbot.mouseMove(bar.slider, QPoint(0, 5))
    qtbot.mouseRelease(bar.slider, Qt.MouseButton.LeftButton, pos=QPoint(0, 5))
    settle(session)
    assert session.mirror.seq < 50
    bar.slider.setFocus()
    qtbot.keyClick(bar.slider, Qt.Key.Key_End)
    settle(session)
    assert session.mirror.seq == NUM_FRAMES


def test_playback_stops_while_the_slider_is_held(session, make_window, qtbot):
    slider, player = make_window(session).playback.slider, session.timeline.player
    player.set_speed(0.02)
    player.play()
    qtbot.mousePress(slider, Qt.MouseButton.LeftButton, pos=QPoint(slider.width() // 2, 5))
    assert not player.is_playing
    assert player.position == slider.value() / 1000
    qtbot.mouseRelease(slider, Qt.MouseButton.LeftButton, pos=QPoint(slider.width() // 2, 5))
    assert player.is_playing
    player.pause()
    settle(session)
    assert player.position == pytest.approx(slider.value() / 1000, abs=0.5)
    player.play()
    qtbot.mousePress(slider, Qt.MouseButton.LeftButton, pos=QPoint(slider.width() - 1, 5))
    qtbot.mouseRelease(slider, Qt.MouseButton.LeftButton, pos=QPoint(slider.width() - 1, 5))
    assert player.position == player.duration


def test_space_on_a_playback_button_toggles_playback_and_enter_presses_it(session, make_window, qtbot):
    window = make_window(session)
    seek(session, 0)
    start_ns = session.timeline.cursor_ns  # time of the first state, shortly after the first message of the file
    for button in window.playback.findChildren(QToolButton):
        seek(session, 3)  # seek each time: on a slow machine playback would otherwise reach the end
        stands = session.timeline.cursor_ns
        qtbot.keyClick(button, Qt.Key.Key_Space)
        assert session.timeline.player.is_playing
        qtbot.keyClick(button, Qt.Key.Key_Space)
        assert not session.timeline.player.is_playing
        assert session.timeline.cursor_ns >= stands
    first = window.playback.findChildren(QToolButton)[0]
    qtbot.keyClick(first, Qt.Key.Key_Return)
    settle(session)
    assert session.timeline.cursor_ns == start_ns < stands


def test_jump_to_an_event_shows_its_kind_and_time_in_the_status_bar(session, make_window):
    window = make_window(session)
    seek(session, 0.5)
    event = session.timeline.go_to_event(None, forward=True)
    assert event is not None
    seek(session, (event.time_ns - session.timeline.origin_ns) / 1e9 - 0.001)
    jumps = EventJumps(session.timeline, window.statusBar().showMessage)
    jumps.set_kind("")
    jumps.go_to_event(forward=True)
    message = window.statusBar().currentMessage()
    assert message.startswith(event.event.kind)
    assert clock_text(session.timeline.cursor_ns) in message
    jumps.set_kind("refused")
    jumps.go_to_event(forward=True)
    assert window.statusBar().currentMessage() == "No refusals after this moment"


def test_playback_actions_move_the_position_and_change_the_speed(session, make_window):
    window = make_window(session)
    actions, player = window.actions_by_name, session.timeline.player
    actions["to_end"].trigger()
    assert player.position == player.duration
    actions["back"].trigger()
    assert player.position == pytest.approx(player.duration - 10)
    actions["forward"].trigger()
    assert player.position == player.duration
    actions["to_start"].trigger()
    settle(session)
    assert session.mirror.seq == 0
    for _ in SPEEDS:
        actions["faster"].trigger()
    assert player.speed == SPEEDS[-1]
    window.playback.refresh()
    assert window.playback.speed.currentText() == "64×"
    window.playback.speed.activated.emit(0)
    assert player.speed == session.timeline.speed == 0.1


def test_all_chart_panels_are_drawn_after_a_seek_while_paused(session, make_window, qtbot):
    window = make_window(session, with_views=("throughput",), size=(1500, 1000))
    session.poll()
    view = window.views["throughput"]
    window.docks["throughput"].setFloating(True)
    window.docks["throughput"].resize(1000, 1500)  # all panels visible: hidden ones are not drawn
    qtbot.waitUntil(lambda: view.height() > 1200, timeout=WAIT_MS)
    view.charts.drawn.clear()
    seek(session, 6.0)
    driver.poll_until(session, lambda: set(view.charts.drawn) == set(view.charts.shown), qtbot)


def test_desktop_opens_a_recording_without_starting_an_engine(path, qapp, qtbot, tmp_path):
    desktop = Desktop(qapp, Options(theme="light"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    window = desktop.open_recording(Recording.open(path))
    load_only_views(window)
    assert window.actions_by_name["open"].isEnabled()
    assert window.supervisor is None
    qtbot.waitUntil(lambda: window.session.mirror.num_blocks == 120, timeout=WAIT_MS)
    qtbot.waitUntil(lambda: window.session.mirror.seq > 0, timeout=WAIT_MS)
    assert try_to_open(window, str(path)) is not None
    qtbot.waitUntil(lambda: len(desktop.windows) == 2, timeout=WAIT_MS)
    with qtbot.waitSignal(try_to_open(window, str(tmp_path / "nowhere.mcap")).failed, timeout=WAIT_MS):
        pass
    assert "nowhere.mcap" in driver.visible_text(window.banner)
    for opened in list(desktop.windows):
        opened.close()
        opened.deleteLater()
    desktop.close()
    desktop.deleteLater()


@pytest.mark.parametrize("content", [None, b"not a recording", b"\x89MCAP0\r\n" + b"\x06" + bytes(30)])
def test_file_that_is_no_recording_prints_one_line_and_exits_with_2(content, tmp_path, capsys):
    path = tmp_path / "odd.mcap"
    if content is not None:
        path.write_bytes(content)
    assert main(["--open", str(path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"kvscope: recording '{path}'") or f"'{path}' is not a recording" in printed
    assert len(printed.splitlines()) == 1


def test_times_are_truncated_not_rounded():
    assert time_text(7.39, 100) == "0:07.3"
    assert time_text(95.22, 95.22) == "1:35.2"
    assert time_text(59.999, 100) == "0:59.9"
    assert time_text(3727.3, 4000) == "1:02:07.3"
    assert time_text(7.3, 4000) == "0:00:07.3"


def test_long_date_is_hidden_if_the_bar_is_narrow(session, make_window, monkeypatch):
    monkeypatch.setattr("kvscope_app.playback.playback_bar.wall_text", lambda _: "2001-02-03 04:05:06.789")
    bar = make_window(session).playback
    bar.resize(640, bar.height())
    assert bar.wall.isHidden()
    bar.resize(900, bar.height())
    assert not bar.wall.isHidden()
