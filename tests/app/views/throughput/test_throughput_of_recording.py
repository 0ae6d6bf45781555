"""Tests of the throughput view on a recording: curves after seeks and playback, maxima, and values at the pointer."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QScrollArea

from kvscope_app.session.session import Session
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.summaries.summary import SECOND_NS

WAIT_MS = 60_000


@pytest.fixture
def session(qtbot):
    session = Session(PlaybackSource(Recording.open(sample_recording()), is_playing=False))
    session.start()
    qtbot.waitUntil(lambda: session.is_overview_complete and session.mirror.hello is not None, timeout=WAIT_MS)
    yield session
    session.close()


@pytest.fixture
def seek(session, qtbot):
    """Function that seeks to a time in seconds from the start, or to a wall-clock time."""

    def seek(at_s=None, time_ns=None):
        session.timeline.go_to(session.timeline.origin_ns + round(at_s * 1e9) if time_ns is None else time_ns)
        arrive()

    def arrive():
        qtbot.waitUntil(lambda: not session.source.is_seeking, timeout=WAIT_MS)

    seek.arrive = arrive
    return seek


def curves(view):
    view.charts.refresh_all()
    panels = {name: view.charts.panels[name] for name in ("decode", "prefill", "requests", "kv")}
    return {name: item.getData() for panel in panels.values() for name, item in panel.curve_items.items()}


@pytest.mark.parametrize("range_s", [30.0, math.inf])
def test_curves_after_playing_equal_those_after_seeking(session, view, seek, qtbot, range_s):
    view.charts.show_last(range_s)
    end_ns = session.timeline.range_ns[1]
    seek(time_ns=end_ns)
    sought = curves(view)
    seek(time_ns=end_ns - 6 * SECOND_NS)
    session.timeline.set_speed(8.0)
    session.timeline.play()
    qtbot.waitUntil(lambda: session.timeline.is_at_end, timeout=WAIT_MS)
    session.timeline.pause()
    assert session.timeline.cursor_ns == end_ns
    played = curves(view)
    for name, (x, y) in sought.items():
        assert np.array_equal(played[name][0], x), name
        assert np.array_equal(played[name][1], y), name
    assert sought["num_running"][1].max() <= session.overview.column("peak_running").max()


def test_range_all_covers_the_whole_recording_at_any_cursor(session, view, seek):
    view.charts.show_last(math.inf)
    seek(20.0)
    x, y = curves(view)["decode_tokens"]
    wall_s = session.history.wall_ns(0) / 1e9
    assert x[-1] + wall_s == pytest.approx(session.overview.time_ns[-1] / 1e9 + 1, abs=1e-3)
    assert y.max() == session.overview.column("decode_tokens_per_s").max()


def test_maximum_is_shown_with_its_time_and_a_click_seeks_there(session, view, seek, qtbot):
    view.charts.show_last(math.inf)
    seek(5.0)
    view.charts.refresh_all()
    rates = session.overview.column("decode_tokens_per_s")
    end_ns = int(session.overview.time_ns[np.argmax(rates)]) + SECOND_NS
    line = view.charts.panels["decode"].peak_line
    clock = time.strftime("%H:%M:%S", time.localtime(end_ns // SECOND_NS))
    assert [peak.text for peak in line.peaks] == [f"{rates.max():.0f} tok/s at {clock}"]
    ((place, _),) = line.links
    qtbot.mouseClick(line, Qt.MouseButton.LeftButton, pos=place.center())
    seek.arrive()
    assert session.timeline.cursor_ns == pytest.approx(end_ns, abs=1000)


def test_maximum_of_a_gauge_is_the_largest_value_within_a_second(session, view, seek):
    view.charts.show_last(math.inf)
    view.charts.refresh_all()
    for panel, curve, value in (
        ("requests", "num_running", lambda mirror: mirror.counters.num_running),
        ("requests", "num_waiting", lambda mirror: mirror.counters.num_waiting),
        ("kv", "active", lambda mirror: mirror.num_active),
    ):
        column = {"num_running": "peak_running", "num_waiting": "peak_waiting", "active": "peak_active_blocks"}[curve]
        label = next(each.label for each in view.charts.panels[panel].curves if each.name == curve)
        peaks = view.charts.panels[panel].peak_line.peaks
        (peak,) = (peak for peak in peaks if peak.text.startswith(f"{label} "))
        view.charts.panels[panel].peak_chosen.emit(peak.x)
        seek.arrive()
        session.poll()
        assert value(session.mirror) == session.overview.column(column).max(), curve


def test_pointer_shows_the_values_and_the_time_that_a_click_goes_to(session, view, seek):
    view.charts.show_last(math.inf)
    seek(5.0)
    view.charts.refresh_all()
    panel = view.charts.panels["kv"]
    for ago_s in (12.3, 20.8, 30.5):
        at_s = session.timeline.range_ns[1] / 1e9 - session.history.wall_ns(0) / 1e9 - ago_s
        panel.hovered.emit(at_s)
        pointed, clock = dict(panel.legend.values), panel.legend.time_text
        panel.chosen.emit(at_s)
        seek.arrive()
        session.poll()
        panel.hovered.emit(None)
        assert panel.legend.values == pointed
        assert clock == time.strftime("%H:%M:%S", time.localtime(round(session.timeline.cursor_ns / 1e9)))


def test_chart_with_only_its_plot_visible_is_drawn(session, view, seek, qtbot):
    view.resize(320, 320)
    view.charts.show_last(math.inf)
    view.charts.refresh_all()
    bar, decode = view.findChild(QScrollArea).verticalScrollBar(), view.charts.panels["decode"]

    def shows_only_the_plot():
        bar.setValue(decode.plot.mapTo(view.charts, decode.plot.rect().center()).y())
        return decode.legend.visibleRegion().isEmpty() and not decode.plot.viewport().visibleRegion().isEmpty()

    qtbot.waitUntil(shows_only_the_plot, timeout=WAIT_MS)
    seek(20.0)
    qtbot.waitUntil(shows_only_the_plot, timeout=WAIT_MS)
    view.charts.drawn.clear()
    view.charts.refresh_visible()
    assert "decode" in view.charts.drawn
    bar.setValue(bar.maximum())
    view.charts.drawn.clear()
    view.charts.refresh_visible()
    assert "decode" not in view.charts.drawn


def test_marks_of_a_recording_name_the_preempted_request(session, view, seek):
    view.charts.show_last(math.inf)
    seek(5.0)
    view.charts.refresh_all()
    marks = view.charts.panels["requests"].shown_marks[1]
    assert marks
    assert all(mark.text.startswith("Request ") and mark.timed_event.event.kind == "preempted" for mark in marks)


def test_busiest_second_stays_the_maximum_after_a_click_on_it(session, view, seek):
    """After the click, the chart ends at the cursor, which is in that second."""
    view.charts.show_last(math.inf)
    view.charts.refresh_all()
    overview = session.overview
    busiest = (overview.column("prefill_tokens_per_s") + overview.column("decode_tokens_per_s")).max()
    (peak,) = view.charts.panels["tokens"].peak_line.peaks
    assert peak.text.startswith(f"{busiest:.0f} tok/s at ")
    view.charts.show_last(60.0)
    view.charts.panels["tokens"].peak_chosen.emit(peak.x)
    seek.arrive()
    view.charts.refresh_all()
    assert [each.text for each in view.charts.panels["tokens"].peak_line.peaks] == [peak.text]
