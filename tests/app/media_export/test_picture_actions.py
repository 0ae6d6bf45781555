"""Tests of the actions that save or copy pictures and make videos."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QApplication, QFileDialog
from tests.app import window_driver as driver
from tests.telemetry.conftest import record_in

from kvscope_app.media_export import picture_actions
from kvscope_app.media_export.picture_actions import ask_picture, ask_video, save_picture, view_in_focus
from kvscope_app.media_export.picture_dialog import PictureDialog
from kvscope_app.media_export.video_dialog import VideoDialog
from kvscope_app.media_export.video_export import make_video
from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource

WAIT_MS = 120_000


@pytest.fixture
def window(session, make_window):
    return make_window(session)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return record_in(tmp_path_factory.mktemp("recorded"), 400, "session.mcap").path


@pytest.fixture
def playback_window(path, make_window, qtbot):
    """Main window on a recording."""
    session = Session(PlaybackSource.open(path))
    window = make_window(session)
    session.start()
    qtbot.waitUntil(lambda: session.mirror.hello is not None, timeout=WAIT_MS)
    yield window
    window.close()
    session.close()
    session.deleteLater()


def dialog_of(window, kind):
    return next(dialog for dialog in window.findChildren(kind) if dialog.isVisible())


def test_picture_actions_use_the_focused_view_or_the_dock_of_the_menu(session, make_window):
    window = make_window(session, with_views=("memory", "throughput"))
    memory, throughput = window.views["memory"], window.views["throughput"]
    window.focus_view("memory")
    assert view_in_focus(window) is memory
    window.actions_by_name["copy_picture"].trigger()
    assert QApplication.clipboard().image().size() == memory.size()
    assert "memory copied" in window.statusBar().currentMessage()
    for name, dock in window.docks.items():
        assert dock.contextMenuPolicy() is Qt.ContextMenuPolicy.ActionsContextMenu
        offered = [action.text() for action in dock.actions()]
        assert offered[:2] == ["Save picture of this view…", "Copy picture of this view"], name
    window.docks["throughput"].actions()[1].trigger()
    assert QApplication.clipboard().image().size() == throughput.size()


def test_picture_dialog_saves_with_the_chosen_look_and_remembers_it(window, tmp_path, settings):
    window.page_map.canvas.setFocus()
    window.actions_by_name["save_picture"].trigger()
    dialog = dialog_of(window, PictureDialog)
    dialog.scale.setCurrentIndex(2)
    dialog.theme.setCurrentText("light")
    dialog.captioned.setChecked(False)
    driver.click_button(dialog, "Save…")
    dialog_of(window, QFileDialog).fileSelected.emit(str(tmp_path / "x.png"))
    dialog_of(window, QFileDialog).close()
    assert QImage(str(tmp_path / "x.png")).size() == window.page_map.size() * 3
    again = ask_picture(window, window.page_map)  # the last choices are remembered
    assert (again.scale.currentIndex(), again.theme.currentText()) == (2, "light")
    assert not again.captioned.isChecked()
    again.reject()


def test_failure_to_save_a_picture_shows_the_banner(window, tmp_path):
    taken = picture_actions.RenderedPicture.of(window.page_map)
    assert not save_picture(window, "Page map", taken, str(tmp_path / "nowhere" / "x.png"))
    assert window.banner.isVisible()


def test_video_needs_a_session_with_a_history(window):
    assert ask_video(window) is None
    assert "No history" in window.statusBar().currentMessage()


def test_video_is_made_in_the_background(playback_window, tmp_path, qtbot):
    playback_window.actions_by_name["save_video"].trigger()
    dialog = dialog_of(playback_window, VideoDialog)
    dialog.first.setValue(1.0)
    dialog.last.setValue(2.0)
    dialog.format_box.setCurrentIndex(3)
    spec = dialog.spec(tmp_path / "x")
    dialog.reject()
    assert (spec.path.name, spec.suffix, spec.from_s, spec.until_s) == ("x.apng", ".apng", 1.0, 2.0)
    task = make_video(playback_window, spec)
    qtbot.waitUntil(lambda: task.work.is_finished, timeout=WAIT_MS)
    assert task.work.failure == ""
    assert spec.path.read_bytes().startswith(b"\x89PNG")
    qtbot.waitUntil(lambda: "The video is in" in playback_window.statusBar().currentMessage(), timeout=WAIT_MS)


def test_cancelled_video_leaves_no_file(playback_window, tmp_path, qtbot):
    dialog = ask_video(playback_window)
    spec = dialog.spec(tmp_path / "x.apng")
    dialog.reject()
    task = make_video(playback_window, spec)
    qtbot.waitUntil(lambda: task.work.share > 0, timeout=WAIT_MS)
    task.work.cancel()
    qtbot.waitUntil(lambda: task.work.is_finished, timeout=WAIT_MS)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("x")]


def test_video_failure_shows_the_banner_and_keeps_the_existing_file(playback_window, tmp_path, qtbot):
    dialog = ask_video(playback_window)
    spec = dialog.spec(tmp_path / "x.apng")
    dialog.reject()
    spec.path.write_text("mine")
    task = make_video(playback_window, spec)
    qtbot.waitUntil(lambda: playback_window.banner.isVisible(), timeout=WAIT_MS)
    assert "already exists" in task.work.failure
    assert spec.path.read_text() == "mine"
