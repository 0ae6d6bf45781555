"""Tests of recording and time actions in a window, with real history processes and sockets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QFileDialog, QLabel
from tests.app import window_driver as driver
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_app.playback.playback_actions import STEPPED_EVENT_KINDS
from kvscope_app.recording.crashed_histories import CrashedHistories
from kvscope_app.recording.history_dialogs import HistoryLengthDialog, SaveHistoryDialog
from kvscope_app.recording.recording_actions import (
    free_path,
    minutes_question,
    proposed_minutes,
    record,
    recording_menu,
    save_last_seconds,
    stop_recording,
)
from kvscope_app.session.recording.disk_history import DiskHistory
from kvscope_app.session.recording.rings import find_orphaned_rings, make_ring, ring_limits, rings_folder
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_client import RingClient

WAIT_MS = 120_000


def wait_for_seek(session, qtbot):
    qtbot.waitUntil(
        lambda: (
            session.timeline.player is not None
            and session.timeline.cursor.viewpoint.has_state
            and not session.timeline.cursor.is_seeking
            and not session.timeline.cursor._playback._spans  # and the updates found there are applied
        ),
        timeout=WAIT_MS,
    )


def test_time_actions_seek_step_and_go_live(window, qtbot):
    actions, session = window.actions_by_name, window.session
    window.playback.refresh()
    assert window.playback.slider.isEnabled()
    assert not actions["to_end"].isEnabled()
    actions["play"].trigger()
    assert session.timeline.is_paused
    assert actions["play"].text() == "Play"
    assert "behind" in driver.current_view_text(window)
    at_ns = session.timeline.cursor_ns
    # otherwise one second forward from one second ago would be live
    qtbot.waitUntil(lambda: session.timeline.behind_seconds > 0.3, timeout=WAIT_MS)
    for name, expected_s in (("back_little", -1.0), ("forward_little", 0.0)):
        actions[name].trigger()
        wait_for_seek(session, qtbot)
        assert (session.timeline.cursor_ns - at_ns) / 1e9 == pytest.approx(expected_s, abs=0.3)
    first_ns = session.timeline.range_ns[0]  # the oldest data may be deleted meanwhile
    actions["to_start"].trigger()
    wait_for_seek(session, qtbot)
    assert first_ns - 1000 <= session.timeline.cursor_ns <= session.timeline.range_ns[0] + 1000
    for name, num_frames in (("frame_forward", 1), ("frame_forward", 1), ("frame_back", -1)):
        seq = session.mirror.seq
        actions[name].trigger()
        qtbot.waitUntil(lambda seq=seq, by=num_frames: session.mirror.seq == seq + by, timeout=WAIT_MS)
    for kind in STEPPED_EVENT_KINDS:
        actions[f"events_{kind or 'all'}"].trigger()
        assert actions[f"events_{kind or 'all'}"].isChecked()
    for name in ("event_next", "event_before", "back", "slower", "faster"):
        actions[name].trigger()
    assert session.timeline.speed == 1.0
    actions["play"].trigger()
    assert session.timeline.is_playing
    assert actions["play"].text() == "Pause" or (window.playback.refresh(), actions["play"].text())[1] == "Pause"
    qtbot.waitUntil(lambda: (actions["forward"].trigger(), not session.timeline.is_paused)[1], timeout=WAIT_MS)
    assert session.mirror is session.live_mirror


def test_home_key_on_the_slider_pauses_in_the_past_and_end_key_goes_live(window, qtbot):
    slider, session = window.playback.slider, window.session
    window.playback.refresh()  # the history may have become available together with the overview
    slider.setFocus()
    qtbot.keyClick(slider, Qt.Key.Key_Home)
    assert session.timeline.is_paused
    wait_for_seek(session, qtbot)
    assert window.playback.wall.text().count(":") == 2

    def is_live_at_the_end():
        """Refresh and press End; repeat, because the end moves on after each refresh."""
        window.playback.refresh()
        qtbot.keyClick(slider, Qt.Key.Key_End)
        return not session.timeline.is_paused

    qtbot.waitUntil(is_live_at_the_end, timeout=WAIT_MS)


def test_playback_bar_is_disabled_before_there_is_a_history(session, make_window):
    window = make_window(session)
    assert window.playback.isVisible()
    assert not window.playback.slider.isEnabled()
    for name in ("back", "frame_back", "to_start", "event_before"):
        assert not window.actions_by_name[name].isEnabled()
    assert window.actions_by_name["play"].isEnabled()


def test_recording_shows_a_dot_and_stops_with_a_complete_file(window, qtbot, tmp_path):
    label, action = driver.status_label(window, "recording"), window.actions_by_name["record"]
    assert not action.isChecked()
    record(window, str(tmp_path / "now"))
    window.status_bar.refresh()
    assert label.text().startswith("● 0:")
    assert label.text().endswith("now.mcap")
    assert str(tmp_path / "now.mcap") in label.toolTip()
    assert (action.text(), action.isChecked()) == ("Stop recording", True)
    assert driver.find_button(driver.menu_bar_corner(window), "Start recording…").isChecked(), (
        "the button in the menu bar shows the recording"
    )
    qtbot.waitUntil(lambda: window.session.disk_history.recorder.writer.num_written > 5, timeout=WAIT_MS)
    action.trigger()
    qtbot.waitUntil(lambda: (tmp_path / "now.mcap").exists(), timeout=WAIT_MS)
    window.status_bar.refresh()
    assert label.text() == ""
    assert (action.text(), action.isChecked()) == ("Start recording…", False)
    qtbot.waitUntil(lambda: "now.mcap" in window.statusBar().currentMessage(), timeout=WAIT_MS)
    assert Recording.open(tmp_path / "now.mcap").info.is_complete


def test_recording_is_listed_as_recent_while_it_is_written(window, qtbot, tmp_path):
    record(window, str(tmp_path / "now"))
    assert window.themes.settings.values.recent_recordings == (str(tmp_path / "now.mcap"),)
    save_last_seconds(window, 60.0, str(tmp_path / "last"))
    recent = (str(tmp_path / "last.mcap"), str(tmp_path / "now.mcap"))
    qtbot.waitUntil(lambda: window.themes.settings.values.recent_recordings == recent, timeout=WAIT_MS)
    stop_recording(window)


def test_recording_in_the_status_bar_can_be_clicked_to_stop_it(window, qtbot, tmp_path):
    record(window, str(tmp_path / "now"))
    window.status_bar.refresh()
    window.status_bar.recording_clicked.disconnect()  # a menu would grab the keyboard
    with qtbot.waitSignal(window.status_bar.recording_clicked, timeout=WAIT_MS):
        qtbot.mouseClick(driver.status_label(window, "recording"), Qt.MouseButton.LeftButton)
    path, copy, stop = recording_menu(window).actions()
    assert (path.text(), copy.text(), stop.text()) == (str(tmp_path / "now.mcap"), "Copy path", "Stop recording")
    stop.trigger()
    qtbot.waitUntil(lambda: (tmp_path / "now.mcap").exists(), timeout=WAIT_MS)


def test_record_action_is_not_checked_while_the_file_dialog_asks(window):
    action = window.actions_by_name["record"]
    action.trigger()
    assert not action.isChecked()
    window.findChild(QFileDialog).reject()
    assert not action.isChecked()


def test_unusable_recording_path_is_reported(window, qtbot, tmp_path):
    record(window, str(tmp_path / "no" / "such" / "folder.mcap"))
    assert "Recording failed" in window.banner.text
    window.banner.hide()
    record(window, str(tmp_path / ("x" * 300)))
    assert "Recording failed" in window.banner.text
    assert "File name too long" in window.banner.accessibleName()
    window.banner.hide()
    task = save_last_seconds(window, 1.0, str(tmp_path / "no" / "such" / "folder.mcap"))
    assert task is not None
    qtbot.waitUntil(lambda: "history could not be saved" in window.banner.text.lower(), timeout=WAIT_MS)


def test_save_history_asks_for_minutes_and_writes_them(window, qtbot, tmp_path):
    window.actions_by_name["keep_last"].trigger()
    dialog = window.findChild(SaveHistoryDialog)
    assert driver.visible_text(dialog).startswith("Save the last … minutes (")
    dialog.accept()
    files = window.findChild(QFileDialog)
    assert files.selectedFiles()[0].endswith(".mcap")
    files.reject()
    save_last_seconds(window, 1.0, str(tmp_path / "kept.mcap"))
    qtbot.waitUntil(lambda: "kept.mcap" in window.statusBar().currentMessage(), timeout=WAIT_MS)
    assert 0.5 < Recording.open(tmp_path / "kept.mcap").info.duration_s < 1.6


def test_offered_minutes_reach_back_to_the_time_shown():
    assert [proposed_minutes(10.0, ago) for ago in (0.0, 5.0, 9.9)] == [2.0, 5.5, 10.0]
    assert proposed_minutes(0.4, 0.0) == 0.4
    assert minutes_question(10.0, 5.0).startswith(
        "What is shown was 5.0 minutes ago.\nSave the last … minutes (10.0 available)"
    )


def test_history_before_a_full_disk_is_kept_and_recording_resumes(window, qtbot, monkeypatch):
    monkeypatch.setattr(RingClient, "num_bytes", 5_000)
    monkeypatch.setattr(DiskHistory, "failure", "No space left on device")
    with qtbot.waitSignal(window.session.history_failed, timeout=WAIT_MS) as signal:
        pass
    assert signal.args == ["History is not being recorded from here on: No space left on device"]
    monkeypatch.setattr(DiskHistory, "failure", "")
    with qtbot.waitSignal(window.session.noticed, timeout=WAIT_MS) as signal:
        pass
    assert signal.args == ["History is being recorded again"]


def test_save_history_reports_a_full_disk_instead_of_asking_for_minutes(window, qtbot, monkeypatch):
    monkeypatch.setattr(RingClient, "num_bytes", 0)
    monkeypatch.setattr(DiskHistory, "failure", "No space left on device")
    with qtbot.waitSignal(window.session.history_failed, timeout=WAIT_MS):
        pass
    assert window.banner.text == "History is not being recorded: No space left on device"
    window.banner.hide()
    window.actions_by_name["keep_last"].trigger()
    assert window.banner.text == "History is not being recorded: No space left on device"
    assert not window.findChildren(SaveHistoryDialog)


def test_proposed_recording_path_does_not_exist(window, tmp_path):
    assert free_path(window).suffix == ".mcap"
    assert not free_path(window).exists()


def test_history_limits_are_shown_and_changed(window, settings):
    window.actions_by_name["kept_bounds"].trigger()
    dialog = window.findChild(HistoryLengthDialog)
    assert (dialog.minutes.value(), dialog.megabytes.value()) == ring_limits(settings) == (10, 512)
    assert any("Now:" in label.text() for label in dialog.findChildren(QLabel))
    dialog.minutes.setValue(3)
    dialog.megabytes.setValue(100)
    dialog.accept()
    assert dialog.result() == QDialog.DialogCode.Accepted
    assert ring_limits(settings) == (3, 100)
    assert window.session.disk_history.ring.bounds.max_seconds == 180
    assert window.session.disk_history.ring.bounds.max_bytes == 100 << 20


def test_history_of_a_crashed_session_can_be_opened_or_discarded(window, settings, qtbot, qapp):
    left = make_ring(settings)
    engine = SimulatedEngine(num_blocks=60, num_running=3, epoch=77)
    for message in (engine.hello, engine.snapshot(), *(engine.advance() for _ in range(30))):
        left.write(message, wait=True)
    left.close(keep=True)
    shown = []
    offer = CrashedHistories(window, lambda: [window], shown.append)
    offer.start()
    qtbot.waitUntil(lambda: "ended unexpectedly" in window.banner.text, timeout=WAIT_MS)
    driver.click_button(window.banner, "Open")
    qtbot.waitUntil(lambda: bool(shown), timeout=WAIT_MS)
    assert isinstance(shown[0], Recording)
    assert shown[0].info.num_frames == 30
    assert window.banner.text == ""
    found = find_orphaned_rings()
    qtbot.waitUntil(lambda: found.is_finished, timeout=WAIT_MS)
    offer.discard_rings(found.result.kept)
    qtbot.waitUntil(
        lambda: list(rings_folder().iterdir()) == [window.session.disk_history.ring.folder], timeout=WAIT_MS
    )


def test_old_history_of_crashed_sessions_is_deleted_and_reported(window, settings, qtbot):
    """History that ended a week before the newest one is too old."""
    engine = SimulatedEngine(num_blocks=60, num_running=3, epoch=77)
    left = [make_ring(settings) for _ in range(2)]
    for ring, days in zip(left, (8, 0), strict=True):
        hello = replace(engine.hello, wall_time_ns=engine.hello.wall_time_ns - days * 24 * 3600 * 10**9)
        for message in (hello, replace(engine.snapshot(), hello=hello), *(engine.advance() for _ in range(30))):
            ring.write(message, wait=True)
        ring.close(keep=True)
    CrashedHistories(window, lambda: [window], lambda recorded: None).start()
    qtbot.waitUntil(lambda: "1 crashed session deleted" in window.banner.accessibleName(), timeout=WAIT_MS)
    assert set(rings_folder().iterdir()) == {window.session.disk_history.ring.folder, left[1].folder}
