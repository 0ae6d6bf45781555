"""Labels that say less where there is less room, and strips that leave the keyboard to the map."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QPushButton, QToolButton, QVBoxLayout, QWidget

from kvscope_app.look.passing_strip import PassingStrip
from kvscope_app.look.widgets import FittingLabel, Segments


def test_it_says_as_much_as_there_is_room_for(qtbot):
    long, short = "160 blocks and many more words that nobody needs", "160 blocks"
    label = FittingLabel(long, short, "")
    qtbot.addWidget(label)
    metrics = label.fontMetrics()
    label.resize(metrics.horizontalAdvance(long) + 1, 20)
    label.show()
    assert label.text() == long
    label.resize(metrics.horizontalAdvance(short) + 1, 20)
    assert label.text() == short
    label.grab()  # which paints
    assert label.toolTip() == long
    label.resize(3, 20)
    assert label.text() == ""
    label.set_lengths("x")
    assert label.text() == label.longest == "x"
    label.resize(metrics.horizontalAdvance(long) + 1, 20)
    label.set_lengths(long, short)
    label.grab()  # which paints
    assert label.text() == long
    assert label.toolTip() == ""


@pytest.fixture
def column(qtbot):
    """A strip with a button, a button that Qt would choose next, and the heir."""
    window = QWidget()
    qtbot.addWidget(window)
    strip, inner, following, heir = (
        PassingStrip(),
        QPushButton("Go there"),
        QPushButton("To the start"),
        QPushButton("map"),
    )
    QVBoxLayout(strip).addWidget(inner)
    rows = QVBoxLayout(window)
    for widget in (strip, following, heir):
        rows.addWidget(widget)
    strip.heir = heir
    with qtbot.waitExposed(window):
        window.show()
    window.activateWindow()
    return window, strip, inner, following, heir


def test_a_strip_that_goes_leaves_the_keyboard_to_its_heir(column, qtbot):
    window, strip, inner, following, heir = column
    inner.setFocus()
    qtbot.waitUntil(lambda: window.focusWidget() is inner)
    strip.hide()
    assert window.focusWidget() is heir
    strip.show()
    following.setFocus()
    strip.hide()
    assert window.focusWidget() is following


def test_words_of_a_row_that_gives_way_are_whole_at_any_size_of_text(qtbot):
    row = Segments(["State", "Owner", "Sharing"], "Colour by", gives_way=True)
    qtbot.addWidget(row)
    for points in (10, 20, 30):
        font = row.font()
        font.setPointSizeF(points)
        row.setFont(font)
        for button in row.findChildren(QToolButton):
            button.setFont(font)
            assert button.minimumSizeHint().width() > button.fontMetrics().horizontalAdvance(button.text())
            assert button.minimumSizeHint().width() < button.sizeHint().width() + 10
