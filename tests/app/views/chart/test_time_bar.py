"""Tests of the bar of time ranges at narrow widths."""

from __future__ import annotations

from PySide6.QtWidgets import QToolButton, QWidget

from kvscope_app.views.chart.time_bar import TimeBar


def test_time_bar_at_minimum_width_truncates_no_text(qtbot, themes):
    dock, bar = QWidget(), TimeBar(QToolButton())
    qtbot.addWidget(dock)
    bar.setParent(dock)
    bar.resize(900, 40)
    dock.show()
    assert bar.ranges.is_shown(0)
    bar.resize(bar.minimumSizeHint())
    bar.layout().activate()
    shown = [button for button in bar.findChildren(QToolButton) if button.isVisible()]
    assert [button.text() for button in shown if button.text()] == ["1 min", "All", "Live"]
    assert all(button.width() >= button.fontMetrics().horizontalAdvance(button.text()) for button in shown)


def test_narrow_time_bar_reduces_spacing_before_hiding_ranges(qtbot, themes):
    dock, bar = QWidget(), TimeBar(QToolButton())
    qtbot.addWidget(dock)
    bar.setParent(dock)
    bar.resize(900, 40)
    dock.show()
    margins = bar.layout().contentsMargins()
    ends = bar.live.width() + bar.layout().spacing() + bar.link.width()
    wide = margins.left() + bar.ranges.width() + bar.layout().spacing() + ends + margins.right()
    for width, num_shown in ((wide, 4), (wide - 10, 4), (bar.minimumSizeHint().width(), 2), (wide, 4)):
        bar.resize(width, 40)
        bar.layout().activate()
        shown = [index for index in range(4) if bar.ranges.is_shown(index)]
        assert len(shown) == num_shown, width
        assert bar.rect().contains(bar.live.geometry())
        assert bar.ranges.geometry().right() < bar.live.geometry().left()
        assert bool(bar.ranges.saved_width) is (width < wide)


def test_time_under_the_mouse_is_shortened_or_hidden_but_not_truncated(qtbot, themes):
    dock, bar = QWidget(), TimeBar(QToolButton())
    qtbot.addWidget(dock)
    bar.setParent(dock)
    dock.show()
    texts = "14:03:20  (12.3 s ago)", "14:03:20"
    bar.show_time(*texts)
    seen = set()
    for width in range(600, bar.minimumSizeHint().width(), -1):
        bar.resize(width, 40)
        bar.layout().activate()
        shown = bar.time.text() if bar.time.isVisible() else ""
        assert bar.time.fontMetrics().horizontalAdvance(shown) <= bar.time.width() or not shown
        seen.add(shown)
    assert seen == {*texts, ""}
