"""Tests of the list of recent recordings and of the menu that opens them."""

from __future__ import annotations

import threading

import pytest
from PySide6.QtWidgets import QMenu

from kvscope_app.recent_recordings import recent_menu
from kvscope_app.recent_recordings.recent_files import MAX_RECENT, add_recent, existing_file, recording_folder
from kvscope_app.recent_recordings.recent_menu import RecentMenu
from kvscope_app.settings.settings_store import SettingsStore, read_settings

WAIT_MS = 120_000


@pytest.fixture
def window(session, make_window):
    """Main window; `opened` lists the names of the files that it opened."""
    opened = []
    made = make_window(session, open_recording=lambda recording: opened.append(recording.path.name))
    made.opened = opened
    return made


@pytest.fixture
def show_recent_menu(window):
    """Return a function that shows the *Open recent* menu and returns it."""

    def shown():
        found = window.findChild(RecentMenu)
        found.aboutToShow.emit()
        return found

    return shown


def action_texts(show_recent_menu: QMenu) -> list[str]:
    return [action.text() for action in show_recent_menu.actions() if not action.isSeparator()]


def test_recording_added_to_recent_files_again_is_listed_once(qapp, settings):
    store = SettingsStore(settings)
    for path in ("/a.mcap", "/b.mcap", "/a.mcap.part"):
        add_recent(store, path)
    assert store.values.recent_recordings == ("/a.mcap", "/b.mcap")
    assert read_settings(settings).recent_recordings == ("/a.mcap", "/b.mcap")


def test_recordings_of_two_processes_are_all_listed(qapp, settings):
    one, other = SettingsStore(settings), SettingsStore(settings)
    add_recent(one, "/one.mcap")
    add_recent(other, "/other.mcap")
    one.reload()
    assert one.values.recent_recordings == other.values.recent_recordings == ("/other.mcap", "/one.mcap")


def test_oldest_recording_is_dropped_from_a_full_list(qapp, settings):
    store = SettingsStore(settings)
    for number in range(MAX_RECENT + 3):
        add_recent(store, f"/{number}.mcap")
    found = store.values.recent_recordings
    assert (len(found), found[0], found[-1]) == (MAX_RECENT, f"/{MAX_RECENT + 2}.mcap", "/3.mcap")


def test_file_that_is_being_written_is_found_by_its_final_name(tmp_path):
    part = tmp_path / "one.mcap.part"
    part.write_bytes(b"")
    assert existing_file(str(tmp_path / "one.mcap")) == str(part)
    assert existing_file(str(tmp_path / "gone.mcap")) == ""


def test_recording_folder_is_the_last_used_one_or_the_documents_folder(qapp, settings, tmp_path):
    store = SettingsStore(settings)
    assert recording_folder(store.values).is_absolute()
    store.change(recording_folder=str(tmp_path))
    assert recording_folder(store.values) == tmp_path


def test_menu_opens_a_recent_recording_and_disables_a_missing_one(
    window, show_recent_menu, write_recording, qtbot, tmp_path
):
    settings = window.themes.settings
    add_recent(settings, tmp_path / "gone & lost.mcap")
    add_recent(settings, write_recording("one.mcap"))
    shown = show_recent_menu()
    assert action_texts(shown) == ["one.mcap", "gone && lost.mcap", "Clear list"]
    there, gone, _, _ = shown.actions()
    assert there.isEnabled()
    assert not gone.isEnabled()
    assert "The file is missing." in gone.toolTip()
    there.trigger()
    qtbot.waitUntil(lambda: window.opened == ["one.mcap"], timeout=WAIT_MS)


def test_menu_stays_usable_while_a_disk_does_not_answer(window, show_recent_menu, write_recording, qtbot, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(recent_menu, "existing_file", lambda path: answers.wait(60) and path)
    add_recent(window.themes.settings, write_recording("one.mcap"))
    try:
        shown = show_recent_menu()
        assert action_texts(shown) == ["one.mcap", "Clear list"]
        assert shown.actions()[0].isEnabled()
    finally:
        answers.set()


def test_list_of_recent_recordings_is_empty_after_clear_list(window, show_recent_menu):
    add_recent(window.themes.settings, "/one.mcap")
    show_recent_menu().actions()[-1].trigger()
    shown = show_recent_menu()
    assert action_texts(shown) == ["No recent recordings", "Clear list"]
    assert not any(action.isEnabled() for action in shown.actions() if not action.isSeparator())
    assert window.themes.settings.values.recent_recordings == ()
