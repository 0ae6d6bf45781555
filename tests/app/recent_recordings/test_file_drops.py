"""Tests of files that are dropped on a window."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver

from kvscope_app.recent_recordings.file_drops import open_dropped
from kvscope_telemetry.recordings.sample import sample_recording

WAIT_MS = 120_000


@pytest.fixture
def window(session, make_window):
    """Main window; `opened` lists the names of the files that it opened."""
    opened = []
    made = make_window(session, open_recording=lambda recording: opened.append(recording.path.name))
    made.opened = opened
    return made


def mime_data_of(*paths):
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    return data


def test_dropped_recordings_are_opened_and_other_files_are_refused(window, write_recording, qtbot, tmp_path):
    data = mime_data_of(write_recording("one.mcap"), tmp_path / "photo.jpg", write_recording("two.mcap"))
    where, copy = window.rect().center(), Qt.DropAction.CopyAction
    buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(where, copy, data, buttons, keys)
    QApplication.sendEvent(window, enter)
    assert window.acceptDrops() or enter.isAccepted()
    assert window.drop_overlay.text == "Drop to open 2 recordings"
    QApplication.sendEvent(window, QDropEvent(QPointF(where), copy, data, buttons, keys))
    assert window.drop_overlay.text == ""
    qtbot.waitUntil(lambda: sorted(window.opened) == ["one.mcap", "two.mcap"], timeout=WAIT_MS)
    assert window.banner.text == "Not a recording"
    assert "photo.jpg" in driver.visible_text(window.banner)


def test_drop_of_many_files_opens_only_the_first_ones(session, make_window, tmp_path):
    window = make_window(session)
    open_dropped(window, mime_data_of(*(tmp_path / f"{number}.mcap" for number in range(12))))
    assert "first 8 of 12" in window.banner.text


def test_prompt_field_does_not_accept_dropped_files(qtbot, tmp_path):
    from kvscope_app.views.console.composer import PromptEdit

    edit = PromptEdit()
    qtbot.addWidget(edit)
    assert not edit.canInsertFromMimeData(mime_data_of(tmp_path / "one.mcap"))
    text = QMimeData()
    text.setText("hello")
    assert edit.canInsertFromMimeData(text)


def test_bundled_sample_recording_is_small():
    assert 0 < sample_recording().stat().st_size < 1_000_000
