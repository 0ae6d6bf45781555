"""Tests of labels that do not trigger a layout whenever their text changes."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QObject
from PySide6.QtWidgets import QHBoxLayout, QWidget

from kvscope_app.ui.steady_label import SteadyLabel


class LayoutRequestCounter(QObject):
    """Counts the layout requests of a widget."""

    def __init__(self, widget):
        super().__init__(widget)
        self.count = 0
        widget.installEventFilter(self)

    def eventFilter(self, watched, event):
        self.count += event.type() == QEvent.Type.LayoutRequest
        return False


@pytest.fixture
def host(qtbot):
    host = QWidget()
    qtbot.addWidget(host)
    host.resize(600, 100)
    QHBoxLayout(host)
    host.show()
    return host


def settle():
    QCoreApplication.sendPostedEvents(None, 0)
    QCoreApplication.processEvents()


def test_text_of_similar_length_does_not_trigger_a_layout(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    label.setText("1,234 frames")
    settle()
    layouts = LayoutRequestCounter(host)
    for number in range(1111, 2000, 111):
        label.setText(f"{number:,} frames")
        settle()
    assert layouts.count == 0
    assert label.text() == "1,999 frames"


def test_longer_text_widens_the_label(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    for text in ("1 frame", "1,234,567 frames, 12 lost"):
        label.setText(text)
        settle()
        assert label.width() >= label.fontMetrics().horizontalAdvance(text)
    wide = label.width()
    label.setText("1 frame")
    settle()
    assert label.width() < wide, "the label shrinks once it is much too wide"


def test_label_is_as_wide_as_its_longest_text_from_the_start(host):
    label = SteadyLabel("00:00.0 / 00:00.0")
    host.layout().addWidget(label)
    label.setText("0:01.0")
    settle()
    layouts = LayoutRequestCounter(host)
    label.setText("12:34.5 / 12:34.5")
    settle()
    assert layouts.count == 0
    assert label.width() >= label.fontMetrics().horizontalAdvance(label.text())


def test_larger_font_widens_the_label(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    label.setText("1,234 frames")
    settle()
    font = label.font()
    font.setPointSizeF(3 * max(font.pointSizeF(), 8))
    label.setFont(font)
    settle()
    assert label.width() >= label.fontMetrics().horizontalAdvance(label.text())
