"""Tests of the tab order of a window."""

from __future__ import annotations

import gc
import weakref

import shiboken6
from PySide6.QtCore import QCoreApplication, QEvent, Qt
from PySide6.QtWidgets import QDockWidget, QLineEdit, QMainWindow, QSpinBox, QTabBar, QWidget

from kvscope_app.ui.focus import tab_order


class Window(QMainWindow):
    """Subclass, as our windows are, because Qt then keeps its Python object alive."""

    def __init__(self):
        super().__init__()
        self.box = QWidget(self)
        self.fields = [QLineEdit(self.box) for _ in range(3)]


def delete(widget):
    widget.deleteLater()
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def test_tab_order_from_a_widget_lists_every_other_widget_once_forward_and_backward(qapp):
    window, empty = Window(), QWidget()
    first, second, third = window.fields
    after = [each for each in tab_order(second) if each in window.fields]
    before = [each for each in tab_order(second, forward=False) if each in window.fields]
    assert (after, before) == ([third, first], [first, third])
    assert [each for each in tab_order(window) if each in window.fields] == window.fields
    everything = [*tab_order(second)]
    assert second not in everything
    assert len({id(each) for each in everything}) == len(everything)
    assert [*tab_order(empty)] == []
    assert all(each.parent() is not None for each in everything if each is not window)
    delete(window)
    delete(empty)


def test_window_can_be_freed_after_its_tab_order_was_read(qapp):
    window = Window()
    freed = weakref.ref(window)
    list(tab_order(window.fields[0]))
    delete(window.fields.pop())  # the widget that precedes the window
    list(tab_order(window.fields[0]))
    delete(window)
    del window
    gc.collect()
    assert freed() is None


def test_widgets_stay_valid_when_the_preceding_widget_is_deleted(qapp):
    window = Window()
    spin = QSpinBox(window.box)
    inner = [each for each in tab_order(window) if each.parent() is spin]
    assert inner
    delete(window.fields[-1])
    assert all(shiboken6.isValid(each) for each in inner)
    delete(window)


def test_backward_tab_order_visits_buttons_of_tab_bars_that_qt_created(qapp, qtbot):
    """The tab bar of docks and its buttons: backwards, the buttons come first, as with Shift+Tab."""
    window = Window()
    qtbot.addWidget(window)
    docks = [QDockWidget(f"dock {number}", window) for number in range(2)]
    for dock in docks:
        window.addDockWidget(Qt.DockWidgetArea.LeftDockWidgetArea, dock)
    window.tabifyDockWidget(*docks)
    window.show()
    qapp.processEvents()  # now Qt creates the tab bar
    in_bar = 0
    for each in tab_order(window, forward=False):
        assert each.window() is window
        in_bar += isinstance(each.parent(), QTabBar)
    assert in_bar == 2, "the buttons that scroll the bar"
