"""Tests of the requests view on a recording: all requests at any time, with the figures of `kvscope info`."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QItemSelectionModel, Qt

from kvscope_app.session.session import Session
from kvscope_app.ui.clock_text import clock_text
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.inspector.inspector_view import REQUEST, InspectorView
from kvscope_app.views.inspector.request_page import request_page
from kvscope_app.views.requests.request_model import COLUMNS, REASON_COLUMN
from kvscope_app.views.requests.requests_view import RequestsView
from kvscope_telemetry.exports.content import Content
from kvscope_telemetry.exports.goodput import evaluate_goals
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording

WAIT_MS = 120_000
NUM_REQUESTS = 39
STATE = next(place for place, each in enumerate(COLUMNS) if each.title == "State")


@pytest.fixture
def view(qtbot):
    session = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
    session.start()
    view = RequestsView(session)
    qtbot.addWidget(view)
    view.resize(1000, 300)
    view.apply_theme(THEMES["dark"])
    view.show()
    view.refresh()
    qtbot.waitUntil(lambda: view.is_loaded and session.is_overview_complete, timeout=WAIT_MS)
    view.refresh()
    yield view
    session.close()


@pytest.fixture
def content(view):
    """Content of the recording as exports and `kvscope info` read it."""
    recording = Recording.open(sample_recording())
    return Content(recording, view.session.overview, span_of(recording))


@pytest.fixture
def go_to(view, qtbot):
    """Function that seeks to a second and waits until its state is shown."""
    timeline = view.session.timeline

    def go(at_s):
        target_ns = timeline.origin_ns + round(at_s * 1e9)
        timeline.go_to(target_ns)

        def is_there():
            history = timeline.history
            return history.began_ns is not None and abs(history.wall_ns(history.began_ns) - target_ns) < 10_000_000

        qtbot.waitUntil(is_there, timeout=WAIT_MS)
        view.refresh()

    return go


def numbers(view):
    return [view.model.number_at(row) for row in range(view.model.rowCount())]


def states(view):
    return [view.model.index(row, STATE).data() for row in range(view.model.rowCount())]


def click(view, qtbot, number, modifier=Qt.KeyboardModifier.NoModifier):
    index = view.model.index(view.model.row_of(number), 2)
    view.table.scrollTo(index)
    place = view.table.visualRect(index).center()
    qtbot.mouseClick(view.table.viewport(), Qt.MouseButton.LeftButton, modifier, place)


def test_all_requests_are_listed_with_their_state_at_the_cursor(view, go_to, content):
    for at_s in (42.4, 30.3, 5.0):
        go_to(at_s)
        counters = view.session.mirror.counters
        assert sorted(numbers(view)) == list(range(1, NUM_REQUESTS + 1))
        shown = states(view)
        assert sum(text == "running" or text.startswith("prefill") for text in shown) == counters.num_running
        assert sum(text in ("waiting", "preempted") for text in shown) == counters.num_waiting
        view.filter.setCurrentText("Running")
        assert view.model.rowCount() == counters.num_running
        view.filter.setCurrentText("All")
    cursor_ns = view.session.timeline.cursor_ns
    num_later = sum(history.arrival_ns > cursor_ns for history in content.histories())
    assert states(view).count("later") == num_later > 0


def test_request_filters_of_a_recording_show_the_requests_that_kvscope_info_counts(view, go_to, content):
    histories, goals = content.histories(), {"ttft": 200.0, "tpot": 50.0}
    kept = evaluate_goals(histories, content.overview, content.recording, content.span, goals, NUM_REQUESTS)
    go_to(42.4)
    view.filter.setCurrentText("Missed goals")
    view.goals.setText("ttft:200 tpot:50")
    view.goals.editingFinished.emit()
    assert sorted(numbers(view)) == sorted(each.history.info.number for each in kept.missed)
    assert view.count.text() == f"goodput {kept.share_text} of 38 finished requests, {kept.num_missed} missed"
    for name, wanted in (
        ("Preempted", [each.info.number for each in histories if each.num_preemptions]),
        ("Aborted", [each.info.number for each in histories if each.end in ("aborted", "refused")]),
    ):
        view.filter.setCurrentText(name)
        assert sorted(numbers(view)) == sorted(wanted)


def test_sorting_by_total_shows_the_slowest_request_and_its_reason(view):
    header, total = view.table.horizontalHeader(), next(i for i, each in enumerate(COLUMNS) if each.title == "Total")
    assert header.model().headerData(total, Qt.Orientation.Horizontal, Qt.ItemDataRole.InitialSortOrderRole) == (
        Qt.SortOrder.DescendingOrder
    )
    view.table.sortByColumn(total, Qt.SortOrder.DescendingOrder)
    assert numbers(view)[:3] == [32, 33, 35]
    assert view.model.index(2, REASON_COLUMN).data().startswith("waited 6.70 s for blocks held by #30, #32, #31")
    assert "preempted for #33" in view.model.index(2, REASON_COLUMN).data(Qt.ItemDataRole.ToolTipRole)


def test_click_on_a_request_seeks_to_a_time_at_which_it_runs(view, go_to, qtbot):
    go_to(42.4)
    click(view, qtbot, 35)

    def runs():
        view.refresh()
        requests = view.session.mirror.requests
        row = requests.row_of(35)
        return row is not None and requests.state[row] == RequestState.RUNNING

    qtbot.waitUntil(runs, timeout=WAIT_MS)
    assert view.session.selection.request == 35
    assert view.detail.strip.accessibleDescription() != "0 blocks"
    assert view.detail.delays.text().startswith("Waited 6.70 s for blocks held by")
    go_to(5.0)
    click(view, qtbot, 35)
    qtbot.waitUntil(runs, timeout=WAIT_MS)


def test_click_that_moves_the_cursor_reports_the_time(view, go_to, qtbot):
    notices = []
    view.session.noticed.connect(notices.append)
    go_to(27.5)
    click(view, qtbot, 33)
    assert notices == [], "#33 exists at this time"
    click(view, qtbot, 35)
    click(view, qtbot, 36)
    text = clock_text(view.session.timeline.cursor_ns)
    assert notices == [f"Moved to {text}, the first token of #36."]


def test_several_chosen_rows_are_selected_as_a_batch(view, go_to, qtbot):
    go_to(30.3)
    click(view, qtbot, 34)
    click(view, qtbot, 36, Qt.KeyboardModifier.ControlModifier)
    assert view.session.selection.batch == (34, 36)
    chosen = {index.row() for index in view.table.selectionModel().selectedRows()}
    assert {view.model.number_at(row) for row in chosen} == {34, 36}


def test_extending_the_selection_does_not_move_the_cursor(view, go_to, qtbot):
    go_to(27.5)
    click(view, qtbot, 36)
    cursor_ns = view.session.timeline.cursor_ns
    notices = []
    view.session.noticed.connect(notices.append)
    for number in (37, 39):
        click(view, qtbot, number, Qt.KeyboardModifier.ControlModifier)
    view.draw_all()
    assert view.session.selection.batch == (36, 37, 39)
    assert (view.session.timeline.cursor_ns, notices) == (cursor_ns, [])


def test_request_that_has_not_started_shows_no_prefill_and_no_reuse(view, go_to):
    """The step that admits #35 begins at 33.7 s; its frame is recorded at 34.4 s."""
    go_to(34.0)
    view.session.selection.select_request(35)
    view.refresh()
    assert states(view)[numbers(view).index(35)] == "waiting"
    assert "Prefill" not in view.detail.phases.text()
    assert view.detail.reuse.isHidden()
    page = request_page(view.session.mirror, view.session.history, 35)
    facts = {fact.name for group in page.groups for fact in group.facts}
    assert not {"Prefill", "Reused"} & facts
    go_to(34.6)
    assert "Prefill: " in view.detail.phases.text()
    assert view.detail.reuse.text().startswith("Reused 16 of 319 prompt tokens")


def test_inspector_shows_the_same_figures_as_the_table(view, go_to, qtbot):
    go_to(30.3)
    inspector = InspectorView(view.session)
    qtbot.addWidget(inspector)
    inspector.apply_theme(THEMES["dark"])
    inspector.show()
    view.session.selection.select_request(32)
    inspector.show_subject(REQUEST)
    inspector.refresh()
    shown = inspector.table.facts
    from_the_end = [
        shown.fact_at(row) for row in reversed(range(shown.rowCount()))
    ]  # reversed, because phases use some of the names
    facts = {fact.name: fact.value for fact in from_the_end if fact is not None}
    row = view.model.row_of(32)
    for title in ("State", "Total", "Queued", "TTFT", "Per token", "Preempted", "Output"):
        place = next(place for place, each in enumerate(COLUMNS) if each.title == title)
        assert facts[title] == view.model.index(row, place).data(), title
    inspector.shut_down()


def test_plots_show_each_request_and_a_click_on_a_dot_selects_it(view, go_to, qtbot):
    go_to(30.3)
    view.detail.setCurrentWidget(view.detail.plots)
    view.refresh()
    plots = view.detail.plots
    assert plots.scatter.accessibleDescription() == "39 requests"
    assert plots.ttft.accessibleDescription() == "39 requests"
    key = view.model.key_of(35)
    place = plots.scatter.position_of(key)
    assert plots.scatter.tip(place) == "#35: 319 prompt tokens, TTFT 7.93 s"
    qtbot.mouseClick(plots.scatter, Qt.MouseButton.LeftButton, pos=place)
    assert view.session.selection.request == 35
    assert view.table.selectionModel().isSelected(view.model.index(view.model.row_of(35), 0))
    counts = plots.ttft.histogram.counts
    assert (counts.size, counts.sum()) == (24, 39)
    assert not plots.grab().isNull()
    view.table.selectionModel().select(view.model.index(0, 0), QItemSelectionModel.SelectionFlag.Clear)
