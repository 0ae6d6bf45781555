"""The list of recordings: what is noted is looked into, shared, found again, and kept where nothing can be written."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing

import pytest

from kvscope_app.library.entry import UNTOLD, Entry, Facts
from kvscope_app.library.file_facts import look_into
from kvscope_app.library.library import Library
from kvscope_app.library.model import COLUMNS, PREEMPTIONS, REQUESTS
from kvscope_app.library.place import library_folder, note_paths
from kvscope_app.library.store import FILE_NAME, LibraryStore
from kvscope_app.look.number_text import NOTHING
from kvscope_telemetry.errors import BadInput

WAIT_MS = 120_000


def watch(library, qtbot, until):
    """Wait until `until` holds of the entries."""
    library.watch()
    try:
        qtbot.waitUntil(lambda: bool(until(library.status.entries)), timeout=WAIT_MS)
    finally:
        library.unwatch()
    return library.status.entries


def is_known(entries):
    return bool(entries) and all(entry.facts.is_known or entry.problem for entry in entries)


def test_what_is_noted_is_looked_into(library, record, qtbot):
    path = record("one.mcap")
    library.note(path)
    (entry,) = watch(library, qtbot, is_known)
    assert entry.path == str(path)
    assert entry.facts.model.startswith("synthetic")
    assert entry.facts.num_bytes == path.stat().st_size
    assert 0 < entry.facts.peak_usage <= 1
    assert entry.facts.requests > 0
    assert entry.facts.is_complete
    assert entry.picture.startswith(b"\x89PNG")


def test_nothing_is_looked_into_on_the_callers_thread(library, record, qtbot, monkeypatch):
    threads = set()

    def look(path, watch):
        threads.add(threading.current_thread())
        return look_into(path, watch)

    monkeypatch.setattr("kvscope_app.library.file_facts.look_into", look)
    library.note(record("one.mcap"))
    watch(library, qtbot, is_known)
    assert threads
    assert threading.main_thread() not in threads


def test_two_desktops_see_what_the_other_writes(library, record, qtbot, tmp_path):
    other = Library(tmp_path / "library")
    try:
        path = record("one.mcap")
        library.note(path)
        watch(other, qtbot, is_known)
        other.set_notes(str(path), "slow after 12 s")
        other.set_tags(str(path), "swap,  slow swap")
        (entry,) = watch(library, qtbot, lambda entries: entries and entries[0].tags)
        assert (entry.notes, entry.tags) == ("slow after 12 s", "swap slow")
    finally:
        other.close()


def test_what_was_removed_comes_back_with_its_words(library, record, qtbot):
    path = str(record("one.mcap"))
    library.note(path)
    library.set_notes(path, "keep me")
    watch(library, qtbot, is_known)
    library.remove([path])
    watch(library, qtbot, lambda entries: not entries)
    library.restore([path])
    (entry,) = watch(library, qtbot, lambda entries: entries)
    assert entry.notes == "keep me"


def test_a_moved_file_is_found_when_it_is_opened_from_its_new_place(library, record, qtbot, tmp_path):
    path = record("one.mcap")
    library.note(path)
    library.set_notes(str(path), "mine")
    watch(library, qtbot, is_known)
    path.rename(tmp_path / "two.mcap")
    (entry,) = watch(library, qtbot, lambda entries: entries[0].is_missing)
    assert entry.facts.is_known
    library.note(tmp_path / "two.mcap")
    (entry,) = watch(library, qtbot, lambda entries: len(entries) == 1 and not entries[0].is_missing)
    assert (entry.name, entry.notes) == ("two.mcap", "mine")


def test_a_missing_file_is_not_taken_for_another(library, record, qtbot):
    path, other = record("one.mcap"), record("other.mcap", epoch=8)
    library.note(path)
    watch(library, qtbot, is_known)
    path.unlink()
    library.watch()
    try:
        with qtbot.waitSignal(library.failed, timeout=WAIT_MS) as failed:
            library.relocate(str(path), other)
        assert "is not the missing recording 'one.mcap'" in failed.args[0]
    finally:
        library.unwatch()


def test_a_job_that_breaks_ends_no_other(library, record, qtbot, monkeypatch):
    def broken(path, watch):
        raise ZeroDivisionError("of a codec")

    path = record("one.mcap")
    library.note(path)
    watch(library, qtbot, is_known)
    monkeypatch.setattr("kvscope_app.library.file_facts.look_into", broken)
    library.watch()
    try:
        with qtbot.waitSignal(library.failed, timeout=WAIT_MS) as failed:
            library.relocate(str(path), record("two.mcap"))
    finally:
        library.unwatch()
    assert "ZeroDivisionError('of a codec')" in failed.args[0]
    library.set_tags(str(path), "still kept")
    watch(library, qtbot, lambda entries: entries[0].tags == "still kept")


def test_a_list_that_cannot_be_read_is_told_and_looked_at_again(library, record, qtbot, monkeypatch):
    path = record("one.mcap")
    library.note(path)
    watch(library, qtbot, is_known)
    entries = LibraryStore.entries
    monkeypatch.setattr(LibraryStore, "entries", lambda store: 1 // 0)
    library.watch()
    qtbot.waitUntil(lambda: "cannot be read" in library.status.trouble, timeout=WAIT_MS)
    assert [entry.path for entry in library.status.entries] == [str(path)]
    monkeypatch.setattr(LibraryStore, "entries", entries)
    qtbot.waitUntil(lambda: not library.status.trouble, timeout=WAIT_MS)
    library.unwatch()


def test_what_is_no_recording_is_listed_with_the_reason(library, qtbot, tmp_path):
    path = tmp_path / "no.mcap"
    path.write_bytes(b"not at all")
    library.note(path)
    (entry,) = watch(library, qtbot, is_known)
    assert "is not a recording" in entry.problem


def test_one_that_is_written_is_listed_and_looked_into_again_once_it_is_whole(library, record, qtbot):
    path = record("one.mcap")
    part = path.rename(path.with_name("one.mcap.part"))
    library.note(part)
    (entry,) = watch(library, qtbot, is_known)
    assert (entry.name, entry.is_part, entry.open_path) == ("one.mcap", True, str(part))
    part.rename(path)
    (entry,) = watch(library, qtbot, lambda entries: not entries[0].is_part)
    assert entry.open_path == str(path)


def test_a_broken_list_is_set_aside_and_said(record, tmp_path):
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(b"this is no database at all" * 100)
    store = LibraryStore(folder)
    store.note(record("one.mcap"))
    assert len(store.entries()) == 1
    assert "set aside as recordings.sqlite3.unreadable-1" in store.trouble
    store.close()


def test_without_a_folder_to_write_the_list_is_of_this_process(library, record, qtbot, tmp_path):
    (tmp_path / "library").write_text("a file where the folder should be")
    library.note(record("one.mcap"))
    watch(library, qtbot, is_known)
    assert "not kept" in library.status.trouble


def test_a_read_only_list_is_read_and_not_written(record, tmp_path, monkeypatch):
    folder, path = tmp_path / "library", record("one.mcap")
    store = LibraryStore(folder)
    listed = store.note(path)
    store.set_notes(listed, "from before")
    store.close()

    def refuses(*args):
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr("kvscope_app.library.store.open_sqlite", refuses)
    store.set_tags(listed, "new")
    (entry,) = store.entries()
    assert (entry.notes, entry.tags) == ("from before", "new")
    assert "readonly" in store.trouble
    store.close()
    monkeypatch.undo()
    (entry,) = store.entries()
    assert (entry.notes, entry.tags, store.trouble) == ("from before", "", "")
    store.close()


def test_moving_onto_one_with_words_of_its_own_is_refused(tmp_path, record):
    store = LibraryStore(tmp_path / "library")
    first, second = store.note(record("one.mcap")), store.note(record("two.mcap"))
    store.set_notes(second, "mine")
    with pytest.raises(BadInput, match="already in the list"):
        store.move(first, second)
    assert len(store.entries()) == 2
    store.close()


def test_facts_of_a_later_version_are_found_out_again(tmp_path, record):
    store = LibraryStore(tmp_path / "library")
    listed = store.note(record("one.mcap"))
    store.keep_facts(listed, Facts(start_ns=5), "stamp", b"")
    with closing(sqlite3.connect(tmp_path / "library" / FILE_NAME)) as database, database:
        database.execute("UPDATE recordings SET facts = ?", (b'{"start_ns": "not a number"}',))
    (entry,) = store.entries()
    assert (entry.facts, entry.stamp) == (Facts(), "")
    store.close()


def test_a_command_without_a_window_adds_to_the_list(record):
    path = record("one.mcap")
    note_paths([path])
    store = LibraryStore(library_folder())
    assert [entry.path for entry in store.entries()] == [str(path)]
    store.close()


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (UNTOLD, NOTHING)])
def test_what_an_engine_does_not_tell_is_no_zero(value, shown):
    entry = Entry("/tmp/a.mcap", 1.0, Facts(start_ns=5, preemptions=value, requests=value))
    assert [COLUMNS[place].text(entry) for place in (PREEMPTIONS, REQUESTS)] == [shown, shown]
