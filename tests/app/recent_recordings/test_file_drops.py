"""Files that are dropped on a window."""

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
    """Its `opened` are the names of the files that it opened."""
    opened = []
    made = make_window(session, open_recording=lambda recording: opened.append(recording.path.name))
    made.opened = opened
    return made


def urls(*paths):
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    return data


def test_dropped_recordings_are_opened_and_others_refused_in_a_line(window, record, qtbot, tmp_path):
    data = urls(record("one.mcap"), tmp_path / "photo.jpg", record("two.mcap"))
    where, copy = window.rect().center(), Qt.DropAction.CopyAction
    buttons, keys = Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    enter = QDragEnterEvent(where, copy, data, buttons, keys)
    QApplication.sendEvent(window, enter)
    assert window.acceptDrops() or enter.isAccepted()
    assert window.drop_sign.text == "Drop to open 2 recordings"
    QApplication.sendEvent(window, QDropEvent(QPointF(where), copy, data, buttons, keys))
    assert window.drop_sign.text == ""
    qtbot.waitUntil(lambda: sorted(window.opened) == ["one.mcap", "two.mcap"], timeout=WAIT_MS)
    assert window.banner.text == "Not a recording"
    assert "photo.jpg" in driver.text(window.banner)


def test_a_drop_of_many_opens_some(session, make_window, tmp_path):
    window = make_window(session)
    open_dropped(window, urls(*(tmp_path / f"{number}.mcap" for number in range(12))))
    assert "first 8 of 12" in window.banner.text


def test_the_prompt_leaves_dropped_files_to_the_window(qtbot, tmp_path):
    from kvscope_app.views.console.composer import PromptEdit

    edit = PromptEdit()
    qtbot.addWidget(edit)
    assert not edit.canInsertFromMimeData(urls(tmp_path / "one.mcap"))
    text = QMimeData()
    text.setText("hello")
    assert edit.canInsertFromMimeData(text)


def test_the_sample_is_there_and_small():
    assert 0 < sample_recording().stat().st_size < 1_000_000
