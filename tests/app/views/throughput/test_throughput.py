"""Tests of the throughput view: curves, values, following and looking back."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QObject, QPoint, QPointF, Qt
from PySide6.QtWidgets import QApplication

from kvscope_app.session.history import BIN_NS
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.throughput.throughput_view import ThroughputView
from kvscope_telemetry.messages.telemetry import Counters, Event
from kvscope_telemetry.source import SERIES_FIELDS, Update
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary


def frame_series(now_ns, num_frames, **columns):
    """Return series of frames 10 ms apart that end at `now_ns`."""
    series = {name: np.zeros(num_frames, np.int64) for name in SERIES_FIELDS}
    series["time_ns"] = now_ns - 10_000_000 * np.arange(num_frames, dtype=np.int64)[::-1]
    series["seq"] = np.arange(1, num_frames + 1)
    for name, value in columns.items():
        series[name][:] = value
    return series


def feed_history(session, events=(), seconds=3, ago_s=0, **columns):
    """Add `seconds` of frames to the history, up to the last whole bin, or up to `ago_s` before the session's snapshot.

    The snapshot is in the history as well, so values around it would depend on how long ago it was.
    """
    newest = session.history.ring.newest if ago_s else time.monotonic_ns() // BIN_NS
    end_ns = (newest - ago_s * 10) * BIN_NS - 1
    for index in range(seconds * 10):
        now_ns = end_ns - (seconds * 10 - 1 - index) * BIN_NS
        update = Update(series=frame_series(now_ns, 10, **columns), events=events if index == 5 else ())
        session.history.add_update(update, session.mirror, now_ns)
    return end_ns


def test_throughput_view_without_an_engine_shows_no_charts(make_engine, make_session, qtbot):
    engine = make_engine()
    engine.source.updates.clear()
    view = ThroughputView(make_session(engine))
    qtbot.addWidget(view)
    view.show()
    view.refresh()
    assert not view.charts.panels["decode"].isVisible()


def test_throughput_curves_and_legend_show_the_received_values(session, view):
    end_s = feed_history(session, ago_s=1, decode_tokens=3, prefill_tokens=7, num_running=5, num_waiting=2) / 1e9
    view.charts.show_fixed(end_s - 5, end_s)
    view.charts.show_values_at(end_s)
    assert view.charts.panels["decode"].legend.values["decode_tokens"] == "300 tok/s"
    assert view.charts.panels["prefill"].legend.values["prefill_tokens"] == "700 tok/s"
    assert view.charts.panels["tokens"].legend.values["all_tokens"] == "1\u202f000 tok/s"
    assert view.charts.panels["requests"].legend.values == {"num_running": "5", "num_waiting": "2"}
    x, y = view.charts.panels["decode"].curve_items["decode_tokens"].getData()
    assert y[-1] == pytest.approx(300)
    assert 2.5 < x[-1] - x[0] < 3.15


def test_maximum_of_a_live_session_is_that_of_the_visible_range(session, view):
    end_s = feed_history(session, ago_s=1, decode_tokens=3, num_running=5) / 1e9
    panel = view.charts.panels["requests"]
    view.charts.show_fixed(end_s - 2, end_s)
    (peak,) = panel.peak_line.peaks
    assert end_s - 2 <= peak.x <= end_s
    assert peak.text == f"running 5 at {panel.clock_text(peak.x)}"
    assert view.charts.panels["decode"].peak_line.peaks[0].text.startswith("300 tok/s at ")
    view.charts.show_fixed(end_s - 20, end_s - 10)
    assert panel.peak_line.peaks == ()


def test_draft_acceptance_panel_is_shown_once_there_are_drafts(session, view):
    feed_history(session)
    view.refresh()
    assert "drafts" not in view.charts.shown
    end_ns = feed_history(session, ago_s=1)
    for second, (drafts, accepted) in enumerate(((8, 4), (16, 10))):
        counters = Counters(draft_tokens=drafts, accepted_tokens=accepted)
        now_ns = end_ns - (2 - second) * SECOND_NS
        session.history.add_update(Update(series=frame_series(now_ns, 1), counters=counters), session.mirror, now_ns)
    view.charts.show_fixed(end_ns / 1e9 - 5, end_ns / 1e9)
    view.charts.show_values_at(end_ns / 1e9 - 1)
    assert view.charts.panels["drafts"].isVisible()
    assert view.charts.panels["drafts"].legend.values == {"draft_share": "75.0 %"}


def test_every_panel_is_drawn_within_six_refreshes(session, view):
    view.resize(1100, 600)
    feed_history(session, decode_tokens=1, num_running=1)
    view.refresh()
    view.charts.drawn.clear()
    for _ in view.charts.shown:
        view.refresh()
    assert set(view.charts.drawn) == set(view.charts.shown)


def test_panel_scrolled_out_of_view_is_not_drawn(session, view):
    view.resize(320, 200)
    feed_history(session, decode_tokens=1)
    view.refresh()
    view.charts.drawn.clear()
    for _ in view.charts.shown:
        view.refresh()
    assert "decode" in view.charts.drawn
    assert "itl" not in view.charts.drawn


def test_choosing_a_shorter_chart_range_ends_at_the_present_and_follows(session, view, qtbot):
    feed_history(session, decode_tokens=1)
    before_s = time.monotonic()
    view.charts.bar.range_chosen.emit(10.0)
    (first, last), _ = view.charts.panels["kv"].plot.view_box.viewRange()
    assert last - first == pytest.approx(10)
    assert before_s - 2 * BIN_NS / 1e9 <= last <= time.monotonic()
    assert view.charts.is_following


def test_dragging_pans_all_panels_and_live_follows_again(session, view, qtbot):
    end_ns = feed_history(session, decode_tokens=1)
    dragged = view.charts.panels["decode"].plot.view_box
    dragged.setXRange(end_ns / 1e9 - 2, end_ns / 1e9 - 1, padding=0)
    dragged.sigRangeChangedManually.emit(dragged.state["mouseEnabled"])
    assert not view.charts.is_following
    assert not view.charts.bar.live.isChecked()
    (first, last), _ = view.charts.panels["itl"].plot.view_box.viewRange()
    assert (first, last) == (pytest.approx(end_ns / 1e9 - 2), pytest.approx(end_ns / 1e9 - 1))
    qtbot.mouseClick(view.charts.bar.live, Qt.MouseButton.LeftButton)
    assert view.charts.is_following
    assert view.charts.bar.live.isChecked()


@pytest.mark.parametrize(
    ("height", "modifier", "zooms"),
    [
        (2000, Qt.KeyboardModifier.NoModifier, True),
        (300, Qt.KeyboardModifier.NoModifier, False),
        (300, Qt.KeyboardModifier.ControlModifier, True),
    ],
)
def test_wheel_over_a_plot_zooms_unless_the_view_scrolls(session, view, qtbot, height, modifier, zooms):
    from PySide6.QtGui import QWheelEvent
    from PySide6.QtWidgets import QScrollArea

    view.resize(400, height)
    feed_history(session, decode_tokens=1)
    view.charts.refresh_all()
    bar = view.findChild(QScrollArea).verticalScrollBar()
    qtbot.waitUntil(lambda: (bar.maximum() > 0) == (height == 300), timeout=120_000)
    viewport = view.charts.panels["decode"].plot.viewport()
    centre = QPointF(viewport.rect().center())
    nothing, turn = QPoint(), QPoint(0, -120)
    phase, button = Qt.ScrollPhase.NoScrollPhase, Qt.MouseButton.NoButton
    event = QWheelEvent(centre, viewport.mapToGlobal(centre), nothing, turn, button, modifier, phase, False)
    QApplication.sendEvent(viewport, event)
    assert view.charts.is_following is not zooms
    assert (bar.value() > 0) is not zooms


def test_infrequent_refreshes_draw_all_panels(session, view, monkeypatch):
    from kvscope_app.views.throughput import throughput_view as module

    now_s = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    feed_history(session, decode_tokens=1)
    view.refresh()
    drawn = []
    monkeypatch.setattr(view.charts, "_draw_panels", lambda names, span: drawn.append(names))
    for _ in range(4):
        now_s[0] += 2.0
        view.refresh()
    assert [len(keys) > 1 for keys in drawn] == [True, True]
    now_s[0] += 0.03
    view.refresh()
    assert len(drawn[-1]) <= 1


def test_hovering_shows_the_values_at_that_time_in_all_panels(session, view):
    end_ns = feed_history(session, decode_tokens=2, num_running=5)
    feed_end = end_ns / 1e9
    view.charts.refresh_all()
    view.charts.panels["kv"].hovered.emit(feed_end - 1.0)
    assert view.charts.panels["requests"].legend.values["num_running"] == "5"
    assert view.charts.bar.time.text()
    assert all(panel.cursor_line.isVisible() for panel in view.charts.panels.values())
    view.charts.panels["kv"].hovered.emit(feed_end - 30.0)
    assert view.charts.panels["requests"].legend.values["num_running"] == "–"
    view.charts.panels["kv"].hovered.emit(None)
    assert not view.charts.bar.time.text()


def test_hovered_time_is_in_the_headlines_at_every_width(session, view):
    end_s = feed_history(session, num_running=5) / 1e9
    clock = view.charts.clock_text(end_s - 1.0)
    for width, in_bar in ((900, True), (view.charts.bar.minimumSizeHint().width(), False)):
        view.resize(width, 700)
        QApplication.processEvents()
        view.charts.refresh_all()
        view.charts.panels["requests"].hovered.emit(end_s - 1.0)
        assert view.charts.bar.time.isVisible() is in_bar
        assert view.charts.panels["requests"].legend.time_text == clock


def test_single_value_is_drawn_as_a_dot(session, view):
    end_ns = feed_history(session, ago_s=1)
    update = Update(series=frame_series(end_ns, 1), first_token_ns=np.array([250_000_000]))
    session.history.add_update(update, session.mirror, end_ns)
    session.history.add_update(Update(), session.mirror, end_ns + BIN_NS)
    view.charts.show_fixed(end_ns / 1e9 - 2, end_ns / 1e9 + 0.5)
    _, y = view.charts.panels["ttft"].dot_items["ttft_p50_s"].getData()
    assert y.tolist() == [0.25]


def test_preemption_marks_name_the_request_and_the_cause(session, view):
    end_ns = feed_history(session, decode_tokens=1)
    event = Event(kind="preempted", time_ns=end_ns, number=12, cause="no free block for request 14")
    session.history.add_update(Update(events=(event,)), session.mirror, end_ns + 1)
    view.charts.refresh_all()
    points = view.charts.panels["requests"].mark_points.points()
    assert [point.data().text for point in points] == ["Request 12 preempted: no free block for request 14"]
    assert points[0].data().timed_event.event == event


def test_overlapping_preemptions_share_a_mark(session, view):
    end_ns = feed_history(session, seconds=2, decode_tokens=1)
    events = tuple(Event(kind="preempted", time_ns=end_ns, number=n, cause="no free block") for n in range(1, 301))
    session.history.add_update(Update(events=events), session.mirror, end_ns + 1)
    view.charts.refresh_all()
    (mark,) = view.charts.panels["requests"].mark_points.points()
    lines = mark.data().text.splitlines()
    assert lines[0] == "Request 1 preempted: no free block"
    assert lines[-1] == f"and {300 - len(lines) + 1} more"


def test_time_without_telemetry_is_shaded(session, view):
    end_ns = feed_history(session, seconds=1, ago_s=4, decode_tokens=1)
    later_ns = end_ns + 4_000_000_000
    session.history.add_update(Update(series=frame_series(later_ns, 1, decode_tokens=1)), session.mirror, later_ns)
    view.charts.show_fixed(end_ns / 1e9 - 2, later_ns / 1e9)
    ((first, last),) = view.charts.panels["decode"].gap_bands.gaps
    assert 3.5 < last - first < 4.5


def test_time_between_two_heartbeats_is_not_shaded(session, view):
    end_ns = feed_history(session, ago_s=3, decode_tokens=1)  # well before the snapshot, which would end a gap
    view.charts.show_fixed(end_ns / 1e9 - 2, end_ns / 1e9 + 1)
    assert not view.charts.panels["decode"].gap_bands.gaps


@pytest.mark.parametrize(("width", "columns"), [(320, 1), (700, 2), (1100, 3)])
def test_number_of_panel_columns_follows_the_width(session, view, width, columns):
    feed_history(session, decode_tokens=1)
    view.refresh()
    view.resize(width, 500)
    QApplication.processEvents()
    assert view.charts.grid.getItemPosition(view.charts.grid.indexOf(view.charts.panels["decode"]))[1] == (
        1 if columns > 1 else 0
    )
    assert view.charts.num_columns == columns


def test_chart_colors_follow_the_theme(session, view):
    feed_history(session, decode_tokens=1)
    for theme in THEMES.values():
        view.apply_theme(theme)
        view.charts.refresh_all()
        image = view.charts.panels["decode"].plot.grab().toImage()
        assert image.pixelColor(2, 2).name() == theme.base


def test_paused_charts_end_at_the_pause(session, view):
    feed_history(session, decode_tokens=1)
    session.timeline.pause()
    stopped_s = session.timeline.shown_monotonic_ns / 1e9
    view.charts.show_last(10.0)
    (_, last), _ = view.charts.panels["decode"].plot.view_box.viewRange()
    assert last == pytest.approx(stopped_s, abs=0.11)


class PaintCounter(QObject):
    """Event filter that counts how often a widget is painted."""

    count = 0

    def eventFilter(self, watched, event):
        self.count += event.type() == QEvent.Type.Paint
        return False


def test_chart_redraw_causes_only_one_paint(session, view, qtbot):
    """Unless prepared before, pyqtgraph moves its items at the beginning of a paint, and then paints again."""
    feed_history(session, decode_tokens=1)
    view.charts.refresh_all()
    qtbot.wait(50)
    paints = PaintCounter()
    view.charts.panels["decode"].plot.viewport().installEventFilter(paints)
    for _ in range(5):
        qtbot.wait(120)  # the next bin begins, so that the curve moves
        view.charts.refresh_all()
        qtbot.wait(20)
    assert 0 < paints.count <= 6


def extend_overview(session, seconds, **columns):
    """Extend the overview by `seconds` seconds until now."""
    last = (time.monotonic_ns() + session.history.wall_ns(0)) // SECOND_NS
    session.overview.extend(
        Summary(time_ns=(last - seconds + second) * SECOND_NS, epoch=7, num_steps=200, **columns)
        for second in range(seconds)
    )


def test_range_all_covers_the_whole_overview(session, view):
    extend_overview(session, 7200, decode_tokens=40, preemptions=1)
    feed_history(session, decode_tokens=4)
    view.charts.show_last(math.inf)
    x, y = view.charts.panels["decode"].curve_items["decode_tokens"].getData()
    assert 7190 < x[-1] - x[0] < 7201
    assert np.allclose(y, 40)
    (first, last), _ = view.charts.panels["decode"].plot.view_box.viewRange()
    assert 7199 < last - first < 7300
    marks = view.charts.panels["requests"].shown_marks[1]
    assert 70 < len(marks) < 90
    assert marks[5].text.endswith("preemptions")


def test_values_older_than_the_history_come_from_the_overview(session, view):
    extend_overview(session, 3600, decode_tokens=40)
    end_s = feed_history(session, ago_s=1, decode_tokens=4) / 1e9
    view.charts.show_fixed(end_s - 1860, end_s - 1800)
    view.charts.show_values_at(end_s - 1800)
    assert view.charts.panels["decode"].legend.values["decode_tokens"] == "40 tok/s"
    view.charts.show_fixed(end_s - 60, end_s)
    view.charts.show_values_at(end_s)
    assert view.charts.panels["decode"].legend.values["decode_tokens"] == "400 tok/s"


def test_overview_panels_are_shown_even_if_the_history_lacks_them(session, view):
    extend_overview(
        session, 900, prefill_tokens=90, prompt_tokens=30, cached_tokens=10, evicted_blocks=2, copied_blocks=1
    )
    feed_history(session, decode_tokens=4)
    view.charts.refresh_all()
    assert "hits" not in view.charts.shown
    view.charts.show_last(math.inf)
    view.charts.show_values_at(time.monotonic() - 60)
    shown = {key: view.charts.panels[key].legend.values for key in ("hits", "evicted", "copied")}
    assert [list(values.values()) for values in shown.values()] == [["25.0 %"], ["2/s"], ["1/s"]]


def test_throughput_range_is_saved_and_restored(session, view, settings, qtbot):
    view.charts.show_last(math.inf)
    view.save_settings(settings)
    other = ThroughputView(session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    assert other.charts.range_s == math.inf


def test_click_in_a_chart_seeks_to_its_time(session, view, monkeypatch):
    feed_history(session, decode_tokens=4)
    view.charts.refresh_all()
    gone = []
    monkeypatch.setattr(session.timeline, "go_to", gone.append)
    view.charts.panels["decode"].chosen.emit(12.5)
    assert gone == [12_500_000_000 + session.history.wall_ns(0)]


def test_going_live_resets_the_zoom_and_follows_the_present(view, session):
    begin_ns = session.history.wall_ns(0)
    session.timeline.shared_zoom.show(TimeSpan(begin_ns, begin_ns + 10**9))
    assert not view.charts.is_following
    session.timeline.go_live()
    assert view.charts.is_following
    assert session.timeline.shared_zoom.span is None
