"""Tests of bookmarks and loops in a window: shortcuts, the dock, the playback bar, the timeline, and saved files."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QApplication, QLineEdit

from kvscope_app.alarms.bookmark_actions import BookmarkNotePopup
from kvscope_app.recording.recording_actions import save_last_seconds
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.summaries.bookmark import in_order, new_bookmark, newest_revisions

WAIT_MS = 120_000
SECOND_NS = 1_000_000_000


def note_popup(window):
    return next(found for found in window.findChildren(BookmarkNotePopup) if found.isVisible())


def add_named_bookmark(window, qtbot, text):
    """Add a bookmark by the action and type its name."""
    window.actions_by_name["bookmark"].trigger()
    qtbot.keyClicks(note_popup(window).note, text)
    qtbot.keyClick(note_popup(window).note, Qt.Key.Key_Return)
    return window.session.bookmarks.shown[-1]


def listed_bookmarks(window):
    view = window.views["bookmarks"]
    return [view.model.index(row, 0).data() for row in range(view.model.rowCount())]


def test_bookmark_exists_before_its_name_is_typed(window, qtbot):
    session = window.session
    before_ns = session.timeline.cursor_ns
    assert window.actions_by_name["bookmark"].shortcut().toString() == "Ctrl+B"
    window.actions_by_name["bookmark"].trigger()
    (made,) = session.bookmarks.shown
    assert before_ns <= made.time_ns <= session.timeline.cursor_ns
    qtbot.keyClick(note_popup(window).note, Qt.Key.Key_Escape)
    assert session.bookmarks.shown == [made]
    named = add_named_bookmark(window, qtbot, "a spike")
    assert named.text == "a spike"
    assert not session.timeline.is_paused  # adding a bookmark does not move the cursor
    window.focus_view("bookmarks")
    window.views["bookmarks"].refresh()
    assert [line.partition("  ")[2] for line in listed_bookmarks(window)] == ["Bookmark", "a spike"]


def test_next_previous_and_list_clicks_move_the_cursor_to_the_bookmark(window, qtbot, wait_for_seek):
    session, view = window.session, window.views["bookmarks"]
    assert session.disk_history.ring.flush(60.0)  # flush, so that the bookmarked times can be read
    first, last = session.disk_history.range_ns
    session.bookmarks.add(first + (last - first) // 4, "one")
    session.bookmarks.add(first + (last - first) // 2, "two")
    one, two = session.bookmarks.shown
    window.actions_by_name["bookmark_before"].trigger()
    wait_for_seek(session)
    assert session.timeline.cursor_ns == pytest.approx(two.time_ns, abs=1000)
    window.actions_by_name["bookmark_before"].trigger()
    qtbot.waitUntil(lambda: abs(session.timeline.cursor_ns - one.time_ns) < 1000, timeout=WAIT_MS)
    window.actions_by_name["bookmark_before"].trigger()
    assert "No bookmark before" in window.statusBar().currentMessage()
    window.actions_by_name["bookmark_next"].trigger()
    qtbot.waitUntil(lambda: abs(session.timeline.cursor_ns - two.time_ns) < 1000, timeout=WAIT_MS)
    window.focus_view("bookmarks")
    view.refresh()
    qtbot.mouseClick(
        view.list.viewport(), Qt.MouseButton.LeftButton, pos=view.list.visualRect(view.model.index(0, 0)).center()
    )
    qtbot.waitUntil(lambda: abs(session.timeline.cursor_ns - one.time_ns) < 1000, timeout=WAIT_MS)


def test_bookmarks_are_renamed_deleted_and_restored_in_the_list(window, qtbot):
    session, view = window.session, window.views["bookmarks"]
    add_named_bookmark(window, qtbot, "wrong")
    add_named_bookmark(window, qtbot, "other")
    window.focus_view("bookmarks")
    view.refresh()
    assert view.delete.isEnabled() is False
    view.list.setCurrentIndex(view.model.index(0, 0))
    view.rename.click()
    editor = view.list.viewport().findChild(QLineEdit)
    session.bookmarks.add_revisions([new_bookmark(session.timeline.cursor_ns, "rings meanwhile", "kv_usage")])
    qtbot.keyClick(editor, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    qtbot.keyClicks(editor, "right")
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: session.bookmarks.shown[0].text == "right", timeout=WAIT_MS)
    view.refresh()
    session.bookmarks.delete(session.bookmarks.shown[2:])
    session.bookmarks._deleted.clear()
    assert [each.text for each in view.chosen] == ["right"]  # the bookmark stays selected
    qtbot.keyClick(view.list, Qt.Key.Key_Delete)
    assert [each.text for each in session.bookmarks.shown] == ["other"]
    assert view.undo.isVisible()
    qtbot.keyClick(view.list, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert [each.text for each in session.bookmarks.shown] == ["right", "other"]
    assert view.undo.isVisible() is False
    view.list.selectAll()
    qtbot.keyClick(view.list, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QApplication.clipboard().text().splitlines() == listed_bookmarks(window)
    view.delete.click()
    assert session.bookmarks.shown == []
    window.actions_by_name["bookmark_undo"].trigger()
    assert "Restored" in window.statusBar().currentMessage()


def test_bookmarks_are_drawn_on_the_playback_bar_and_the_timeline(window, qtbot):
    session = window.session
    first, last = session.timeline.range_ns
    made = session.bookmarks.add((first + last) // 2, "in the middle")
    window.playback.refresh()
    slider, marks = window.playback.slider, window.playback.marks
    seconds = (made.time_ns - session.timeline.origin_ns) / 1e9
    assert marks.size() == slider.size()
    assert marks.text_at(seconds).endswith("in the middle")
    assert "middle" not in marks.text_at(slider.minimum_s)
    image = window.playback.grab().toImage()
    scale = image.devicePixelRatio()
    at = slider.mapTo(window.playback, QPoint(round(slider.x_of(seconds)), slider.height() // 2 - 8))
    accent = window.themes.theme.accent
    around = [image.pixelColor(round((at.x() + dx) * scale), round(at.y() * scale)).name() for dx in (-2, -1, 0, 1, 2)]
    assert accent in around
    canvas = window.views["timeline"].canvas
    window.focus_view("timeline")
    window.views["timeline"].refresh()
    assert next(canvas.lane_layout.boxes())[0].name == "marks"
    canvas.show_marks(type(canvas.shown.marks)())
    assert next(canvas.lane_layout.boxes())[0].name == "usage"


def test_loop_repeats_until_escape_is_pressed(window, qtbot, wait_for_seek):
    session, actions = window.session, window.actions_by_name
    qtbot.waitUntil(lambda: len(session.overview) >= 3, timeout=WAIT_MS)
    begin_ns = session.timeline.range_ns[0] + SECOND_NS // 2
    assert session.disk_history.ring.flush(60.0)
    session.timeline.go_to(begin_ns)
    wait_for_seek(session)
    actions["loop_begin"].trigger()
    assert "Ctrl+]" in window.statusBar().currentMessage()
    session.timeline.go_to(begin_ns + SECOND_NS // 4)
    qtbot.waitUntil(lambda: session.timeline.cursor_ns >= begin_ns + SECOND_NS // 5, timeout=WAIT_MS)
    actions["loop_end"].trigger()
    assert session.timeline.loop.range_ns == pytest.approx((begin_ns, begin_ns + SECOND_NS // 4), abs=1000)
    assert session.timeline.is_playing
    seen, turns = [], 0

    def has_turned():
        nonlocal turns
        seen.append(session.timeline.cursor_ns)
        turns += len(seen) > 1 and seen[-1] < seen[-2]
        return turns >= 2

    qtbot.waitUntil(has_turned, timeout=WAIT_MS)
    assert session.timeline.is_paused
    assert actions["clear"].shortcut().toString() == "Esc"
    actions["clear"].trigger()
    assert session.timeline.loop.range_ns is None
    passed_ns = begin_ns + SECOND_NS // 2
    qtbot.waitUntil(lambda: session.timeline.cursor_ns > passed_ns, timeout=WAIT_MS)


def test_rename_and_add_keep_the_open_name_editor(window, qtbot):
    session, view = window.session, window.views["bookmarks"]
    first, last = session.timeline.range_ns
    session.bookmarks.add((first + last) // 2, "old")
    window.focus_view("bookmarks")
    view.refresh()
    view.list.setCurrentIndex(view.model.index(0, 0))
    view.refresh()
    view.rename.click()
    view.rename.click()
    editor = view.list.indexWidget(view.model.index(0, 0))
    editor.setText("new")
    view.add.click()
    assert view.list.indexWidget(view.model.index(0, 0)) is editor
    qtbot.keyClick(editor, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: {each.text for each in session.bookmarks.shown} == {"new", ""}, timeout=WAIT_MS)


def test_loop_can_be_set_between_two_selected_bookmarks(window, qtbot):
    session, view = window.session, window.views["bookmarks"]
    first, _ = session.timeline.range_ns
    one, two = (session.bookmarks.add(first + at * SECOND_NS // 10) for at in (3, 7))
    window.focus_view("bookmarks")
    view.refresh()
    assert not view.loop.isEnabled()
    view.list.selectAll()
    view.loop.click()
    assert session.timeline.loop.range_ns == (one.time_ns, two.time_ns)
    session.timeline.loop.clear()


def test_loop_ends_set_in_the_wrong_order_clear_the_loop(window):
    loop, changes = window.session.timeline.loop, []
    loop.changed.connect(lambda: changes.append(loop.range_ns))
    loop.set_end(100 * SECOND_NS)
    loop.set_begin(200 * SECOND_NS)
    loop.set_end(150 * SECOND_NS)
    loop.set_begin(120 * SECOND_NS)
    assert changes == [None, None, None, (120 * SECOND_NS, 150 * SECOND_NS)]
    assert loop.clear()
    assert not loop.clear()


def test_bookmarks_are_saved_with_recordings_and_edits_leave_the_file_unchanged(
    window, open_playback_window, qtbot, tmp_path
):
    made = add_named_bookmark(window, qtbot, "saved")
    gone = add_named_bookmark(window, qtbot, "gone")
    window.session.bookmarks.delete([gone])
    path = tmp_path / "kept.mcap"
    qtbot.waitUntil(
        lambda: (window.session.disk_history.range_ns or (0, 0))[1] > made.time_ns + SECOND_NS, timeout=WAIT_MS
    )
    task = save_last_seconds(window, 600.0, str(path))
    qtbot.waitUntil(lambda: task.work.is_finished, timeout=WAIT_MS)
    assert in_order(newest_revisions(Recording.open(path).bookmarks()).values()) == [made]
    whole = path.read_bytes()

    playing = open_playback_window(path)
    session = playing.session
    assert session.bookmarks.shown == [made]
    session.bookmarks.rename(made, "renamed")
    added = session.bookmarks.add(session.timeline.range_ns[0] + SECOND_NS, "added")
    playing.close()
    assert path.read_bytes() == whole
    moved = path.rename(tmp_path / "another name.mcap")

    again = open_playback_window(moved).session
    qtbot.waitUntil(lambda: len(again.bookmarks.shown) == 2, timeout=WAIT_MS)
    assert {mark.text for mark in again.bookmarks.shown} == {"renamed", "added"}
    assert added in again.bookmarks.shown


def test_bookmark_and_loop_actions_do_nothing_before_the_timeline_exists(session, make_window):
    window = make_window(session)
    for name in ("bookmark", "loop_begin", "bookmark_before", "bookmark_undo"):
        window.actions_by_name[name].trigger()
    assert session.bookmarks.shown == []
    assert session.timeline.loop.begin_ns is None
