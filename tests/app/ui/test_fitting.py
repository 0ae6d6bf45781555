"""Labels that say less where there is less room, and strips that leave the keyboard to the map."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QMargins
from PySide6.QtWidgets import QLineEdit, QPushButton, QTextEdit, QToolButton, QVBoxLayout, QWidget

from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.passing_strip import PassingStrip
from kvscope_app.ui.widget_factories import head_row
from kvscope_app.ui.widgets import FittingLabel, SegmentedControl


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
    row = SegmentedControl(["State", "Owner", "Sharing"], "Colour by", is_collapsible=True)
    qtbot.addWidget(row)
    for points in (10, 20, 30):
        font = row.font()
        font.setPointSizeF(points)
        row.setFont(font)
        for button in row.findChildren(QToolButton):
            button.setFont(font)
            assert button.minimumSizeHint().width() > button.fontMetrics().horizontalAdvance(button.text())
            assert button.minimumSizeHint().width() < button.sizeHint().width() + 10


@pytest.fixture
def row(qtbot):
    made = SegmentedControl(["State", "Owner", "Sharing"], "Colour by", is_collapsible=True)
    made.set_button_enabled(1, False)
    made.set_tip(1, "Not known here")
    window = QWidget()
    qtbot.addWidget(window)
    QVBoxLayout(window).addWidget(made)
    window.show()
    yield made
    window.close()


def test_one_button_with_a_menu_stands_where_words_of_a_row_would_be_cut(row, qtbot):
    window, chosen = row.window(), []
    row.chosen.connect(chosen.append)
    buttons = [part for part in row.findChildren(QToolButton) if part is not row.menu_button]
    window.resize(window.minimumSizeHint())
    qtbot.waitUntil(row.menu_button.isVisible)
    assert not any(button.isVisible() for button in buttons)
    assert (row.menu_button.text(), row.menu_button.accessibleName()) == ("State ▾", "Colour by")
    assert row.menu_button.width() >= row.menu_button.fontMetrics().horizontalAdvance(row.menu_button.text())
    row.menu_button.menu().aboutToShow.emit()
    actions = row.menu_button.menu().actions()
    assert [(a.text(), a.isChecked(), a.isEnabled(), a.toolTip()) for a in actions] == [
        ("State", True, True, "State"),
        ("Owner", False, False, "Not known here"),
        ("Sharing", False, True, "Sharing"),
    ]
    actions[2].trigger()
    assert chosen == [2]
    assert row.menu_button.text() == "Sharing ▾"
    window.resize(window.sizeHint())
    qtbot.waitUntil(lambda: all(button.isVisible() for button in buttons))
    assert not row.menu_button.isVisible()
    assert buttons[2].isChecked()


def test_no_word_of_a_row_is_cut_at_any_width(row):
    window = row.window()
    for width in range(window.sizeHint().width() + 40, window.minimumSizeHint().width(), -1):
        window.resize(width, window.height())
        window.layout().activate()
        row.layout().activate()
        for button in row.findChildren(QToolButton):
            wide = button.fontMetrics().horizontalAdvance(button.text())
            assert button.isHidden() or button.width() >= wide, (width, button.text())


def test_widgets_flow_onto_lines_without_overlap(qtbot):
    parts = [QPushButton(text) for text in ("Preemptions", "Selected request", "Export…")]
    count = FittingLabel("342 events", "342")
    flow = FlowLayout(QLineEdit(), *parts[:2], count, parts[2], margins=QMargins(8, 6, 8, 4))
    window, head = QWidget(), head_row(flow)
    qtbot.addWidget(window)
    column = QVBoxLayout(window)
    column.setContentsMargins(0, 0, 0, 0)
    column.addWidget(head)
    column.addWidget(QTextEdit(), 1)
    window.show()
    num_lines = set()
    for width in (1000, 500, 300, 200):
        window.resize(width, 500)
        column.activate()
        flow.activate()
        boxes = [flow.itemAt(number).geometry() for number in range(flow.count())]
        assert not any(a.intersects(b) for number, a in enumerate(boxes) for b in boxes[:number])
        assert all(head.rect().contains(box) for box in boxes)
        assert all(box.width() >= part.sizeHint().width() for box, part in zip(boxes[1:3], parts, strict=False))
        assert count.text() == "342 events"
        num_lines.add(len({box.center().y() // 20 for box in boxes}))
        if width == 1000:
            assert boxes[-1].right() == 1000 - 8 - 1, "what is left goes to the field and the label"
    assert num_lines == {1, 2, 3, 4} or max(num_lines) > min(num_lines) == 1
