"""Tests of views in one window that share the visible range."""

from __future__ import annotations

import pytest
from tests.app.compare.conftest import BEGAN_NS, write_recording

from kvscope_app.session.session import Session
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.views.heatmap.time_frame import TimeFrameMode
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording

SECOND_NS = 1_000_000_000
VIEWS = ("timeline", "heatmap", "memory", "requests", "events", "roofline", "throughput")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_recording(tmp_path_factory.mktemp("recordings") / "one.mcap", 700, 120)


@pytest.fixture
def session(path):
    made = Session(PlaybackSource(Recording.open(path), is_playing=False))
    made.start()
    yield made
    made.close()
    made.deleteLater()


@pytest.fixture
def open_window(session, make_window, qtbot):
    """Return a function that opens a window on the recording and draws all its views."""

    def open_it():
        made = make_window(session, with_views=VIEWS, size=(1500, 900))
        qtbot.waitUntil(lambda: session.mirror.hello is not None and session.is_overview_complete, timeout=WAIT_MS)
        for name in VIEWS:
            made.docks[name].show()
            made.docks[name].raise_()
            made.views[name].draw_all()
        return made

    return open_it


@pytest.fixture
def window(open_window):
    return open_window()


def charts_span(window):
    """Return the wall-clock range shown by the throughput charts."""
    charts, offset_ns = window.views["throughput"].charts, window.session.history.wall_ns(0)
    (first_s, last_s), _ = charts.panels["decode"].plot.view_box.viewRange()
    return TimeSpan(round(first_s * 1e9) + offset_ns, round(last_s * 1e9) + offset_ns)


def is_about(found, wanted):
    """Whether two ranges are equal within a pixel column."""
    within_ns = wanted.length_ns // 50
    return abs(found.begin_ns - wanted.begin_ns) <= within_ns and abs(found.end_ns - wanted.end_ns) <= within_ns


def test_zooming_the_timeline_zooms_charts_and_heatmap(window):
    timeline, heatmap = window.views["timeline"], window.views["heatmap"]
    timeline.canvas.zoom(0.3, 0.5)
    span = timeline.canvas.shown.span
    assert window.session.timeline.shared_zoom.span == span
    assert is_about(heatmap.frame.span, span)
    assert is_about(charts_span(window), span)


def test_zooming_the_heatmap_zooms_charts_and_timeline(window):
    heatmap = window.views["heatmap"]
    heatmap.frame.zoom(3.0, 150)
    assert is_about(
        window.views["timeline"].canvas.shown.span, heatmap.frame.span.clamped_to(window.views["timeline"].canvas.whole)
    )
    assert is_about(charts_span(window), heatmap.frame.span)


def test_dragging_a_chart_zooms_the_timeline(window):
    charts, offset_ns = window.views["throughput"].charts, window.session.history.wall_ns(0)
    first_s = (BEGAN_NS + 2 * SECOND_NS - offset_ns) / 1e9
    charts.panels["decode"].range_dragged.emit(first_s, first_s + 3)
    assert is_about(
        window.views["timeline"].canvas.shown.span, TimeSpan(BEGAN_NS + 2 * SECOND_NS, BEGAN_NS + 5 * SECOND_NS)
    )


def test_unlinked_view_keeps_its_range_until_it_is_linked_again(window):
    timeline, heatmap = window.views["timeline"], window.views["heatmap"]
    heatmap.link.button.click()
    timeline.canvas.zoom(0.3, 0.5)
    assert heatmap.frame.mode is TimeFrameMode.FIT
    heatmap.frame.zoom(2.0, 100)
    assert window.session.timeline.shared_zoom.span == timeline.canvas.shown.span, (
        "zooming an unlinked view must not change the shared range"
    )
    heatmap.link.button.click()
    assert is_about(heatmap.frame.span, timeline.canvas.shown.span)


def test_alt_left_undoes_a_zoom_in_all_views(window):
    actions, timeline, heatmap = window.actions_by_name, window.views["timeline"], window.views["heatmap"]
    assert not actions["zoom_back"].isEnabled()
    assert actions["zoom_back"].shortcut().toString() == "Alt+Left"
    timeline.canvas.zoom(0.3, 0.5)
    span = timeline.canvas.shown.span
    actions["zoom_back"].trigger()
    assert timeline.canvas.shown.span == timeline.canvas.whole
    assert heatmap.frame.mode is TimeFrameMode.FIT
    actions["zoom_forward"].trigger()
    assert timeline.canvas.shown.span == span


def test_hidden_charts_follow_the_visible_range_when_they_are_shown(window, qtbot):
    """Zooming must not draw hidden views."""
    window.focus_view("memory")
    before = charts_span(window)
    timeline = window.views["timeline"]
    timeline.canvas.zoom(0.3, 0.5)
    assert charts_span(window) == before
    window.focus_view("throughput")
    qtbot.waitUntil(lambda: is_about(charts_span(window), timeline.canvas.shown.span), timeout=WAIT_MS)


def test_fit_in_one_view_resets_the_zoom_of_all(window):
    timeline, heatmap = window.views["timeline"], window.views["heatmap"]
    timeline.canvas.zoom(0.3, 0.5)
    heatmap.fit_button.click()
    assert timeline.canvas.shown.span == timeline.canvas.whole
    assert window.session.timeline.shared_zoom.span is None
    assert window.views["throughput"].charts.is_following


def test_requests_and_events_can_be_filtered_by_the_visible_range(window):
    requests, events = window.views["requests"], window.views["events"]
    requests.filter.setCurrentText("In visible range")
    events.only_in_range.setChecked(True)
    all_requests, all_events = requests.model.rowCount(), events.model.rowCount()
    span = TimeSpan(BEGAN_NS + 3 * SECOND_NS, BEGAN_NS + 4 * SECOND_NS)
    window.session.timeline.shared_zoom.show(span)
    events.refresh()
    assert 0 < requests.model.rowCount() < all_requests
    assert 0 < events.model.rowCount() < all_events
    times = [events.model.timed_at(row).time_ns for row in range(events.model.rowCount())]
    assert all(span.begin_ns <= each <= span.end_ns for each in times)
    window.session.timeline.shared_zoom.show(None)
    events.refresh()
    assert (requests.model.rowCount(), events.model.rowCount()) == (all_requests, all_events)


def test_view_opened_later_shows_the_current_visible_range(session, open_window):
    span = TimeSpan(BEGAN_NS + 3 * SECOND_NS, BEGAN_NS + 5 * SECOND_NS)
    session.timeline.shared_zoom.show(span)
    window = open_window()
    assert window.views["timeline"].canvas.shown.span == span
    assert is_about(window.views["heatmap"].frame.span, span)
    assert is_about(charts_span(window), span)
