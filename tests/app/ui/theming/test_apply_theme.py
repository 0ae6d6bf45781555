"""Tests that the stylesheet forgets deleted widgets and that a theme change reaches all living ones."""

from __future__ import annotations

import ctypes
import gc

import pytest
import shiboken6
from PySide6.QtWidgets import QApplication, QComboBox, QLabel, QSpinBox, QWidget

from kvscope_app.ui.theme import DARK, LIGHT
from kvscope_app.ui.theming.apply_theme import apply_theme, clear_style_cache

NUM_WIDGETS = 300
MAX_BYTES_EACH = 250
"""Bytes retained per deleted widget; without `clear_style_cache` it was about 1,000."""


class MallocInfo(ctypes.Structure):
    """Return value of glibc's `mallinfo2`."""

    _fields_ = (
        ("ignored", ctypes.c_size_t * 7),
        ("allocated_bytes", ctypes.c_size_t),
        ("ignored_too", ctypes.c_size_t * 2),
    )


@pytest.fixture
def live_bytes():
    """Return a function that measures allocated bytes; resident memory would depend on what malloc returns."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("only glibc says how much is allocated")
    libc.mallinfo2.restype = MallocInfo

    def measure():
        gc.collect()
        return libc.mallinfo2().allocated_bytes

    return measure


@pytest.fixture
def themed_app(qapp):
    """Application in the dark theme."""
    apply_theme(qapp, DARK)
    return qapp


def combo_box(parent):
    box = QComboBox(parent)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    box.addItem("one")


@pytest.mark.parametrize("create_widget", [QSpinBox, combo_box])
def test_deleted_widgets_leave_no_style_rules(themed_app, live_bytes, create_widget):
    def create_and_delete_widgets():
        root = QWidget()
        for _ in range(NUM_WIDGETS):
            create_widget(root)
        shiboken6.delete(root)
        clear_style_cache(themed_app)

    create_and_delete_widgets()  # the first run creates lasting objects
    before = live_bytes()
    create_and_delete_widgets()
    create_and_delete_widgets()
    assert (live_bytes() - before) / (2 * NUM_WIDGETS) < MAX_BYTES_EACH


def text_colors(*labels):
    return {label.palette().color(label.foregroundRole()).name() for label in labels}


def test_theme_change_recolors_shown_and_hidden_widgets_after_the_style_cache_was_cleared(themed_app, qtbot):
    window = QWidget()
    qtbot.addWidget(window)
    seen, hidden = QLabel("seen", window), QLabel("hidden", window)
    for label in (seen, hidden):
        label.setProperty("look", "muted")
    window.show()
    hidden.hide()
    themed_app.processEvents()
    assert text_colors(seen, hidden) == {DARK.muted}
    clear_style_cache(themed_app)
    apply_theme(themed_app, LIGHT)
    assert text_colors(seen, hidden) == {LIGHT.muted}


def test_theme_change_does_not_set_the_style_again(themed_app, monkeypatch):
    """Setting a style polishes every widget, which takes as long again as the stylesheet."""
    styles = []
    monkeypatch.setattr(QApplication, "setStyle", styles.append)
    apply_theme(themed_app, LIGHT)
    apply_theme(themed_app, DARK)
    assert styles == []
    monkeypatch.undo()
    themed_app.setStyleSheet("")
    assert themed_app.style().objectName() == "fusion"
    apply_theme(themed_app, DARK)
