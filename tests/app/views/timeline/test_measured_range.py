"""Tests of a measured range of the timeline: figures, and the requests that were delayed most."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel

sys.path.insert(0, str(Path(__file__).parents[1]))

from timed_fakes import EPOCH, START_NS, FakeTimedSession, second, small_overview, timed

from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import DARK
from kvscope_app.views.timeline.lane_layout import GUTTER
from kvscope_app.views.timeline.measured_range import WholeSeconds, measure_range, most_delayed
from kvscope_app.views.timeline.request_lanes import RequestLanes
from kvscope_app.views.timeline.timeline_view import TimelineView
from kvscope_telemetry.summaries.latency_buckets import pack
from kvscope_telemetry.summaries.run_figures import BY_KEY, largest_of, rows_in
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Latency

SHIFT = Qt.KeyboardModifier.ShiftModifier
LEFT = Qt.MouseButton.LeftButton
UNTIL_NS = START_NS + 100 * SECOND_NS


def span(begin_s, end_s):
    return TimeSpan(START_NS + round(begin_s * SECOND_NS), START_NS + round(end_s * SECOND_NS))


def lanes_of(overview):
    lanes = RequestLanes()
    lanes.add_events(overview.events[place] for place in range(len(overview.events)))
    return lanes


def latency(*values_s):
    values = np.array(values_s)
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
    return Latency(count=len(values), p50_s=p50, p95_s=p95, p99_s=p99, buckets=pack(values))


def test_measured_figures_cover_the_nearest_whole_seconds():
    overview = SessionOverview()
    overview.extend([second(at, decode_tokens=10 * at, finished=1, preemptions=at % 2) for at in range(20)])
    found = measure_range(overview, RequestLanes(), span(4.2, 6.9), UNTIL_NS)
    rows = dict(found.rows)
    assert found.title.startswith("2.7")
    assert rows["Requests finished"] == "3"
    assert rows["Preemptions"] == "1"
    assert rows["Decode tokens per second"] == "50.0 tokens/s"
    whole = WholeSeconds.from_span(span(4.2, 6.9))
    assert BY_KEY["decode_tokens_per_s"].of(overview, whole) == pytest.approx(50)
    assert BY_KEY["finished"].of(overview, WholeSeconds.from_span(span(4, 5))) == 1, "the end of the range is excluded"


def test_measured_latencies_include_the_maximum():
    overview = SessionOverview()
    overview.extend([second(0, first_token=latency(0.1, 0.2)), second(1, first_token=latency(0.1, 4.0))])
    assert largest_of(overview, "first_token", rows_in(overview, WholeSeconds.from_span(span(0, 2)))) == pytest.approx(
        4, rel=0.01
    )
    assert largest_of(overview, "first_token", rows_in(overview, WholeSeconds.from_span(span(0, 1)))) == pytest.approx(
        0.2, rel=0.01
    )
    assert largest_of(overview, "inter_token", slice(0, 2)) is None
    rows = dict(measure_range(overview, RequestLanes(), span(0, 2), UNTIL_NS).rows)
    assert rows["First token, p50 / p95 / max"].count("/") == 2
    assert "unknown" in rows["Between tokens, p50 / p95 / max"]


def test_latency_maximum_without_histogram_buckets_is_unknown():
    overview = SessionOverview()
    overview.extend([second(0, first_token=Latency(count=9, p50_s=1.0, p95_s=2.0, p99_s=2.0))])
    assert largest_of(overview, "first_token", slice(0, 1)) is None


def test_most_delayed_requests_are_those_not_served_within_the_range():
    overview = small_overview()
    (delayed,) = most_delayed(overview, lanes_of(overview), span(25, 35), UNTIL_NS)
    assert (delayed.epoch, delayed.number) == (EPOCH, 1)
    assert delayed.delay_ns == 5 * SECOND_NS, "delayed since 30 s; time after the range does not count"
    assert delayed.time_ns == START_NS + 30 * SECOND_NS
    assert not most_delayed(overview, lanes_of(overview), span(50, 90), UNTIL_NS)
    overview.extend([], [timed(95, "admitted", 4), timed(96, "preempted", 4)])
    (open_one,) = most_delayed(overview, lanes_of(overview), span(94, 100), UNTIL_NS)
    assert (open_one.number, open_one.delay_ns) == (4, 4 * SECOND_NS), "the delay has not ended"


@pytest.fixture
def view(qtbot):
    view = TimelineView(FakeTimedSession(small_overview()))
    qtbot.addWidget(view)
    view.resize(GUTTER + 1_000, 520)
    view.apply_theme(DARK)
    view.show()
    view.refresh()
    return view


def drag_with_shift(view, begin_s, end_s):
    canvas = view.canvas
    first, last = (
        QPoint(
            GUTTER + round(canvas.shown.span.share_at(START_NS + at * SECOND_NS) * canvas.lane_layout.chart_width), 60
        )
        for at in (begin_s, end_s)
    )
    QTest.mousePress(canvas, LEFT, SHIFT, first)
    QTest.mouseMove(canvas, QPoint((first.x() + last.x()) // 2, 60))
    QTest.mouseMove(canvas, last)
    QTest.mouseRelease(canvas, LEFT, SHIFT, last)


def test_shift_drag_measures_a_range_until_dismissed(view):
    before = view.canvas.shown.span
    drag_with_shift(view, 35, 20)
    assert view.canvas.shown.span == before, "the drag must not pan"
    assert view.canvas.measured.begin_ns == pytest.approx(START_NS + 20 * SECOND_NS, abs=SECOND_NS)
    assert view.canvas.measured.length_ns == pytest.approx(15 * SECOND_NS, abs=SECOND_NS)
    assert view.card.isVisible()
    assert view.canvas.grab().toImage().width() > 0
    assert any("First token" in label.text() for label in view.card.findChildren(QLabel))
    view.card.copy_button.click()
    pasted = QGuiApplication.clipboard().text()
    assert "Preemptions: " in pasted
    assert "#1: " in pasted
    assert view.dismiss()
    assert not view.card.isVisible()
    assert view.canvas.measured is None
    assert not view.dismiss()


def test_delayed_request_can_be_selected_from_the_card(view):
    drag_with_shift(view, 20, 38)
    view.card.chosen.emit(view.card.measured.delayed[0])
    assert view.session.selection.request == 1
    assert view.card.isVisible()


def test_card_is_updated_while_its_range_grows(view):
    view.session.overview.extend([second(100, finished=2)])
    view.refresh()
    drag_with_shift(view, 98, 101)
    before = dict(view.card.measured.rows)["Requests finished"]
    view.session.overview.extend([second(100, finished=7)])
    view.refresh()
    after = dict(view.card.measured.rows)["Requests finished"]
    assert int(after) == int(before) + 5


def test_wasd_keys_zoom_at_the_pointer_and_pan(view, qtbot):
    canvas = view.canvas
    x = GUTTER + canvas.lane_layout.chart_width // 4
    qtbot.mouseMove(canvas, QPoint(x, 60))
    under = canvas.shown.span.time_at(0.25)
    qtbot.keyClick(canvas, Qt.Key.Key_W)
    seen = canvas.shown.span
    assert seen.length_ns < canvas.whole.length_ns
    assert seen.time_at(0.25) == pytest.approx(under, abs=SECOND_NS / 5)
    qtbot.keyClick(canvas, Qt.Key.Key_D)
    assert canvas.shown.span.begin_ns > seen.begin_ns
    qtbot.keyClick(canvas, Qt.Key.Key_A)
    assert canvas.shown.span == seen
    qtbot.keyClick(canvas, Qt.Key.Key_S)
    assert canvas.shown.span.length_ns > seen.length_ns


@pytest.mark.parametrize(
    ("begin_s", "end_s", "first", "last"),
    [
        pytest.param(4.0, 5.0, 4, 5, id="a whole second"),
        pytest.param(3.99, 5.01, 4, 5, id="a little more than a second"),
        pytest.param(4.1, 4.3, 4, 5, id="a part of a second"),
        pytest.param(4.6, 4.9, 4, 5, id="the end of a second"),
        pytest.param(3.4, 5.6, 3, 6, id="two seconds"),
    ],
)
def test_whole_seconds_nearest_to_the_range_are_used(begin_s, end_s, first, last):
    whole = WholeSeconds.from_span(span(begin_s, end_s))
    assert (whole.from_ns, whole.until_ns + 1) == (span(first, last).begin_ns, span(first, last).end_ns)
