"""Tests of the Memory view's charts."""

from __future__ import annotations

import math
import time

import pytest
from PySide6.QtWidgets import QScrollArea

from kvscope_app.session.session import Session
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.chart.time_bar import RANGES_S
from kvscope_app.views.memory.memory_view import MemoryView
from kvscope_app.views.refresher import Refresher
from kvscope_telemetry.playback.playback_source import PlaybackSource
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.sample import sample_recording
from kvscope_telemetry.summaries.summary import SECOND_NS, Summary

MIB = 1 << 20


def extend_overview(session, seconds, ago_s=0, **columns):
    """Extend the overview by `seconds` seconds that end `ago_s` seconds ago."""
    last = (time.monotonic_ns() + session.history.wall_ns(0)) // SECOND_NS - ago_s
    session.overview.extend(
        Summary(time_ns=(last - seconds + second) * SECOND_NS, epoch=7, **columns) for second in range(seconds)
    )


@pytest.fixture
def view(session, qtbot):
    view = MemoryView(session)
    qtbot.addWidget(view)
    view.resize(420, 1400)
    view.apply_theme(THEMES["dark"])
    view.show()
    return view


def test_memory_charts_are_hidden_without_an_overview(view):
    view.draw_all()
    assert not view.charts.isVisible()


def test_memory_charts_show_the_reported_bytes(session, view):
    block_bytes = session.mirror.hello.cache.block_bytes
    extend_overview(session, 90, active_blocks=3, cached_blocks=1, process_bytes=700 * MIB, memory_used_bytes=900 * MIB)
    view.draw_all()
    pool, lower, device = view.charts.panels.values()
    assert (pool.isVisible(), lower.isVisible(), device.isVisible()) == (True, False, True)
    view.charts.show_values_at(time.monotonic() - 5)
    assert device.legend.values == {"memory_used_bytes": "900.0 MiB", "process_bytes": "700.0 MiB"}
    unit = view.charts.scales["KV pool"].unit_bytes
    cached, active = (pool.curve_items[name].getData()[1][1] for name in ("cached_blocks", "active_blocks"))
    assert active * unit == pytest.approx(3 * block_bytes)
    assert cached * unit == pytest.approx(4 * block_bytes)  # stacked on the active blocks


def test_memory_chart_range_all_starts_at_the_first_recorded_second(session, view):
    extend_overview(session, 7200, active_blocks=3)
    view.charts.show_last(math.inf)
    (first, last), _ = view.charts.panels["KV pool"].plot.view_box.viewRange()
    assert 7198 < last - first < 7300
    view.charts.show_last(RANGES_S["30 s"])
    (first, last), _ = view.charts.panels["KV pool"].plot.view_box.viewRange()
    assert last - first == pytest.approx(30)


def test_memory_chart_range_is_saved_and_restored(session, view, settings, qtbot):
    view.charts.show_last(math.inf)
    view.save_settings(settings)
    other = MemoryView(session)
    qtbot.addWidget(other)
    other.restore_settings(settings)
    assert other.charts.range_s == math.inf
    settings.setValue("memory/range", "for ever")
    other.restore_settings(settings)
    assert other.charts.range_s == math.inf


def test_memory_charts_fit_a_narrow_dock(session, view):
    extend_overview(session, 60, active_blocks=3)
    view.draw_all()
    assert view.charts.minimumSizeHint().width() < 276
    view.resize(300, 1400)
    assert view.charts.bar.width() < 300


def test_charts_of_a_paused_recording_are_drawn_when_scrolled_into_view(qtbot):
    recording = Recording.open(sample_recording())
    session = Session(PlaybackSource(recording, is_playing=False))
    try:
        view = MemoryView(session)
        qtbot.addWidget(view)
        view.apply_theme(THEMES["dark"])
        view.resize(420, 320)
        view.show()
        refresher = Refresher(session, view)
        refresher.add_view(view)
        session.start()
        session.timeline.go_to(recording.start_ns + 10 * SECOND_NS)
        qtbot.waitUntil(lambda: view.details.isVisible() and session.is_overview_complete, timeout=60_000)
        qtbot.waitUntil(lambda: not session.source.is_seeking, timeout=60_000)
        bar = view.findChild(QScrollArea).verticalScrollBar()
        qtbot.waitUntil(lambda: bar.maximum() > 0, timeout=60_000)
        qtbot.wait(200)  # wait until nothing is refreshed by itself
        bar.setValue(bar.maximum())
        qtbot.wait(200)  # the content may grow while it is shown for the first time
        bar.setValue(bar.maximum())
        plots = [view.charts.panels[name].plot for name in ("Lower tiers", "Device memory")]
        now_s = session.timeline.shown_monotonic_ns / 1e9
        for plot in plots:
            qtbot.waitUntil(lambda plot=plot: plot.view_box.viewRange()[0][1] == math.ceil(now_s), timeout=10_000)
        x, _ = view.charts.panels["Device memory"].curve_items["process_bytes"].getData()
        assert x is not None
        assert x.size > 5
    finally:
        session.close()
