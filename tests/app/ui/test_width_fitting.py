"""Tests of widgets that adapt to the available width, and of strips that pass the focus on when they are hidden."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QMargins
from PySide6.QtWidgets import QLineEdit, QPushButton, QTextEdit, QToolButton, QVBoxLayout, QWidget

from kvscope_app.ui.flow_layout import FlowLayout
from kvscope_app.ui.passing_strip import PassingStrip
from kvscope_app.ui.widget_factories import head_row
from kvscope_app.ui.widgets import FittingLabel, SegmentedControl


def test_fitting_label_shows_the_longest_text_that_fits(qtbot):
    long, short = "160 blocks and many more words that nobody needs", "160 blocks"
    label = FittingLabel(long, short, "")
    qtbot.addWidget(label)
    metrics = label.fontMetrics()
    label.resize(metrics.horizontalAdvance(long) + 1, 20)
    label.show()
    assert label.text() == long
    label.resize(metrics.horizontalAdvance(short) + 1, 20)
    assert label.text() == short
    label.grab()  # forces a paint
    assert label.toolTip() == long
    label.resize(3, 20)
    assert label.text() == ""
    label.set_variants("x")
    assert label.text() == label.longest == "x"
    label.resize(metrics.horizontalAdvance(long) + 1, 20)
    label.set_variants(long, short)
    label.grab()  # forces a paint
    assert label.text() == long
    assert label.toolTip() == ""


@pytest.fixture
def column(qtbot):
    """Window, strip, button in the strip, button that Qt would focus next, and the strip's focus heir."""
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
    strip.focus_heir = heir
    with qtbot.waitExposed(window):
        window.show()
    window.activateWindow()
    return window, strip, inner, following, heir


def test_hiding_a_focused_strip_of_widgets_moves_the_focus_to_the_designated_widget(column, qtbot):
    window, strip, inner, following, heir = column
    inner.setFocus()
    qtbot.waitUntil(lambda: window.focusWidget() is inner)
    strip.hide()
    assert window.focusWidget() is heir
    strip.show()
    following.setFocus()
    strip.hide()
    assert window.focusWidget() is following


def test_segmented_control_shows_whole_texts_at_any_font_size(qtbot):
    segmented_control = SegmentedControl(["State", "Owner", "Sharing"], "Colour by", is_collapsible=True)
    qtbot.addWidget(segmented_control)
    for points in (10, 20, 30):
        font = segmented_control.font()
        font.setPointSizeF(points)
        segmented_control.setFont(font)
        for button in segmented_control.findChildren(QToolButton):
            button.setFont(font)
            assert button.minimumSizeHint().width() > button.fontMetrics().horizontalAdvance(button.text())
            assert button.minimumSizeHint().width() < button.sizeHint().width() + 10


@pytest.fixture
def segmented_control(qtbot):
    made = SegmentedControl(["State", "Owner", "Sharing"], "Colour by", is_collapsible=True)
    made.set_button_enabled(1, False)
    made.set_tip(1, "Not known here")
    window = QWidget()
    qtbot.addWidget(window)
    QVBoxLayout(window).addWidget(made)
    window.show()
    yield made
    window.close()


def test_narrow_segmented_control_becomes_a_menu_button(segmented_control, qtbot):
    window, chosen = segmented_control.window(), []
    segmented_control.chosen.connect(chosen.append)
    buttons = [
        part for part in segmented_control.findChildren(QToolButton) if part is not segmented_control.menu_button
    ]
    window.resize(window.minimumSizeHint())
    qtbot.waitUntil(segmented_control.menu_button.isVisible)
    assert not any(button.isVisible() for button in buttons)
    assert (segmented_control.menu_button.text(), segmented_control.menu_button.accessibleName()) == (
        "State ▾",
        "Colour by",
    )
    assert segmented_control.menu_button.width() >= segmented_control.menu_button.fontMetrics().horizontalAdvance(
        segmented_control.menu_button.text()
    )
    segmented_control.menu_button.menu().aboutToShow.emit()
    actions = segmented_control.menu_button.menu().actions()
    assert [(a.text(), a.isChecked(), a.isEnabled(), a.toolTip()) for a in actions] == [
        ("State", True, True, "State"),
        ("Owner", False, False, "Not known here"),
        ("Sharing", False, True, "Sharing"),
    ]
    actions[2].trigger()
    assert chosen == [2]
    assert segmented_control.menu_button.text() == "Sharing ▾"
    window.resize(window.sizeHint())
    qtbot.waitUntil(lambda: all(button.isVisible() for button in buttons))
    assert not segmented_control.menu_button.isVisible()
    assert buttons[2].isChecked()


def test_segmented_control_never_truncates_a_text(segmented_control):
    window = segmented_control.window()
    for width in range(window.sizeHint().width() + 40, window.minimumSizeHint().width(), -1):
        window.resize(width, window.height())
        window.layout().activate()
        segmented_control.layout().activate()
        for button in segmented_control.findChildren(QToolButton):
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
            assert boxes[-1].right() == 1000 - 8 - 1, "remaining width goes to the field and the label"
    assert num_lines == {1, 2, 3, 4} or max(num_lines) > min(num_lines) == 1
