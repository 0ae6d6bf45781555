"""Tests of the shaded bands of a chart where no telemetry was received."""

from __future__ import annotations

import pytest
from PySide6.QtGui import QColor, QImage

from kvscope_app.ui.theme import DARK, LIGHT, mix
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec

BOOT_S = 5_000_000.0
"""Time in seconds since boot on a machine that has run for two months."""


@pytest.fixture
def panel(qtbot):
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    panel.resize(500, 200)
    panel.apply_theme(DARK)
    panel.show_time(BOOT_S, BOOT_S + 60, None)
    panel.show()
    return panel


def shaded_seconds(panel, *, theme=DARK, at=(5.0, 15.0, 25.0, 35.0, 45.0, 55.0)):
    """Return those of the given seconds at which the plot is shaded, in its middle and near its edges."""
    panel.finish_layout()
    plot = panel.plot
    image = plot.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    scale = image.width() / plot.width()
    seen = plot.view_box.sceneBoundingRect()
    color = QColor(mix(theme.base, theme.muted, 0.10)).rgb()
    found = []
    for second in at:
        x = round((seen.left() + seen.width() * second / 60) * scale)
        ys = [round((seen.top() + seen.height() * share) * scale) for share in (0.1, 0.5, 0.85)]
        if all(image.pixel(x, y) == color for y in ys):
            found.append(second)
    return found


def test_chart_gaps_without_telemetry_are_shaded_at_the_right_times(panel):
    assert shaded_seconds(panel) == []
    panel.show_gaps([(BOOT_S + 12, BOOT_S + 27), (BOOT_S + 50, BOOT_S + 90)])
    assert shaded_seconds(panel) == [15.0, 25.0, 55.0]
    panel.show_time(BOOT_S + 20, BOOT_S + 80, None)
    assert shaded_seconds(panel) == [5.0, 35.0, 45.0, 55.0]
    panel.show_gaps([])
    assert shaded_seconds(panel) == []


def test_shaded_chart_gaps_take_the_color_of_a_changed_theme(panel):
    panel.show_gaps([(BOOT_S, BOOT_S + 30)])
    panel.apply_theme(LIGHT)
    assert shaded_seconds(panel, theme=LIGHT) == [5.0, 15.0, 25.0]


def test_bands_fill_the_plot_height_after_resizing_and_rescaling(panel):
    panel.show_gaps([(BOOT_S + 10, BOOT_S + 20)])
    assert shaded_seconds(panel) == [15.0]
    panel.resize(640, 320)
    panel.fit(1e6)
    assert shaded_seconds(panel) == [15.0]


def test_many_gaps_add_no_scene_items(panel):
    num_items = len(panel.plot.scene().items())
    panel.show_gaps([(BOOT_S + number / 10, BOOT_S + (number + 0.5) / 10) for number in range(600)])
    panel.finish_layout()
    panel.grab()
    assert len(panel.plot.scene().items()) == num_items


def test_gap_shading_without_a_plot_has_an_empty_rectangle():
    from kvscope_app.views.chart.gap_bands import GapBands

    assert GapBands().boundingRect().isNull()
