"""The sheet "Recordings", and files dropped on a window: what a person does, on real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QItemSelectionModel, QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDesktopServices, QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QApplication
from tests.app import window_driver as driver

from kvscope_app.library.model import NAME, NOTES, PEAK, PICTURE, TAGS
from kvscope_app.library.offers import open_dropped
from kvscope_app.library.recordings_sheet import NOTHING_FOUND, NOTHING_YET, compare_two, show_recordings
from kvscope_telemetry.recordings.sample import sample_recording

WAIT_MS = 120_000


@pytest.fixture
def window(session, make_window, library):
    """Notes what it is asked to open, and to compare."""
    opened, compared = [], []
    made = make_window(
        session,
        library=library,
        open_recording=lambda recording: opened.append(recording.path.name),
        compare=lambda a, b, _: compared.append((a.path.name, b.path.name)),
    )
    made.opened, made.compared = opened, compared
    return made


@pytest.fixture
def sheet(window, library, record, qtbot):
    """With two recordings, the newer first."""
    for number, name in enumerate(("first.mcap", "second.mcap")):
        library.note(record(name, epoch=number + 1))
    made = show_recordings(window)
    wait(made, qtbot, lambda entries: len(entries) == 2 and all(entry.facts.is_known for entry in entries))
    return made


def wait(sheet, qtbot, until):
    qtbot.waitUntil(lambda: bool(until(sheet.table.model_of_list.entries)), timeout=WAIT_MS)


def select_rows(sheet, rows):
    selection = sheet.table.selectionModel()
    selection.clearSelection()
    for row in rows:
        flags = QItemSelectionModel.SelectionFlag.Select | QItemSelectionModel.SelectionFlag.Rows
        selection.select(sheet.table.proxy.index(row, 0), flags)


def names(sheet):
    return [sheet.table.proxy.entry_at(row).name for row in range(sheet.table.proxy.rowCount())]


def cell(sheet, row, column):
    return sheet.table.proxy.index(row, column)


def test_it_lists_searches_and_sorts(sheet, qtbot):
    assert sorted(names(sheet)) == ["first.mcap", "second.mcap"]
    assert cell(sheet, 0, PEAK).data().endswith("%")
    assert not cell(sheet, 0, PICTURE).data(Qt.ItemDataRole.DecorationRole).isNull()
    sheet.table.sortByColumn(NAME, Qt.SortOrder.DescendingOrder)
    assert names(sheet) == ["second.mcap", "first.mcap"]
    sheet.search.setText("FIRST synth")
    assert names(sheet) == ["first.mcap"]
    sheet.search.setText("nowhere")
    assert NOTHING_FOUND in driver.lines(sheet)


def test_words_are_edited_in_place_and_found(sheet, qtbot):
    sheet.table.sortByColumn(NAME, Qt.SortOrder.AscendingOrder)
    model = sheet.table.proxy
    assert model.flags(cell(sheet, 0, TAGS)) & Qt.ItemFlag.ItemIsEditable
    assert not model.flags(cell(sheet, 0, NAME)) & Qt.ItemFlag.ItemIsEditable
    model.setData(cell(sheet, 0, TAGS), "swap storm")
    model.setData(cell(sheet, 0, NOTES), "the third request waits")
    wait(sheet, qtbot, lambda entries: any(entry.notes and entry.tags for entry in entries))
    sheet.search.setText("storm third")
    assert names(sheet) == ["first.mcap"]


def test_enter_opens_what_is_selected(sheet, window, qtbot):
    select_rows(sheet, [0, 1])
    qtbot.keyClick(sheet.table, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: sorted(window.opened) == ["first.mcap", "second.mcap"], timeout=WAIT_MS)


def test_removing_can_be_undone(sheet, qtbot):
    select_rows(sheet, [0])
    path = Path(sheet.chosen[0].path)
    sheet.table.setFocus()
    sheet.buttons["remove"].click()
    wait(sheet, qtbot, lambda entries: len(entries) == 1)
    assert path.exists()
    assert sheet.focusWidget() is sheet.table, "and not the button that comes next"
    assert sheet.undo.isVisible()
    sheet.undo.click()
    wait(sheet, qtbot, lambda entries: len(entries) == 2)
    assert not sheet.undo.isVisible()


def test_a_missing_file_is_said_and_found_again(sheet, library, qtbot, tmp_path):
    path = tmp_path / "first.mcap"
    path.rename(tmp_path / "elsewhere.mcap")
    wait(sheet, qtbot, lambda entries: any(entry.is_missing for entry in entries))
    sheet.search.setText("first")
    select_rows(sheet, [0])
    assert "(missing)" in cell(sheet, 0, NAME).data()
    assert sheet.buttons["find"].isEnabled()
    assert not sheet.buttons["open"].isEnabled()
    library.relocate(str(path), tmp_path / "elsewhere.mcap")
    wait(sheet, qtbot, lambda entries: not any(entry.is_missing for entry in entries))


def test_two_can_be_compared_where_that_is_offered(window, library, record, qtbot):
    for number, name in enumerate(("a.mcap", "b.mcap")):
        library.note(record(name, epoch=number + 1))
    compared = []
    sheet = show_recordings(window, lambda first, second: compared.append((first.name, second.name)))
    wait(sheet, qtbot, lambda entries: len(entries) == 2)
    select_rows(sheet, [0])
    assert not sheet.buttons["compare"].isEnabled()
    select_rows(sheet, [0, 1])
    sheet.buttons["compare"].click()
    assert sorted(compared[0]) == ["a.mcap", "b.mcap"]
    sheet.close()


def test_two_are_opened_for_what_compares(sheet, window, qtbot, tmp_path):
    compare_two(window, tmp_path / "first.mcap", tmp_path / "second.mcap")
    qtbot.waitUntil(lambda: window.compared == [("first.mcap", "second.mcap")], timeout=WAIT_MS)
    compare_two(window, tmp_path / "first.mcap", tmp_path / "gone.mcap")
    qtbot.waitUntil(lambda: window.banner.text == "These recordings cannot be compared", timeout=WAIT_MS)


def test_the_folder_is_shown(sheet, monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr(QDesktopServices, "openUrl", shown.append)
    select_rows(sheet, [1])
    sheet.buttons["reveal"].click()
    assert [url.toLocalFile() for url in shown] == [str(tmp_path)]


def test_an_empty_list_says_what_it_is_for(window, qtbot):
    sheet = show_recordings(window)
    assert NOTHING_YET in driver.lines(sheet)
    assert show_recordings(window) is sheet
    sheet.reject()
    assert driver.is_at_rest(window.openers.library)


def test_in_light_colours_as_well(sheet, themes):
    themes.choose("light")
    assert not sheet.table.model_of_list.theme.is_dark


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
