"""Tests of a session's bookmarks: adding, renaming, deleting, undo, and the bookmark file of a recording."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvscope_app.session.recording.bookmark_file import read_bookmarks, save_bookmarks
from kvscope_app.session.recording.bookmarks import Bookmarks
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.summaries.bookmark import Bookmark, new_bookmark


@pytest.fixture
def stored_bookmarks():
    return []


@pytest.fixture
def bookmarks(qapp, stored_bookmarks):
    made = Bookmarks()
    made.store = lambda said: stored_bookmarks.extend(said) or ""
    yield made
    made.deleteLater()


def texts(bookmarks):
    return [mark.text for mark in bookmarks.shown]


def test_each_change_of_a_bookmark_is_saved_as_a_new_revision(bookmarks, stored_bookmarks):
    second, first = bookmarks.add(20, "second"), bookmarks.add(10)
    assert bookmarks.shown == [first, second]
    bookmarks.rename(first, "  first ")
    assert texts(bookmarks) == ["first", "second"]
    bookmarks.delete([first])
    assert texts(bookmarks) == ["second"]
    back = bookmarks.undo()
    assert back.text == "first"
    assert texts(bookmarks) == ["first", "second"]
    assert [mark.revision for mark in stored_bookmarks if mark.bookmark_id == first.bookmark_id] == [0, 1, 2, 3]
    again = Bookmarks()
    again.load(reversed(stored_bookmarks))
    assert again.shown == bookmarks.shown
    again.deleteLater()


def test_undo_restores_deleted_bookmarks_one_deletion_at_a_time(bookmarks, qtbot):
    marks = [bookmarks.add(at, str(at)) for at in (1, 2, 3)]
    assert not bookmarks.can_undo
    assert bookmarks.undo() is None
    with qtbot.waitSignal(bookmarks.deleted) as signal:
        bookmarks.delete(marks[:2])
    assert signal.args == [marks[:2]]
    bookmarks.delete(marks[2:])
    assert bookmarks.shown == []
    for expected in (["3"], ["2", "3"], ["1", "2", "3"]):
        bookmarks.undo()
        assert texts(bookmarks) == expected
    assert not bookmarks.can_undo


def test_bookmark_that_cannot_be_saved_is_reported_and_stays_in_memory(bookmarks, qtbot):
    bookmarks.store = lambda said: "the disk is full"
    with qtbot.waitSignal(bookmarks.failed) as signal:
        bookmarks.add(5, "still here")
    assert signal.args == ["the disk is full"]
    assert texts(bookmarks) == ["still here"]


def test_bookmarks_before_the_timeline_are_removed_unless_they_are_ongoing(bookmarks):
    bookmarks.add(10, "gone")
    bookmarks.add_revisions([replace(new_bookmark(5, "lasts", "kv_usage"), until_ns=40)])
    bookmarks.add(30, "there")
    bookmarks.add_revisions([new_bookmark(7, "rings still", "waiting")])
    bookmarks.drop_before(20)
    assert texts(bookmarks) == ["lasts", "rings still", "there"]


def test_saved_alarm_replaces_an_overlapping_derived_alarm(bookmarks):
    kept = Bookmark(bookmark_id="a", time_ns=100, until_ns=200, kind="kv_usage", text="kept")
    bookmarks.add_revisions([kept])
    same = Bookmark(bookmark_id="b", time_ns=150, until_ns=260, kind="kv_usage", text="again")
    later = Bookmark(bookmark_id="c", time_ns=300, kind="kv_usage", text="later")
    other = Bookmark(bookmark_id="d", time_ns=150, kind="hot", text="other")
    bookmarks.set_derived([same, later, other])
    assert texts(bookmarks) == ["kept", "other", "later"]
    assert bookmarks.is_stored(kept)
    assert not bookmarks.is_stored(later)
    bookmarks.delete([later])
    assert texts(bookmarks) == ["kept", "other", "later"]
    bookmarks.set_derived(())
    assert texts(bookmarks) == ["kept"]


def test_nearest_bookmark_is_found_in_both_directions(bookmarks):
    for at in (10, 20, 30):
        bookmarks.add(at, str(at))
    assert bookmarks.nearest(20, forward=True).time_ns == 30
    assert bookmarks.nearest(20, forward=False).time_ns == 10
    assert bookmarks.nearest(30, forward=True) is None
    assert bookmarks.nearest(10, forward=False) is None


class TestFile:
    def test_bookmarks_saved_by_two_windows_are_merged(self, tmp_path):
        path = tmp_path / "data" / "kvscope" / "bookmarks" / "x.json"
        first, second = new_bookmark(1, "first"), new_bookmark(2, "second")
        assert read_bookmarks(path) == []
        assert save_bookmarks(path, [first]) == ""
        assert save_bookmarks(path, [second]) == ""
        assert save_bookmarks(path, [replace(first, revision=1, text="renamed")]) == ""
        found = {mark.bookmark_id: mark for mark in read_bookmarks(path)}
        assert {mark.text for mark in found.values()} == {"renamed", "second"}
        assert path.stat().st_mode & 0o077 == 0

    def test_damaged_bookmark_file_is_not_overwritten(self, tmp_path):
        path = tmp_path / "data" / "kvscope" / "bookmarks" / "x.json"
        assert save_bookmarks(path, [new_bookmark(1)]) == ""
        path.write_text("not JSON")
        with pytest.raises(BadInput, match=r"x\.json is not accepted"):
            read_bookmarks(path)
        assert "is not accepted" in save_bookmarks(path, [new_bookmark(2)])
        assert path.read_text() == "not JSON"

    def test_failure_to_create_the_folder_returns_a_reason(self, tmp_path):
        (tmp_path / "data").write_text("a file")
        assert save_bookmarks(tmp_path / "data" / "kvscope" / "bookmarks" / "x.json", [new_bookmark(1)])
