"""Tests of the Recordings window, with real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PySide6.QtCore import QItemSelectionModel, Qt
from PySide6.QtGui import QDesktopServices
from tests.app import window_driver as driver

from kvscope_app.recent_recordings.recordings_model import ENGINE, LENGTH, MODEL, NAME, RECORDED, SIZE
from kvscope_app.recent_recordings.recordings_window import (
    NO_MATCH,
    NO_RECORDINGS,
    compare_two,
    show_recordings,
)

WAIT_MS = 120_000


@pytest.fixture
def window(session, make_window, tmp_path):
    """Main window that lists `tmp_path`; `opened` and `compared` are the names of the files that it opened and
    compared.
    """
    opened, compared = [], []
    made = make_window(
        session,
        open_recording=lambda recording: opened.append(recording.path.name),
        compare=lambda a, b, _: compared.append((a.path.name, b.path.name)),
    )
    made.themes.settings.change(recording_folder=str(tmp_path))
    made.opened, made.compared = opened, compared
    return made


@pytest.fixture
def recordings(window, write_recording, qtbot):
    """Recordings window that lists two files, of which the second is longer and newer."""
    write_recording("first.mcap", epoch=1)
    write_recording("second.mcap", epoch=2, num_frames=400)
    made = show_recordings(window)
    wait_until_read(made, qtbot, 2)
    return made


def wait_until_read(recordings, qtbot, number):
    """Wait until `number` files are listed and read."""

    def is_read():
        listed = recordings.table.recordings.shown
        return len(listed) == number and not any(each.is_pending for each in listed)

    qtbot.waitUntil(is_read, timeout=WAIT_MS)


def select_rows(recordings, rows):
    selection = recordings.table.selectionModel()
    selection.clearSelection()
    for row in rows:
        flags = QItemSelectionModel.SelectionFlag.Select | QItemSelectionModel.SelectionFlag.Rows
        selection.select(recordings.table.recordings.index(row, 0), flags)


def listed_names(recordings):
    return [recording.name for recording in recordings.table.recordings.shown]


def cell_text(recordings, row, column):
    return recordings.table.recordings.index(row, column).data()


def test_recordings_window_lists_the_newest_first_with_length_size_model_and_engine(recordings):
    assert listed_names(recordings) == ["second.mcap", "first.mcap"]
    assert cell_text(recordings, 0, NAME) == "second.mcap"
    assert cell_text(recordings, 0, RECORDED).startswith("20")
    assert cell_text(recordings, 0, LENGTH).endswith("s")
    assert cell_text(recordings, 0, SIZE).endswith("KiB")
    assert cell_text(recordings, 0, MODEL).startswith("simulated")
    assert cell_text(recordings, 0, ENGINE) == "kvscope simulated"
    assert "2 recordings" in driver.visible_texts(recordings)


@pytest.mark.parametrize("column", [NAME, RECORDED, LENGTH, SIZE])
def test_each_column_can_be_sorted(recordings, column):
    recordings.table.sortByColumn(column, Qt.SortOrder.AscendingOrder)
    assert listed_names(recordings) == ["first.mcap", "second.mcap"]
    recordings.table.sortByColumn(column, Qt.SortOrder.DescendingOrder)
    assert listed_names(recordings) == ["second.mcap", "first.mcap"]


def test_filter_finds_all_its_words_in_name_model_and_engine(recordings):
    recordings.filter.setText("FIRST simul kvscope")
    assert listed_names(recordings) == ["first.mcap"]
    recordings.filter.setText("nowhere")
    assert NO_MATCH in driver.visible_texts(recordings)
    recordings.filter.clear()
    assert len(listed_names(recordings)) == 2


def test_selected_recording_stays_selected_when_rows_move(recordings, qtbot):
    select_rows(recordings, [1])
    recordings.table.sortByColumn(NAME, Qt.SortOrder.AscendingOrder)
    assert [each.name for each in recordings.selected] == ["first.mcap"]
    recordings.filter.setText("second")
    assert recordings.selected == []
    assert not recordings.buttons["open"].isEnabled()
    recordings.filter.clear()
    assert recordings.table.verticalHeader().count() == 2, "the view has one row per recording"


def test_enter_opens_all_selected_recordings(recordings, window, qtbot):
    select_rows(recordings, [0, 1])
    qtbot.keyClick(recordings.table, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: sorted(window.opened) == ["first.mcap", "second.mcap"], timeout=WAIT_MS)


def test_double_click_opens_a_recording(recordings, window, qtbot):
    where = recordings.table.visualRect(recordings.table.recordings.index(1, NAME)).center()
    viewport = recordings.table.viewport()
    qtbot.mouseClick(viewport, Qt.MouseButton.LeftButton, pos=where)
    qtbot.mouseDClick(viewport, Qt.MouseButton.LeftButton, pos=where)
    qtbot.waitUntil(lambda: window.opened == ["first.mcap"], timeout=WAIT_MS)


def test_two_selected_recordings_are_compared(recordings, window, qtbot):
    assert not recordings.buttons["compare"].isEnabled()
    select_rows(recordings, [0])
    assert not recordings.buttons["compare"].isEnabled()
    select_rows(recordings, [0, 1])
    recordings.buttons["compare"].click()
    qtbot.waitUntil(lambda: window.compared == [("second.mcap", "first.mcap")], timeout=WAIT_MS)


def test_comparison_with_a_missing_file_says_why_not(recordings, window, qtbot, tmp_path):
    compare_two(window, str(tmp_path / "first.mcap"), str(tmp_path / "gone.mcap"))
    qtbot.waitUntil(lambda: window.banner.text == "These recordings cannot be compared", timeout=WAIT_MS)


def test_compare_button_is_hidden_if_the_window_cannot_compare_recordings(session, make_window):
    recordings = show_recordings(make_window(session, open_recording=lambda _: None))
    assert not recordings.buttons["compare"].isVisible()
    recordings.close()


def test_folder_is_shown_in_the_file_manager(recordings, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(QDesktopServices, "openUrl", shown.append)
    recordings.buttons["show_folder"].click()
    assert [url.toLocalFile() for url in shown] == [str(tmp_path)]


def test_new_file_appears_and_the_selection_stays(recordings, write_recording, qtbot):
    select_rows(recordings, [1])
    third = write_recording("third.mcap", epoch=3)
    wait_until_read(recordings, qtbot, 3)
    assert listed_names(recordings)[0] == "third.mcap"
    assert [each.name for each in recordings.selected] == ["first.mcap"]
    third.unlink()
    wait_until_read(recordings, qtbot, 2)


def test_unreadable_and_unfinished_files_are_marked(recordings, write_recording, qtbot, tmp_path):
    (tmp_path / "broken.mcap").write_bytes(b"not at all")
    os.rename(tmp_path / "first.mcap", tmp_path / "first.mcap.part")
    wait_until_read(recordings, qtbot, 3)
    shown = {cell_text(recordings, row, NAME) for row in range(3)}
    assert shown == {"broken.mcap  (cannot be read)", "first.mcap  (not ended)", "second.mcap"}


def test_recordings_window_lists_the_chosen_folder_again_at_the_next_start(
    recordings, window, qtbot, tmp_path, write_recording
):
    other = tmp_path / "other"
    other.mkdir()
    recordings.list_folder(str(other))
    qtbot.waitUntil(lambda: NO_RECORDINGS in driver.visible_texts(recordings), timeout=WAIT_MS)
    with qtbot.waitSignal(recordings.destroyed, timeout=WAIT_MS):
        recordings.close()
    again = show_recordings(window)
    assert Path(again.folder.text()) == other
    again.list_folder(str(tmp_path))
    wait_until_read(again, qtbot, 2)
    assert window.themes.settings.values.listed_folder == "", "the default folder is not stored"


def test_recordings_window_says_that_its_folder_no_longer_exists(window, qtbot, tmp_path):
    window.themes.settings.change(recording_folder=str(tmp_path / "gone"))
    recordings = show_recordings(window)
    reason = "The folder cannot be read: No such file or directory"
    qtbot.waitUntil(lambda: reason in driver.visible_texts(recordings), timeout=WAIT_MS)


def test_closed_recordings_window_has_no_running_timer(window, qtbot):
    recordings = show_recordings(window)
    assert show_recordings(window) is recordings
    recordings.reject()
    assert driver.has_no_running_timer(recordings)


def test_recordings_window_follows_a_changed_theme(recordings, themes):
    themes.choose("light")
    assert not recordings.table.recordings.theme.is_dark


def test_recordings_window_never_changes_a_listed_recording(recordings, window, qtbot, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.glob("*.mcap")}
    select_rows(recordings, [0, 1])
    qtbot.keyClick(recordings.table, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: len(window.opened) == 2, timeout=WAIT_MS)
    qtbot.keyClick(recordings.table, Qt.Key.Key_Delete)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.mcap")} == before
