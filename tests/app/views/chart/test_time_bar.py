"""The bar of time ranges: narrow, it leaves out; nothing in it is cut."""

from __future__ import annotations

from PySide6.QtWidgets import QToolButton, QWidget

from kvscope_app.views.chart.time_bar import TimeBar


def test_as_narrow_as_it_gets_no_word_is_cut(qtbot, themes):
    dock, bar = QWidget(), TimeBar()
    qtbot.addWidget(dock)
    bar.setParent(dock)
    bar.resize(900, 40)
    dock.show()
    assert bar.ranges.is_shown(0)
    bar.resize(bar.minimumSizeHint())
    bar.layout().activate()
    shown = [button for button in bar.findChildren(QToolButton) if button.isVisible()]
    assert [button.text() for button in shown] == ["1 min", "All", "Live"]
    assert all(button.width() >= button.sizeHint().width() for button in shown)
