"""Tests of windows with linked times: navigation in the active window moves the others."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSettings
from PySide6.QtWidgets import QLabel
from tests.app.compare.conftest import BEGAN_NS, write_recording
from tests.app.window_driver import load_only_views
from tests.simulated_engine.command import COMMAND

from kvscope_app.command_line import Options
from kvscope_app.desktop import Desktop
from kvscope_app.engine_launcher.engine_process import EngineProcess
from kvscope_telemetry.recordings.reader import Recording

WAIT_MS = 120_000
SECOND_NS = 1_000_000_000
DAY_NS = 86_400 * SECOND_NS
SIMULATED = [*COMMAND, "--endpoint", "{endpoint}", "--blocks", "300"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Two recordings that overlap in time, the second starting a second later and shorter, and one of the next day."""
    folder = tmp_path_factory.mktemp("recordings")
    return (
        write_recording(folder / "first.mcap", 700, 120),
        write_recording(folder / "second.mcap", 250, 120, wall_ns=BEGAN_NS + SECOND_NS),
        write_recording(folder / "next_day.mcap", 700, 120, wall_ns=BEGAN_NS + DAY_NS),
    )


@pytest.fixture
def desktop(qapp, tmp_path):
    made = Desktop(qapp, Options(theme="dark"), QSettings(str(tmp_path / "s.ini"), QSettings.Format.IniFormat))
    yield made
    for window in list(made.windows):
        window.close()
    made.close()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    made.deleteLater()


@pytest.fixture
def open_paused(desktop, qtbot):
    """Return a function that opens paused windows on recordings and waits for the given views."""

    def open_them(*paths, with_views=()):
        made = [desktop.open_recording(Recording.open(path), at_s=0.5) for path in paths]
        for window in made:
            load_only_views(window, with_views)
        for window in made:
            qtbot.waitUntil(lambda window=window: {*with_views} <= {*window.views}, timeout=WAIT_MS)
            qtbot.waitUntil(lambda window=window: window.session.mirror.hello is not None, timeout=WAIT_MS)
        return made

    return open_them


def activate(window, qtbot):
    """Activate `window`."""
    with qtbot.waitActive(window, timeout=WAIT_MS):
        window.raise_()
        window.activateWindow()


def cursor_seconds(window):
    """Return the cursor's time in seconds since the start of the first recording."""
    return (window.session.timeline.cursor_ns - BEGAN_NS) / 1e9


def wait_for_cursor(window, wanted_s, qtbot):
    qtbot.waitUntil(lambda: abs(cursor_seconds(window) - wanted_s) < 0.05, timeout=WAIT_MS)


def status_texts(window):
    """Return the texts in the status bar."""
    return [label.text() for label in window.statusBar().findChildren(QLabel)]


def link_times(window, qtbot):
    activate(window, qtbot)
    window.actions_by_name["link_times"].trigger()


def test_linked_windows_of_overlapping_recordings_show_the_same_time(open_paused, paths, qtbot):
    first, second = open_paused(*paths[:2])
    link_times(first, qtbot)
    assert all(window.actions_by_name["link_times"].isChecked() for window in (first, second))
    first.session.timeline.go_to(BEGAN_NS + 2 * SECOND_NS)
    wait_for_cursor(second, 2, qtbot)
    activate(second, qtbot)
    second.session.timeline.go_to(BEGAN_NS + 3 * SECOND_NS)
    wait_for_cursor(first, 3, qtbot)


def test_linked_recordings_without_overlap_are_aligned_by_their_starts(open_paused, paths, qtbot):
    first, next_day = open_paused(paths[0], paths[2])
    link_times(first, qtbot)
    first.session.timeline.go_to(BEGAN_NS + 4 * SECOND_NS)
    wait_for_cursor(next_day, 86_400 + 4, qtbot)
    assert any("by their starts" in words for words in status_texts(next_day))


def test_linked_window_whose_recording_is_shorter_stays_at_the_end_of_its_recording(open_paused, paths, qtbot):
    first, second = open_paused(*paths[:2])
    link_times(first, qtbot)
    first.session.timeline.go_to(BEGAN_NS + 9 * SECOND_NS)
    end_ns = second.session.timeline.range_ns[1]
    qtbot.waitUntil(lambda: abs(second.session.timeline.cursor_ns - end_ns) < SECOND_NS // 20, timeout=WAIT_MS)
    assert any("nothing was recorded at this time" in words for words in status_texts(second))
    activate(second, qtbot)  # activating the window moves no cursor
    qtbot.wait(200)
    wait_for_cursor(first, 9, qtbot)


def test_linked_windows_play_at_the_same_speed_and_pause_together(open_paused, paths, qtbot):
    first, second = open_paused(*paths[:2])
    link_times(first, qtbot)
    first.session.timeline.go_to(BEGAN_NS + round(1.2 * SECOND_NS))
    first.session.timeline.set_speed(0.5)
    first.session.timeline.play()
    follower = second.session.timeline
    qtbot.waitUntil(lambda: follower.is_playing and follower.speed == 0.5, timeout=WAIT_MS)
    activate(second, qtbot)
    second.session.timeline.pause()
    qtbot.waitUntil(lambda: not first.session.timeline.is_playing, timeout=WAIT_MS)
    wait_for_cursor(first, cursor_seconds(second), qtbot)


def test_linked_windows_share_the_visible_range_and_the_selection(open_paused, paths, qtbot):
    names = ("timeline", "heatmap")
    first, second = open_paused(*paths[:2], with_views=names)
    link_times(first, qtbot)
    for window in (first, second):
        for name in names:
            window.docks[name].show()
            window.docks[name].raise_()
            window.views[name].refresh()
    first.views["heatmap"].frame.zoom(4, 100)
    zoomed = first.session.timeline.shared_zoom.span
    assert zoomed is not None
    assert second.session.timeline.shared_zoom.span == zoomed
    first.session.timeline.shared_zoom.back()
    assert second.session.timeline.shared_zoom.span is None
    first.session.selection.select_block(11)
    number = int(first.session.mirror.requests.number[0])
    first.session.selection.select_request(number)
    assert (second.session.selection.block, second.session.selection.request) == (11, number)


def test_unlinked_windows_move_independently(open_paused, paths, qtbot):
    first, second = open_paused(*paths[:2])
    link_times(first, qtbot)
    first.session.timeline.go_to(BEGAN_NS + 2 * SECOND_NS)
    wait_for_cursor(second, 2, qtbot)
    link_times(second, qtbot)
    assert not first.actions_by_name["link_times"].isChecked()
    first.session.timeline.go_to(BEGAN_NS + 4 * SECOND_NS)
    qtbot.wait(200)
    wait_for_cursor(second, 2, qtbot)


def test_link_action_is_disabled_for_a_single_window(open_paused, paths, qtbot, desktop):
    first, second = open_paused(*paths[:2])
    link_times(first, qtbot)
    second.close()
    action = first.actions_by_name["link_times"]
    qtbot.waitUntil(lambda: not action.isEnabled() and not action.isChecked(), timeout=WAIT_MS)


def test_linked_live_windows_pause_and_go_live_together(desktop, qtbot):
    processes = [EngineProcess(command=SIMULATED) for _ in range(2)]
    try:
        windows = []
        for process in processes:
            process.start()
            windows.append(desktop.open_window(process.endpoint))
            load_only_views(windows[-1])
        for window in windows:
            qtbot.waitUntil(lambda window=window: window.session.timeline.range_ns is not None, timeout=WAIT_MS)
        first, second = windows
        link_times(first, qtbot)
        qtbot.wait(1500)
        first.session.timeline.pause()
        leader, follower = first.session.timeline, second.session.timeline
        qtbot.waitUntil(lambda: follower.is_paused and not follower.is_playing, timeout=WAIT_MS)
        qtbot.waitUntil(lambda: abs(follower.cursor_ns - leader.cursor_ns) < SECOND_NS // 10, timeout=WAIT_MS)
        first.session.timeline.go_live()
        qtbot.waitUntil(lambda: not second.session.timeline.is_paused, timeout=WAIT_MS)
    finally:
        for window in list(desktop.windows):
            window.close()
        for process in processes:
            process.close()
