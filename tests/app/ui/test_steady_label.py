"""A label whose words change does not lay out the window."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QObject
from PySide6.QtWidgets import QHBoxLayout, QWidget

from kvscope_app.ui.steady_label import SteadyLabel


class Layouts(QObject):
    """Counts how often a widget is asked to lay itself out."""

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


def test_words_of_a_like_length_keep_the_layout(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    label.setText("1,234 frames")
    settle()
    layouts = Layouts(host)
    for number in range(1111, 2000, 111):
        label.setText(f"{number:,} frames")
        settle()
    assert layouts.count == 0
    assert label.text() == "1,999 frames"


def test_longer_words_get_their_room(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    for text in ("1 frame", "1,234,567 frames, 12 lost"):
        label.setText(text)
        settle()
        assert label.width() >= label.fontMetrics().horizontalAdvance(text)
    wide = label.width()
    label.setText("1 frame")
    settle()
    assert label.width() < wide, "and give it back once it is far too much"


def test_it_has_room_for_the_longest_from_the_start(host):
    label = SteadyLabel("00:00.0 / 00:00.0")
    host.layout().addWidget(label)
    label.setText("0:01.0")
    settle()
    layouts = Layouts(host)
    label.setText("12:34.5 / 12:34.5")
    settle()
    assert layouts.count == 0
    assert label.width() >= label.fontMetrics().horizontalAdvance(label.text())


def test_another_font_is_another_size(host):
    label = SteadyLabel()
    host.layout().addWidget(label)
    label.setText("1,234 frames")
    settle()
    font = label.font()
    font.setPointSizeF(3 * max(font.pointSizeF(), 8))
    label.setFont(font)
    settle()
    assert label.width() >= label.fontMetrics().horizontalAdvance(label.text())
