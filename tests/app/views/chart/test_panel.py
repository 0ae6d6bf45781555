"""Tests of chart panels: number of widgets, cursor, keyboard, maxima, legend and accessibility."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction, QContextMenuEvent
from PySide6.QtWidgets import QApplication, QMenu, QWidget

from kvscope_app.ui.theme import DARK
from kvscope_app.views.chart import panel as panel_module
from kvscope_app.views.chart.chart_legend import ChartLegend, LegendEntry
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec
from kvscope_app.views.chart.peak_line import CurvePeak

MAX_WIDGETS = 20
"""With pyqtgraph's menus there would be five times as many, all restyle_in_steps with each change of theme or zoom."""


def test_chart_creates_few_widgets_and_no_menu(qtbot):
    before = len(QApplication.allWidgets())
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    assert panel.plot.view_box.menu is None
    assert len(QApplication.allWidgets()) - before < MAX_WIDGETS


def test_gap_is_not_drawn_as_zeros(qtbot):
    panel = ChartPanel("Use", [CurveSpec("used", "in use", "accent", filled=True)], str, top=1.0)
    qtbot.addWidget(panel)
    x = np.arange(100.0)
    y = np.where((x > 30) & (x < 60), np.nan, 0.5)
    panel.show_curve("used", x, y, 0)
    drawn = panel.curve_items["used"].getData()[1]
    assert set(drawn[drawn < 0.5]) == {-0.1}, "the line that joins both sides is below the visible range"


def test_enter_chooses_the_time_under_the_cursor(qtbot):
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    chosen: list[float] = []
    panel.chosen.connect(chosen.append)
    panel.hovered.connect(panel.show_cursor)
    panel.show_time(0.0, 100.0, None)
    qtbot.keyClick(panel.plot, Qt.Key.Key_Return)
    assert chosen == [], "there is no cursor yet"
    qtbot.keyClick(panel.plot, Qt.Key.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    qtbot.keyClick(panel.plot, Qt.Key.Key_Return)
    assert chosen == [99.0]


def test_arrow_keys_move_the_cursor_by_at_least_one_point(qtbot):
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    panel.hovered.connect(panel.show_cursor)
    panel.show_time(0.0, 20.0, None)
    panel.show_curve("tokens", np.arange(21.0), np.ones(21), 0)
    qtbot.keyClick(panel.plot, Qt.Key.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert panel.cursor_line.value() == 19.0


def test_chart_context_menu_offers_jumps_to_maxima_and_the_actions_of_its_dock(qtbot, monkeypatch):
    opened: list[QMenu] = []
    monkeypatch.setattr(QMenu, "popup", lambda menu, _position: opened.append(menu))
    panel = ChartPanel("Requests", [CurveSpec("run", "running", 0), CurveSpec("wait", "waiting", 1)], str)
    qtbot.addWidget(panel)
    dock = QWidget()
    qtbot.addWidget(dock)
    dock.addAction(QAction("Save picture", dock))
    dock.setContextMenuPolicy(Qt.ContextMenuPolicy.ActionsContextMenu)
    panel.setParent(dock)
    panel.show_peaks([CurvePeak(12.0, "running 11 at 0:12"), CurvePeak(19.0, "waiting 10 at 0:19")])
    chosen: list[float] = []
    panel.peak_chosen.connect(chosen.append)
    QApplication.sendEvent(panel, QContextMenuEvent(QContextMenuEvent.Reason.Mouse, QPoint(5, 5), QPoint(5, 5)))
    (menu,) = opened
    texts = [action.text() for action in menu.actions()]
    assert texts == ["Go to maximum: running 11 at 0:12", "Go to maximum: waiting 10 at 0:19", "", "Save picture"]
    menu.actions()[1].trigger()
    assert chosen == [19.0]
    menu.close()


def test_chart_maxima_that_do_not_fit_are_hidden_and_shown_ones_can_be_clicked(qtbot):
    panel = ChartPanel("Requests", [CurveSpec("run", "running", 0), CurveSpec("wait", "waiting", 1)], str)
    qtbot.addWidget(panel)
    line = panel.peak_line
    panel.show_peaks([CurvePeak(12.0, "running 11 at 00:00:12"), CurvePeak(19.0, "waiting 10 at 00:00:19")])
    line.resize(1000, line.sizeHint().height())
    (_, first), (place, second) = line.links
    assert (first.x, second.x) == (12.0, 19.0)
    chosen: list[float] = []
    panel.peak_chosen.connect(chosen.append)
    qtbot.mouseClick(line, Qt.MouseButton.LeftButton, pos=place.center())
    qtbot.mouseClick(line, Qt.MouseButton.LeftButton, pos=QPoint(990, 5))
    assert chosen == [19.0]
    line.resize(place.right() - 2, line.height())
    assert [peak.x for _, peak in line.links] == [12.0]


def test_narrow_legend_shows_the_time_under_the_pointer(qtbot):
    def inked(text, *, is_read):
        legend = ChartLegend("External fragmentation", [LegendEntry("a", "cached"), LegendEntry("b", "in use")])
        qtbot.addWidget(legend)
        legend.apply_theme(DARK, {})
        legend.set_values({"a": "0.0 %", "b": "0.0 %"}, text, is_read=is_read)
        legend.resize(330, legend.sizeHint().height())
        return legend.grab().toImage()

    assert inked("current", is_read=False) == inked("last 10 s", is_read=False), "there is no space for the time"
    assert inked("23:49:43", is_read=True) != inked("23:49:44", is_read=True)


def test_accessible_description_contains_the_values(qtbot, monkeypatch):
    panel = ChartPanel("Requests", [CurveSpec("run", "running", 0), CurveSpec("wait", "waiting", 1)], str)
    qtbot.addWidget(panel)
    panel.apply_theme(DARK)
    panel.show_time(0.0, 60.0, 60.0)
    panel.legend.set_values({"run": "5", "wait": "9"})
    assert panel.plot.accessibleDescription() == ""  # not updated without focus or a screen reader
    panel.plot.focused.emit()
    assert panel.plot.accessibleDescription() == "running 5, waiting 9"
    monkeypatch.setattr(panel_module, "is_screen_reader_active", lambda: True)
    panel.legend.set_values({"run": "6", "wait": "9"})
    assert panel.plot.accessibleDescription() == "running 6, waiting 9"
    panel.hovered.connect(panel.show_cursor)
    qtbot.keyClick(panel.plot, Qt.Key.Key_Left, Qt.KeyboardModifier.ShiftModifier)
    assert panel.plot.accessibleDescription() == f"{panel.clock_text(59.4)}: running 6, waiting 9"


def test_long_title_is_elided_in_favour_of_the_curve_labels(qtbot):
    def inked(labels):
        legend = ChartLegend("External fragmentation", [LegendEntry(name, label) for name, label in labels])
        qtbot.addWidget(legend)
        legend.apply_theme(DARK, {})
        legend.set_values({"a": "0.0 %", "b": "0.0 %"})
        legend.resize(270, legend.sizeHint().height())
        return legend.grab().toImage()

    assert inked([("a", "A"), ("b", "B")]) != inked([("a", ""), ("b", "")])
