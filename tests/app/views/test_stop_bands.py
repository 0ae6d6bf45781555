"""Tests of bands that mark when the engine was stopped: in the timeline, the heatmap and charts."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPointF
from tests.app.views.timed_fakes import START_NS, second, small_overview, timed

from kvscope_app.session.stop_bands import StopBand, stop_text_at, stops_until
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec, pause_background
from kvscope_app.views.heatmap.cell_text import cell_text
from kvscope_app.views.heatmap.pools import PoolRegistry
from kvscope_app.views.timeline.lane_colors import STOPPED_COLOR, STOPPED_PALENESS, pale_pixel, theme_pixel
from kvscope_app.views.timeline.lane_descriptions import hit_lane, hit_row
from kvscope_app.views.timeline.lane_layout import LaneLayout
from kvscope_app.views.timeline.lane_picture import ShownLanes, draw, lanes_without_data
from kvscope_app.views.timeline.request_lanes import RequestLanes
from kvscope_telemetry.messages.telemetry import SUSPENDED, Stop
from kvscope_telemetry.summaries.summary import SECOND_NS


def to_ns(seconds: float) -> int:
    return START_NS + round(seconds * SECOND_NS)


@pytest.fixture
def overview():
    overview = small_overview()
    overview.stops.add(Stop(begin_ns=to_ns(15), end_ns=to_ns(25), by="Ada"))
    return overview


def test_request_lane_is_dimmed_while_the_engine_is_paused(overview):
    lanes = RequestLanes()
    lanes.add_events([overview.events[index] for index in range(len(overview.events))])
    shown = ShownLanes(overview, lanes, TimeSpan(to_ns(0), to_ns(100)), to_ns(100))
    shown.assign_rows()
    layout = LaneLayout(1104, 700, lanes_without_data(overview))
    row = int(shown.rows[lanes.index_of(overview.events[0].epoch, 2)])
    for theme in (DARK, LIGHT):
        pixels = draw(shown, layout, theme, 1.0)
        line = pixels[layout.requests_top + 15 * row + 6]
        width = pixels.shape[1]
        assert line[round(0.14 * width)] == theme_pixel("good", theme)
        assert line[round(0.20 * width)] == pale_pixel(STOPPED_COLOR, theme, STOPPED_PALENESS)
        assert line[round(0.26 * width)] == theme_pixel("good", theme)
    assert hit_lane("paused", shown, to_ns(20), 0).text == "Engine paused by Ada, 10.0 s"
    assert hit_lane("paused", shown, to_ns(30), 0).text == ""
    assert "(without 10.0 s paused)" in hit_row(row, shown, to_ns(20), 0).text
    assert "paused" in lanes_without_data(small_overview())
    overview.stops.add(Stop(begin_ns=to_ns(26), end_ns=to_ns(28), kind=SUSPENDED))
    assert "(without 12.0 s paused or suspended)" in hit_row(row, shown, to_ns(20), 0).text


def test_heatmap_cell_states_that_the_engine_was_stopped(overview):
    overview.extend([second(100, num_rows=8), second(101, num_rows=8)])
    overview.stops.add(Stop(begin_ns=to_ns(100), end_ns=to_ns(101), by="Bob"))
    assert cell_text(overview, PoolRegistry(), to_ns(100.5), 0).endswith("engine paused by Bob, 1.00 s")
    assert "paused" not in cell_text(overview, PoolRegistry(), to_ns(101.5), 0)
    overview.stops.add(Stop(begin_ns=to_ns(40), end_ns=to_ns(42), kind=SUSPENDED))
    assert stop_text_at(overview, to_ns(41)) == "process suspended, 2.00 s"


def test_ongoing_pause_extends_to_the_time_shown(overview):
    overview.stops.add(Stop(begin_ns=to_ns(95), end_ns=to_ns(99.8), by="Ada"))
    overview.events.extend([timed(95, "engine_paused", 0)])
    assert stops_until(overview, to_ns(101)).stopped_ns(to_ns(90), to_ns(101)) == 6 * SECOND_NS
    overview.events.extend([timed(99.8, "engine_resumed", 0)])
    assert stops_until(overview, to_ns(101)) is overview.stops


def test_chart_shades_the_time_of_a_pause_and_names_it_under_the_pointer(qtbot):
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    panel.apply_theme(DARK)
    panel.resize(600, 200)
    panel.show_time(0.0, 100.0, None)
    panel.show_stops([StopBand(20.0, 60.0, "paused by Ada, 40.0 s")])
    with qtbot.waitExposed(panel):
        panel.show()
    panel.finish_layout()
    picture = panel.plot.grab().toImage()
    view = panel.plot.view_box
    inside, outside = (panel.plot.mapFromScene(view.mapViewToScene(QPointF(x, 0.4))) for x in (50.0, 80.0))
    assert picture.pixelColor(inside).name() == pause_background(DARK)
    assert picture.pixelColor(outside).name() != pause_background(DARK)
    panel.show_cursor(30.0)
    assert panel.stop_bands.text_at(30.0) == "paused by Ada, 40.0 s"
    assert panel.stop_bands.text_at(70.0) == ""
