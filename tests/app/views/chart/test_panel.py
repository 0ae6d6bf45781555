"""A chart brings no menus: nobody can open them, and each window would build dozens of widgets for them."""

from __future__ import annotations

from PySide6.QtWidgets import QApplication

from kvscope_app.views.chart.panel import ChartPanel, CurveSpec

MAX_WIDGETS = 80
"""With pyqtgraph's menus for both axes it is more than twice as many."""


def test_a_chart_is_few_widgets(qtbot):
    before = len(QApplication.allWidgets())
    panel = ChartPanel("Tokens", [CurveSpec("tokens", "tokens", "accent")], str)
    qtbot.addWidget(panel)
    assert panel.plot.getViewBox().menu is None
    assert len(QApplication.allWidgets()) - before < MAX_WIDGETS
