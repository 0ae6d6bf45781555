"""The stylesheet remembers nothing of widgets that are gone, and a change of theme reaches all that live."""

from __future__ import annotations

import ctypes
import gc

import pytest
import shiboken6
from PySide6.QtWidgets import QApplication, QComboBox, QLabel, QSpinBox, QWidget

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.ui.theming.apply_theme import apply_theme, forget_rules

NUM_WIDGETS = 300
MAX_BYTES_EACH = 250
"""What stayed of each was about 1,000 bytes."""


class MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = (
        ("ignored", ctypes.c_size_t * 7),
        ("allocated_bytes", ctypes.c_size_t),
        ("ignored_too", ctypes.c_size_t * 2),
    )


@pytest.fixture
def live_bytes():
    """How much is allocated and not freed: no resident memory, which depends on what malloc gives back."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("only glibc says how much is allocated")
    libc.mallinfo2.restype = MallocInfo

    def measure():
        gc.collect()
        return libc.mallinfo2().allocated_bytes

    return measure


@pytest.fixture
def themed(qapp):
    """The application in the dark theme."""
    apply_theme(qapp, DARK)
    return qapp


def combo_box(parent):
    box = QComboBox(parent)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    box.addItem("one")


@pytest.mark.parametrize("make", [QSpinBox, combo_box])
def test_widgets_that_are_gone_leave_no_rules(themed, live_bytes, make):
    def come_and_go():
        root = QWidget()
        for _ in range(NUM_WIDGETS):
            make(root)
        shiboken6.delete(root)
        forget_rules(themed)

    come_and_go()  # the first brings what stays
    before = live_bytes()
    come_and_go()
    come_and_go()
    assert (live_bytes() - before) / (2 * NUM_WIDGETS) < MAX_BYTES_EACH


def text_colors(*labels):
    return {label.palette().color(label.foregroundRole()).name() for label in labels}


def test_a_theme_reaches_those_whose_rules_were_forgotten(themed, qtbot):
    window = QWidget()
    qtbot.addWidget(window)
    seen, hidden = QLabel("seen", window), QLabel("hidden", window)
    for label in (seen, hidden):
        label.setProperty("look", "muted")
    window.show()
    hidden.hide()
    themed.processEvents()
    assert text_colors(seen, hidden) == {DARK.muted}
    forget_rules(themed)
    apply_theme(themed, LIGHT)
    assert text_colors(seen, hidden) == {LIGHT.muted}


def test_another_theme_is_no_other_style(themed, monkeypatch):
    """Each widget of each window is polished anew for a style: as long again as for the stylesheet."""
    styles = []
    monkeypatch.setattr(QApplication, "setStyle", styles.append)
    apply_theme(themed, LIGHT)
    apply_theme(themed, DARK)
    assert styles == []
    monkeypatch.undo()
    themed.setStyleSheet("")
    assert themed.style().objectName() == "fusion"
    apply_theme(themed, DARK)
