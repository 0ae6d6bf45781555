"""Tests of the timeline view: drawing, mouse, keyboard, wheel and selection."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication, QLabel, QToolButton

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.app import window_driver as driver
from timed_fakes import EPOCH, START_NS, FakeTimedSession, second, small_overview, timed

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import DARK, THEMES
from kvscope_app.views.timeline.lane_colors import pale_pixel
from kvscope_app.views.timeline.lane_layout import GUTTER, ROW_HEIGHT
from kvscope_app.views.timeline.timeline_view import EMPTY_TEXT, TimelineView
from kvscope_telemetry.messages.telemetry import RequestInfo, RequestRows
from kvscope_telemetry.summaries.summary import SECOND_NS


@pytest.fixture
def timed_session():
    return FakeTimedSession(small_overview())


@pytest.fixture
def view(timed_session, qtbot):
    view = TimelineView(timed_session)
    qtbot.addWidget(view)
    view.resize(GUTTER + 1_000, 520)
    view.apply_theme(DARK)
    view.show()
    view.refresh()
    return view


def point_at(view, at_s, lane=None, row=None):
    """Return the position of a time in a lane or in a row of requests."""
    layout = view.canvas.lane_layout
    x = GUTTER + view.canvas.shown.span.share_at(START_NS + round(at_s * SECOND_NS)) * layout.chart_width
    if row is not None:
        return QPoint(round(x), layout.requests_top + row * ROW_HEIGHT + 5)
    top, height = next((top, height) for found, top, height in layout.boxes() if found.name == lane)
    return QPoint(round(x), top + height - 2)


def color_at(view, at_s, **where):
    return view.canvas.grab().toImage().pixelColor(point_at(view, at_s, **where)).name()


@pytest.mark.parametrize("theme", list(THEMES.values()), ids=list(THEMES))
def test_each_lane_is_colored_where_its_events_happened(view, theme):
    view.apply_theme(theme)
    bare = f"#{pale_pixel('raised', theme, 0.55) & 0xFFFFFF:06x}"
    assert color_at(view, 55, lane="usage") == theme.block_active
    assert color_at(view, 65, lane="usage") == bare
    assert color_at(view, 65, lane="gaps") == theme.warn
    assert color_at(view, 80.5, lane="gaps") == theme.bad
    assert color_at(view, 50.5, lane="gaps") == bare
    assert color_at(view, 20.5, lane="copied") == theme.flash_copied
    assert color_at(view, 22, lane="copied") == bare
    assert color_at(view, 12, lane="running") == theme.good
    for lane, at, name in (("swapped", 30, "flash_saved"), ("preempted", 30, "bad"), ("evicted", 45, "flash_evicted")):
        x = point_at(view, at, lane=lane)
        image = view.canvas.grab().toImage()
        near = {image.pixelColor(x.x() + by, x.y()).name() for by in (-1, 0, 1)}
        assert getattr(theme, name) in near


@pytest.mark.parametrize("theme", list(THEMES.values()), ids=list(THEMES))
def test_usage_lane_is_as_high_as_the_share_in_use(view, theme):
    view.apply_theme(theme)
    image = view.canvas.grab().toImage()
    x = point_at(view, 30, lane="usage").x()
    _, top, height = next(view.canvas.lane_layout.boxes())
    column = [image.pixelColor(x, y).name() for y in range(top, top + height)]
    assert abs(column.count(theme.block_active) - height * 0.5) <= 1
    assert abs(column.count(theme.block_cached) - height * 0.25) <= 1


def test_request_row_has_the_colors_of_its_phases(view):
    assert color_at(view, 20, row=0) == DARK.good
    assert color_at(view, 35, row=0) == DARK.flash_saved
    assert color_at(view, 60, row=0) == DARK.good
    assert color_at(view, 95, row=0) == DARK.base
    assert color_at(view, 99, row=1) == DARK.good
    assert color_at(view, 8.5, row=0) == f"#{pale_pixel('warn', DARK, 0.35) & 0xFFFFFF:06x}"


def test_click_on_a_request_selects_it_and_seeks(view, timed_session, qtbot):
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=point_at(view, 35, row=0))
    assert timed_session.selection.request == 1
    assert abs(timed_session.timeline.cursor_ns - (START_NS + 35 * SECOND_NS)) < SECOND_NS
    assert view.canvas.selected == (EPOCH, 1)


def test_click_near_an_event_seeks_to_its_exact_time(view, timed_session, qtbot):
    where = point_at(view, 30, lane="swapped") + QPoint(3, 0)
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=where)
    assert timed_session.timeline.cursor_ns == START_NS + 30 * SECOND_NS
    assert timed_session.selection.request == 1


def test_request_of_another_engine_run_is_selected_once_that_run_is_shown(view, timed_session, qtbot):
    timed_session.mirror.epoch = EPOCH + 1
    qtbot.mouseClick(view.canvas, Qt.MouseButton.LeftButton, pos=point_at(view, 35, row=0))
    assert timed_session.selection.request is None
    timed_session.mirror.epoch = EPOCH
    view.refresh()
    assert timed_session.selection.request == 1


def test_selected_request_is_outlined(view, timed_session):
    before = view.canvas.grab().toImage()
    timed_session.selection.select_request(2)
    after = view.canvas.grab().toImage()
    assert before != after
    top = view.canvas.lane_layout.requests_top + ROW_HEIGHT
    assert after.pixelColor(point_at(view, 60, row=1).x(), top).name() == DARK.selection


def test_lane_and_row_under_the_pointer_are_described(view):
    words = view.canvas.hit_test(point_at(view, 35, row=0)).text
    assert "#1 preempted, swapped" in words
    assert "request #1 was chosen, being the newest" in words
    assert "preempted #1: request #2 needed" in view.canvas.hit_test(point_at(view, 30, lane="preempted")).text
    assert "50.0 % in use: 50 blocks active" in view.canvas.hit_test(point_at(view, 30.5, lane="usage")).text
    assert view.canvas.hit_test(point_at(view, 65, lane="gaps")).text == "no telemetry was received for 10.0 s"
    assert view.canvas.hit_test(point_at(view, 80.5, lane="gaps")).text == "5 frames lost here"
    assert "3 copied blocks" in view.canvas.hit_test(point_at(view, 20.5, lane="copied")).text
    assert "#3 refused" in view.canvas.hit_test(point_at(view, 70, row=2)).text
    assert view.canvas.hit_test(QPoint(5, 100)) is None


def test_description_of_a_request_names_its_adapter(view, timed_session):
    request_info = RequestInfo(number=1, request_id="r", arrival_ns=1, num_prompt_tokens=2, max_tokens=3, adapter="sql")
    timed_session.mirror.requests.apply([request_info], RequestRows(), time_ns=1)
    assert "#1 (sql) preempted, swapped" in view.canvas.hit_test(point_at(view, 35, row=0)).text
    assert "#3 refused" in view.canvas.hit_test(point_at(view, 70, row=2)).text


def turn_wheel(view, at_s, steps, *, modifiers=Qt.KeyboardModifier.NoModifier):
    turn_wheel_at(view, point_at(view, at_s, lane="usage"), steps, modifiers=modifiers)


def turn_wheel_at(view, position, steps, *, modifiers=Qt.KeyboardModifier.NoModifier):
    position = QPointF(position)
    event = QWheelEvent(
        position,
        view.canvas.mapToGlobal(position),
        QPoint(),
        QPoint(0, 120 * steps),
        Qt.MouseButton.NoButton,
        modifiers,
        Qt.ScrollPhase.NoScrollPhase,
        False,
    )
    QApplication.sendEvent(view.canvas, event)


def test_wheel_zooms_the_timeline_at_the_pointer(view):
    x = point_at(view, 30, lane="usage").x()
    turn_wheel(view, 30, 8)
    assert view.canvas.shown.span.length_ns < 25 * SECOND_NS
    assert abs(point_at(view, 30, lane="usage").x() - x) <= 2
    turn_wheel(view, 30, 100)
    assert view.canvas.shown.span.length_ns == 100_000
    turn_wheel(view, 30, -200)
    assert view.canvas.shown.span == view.canvas.whole
    assert view.canvas.length_ns is None


def test_zoomed_timeline_moves_neither_with_the_end_nor_with_the_cursor(view, timed_session):
    timed_session.timeline.cursor_ns = START_NS + 90 * SECOND_NS
    view.refresh()
    x = point_at(view, 20, lane="usage").x()
    turn_wheel(view, 20, 8)
    timed_session.overview.extend([second(at, num_running=1) for at in range(100, 110)])  # the engine continues
    timed_session.overview_changed.emit()
    assert abs(point_at(view, 20, lane="usage").x() - x) <= 2
    assert not view.follow.isChecked()
    seen = view.canvas.shown.span
    timed_session.timeline.cursor_ns = START_NS + 100 * SECOND_NS
    view.refresh()
    assert view.canvas.shown.span == seen
    view.follow.click()
    assert view.canvas.shown.span.end_ns >= timed_session.timeline.cursor_ns


def test_panning_to_the_end_while_time_is_paused_stays_there(view, timed_session):
    timed_session.timeline.cursor_ns = START_NS + 10 * SECOND_NS
    view.refresh()
    view.canvas.show_length(20 * SECOND_NS)
    view.canvas.pan(500 * SECOND_NS)
    seen = view.canvas.shown.span
    timed_session.overview.extend([second(at, num_running=1) for at in range(100, 110)])
    timed_session.overview_changed.emit()
    assert view.canvas.shown.span == seen


def test_timeline_description_is_updated_when_the_view_moves_under_a_resting_pointer(view, timed_session, qtbot):
    qtbot.mouseMove(view.canvas, point_at(view, 30.5, lane="usage"))
    assert "50.0 % in use" in view.pointed.longest
    view.canvas.show_span(TimeSpan(START_NS + 62 * SECOND_NS, START_NS + 68 * SECOND_NS))
    assert "in use" not in view.pointed.longest, "there is no data for that time"
    before = view.pointed.longest
    turn_wheel(view, 67, 1)
    view.canvas.show_span(TimeSpan(START_NS, START_NS + 60 * SECOND_NS))
    assert view.pointed.longest != before


def test_shift_right_key_pans_the_timeline_and_zooming_out_fits_all(view, timed_session, qtbot):
    canvas = view.canvas
    for _ in range(2):
        canvas.zoom_by(1)
    assert canvas.shown.span.length_ns == 25 * SECOND_NS
    canvas.show_span(TimeSpan(canvas.whole.begin_ns, canvas.whole.begin_ns + 25 * SECOND_NS))
    qtbot.keyClick(canvas, Qt.Key.Key_Right, Qt.KeyboardModifier.ShiftModifier)
    assert canvas.shown.span.begin_ns == canvas.whole.begin_ns + 2_500_000_000
    assert not timed_session.timeline.went_to
    canvas.zoom_by(-1)
    canvas.zoom_by(-1)
    assert canvas.shown.span == canvas.whole


def test_arrow_keys_move_the_cursor_and_keep_it_visible(view, timed_session, qtbot):
    before = timed_session.timeline.cursor_ns
    qtbot.keyClick(view.canvas, Qt.Key.Key_Right)
    assert timed_session.timeline.cursor_ns == before + 2 * SECOND_NS
    view.canvas.show_length(10 * SECOND_NS)
    for _ in range(100):
        qtbot.keyClick(view.canvas, Qt.Key.Key_Right)
    span = view.canvas.shown.span
    assert span.begin_ns <= timed_session.timeline.cursor_ns <= span.end_ns
    assert timed_session.timeline.cursor_ns > before + 20 * SECOND_NS


def test_dragging_pans_the_timeline_without_selecting_anything(view, timed_session, qtbot):
    view.canvas.show_length(20 * SECOND_NS)
    begin = view.canvas.shown.span.begin_ns
    qtbot.mousePress(view.canvas, Qt.MouseButton.LeftButton, pos=QPoint(GUTTER + 600, 100))
    for x in (550, 400):
        qtbot.mouseMove(view.canvas, QPoint(GUTTER + x, 100))
    qtbot.mouseRelease(view.canvas, Qt.MouseButton.LeftButton, pos=QPoint(GUTTER + 400, 100))
    width = view.canvas.lane_layout.chart_width
    assert abs(view.canvas.shown.span.begin_ns - begin - 200 / width * 20 * SECOND_NS) < SECOND_NS / 10
    assert not timed_session.timeline.went_to


def test_double_click_fits_the_whole_timeline(view, qtbot):
    view.canvas.show_length(SECOND_NS)
    qtbot.mouseDClick(view.canvas, Qt.MouseButton.LeftButton, pos=QPoint(GUTTER + 50, 100))
    assert view.canvas.shown.span == view.canvas.whole


def test_follow_keeps_the_live_end_visible_until_the_user_pans(view, timed_session, qtbot):
    timed_session.timeline.cursor_ns = START_NS + 100 * SECOND_NS
    view.refresh()
    view.canvas.show_length(10 * SECOND_NS)
    assert view.canvas.shown.span.end_ns == START_NS + 100 * SECOND_NS
    timed_session.overview.extend([second(at, num_running=1, free_blocks=1) for at in range(100, 110)])
    timed_session.timeline.cursor_ns = START_NS + 110 * SECOND_NS
    timed_session.overview_changed.emit()
    assert view.canvas.shown.span.end_ns == START_NS + 110 * SECOND_NS
    for _ in range(200):
        qtbot.keyClick(view.canvas, Qt.Key.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert not view.follow.isChecked()
    timed_session.overview.extend([second(110)])
    timed_session.timeline.cursor_ns = START_NS + 111 * SECOND_NS
    timed_session.overview_changed.emit()
    assert view.canvas.shown.span.begin_ns == START_NS
    view.follow.click()
    assert view.canvas.shown.span.end_ns == START_NS + 111 * SECOND_NS


def test_many_requests_can_be_scrolled_newest_at_the_bottom(view, timed_session, qtbot):
    timed_session.overview.extend((), [timed(91 + number / 100, "admitted", number) for number in range(10, 210)])
    view.refresh()
    view.orders.chosen.emit(1)
    assert view.rows.isVisibleTo(view)
    view.rows.setValue(view.rows.maximum())
    row = view.canvas.shown.num_rows - 1 - view.canvas.shown.first_row
    assert view.canvas.hit_test(point_at(view, 96, row=row)).number == 209
    most = view.rows.maximum()
    qtbot.keyClick(view.canvas, Qt.Key.Key_PageUp)
    assert view.rows.value() == most - view.canvas.lane_layout.num_rows


def test_up_and_down_select_the_previous_and_next_request(view, timed_session, qtbot):
    view.orders.chosen.emit(1)
    view.canvas.setFocus()
    there = [view.canvas.hit_test(point_at(view, at, row=row)).number for row, at in enumerate((8, 20, 70))]
    assert sorted(there) == [1, 2, 3]
    timed_session.timeline.go_to(START_NS + 50 * SECOND_NS)
    view.refresh()
    seen = []
    for key in (*[Qt.Key.Key_Down] * 4, Qt.Key.Key_Up):
        qtbot.keyClick(view.canvas, key)
        seen.append(timed_session.selection.request)
    assert seen == [*there, there[2], there[1]]


def test_up_and_down_keep_the_cursor_where_both_requests_exist(view, timed_session, qtbot):
    view.orders.chosen.emit(1)
    at_ns = START_NS + 50 * SECOND_NS
    timed_session.timeline.go_to(at_ns)
    view.refresh()
    for _ in range(2):
        qtbot.keyClick(view.canvas, Qt.Key.Key_Down)
        assert timed_session.timeline.cursor_ns == at_ns
    qtbot.keyClick(view.canvas, Qt.Key.Key_Down)
    assert timed_session.selection.request == 3
    assert timed_session.timeline.cursor_ns != at_ns  # the request did not exist at that time


def test_up_key_in_the_timeline_first_selects_the_request_in_the_last_visible_row(view, timed_session, qtbot):
    timed_session.overview.extend((), [timed(91 + number / 100, "admitted", number) for number in range(10, 210)])
    view.refresh()
    view.orders.chosen.emit(1)
    timed_session.timeline.go_to(START_NS + 99 * SECOND_NS)
    qtbot.keyClick(view.canvas, Qt.Key.Key_Up)
    row = view.canvas.lane_layout.num_rows - 1
    assert timed_session.selection.request == view.canvas.hit_test(point_at(view, 96, row=row)).number
    qtbot.keyClick(view.canvas, Qt.Key.Key_Down)
    assert view.canvas.shown.first_row == 1, "the selected row must be visible"


def test_up_and_down_do_nothing_without_requests(qtbot):
    session = FakeTimedSession(small_overview())
    session.overview.events.forget_before(START_NS + 1_000 * SECOND_NS)
    empty = TimelineView(session)
    qtbot.addWidget(empty)
    empty.refresh()
    before = session.timeline.cursor_ns
    qtbot.keyClick(empty.canvas, Qt.Key.Key_Down)
    assert (session.selection.request, session.timeline.cursor_ns) == (None, before)


def test_low_dock_hides_lanes_without_events(view, timed_session):
    timed_session.overview.forget_before(START_NS + 71 * SECOND_NS)
    view.refresh()
    assert {"refused", "copied", "swapped"} <= {lane.name for lane, *_ in view.canvas.lane_layout.boxes()}
    view.resize(GUTTER + 1_000, 260)
    assert {lane.name for lane, *_ in view.canvas.lane_layout.boxes()} == {"usage", "running", "waiting", "gaps"}


def lane_names(view):
    return [lane.name for lane, *_ in view.canvas.lane_layout.boxes()]


LANES_IN_USE = ["usage", "running", "waiting", "preempted", "evicted", "copied", "refused", "gaps"]


@pytest.fixture
def low_view(view):
    view.resize(GUTTER + 1_000, 165)
    view.refresh()
    return view


def test_low_dock_shows_request_rows_instead_of_the_last_lanes(low_view):
    canvas, layout = low_view.canvas, low_view.canvas.lane_layout
    shown = lane_names(low_view)
    assert 2 <= len(shown) < len(LANES_IN_USE)
    assert shown == LANES_IN_USE[: len(shown)]
    assert canvas.height() >= layout.requests_top + 4 * ROW_HEIGHT
    assert color_at(low_view, 60, row=0) == DARK.good
    assert canvas.hit_test(point_at(low_view, 35, row=0)).number == 1


def test_low_dock_scrolls_to_the_lanes_that_do_not_fit(low_view, timed_session):
    fixed = lane_names(low_view)
    timed_session.overview.extend((), [timed(91 + number / 100, "admitted", number) for number in range(10, 60)])
    low_view.refresh()
    rows, canvas = low_view.rows, low_view.canvas
    assert rows.isVisibleTo(low_view)
    assert rows.value() == 0
    rows.setValue(-1)
    assert lane_names(low_view) == [*fixed, "gaps"]
    rows.setValue(rows.minimum())
    assert lane_names(low_view) == LANES_IN_USE
    rows.setValue(rows.maximum())
    assert lane_names(low_view) == fixed
    assert canvas.hit_test(point_at(low_view, 96, row=canvas.lane_layout.num_rows - 1)).number == 59


def test_wheel_over_names_and_ctrl_wheel_scroll_without_zooming(low_view):
    span = low_view.canvas.shown.span
    turn_wheel_at(low_view, QPoint(GUTTER // 2, 60), 1)
    assert low_view.rows.value() == -3
    turn_wheel(low_view, 30, -1, modifiers=Qt.KeyboardModifier.ControlModifier)
    assert low_view.rows.value() == 0
    assert low_view.canvas.shown.span == span


def test_low_dock_without_requests_shows_every_lane(qtbot):
    session = FakeTimedSession(small_overview())
    session.overview.events.forget_before(START_NS + 1_000 * SECOND_NS)
    empty = TimelineView(session)
    qtbot.addWidget(empty)
    empty.resize(GUTTER + 1_000, 200)
    empty.refresh()
    assert empty.canvas.lane_layout.num_scrolling == 0


def test_long_overview_is_read_in_parts_and_painted_meanwhile(view, timed_session, qtbot):
    events = [timed(91 + at / 1_000, kind, 100 + at) for at in range(2_000) for kind in ("admitted", "finished")]
    timed_session.overview.extend((), events)
    view.refresh()
    while not driver.has_no_running_timer(view):
        view.canvas.grab()
        view.canvas.hit_test(point_at(view, 92, row=2))
        QApplication.processEvents()
    assert view.canvas.shown.lanes.index_of(EPOCH, 2_099) is not None
    assert view.canvas.hit_test(point_at(view, 92.5, row=0)).number


def test_empty_timeline_shows_an_explanation(qtbot):
    empty = TimelineView(FakeTimedSession())
    qtbot.addWidget(empty)
    empty.show()
    empty.refresh()
    assert EMPTY_TEXT in [label.text() for label in empty.findChildren(QLabel) if label.isVisibleTo(empty)]


def test_time_to_paint_the_timeline_does_not_grow_with_the_number_of_events(view, timed_session, qtbot):
    """Events and requests are drawn by numpy: a repaint of thousands of them makes no more Python calls than one of
    few.
    """

    def num_calls():
        calls = 0

        def count_call(*_):
            nonlocal calls
            calls += 1

        view.canvas.apply_theme(DARK)  # redraws everything
        sys.setprofile(count_call)
        try:
            view.canvas.grab()
        finally:
            sys.setprofile(None)
        return calls

    few = num_calls()
    events = [timed(at / 100, "evicted", 0) for at in range(5_000)]
    events += [timed(50 + at / 100, kind, 100 + at) for at in range(2_000) for kind in ("admitted", "finished")]
    timed_session.overview.extend((), events)
    view.refresh()
    qtbot.waitUntil(lambda: driver.has_no_running_timer(view), timeout=120_000)
    assert num_calls() < few + 1_500


@pytest.mark.parametrize("width", range(300, 900, 30))
def test_texts_in_the_timeline_bar_are_not_truncated_at_any_width(view, width):
    view.resize(width, 400)
    QApplication.processEvents()
    for row in (view.lengths, view.orders):
        for button in row.findChildren(QToolButton):
            assert not button.isVisible() or button.width() >= button.sizeHint().width(), button.text()
