"""Tests of the events view: order, selection, filters, copying, export and search."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QLabel
from tests.conftest import examples
from tests.processes import make_named_pipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from timed_fakes import EPOCH, START_NS, FakeTimedSession, small_overview, timed

from kvscope_app.ui.theme import DARK, THEMES
from kvscope_app.views.events.event_search import EventSearch, matches
from kvscope_app.views.events.events_view import EMPTY_TEXT, EventsView
from kvscope_telemetry.summaries.event_index import EventIndex
from kvscope_telemetry.summaries.summary import SECOND_NS


@pytest.fixture
def timed_session():
    return FakeTimedSession(small_overview())


@pytest.fixture
def view(timed_session, qtbot):
    made = EventsView(timed_session)
    qtbot.addWidget(made)
    made.resize(1_200, 400)
    made.apply_theme(DARK)
    made.show()
    made.refresh()
    return made


def kinds_shown(view):
    return [view.model.entry_at(row).event.kind for row in range(view.model.rowCount())]


def click_row(view, row, qtbot, keys=Qt.KeyboardModifier.NoModifier):
    box = view.table.visualRect(view.model.index(row, 3))
    qtbot.mouseClick(view.table.viewport(), Qt.MouseButton.LeftButton, keys, box.center())


def test_narrow_view_does_not_truncate_the_number_of_events(view):
    view.resize(720, 300)
    assert view.count.text() == "7 events"
    view.resize(625, 300)
    assert view.count.text() in ("7 events", "7")
    assert view.count.fontMetrics().horizontalAdvance(view.count.text()) <= view.count.width()


def test_newest_event_is_at_the_top(view, timed_session):
    assert kinds_shown(view) == ["finished", "refused", "evicted", "resumed", "preempted", "admitted", "admitted"]
    assert view.count.text() == "7 events"
    timed_session.overview.extend((), [timed(95, "finished", 2)])
    timed_session.overview_changed.emit()
    assert kinds_shown(view)[:2] == ["finished", "finished"]
    assert view.model.entry_at(0).event.number == 2


def test_click_on_an_event_seeks_and_selects_its_request(view, timed_session, qtbot):
    click_row(view, 4, qtbot)
    assert timed_session.timeline.went_to == [START_NS + 30 * SECOND_NS]
    assert timed_session.selection.request == 1
    click_row(view, 2, qtbot)
    assert timed_session.timeline.went_to[-1] == START_NS + 45 * SECOND_NS


def test_cursor_position_is_marked_between_the_events(view, timed_session):
    timed_session.timeline.is_live = False
    timed_session.timeline.cursor_ns = START_NS + 42 * SECOND_NS
    view.refresh()
    assert [view.model.is_ahead(view.model.entry_at(row)) for row in range(7)] == [True] * 3 + [False] * 4
    assert view.model.num_ahead(timed_session.timeline.cursor_ns) == 3
    edge = view.table.rowViewportPosition(3) - 1
    assert view.table.viewport().grab().toImage().pixelColor(5, edge) == DARK.color("accent")
    timed_session.timeline.is_live = True
    view.refresh()
    assert not any(view.model.is_ahead(view.model.entry_at(row)) for row in range(7))


def test_seek_scrolls_to_the_cursor_and_new_events_do_not(view, timed_session):
    timed_session.timeline.is_live = False
    timed_session.overview.extend((), [timed(100 + at, "admitted", at) for at in range(200)])
    timed_session.timeline.cursor_ns = START_NS + 30 * SECOND_NS
    view.refresh()
    row = view.model.num_ahead(timed_session.timeline.cursor_ns)
    assert view.table.viewport().rect().contains(view.table.visualRect(view.model.index(row, 3)).center())
    view.table.scrollToTop()
    timed_session.overview.extend((), [timed(400, "admitted", 900)])
    view.refresh()
    assert view.table.verticalScrollBar().value() == 0


def test_events_are_filtered_by_kind_text_and_selected_request(view, timed_session, qtbot):
    view.kind_actions["preempted"].trigger()
    assert kinds_shown(view) == ["preempted"]
    assert view.kinds.text() == "preempted ▾"
    assert view.count.text() == "1 of 7"
    view.kind_actions["preempted"].trigger()
    assert view.kinds.text() == "All kinds ▾"
    qtbot.keyClicks(view.text, "CHOSEN newest")
    assert kinds_shown(view) == ["preempted"]
    view.text.setText("#3")
    assert kinds_shown(view) == ["refused"]
    view.text.clear()
    view.only_selected.click()
    assert kinds_shown(view) == []
    timed_session.selection.select_request(2)
    assert kinds_shown(view) == ["evicted", "preempted", "admitted"]
    view.only_selected.click()
    assert len(kinds_shown(view)) == 7


def test_preemptions_button_and_kind_menu_stay_in_agreement(view):
    view.preemptions.click()
    assert kinds_shown(view) == ["preempted"]
    assert view.kind_actions["preempted"].isChecked()
    view.kind_actions["evicted"].trigger()
    assert kinds_shown(view) == ["evicted", "preempted"]
    assert not view.preemptions.isChecked()
    view.preemptions.click()
    assert kinds_shown(view) == ["preempted"]
    view.preemptions.click()
    assert len(kinds_shown(view)) == 7
    assert view.kind_actions["engine_paused"].text() == "engine paused"


def test_selected_events_are_copied_as_tab_separated_rows(view, timed_session, qtbot):
    click_row(view, 4, qtbot)
    click_row(view, 5, qtbot, Qt.KeyboardModifier.ShiftModifier)
    assert len(timed_session.timeline.went_to) == 1
    qtbot.keyClick(view.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    head, *rows = QGuiApplication.clipboard().text().splitlines()
    assert head.split("\t")[:4] == ["time", "time_ns", "event", "request"]
    assert [row.split("\t")[2] for row in rows] == ["preempted", "admitted"]
    assert rows[0].split("\t")[1] == str(START_NS + 30 * SECOND_NS)
    assert "chosen, being the newest" in rows[0]


@pytest.mark.parametrize(("name", "delimiter"), [("events.csv", ","), ("events.tsv", "\t")])
def test_shown_events_are_exported_in_time_order(view, tmp_path, qtbot, name, delimiter):
    view.text.setText("request 1")
    with qtbot.waitSignal(view.export_to(str(tmp_path / name)).done):
        pass
    with (tmp_path / name).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter=delimiter))
    assert [row["event"] for row in rows] == [*reversed(kinds_shown(view))]
    assert rows[0]["time_ns"] == str(START_NS + 30 * SECOND_NS)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]
    assert name in view.count.text()


def test_export_to_an_unusable_path_is_reported(view, tmp_path, qtbot):
    with qtbot.waitSignal(view.export_to(str(tmp_path / "no" / "where.csv")).done):
        pass
    assert "No such file" in view.count.text()
    pipe = tmp_path / "pipe.csv"
    make_named_pipe(pipe)
    with qtbot.waitSignal(view.export_to(str(pipe)).done):
        pass
    assert "it is a named pipe, not a file" in view.count.text()
    assert pipe.is_fifo()


def test_export_button_opens_a_save_dialog(view, qtbot):
    view.export.click()
    (dialog,) = view.findChildren(QFileDialog)
    assert dialog.acceptMode() is QFileDialog.AcceptMode.AcceptSave
    dialog.reject()


def test_new_events_do_not_move_the_scrolled_or_selected_rows(view, timed_session, qtbot):
    timed_session.overview.extend((), [timed(200 + at, "evicted", 0) for at in range(500)])
    view.refresh()
    view.table.scroll_by(300)
    first = view.model.timed_at(view.table.rowAt(1))
    view.table.selectRow(300)
    chosen = view.model.timed_at(view.table.currentIndex().row())
    timed_session.overview.extend((), [timed(800 + at, "evicted", 0) for at in range(50)])
    view.refresh()
    assert view.model.timed_at(view.table.rowAt(1)) is first
    assert view.model.timed_at(view.table.currentIndex().row()) is chosen


def test_events_dropped_from_the_overview_are_removed_from_the_events_view(view, timed_session):
    timed_session.overview.forget_before(START_NS + 40 * SECOND_NS)
    view.refresh()
    assert kinds_shown(view) == ["finished", "refused", "evicted", "resumed"]


@pytest.mark.parametrize("theme", list(THEMES.values()), ids=list(THEMES))
@pytest.mark.parametrize("width", [400, 1_200])
def test_event_colors_are_painted_in_all_themes_and_widths(view, theme, width):
    view.apply_theme(theme)
    view.resize(width, 400)
    image = view.table.viewport().grab().toImage()
    colours = {image.pixelColor(x, y).name() for x in range(min(width, 380)) for y in range(120)}
    assert theme.bad in colours


def test_events_view_without_events_shows_an_explanation(qtbot):
    empty = EventsView(FakeTimedSession())
    qtbot.addWidget(empty)
    empty.show()
    empty.refresh()
    assert EMPTY_TEXT in [label.text() for label in empty.findChildren(QLabel) if label.isVisibleTo(empty)]


def test_search_in_many_events_shows_that_it_is_searching_and_then_the_number_found(view, timed_session, qtbot):
    timed_session.overview.extend((), [timed(200 + at / 100, "evicted", at % 50 + 10, 5) for at in range(20_000)])
    view.text.setText("because #12")
    assert "searching" in view.count.text()
    qtbot.waitUntil(lambda: view.count.text().startswith("400 of"), timeout=60_000)


word_lists = st.sampled_from(("", "evicted", "because 3", "#3", "#3 admitted", "nothing"))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_search_results_equal_those_of_checking_each_event(data):
    events, search, at = EventIndex(max_events=64), EventSearch(), 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        fresh = []
        for _ in range(data.draw(st.integers(0, 20))):
            at += data.draw(st.sampled_from((0.0, 1.0, -0.5)))
            kind = data.draw(st.sampled_from(("admitted", "evicted", "finished")))
            fresh.append(timed(at, kind, data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))))
        events.extend(fresh)
        words = data.draw(word_lists)
        search.set_text(words)
        search.set_kinds(data.draw(st.sampled_from((None, ("evicted", "finished")))))
        search.request = data.draw(st.sampled_from((None, (EPOCH, 3))))
        while search.update(events, max_texts=5):
            pass
        found = [events[serial - events.num_forgotten] for serial in search.serials.tolist()]
        assert found == [
            event
            for event in (events[place] for place in range(len(events)))
            if (search.kinds is None or event.event.kind in search.kinds)
            and (search.request is None or 3 in (event.event.number, event.event.other))
            and matches(event.event, words.split())
        ]
        assert (np.diff(search.serials) > 0).all()
