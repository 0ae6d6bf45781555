"""Tests of the requests view: table, filters, selection, abort, block table and events."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtWidgets import QMessageBox

from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.events.event_entries import why_text
from kvscope_app.views.events.event_model import EventFilter
from kvscope_app.views.requests.block_strip import BlockStrip
from kvscope_app.views.requests.request_model import COLUMNS, PROGRESS_ROLE
from kvscope_app.views.requests.request_rows import RequestQuery, order_rows, read_columns
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import Abort
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Event

WAITING, RUNNING, PREEMPTED, FINISHED = range(4)


@pytest.fixture
def view(engine, session, poll, qtbot):
    engine.request(1, blocks=(), state=FINISHED, num_output_tokens=64)
    engine.request(2, blocks=(4, 9, 17), state=RUNNING, num_prompt_tokens=40, num_output_tokens=8)
    engine.request(3, blocks=(), state=WAITING, num_output_tokens=0)
    engine.request(4, blocks=(), state=PREEMPTED, num_output_tokens=3)
    engine.write_blocks([4, 9], owner=2)
    engine.write_blocks([17], owner=2, filled=5)
    poll(session)
    view = RequestsView(session)
    qtbot.addWidget(view)
    view.resize(900, 500)
    view.apply_theme(THEMES["dark"])
    view.show()
    view.refresh()
    return view


def column(view, title):
    index = next(i for i, c in enumerate(COLUMNS) if c.title == title)
    return [view.model.index(row, index).data() for row in range(view.model.rowCount())]


def test_request_model_passes_the_model_tester(view, engine, session, poll, qtmodeltester):
    qtmodeltester.check(view.model)
    engine.request(5)
    poll(session)
    view.refresh()
    view.filter.setCurrentText("Ended")
    qtmodeltester.check(view.model)


def test_requests_are_listed_newest_first_with_named_states(view):
    assert column(view, "#") == ["4", "3", "2", "1"]
    assert column(view, "Id") == ["chat-4", "chat-3", "chat-2", "chat-1"]
    assert column(view, "State") == ["preempted", "waiting", "running", "finished"]
    assert column(view, "Output") == ["3 / 64", "0 / 64", "8 / 64", "64 / 64"]
    assert column(view, "Blocks") == ["0", "0", "3", "0"]


def test_ended_requests_show_how_they_ended(engine, session, poll, view):
    for number in (6, 7, 8, 9):
        engine.request(number, state=FINISHED, num_output_tokens=0)
    for number, kind in ((6, "finished"), (7, "aborted"), (8, "refused")):
        engine.event(kind=kind, number=number)
    poll(session)
    view.refresh()
    assert column(view, "State")[:4] == ["ended", "refused", "aborted", "finished"]
    view.filter.setCurrentText("Ended")
    assert column(view, "#") == ["9", "8", "7", "6", "1"]
    assert json.loads(view.model.json_at(2))["ending"] == "aborted"


def test_prefill_in_progress_shows_its_percentage(engine, session, poll, view):
    engine.request(9, state=RUNNING, num_prompt_tokens=200, num_output_tokens=0)
    columns = session.mirror.requests
    poll(session)
    columns = read_columns(session.mirror, session.history.request_times)
    columns.num_computed_tokens[-1] = 50
    columns.num_output_now[-1] = 0
    view.model.show_columns(columns, session.mirror.epoch)
    assert column(view, "State")[0] == "prefill 25%"


def test_output_column_of_requests_has_a_progress_bar_of_generated_tokens(view):
    output = next(i for i, c in enumerate(COLUMNS) if c.title == "Output")
    assert view.model.index(2, output).data(PROGRESS_ROLE) == pytest.approx(8 / 64)
    assert view.model.index(2, 0).data(PROGRESS_ROLE) is None


@pytest.mark.parametrize(
    ("chosen", "text", "numbers"),
    [
        ("All", "", [4, 3, 2, 1]),
        ("Waiting", "", [4, 3]),
        ("Running", "", [2]),
        ("All", "#3", [3]),
        ("All", "at-1", [1]),
    ],
)
def test_filter_and_search_limit_the_listed_requests(view, chosen, text, numbers):
    view.filter.setCurrentText(chosen)
    view.search.setText(text)
    assert [view.model.number_at(row) for row in range(view.model.rowCount())] == numbers
    assert view.count.text() == (
        "4 requests, 1 running, 2 waiting" if len(numbers) == 4 else f"{len(numbers)} of 4 requests"
    )


def test_request_columns_sort_numerically_with_unknown_values_last(view, session):
    columns = read_columns(session.mirror, session.history.request_times)
    columns.ttft_s[:] = [np.nan, 0.5, 0.02, np.nan]
    for descending, wanted in ((False, [2, 1, 3, 0]), (True, [1, 2, 3, 0])):
        assert order_rows(columns, RequestQuery(), "ttft_s", descending).tolist() == wanted


def test_click_on_a_row_selects_the_request(view, session, qtbot):
    with qtbot.waitSignal(session.selection.changed):
        place = view.table.visualRect(view.model.index(2, 1)).center()
        qtbot.mouseClick(view.table.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert session.selection.request == 2


def test_swatch_keeps_its_color_in_a_selected_row(view, session):
    row = view.model.row_of(2)
    index = view.model.index(row, 0)
    session.selection.select_request(2)
    view.refresh()
    picture = view.table.viewport().grab(view.table.visualRect(index)).toImage()
    colors = {picture.pixelColor(x, picture.height() // 2).name() for x in range(picture.width() // 2)}
    assert view.table.selectionModel().isRowSelected(row)
    assert index.data(Qt.ItemDataRole.DecorationRole).name() in colors


def test_selected_request_stays_selected_while_rows_move(view, engine, session, poll):
    session.selection.select_request(2)
    assert view.model.number_at(view.table.currentIndex().row()) == 2
    engine.request(5)
    engine.request(6)
    poll(session)
    view.refresh()
    assert view.table.currentIndex().row() == 4
    assert session.selection.request == 2
    view.filter.setCurrentText("Waiting")
    assert not view.table.selectionModel().hasSelection()
    assert session.selection.request == 2
    view.filter.setCurrentText("All")
    assert view.model.number_at(view.table.currentIndex().row()) == 2


def test_unfinished_request_is_aborted_after_confirmation(view, engine, session):
    view.table.setFocus()
    session.selection.select_request(1)
    view.confirm_abort()
    assert not view.findChildren(QMessageBox)
    session.selection.select_request(2)
    view.table.abort.trigger()
    (question,) = view.findChildren(QMessageBox)
    assert "chat-2" in question.text()
    assert engine.source.sent == []
    next(button for button in question.buttons() if button.text() == "Abort").click()
    assert engine.source.sent == [Abort(request_id="chat-2")]


def test_detail_shows_the_blocks_of_the_selected_request(view, session):
    session.selection.select_request(2)
    assert view.detail.summary.text() == "Request #2: 3 blocks, 1.05 MiB, 37 of 48 slots filled"
    assert view.detail.strip.tip(2) == "Block 17\nindex 2 of the table, positions 32 to 47\n5 of 16 slots filled"
    session.selection.select_request(3)
    assert view.detail.summary.text() == "Request #3 holds no blocks now."
    ledger = session.mirror.ledger
    ledger.owner[[30, 31]], ledger.state[[30, 31]] = 3, BlockState.CACHED
    view.detail.refresh()
    assert view.detail.summary.text() == "Request #3 holds no blocks now. 2 blocks are still cached."
    ledger.hash[29], ledger.parent[30], ledger.owner[29] = 7, 7, 1
    view.detail.refresh()
    assert view.detail.summary.text() == "Request #3 holds no blocks now. 3 blocks are still cached, 1 of them reused."


def test_several_selected_requests_show_their_total_of_blocks(view, engine, session, poll):
    engine.request(5, blocks=(4, 20), state=RUNNING)
    poll(session)
    session.selection.select_batch((2, 3, 5))
    assert view.detail.summary.text() == (
        "3 requests selected: #2, #3, #5, 4 blocks together. Select one to see its blocks."
    )


def test_event_tables_show_requests_reasons_and_amounts(view, engine, session, poll):
    engine.event(kind="preempted", number=4, other=2, cause="no free block", num_blocks=3, num_tokens=40)
    engine.event(kind="admitted", number=2)
    poll(session)
    session.selection.select_request(4)
    view.refresh()
    own = view.detail.own_events
    assert own.rowCount() == 1
    assert own.index(0, 1).data() == "preempted"
    assert own.index(0, 3).data() == "no free block · for request #2 · 3 blocks · 40 tokens"
    assert [view.detail.all_events.index(row, 1).data() for row in range(2)] == ["admitted", "preempted"]
    view.detail.filter.setCurrentText(EventFilter.PREEMPTIONS.value)
    assert view.detail.all_events.rowCount() == 1
    engine.event(kind="finished", number=2)
    engine.event(kind="preempted", number=2, cause="no free block")
    poll(session)
    view.refresh()
    assert [view.detail.all_events.index(row, 2).data() for row in range(2)] == ["#2", "#4"]


def test_activated_event_selects_its_request(view, engine, session, poll):
    engine.event(kind="admitted", number=2)
    poll(session)
    view.refresh()
    view.detail.tables[1].activated.emit(view.detail.all_events.index(0, 0))
    assert session.selection.request == 2


def test_reason_text_does_not_repeat_the_other_request():
    assert why_text(Event(kind="preempted", time_ns=0, other=7, cause="for request 7")) == "for request 7"


def test_number_of_events_listed_for_a_request_is_bounded(view, session, qtmodeltester):
    session.history.events.extend([Event(kind="note", time_ns=i) for i in range(5_000)], 7, 0)
    view.refresh()
    assert view.detail.all_events.rowCount() == 2_000
    session.history.events.extend([Event(kind="note", time_ns=i) for i in range(10)], 7, 0)
    view.refresh()
    assert view.detail.all_events.rowCount() == 2_000
    qtmodeltester.check(view.detail.all_events)


@pytest.fixture
def strip(qtbot):
    strip = BlockStrip()
    qtbot.addWidget(strip)
    strip.apply_theme(THEMES["dark"])
    return strip


def test_cells_of_a_block_strip_wrap_onto_rows_and_are_found_by_position(strip):
    ids = np.arange(200, 210)
    strip.show_blocks(ids, np.full(10, 16), np.ones(10, np.int64), 16)
    strip.resize(240, strip.heightForWidth(240))
    assert [strip.index_at(20, 20), strip.index_at(20 + 55, 20), strip.index_at(20, 20 + 29)] == [0, 1, 4]
    assert strip.index_at(2, 2) is None
    assert strip.index_at(239, strip.height() - 12) is None


def test_cell_of_a_block_strip_is_filled_in_proportion_to_used_slots(strip):
    theme = THEMES["dark"]
    strip.show_blocks(np.arange(200), np.repeat([16, 0], 100), np.repeat([1, 2], 100), 16)
    strip.resize(400, strip.heightForWidth(400))
    image = strip.grab().toImage()
    first, last = QPoint(8 + 6, 8 + 6), strip.cell_rect(199).center()
    assert image.pixelColor(first).name() == theme.block_active
    assert image.pixelColor(last).name() == theme.block_free


def test_requests_view_is_painted_in_all_themes_and_sizes(view, session):
    session.selection.select_request(2)
    for theme in THEMES.values():
        view.apply_theme(theme)
        for size in ((420, 300), (900, 500)):
            view.resize(*size)
            assert not view.grab().isNull()


def test_queue_time_is_shown_for_waiting_and_running_requests(view):
    waited = column(view, "Queued")
    assert [text.endswith(" ms") for text in waited] == [False, True, True, False]


def test_small_dock_gives_the_table_all_space_until_a_request_is_selected(view, session, qtbot):
    view.resize(430, 250)
    splitter = view.splitter
    qtbot.waitUntil(lambda: splitter.orientation() is Qt.Orientation.Vertical, timeout=120_000)
    table, detail = splitter.sizes()
    assert detail <= view.detail.tabBar().sizeHint().height() + 2
    assert table > 3 * detail
    session.selection.select_request(2)
    table, detail = splitter.sizes()
    assert abs(table - detail) <= 4
    session.selection.select_request(None)
    assert splitter.sizes()[1] <= view.detail.tabBar().sizeHint().height() + 2
    view.detail.setCurrentIndex(2)
    assert abs(splitter.sizes()[0] - splitter.sizes()[1]) <= 4


def test_split_moved_by_the_user_is_kept(view, session):
    view.resize(430, 250)
    view.splitter.setSizes([100, 100])
    view.splitter.splitterMoved.emit(100, 1)
    before = view.splitter.sizes()
    session.selection.select_request(2)
    assert view.splitter.sizes() == before


def test_detail_tabs_keep_their_height_with_a_larger_font(session, qtbot):
    view = RequestsView(session)
    qtbot.addWidget(view)
    font = view.detail.tabBar().font()
    font.setPointSizeF(3 * font.pointSizeF())
    view.detail.tabBar().setFont(font)
    assert view.detail.minimumSizeHint().height() >= view.detail.tabBar().fontMetrics().height()


def test_adapter_column_is_shown_once_needed_and_can_be_searched(engine, session, poll, view):
    index = next(i for i, each in enumerate(COLUMNS) if each.title == "Adapter")
    assert view.table.isColumnHidden(index)
    engine.request(5, adapter="sql")
    engine.request(6, adapter="python")
    poll(session)
    view.refresh()
    assert not view.table.isColumnHidden(index)
    assert column(view, "Adapter") == ["python", "sql", "–", "–", "–", "–"]
    view.table.sortByColumn(index, Qt.SortOrder.DescendingOrder)
    assert column(view, "Adapter")[:3] == ["sql", "python", "–"]
    view.search.setText("SQL")
    assert column(view, "#") == ["5"]
    assert json.loads(view.model.json_at(0))["adapters"] == "sql"


def test_request_aborted_before_tokenization_shows_no_prompt_length(engine, session, poll, view):
    engine.request(5, num_prompt_tokens=0, num_output_tokens=0, state=RequestState.FINISHED)
    engine.request(6, num_prompt_tokens=1234)
    poll(session)
    view.refresh()
    prompts = dict(zip(column(view, "#"), column(view, "Prompt"), strict=True))
    assert (prompts["5"], prompts["6"]) == ("–", count(1234))


def test_context_menu_filters_requests_of_one_client(engine, session, poll, view):
    index = next(i for i, each in enumerate(COLUMNS) if each.title == "Client")
    assert view.table.isColumnHidden(index), "the engine reports no clients"
    for number, client in ((5, 1), (6, 2), (7, 1)):
        engine.request(number, client=client)
    poll(session)
    view.refresh()
    assert not view.table.isColumnHidden(index)
    assert column(view, "Client") == ["1", "2", "1", "–", "–", "–", "–"]
    view.table.setCurrentIndex(view.model.index(view.model.row_of(5), 0))
    view.table.one_client.trigger()
    assert view.search.text() == "client 1"
    assert column(view, "#") == ["7", "5"]


def test_requests_of_an_earlier_engine_run_stay_listed_and_cannot_be_selected(engine, session, poll, view):
    engine.restart(8)
    engine.requests.clear()
    engine.request(1, state=RUNNING)
    poll(session)
    view.refresh()
    assert column(view, "#").count("1") == 2
    assert view.count.text() == "5 requests, 1 running"
    view.table.selectRow(view.model.row_of(1))
    assert session.selection.request == 1
    older = next(row for row in range(view.model.rowCount()) if view.model.epoch_at(row) == 7)
    view.table.selectRow(older)
    assert session.selection.request == 1


def test_requests_dropped_from_the_mirror_stay_in_the_table(engine, session, poll, view):
    session.live_mirror.requests.max_finished = 2
    for number in range(5, 60):
        engine.request(number, state=RUNNING)
        engine.request(number, state=FINISHED)
    poll(session)
    view.refresh()
    assert session.live_mirror.requests.row_of(5) is None
    assert column(view, "#")[:3] == ["59", "58", "57"]
    assert len(column(view, "#")) == 59
