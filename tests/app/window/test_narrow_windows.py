"""Tests that small windows wrap, fold or hide texts and buttons instead of truncating them."""

from __future__ import annotations

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAction
from PySide6.QtWidgets import (
    QAbstractButton,
    QHBoxLayout,
    QLabel,
    QMainWindow,
    QPushButton,
    QScrollArea,
    QToolButton,
    QWidget,
)
from tests.app import window_driver as driver

from kvscope_app.actions.shortcut_dialog import shortcut_dialog
from kvscope_app.ui.folding_frame import FoldingFrame
from kvscope_app.views.docks import DOCKS
from kvscope_app.window.dock_state import default_length
from kvscope_app.window.welcome import Welcome
from kvscope_telemetry.alarms.alarm_engine import Alarm
from kvscope_telemetry.alarms.rules import DEFAULT_RULES

START_NS = 1_700_000_000_000_000_000


@pytest.fixture
def show_sized(qtbot):
    def show(widget, width, height):
        qtbot.addWidget(widget)
        widget.resize(width, height)
        widget.show()
        widget.layout().activate()
        return widget

    return show


@pytest.mark.parametrize(("width", "height"), [(900, 700), (420, 330), (300, 200)])
def test_welcome_page_shows_whole_buttons_and_sentences(show_sized, width, height):
    welcome = Welcome()
    for text in ("Open the sample recording: an engine under memory pressure", "Recordings…"):
        welcome.add_offer(QAction(text, welcome))
    show_sized(welcome, width, height)
    welcome.show_waiting("Starting the engine", "default: 272 of 272 tensors")
    welcome.card.layout().activate()
    buttons = [button for button in welcome.findChildren(QPushButton) if button.isVisible()]
    assert len(buttons) == 2
    wide = min(width, 560)
    for button in buttons:
        assert button.width() >= min(button.sizeHint().width(), wide - 120)
    for words in welcome.steps_list.findChildren(QLabel):
        if words.isVisible() and words.wordWrap():
            assert words.height() >= words.heightForWidth(words.width())


def test_large_welcome_page_shows_the_list_of_views(show_sized):
    assert show_sized(Welcome(), 700, 600).steps_list.isVisible()


def test_keys_in_the_shortcuts_dialog_are_not_truncated(qtbot):
    parent = QWidget()
    qtbot.addWidget(parent)
    action = QAction("An action with a rather long name that says what it does", parent)
    action.setShortcuts(["Ctrl+Shift+Z", "Ctrl+Y"])
    dialog = shortcut_dialog(parent, [("Edit", action)], lambda: None)
    dialog.show()
    area = dialog.findChild(QScrollArea)
    area.widget().layout().activate()
    assert area.widget().width() <= area.viewport().width()
    keys = [label for label in area.widget().findChildren(QLabel) if label.property("look") == "key"]
    assert all(label.width() >= label.sizeHint().width() for label in keys)
    assert "Ctrl+Shift+Z, Ctrl+Y" in [label.text() for label in keys]


def test_narrow_folding_frame_puts_buttons_below_the_text(show_sized):
    words, buttons = QHBoxLayout(), QHBoxLayout()
    words.addWidget(QLabel("words"))
    buttons.addWidget(QPushButton("Go there"))
    frame = show_sized(FoldingFrame(words, buttons, QToolButton()), 900, 60)
    assert not frame.is_folded
    frame.resize(300, 60)
    assert frame.is_folded
    frame.resize(900, 60)
    assert not frame.is_folded


def test_dock_width_is_proportional_in_a_smaller_window(qtbot):
    window = QMainWindow()
    qtbot.addWidget(window)
    console = DOCKS[0]
    widths = []
    for size in (1560, 1300, 900):
        window.resize(size, 800)
        widths.append(default_length(console, window))
    assert widths == [console.size, round(console.size * 1300 / 1560), console.size * 3 // 4]


def test_notices_do_not_make_a_small_window_larger(make_window, session, qtbot):
    window = make_window(session, with_views=True, size=(1200, 700))
    window.show_map()
    window.banner.show_message(
        "A session ended unexpectedly", "It can be looked at", (("Open", print), ("Delete", print))
    )
    alarm = Alarm(DEFAULT_RULES[0], 7, START_NS, START_NS, 1.0)
    window.alarms.alarm_started.emit(alarm)
    for dock in ("heatmap", "timeline"):
        window.focus_view(dock)
        qtbot.waitUntil(lambda name=dock: not window.docks[name].visibleRegion().isEmpty())
        window.layout().activate()
        assert window.minimumSizeHint().height() <= 700
        assert window.height() == 700


def test_all_menus_fit_at_twice_the_zoom(make_window, session, qtbot):
    window = make_window(session, with_views=True, size=(1800, 1000))
    window.show_map()
    try:
        for _ in range(10):
            window.themes.zoom(1)
        qtbot.waitUntil(lambda: not driver.menu_bar_corner(window).findChildren(QToolButton)[0].isVisible())
        bar = window.menuBar()
        assert window.page_map.minimumSizeHint().width() < window.width() // 3
        assert all(bar.actionGeometry(action).right() <= driver.menu_bar_corner(window).x() for action in bar.actions())
    finally:
        window.themes.zoom(0)
    qtbot.waitUntil(driver.menu_bar_corner(window).findChildren(QToolButton)[0].isVisible)


@pytest.fixture
def small_window(make_window, session, engine, poll):
    engine.write_blocks([1, 2])
    poll(session)
    window = make_window(session, with_views=("requests", "events", "timeline"), size=(640, 480))
    window.show_map()
    return window


def actions_in_menus(menu_actions):
    """Yield all actions that can be reached from a menu bar."""
    for action in menu_actions:
        yield action
        if action.menu() is not None:
            yield from actions_in_menus(action.menu().actions())


def test_small_menu_bar_offers_its_buttons_in_a_menu_and_overlaps_nothing(small_window, qtbot):
    window, corner, bar = small_window, driver.menu_bar_corner(small_window), small_window.menuBar()
    more = driver.find_button(corner, "More actions")
    qtbot.waitUntil(more.isVisible)
    names = ("play", "record", "palette", "theme_toggle", "shortcuts")
    actions = [window.actions_by_name[name] for name in names]
    assert more.menu().actions() == actions
    assert set(actions) <= set(actions_in_menus(bar.actions())), "each action must also be in a menu of the menu bar"
    assert all(action.shortcuts() for action in actions)
    assert more.focusPolicy() & Qt.FocusPolicy.TabFocus
    assert all(bar.actionGeometry(action).right() < corner.x() for action in bar.actions())
    assert corner.geometry().right() <= bar.rect().right()
    shown = [part.geometry() for part in corner.findChildren(QWidget) if part.isVisible() and part.parent() is corner]
    assert all(corner.rect().contains(box) for box in shown)
    assert not any(a.intersects(b) for number, a in enumerate(shown) for b in shown[:number])


def test_more_menu_is_hidden_when_its_buttons_fit(small_window, qtbot):
    window, corner = small_window, driver.menu_bar_corner(small_window)
    more, theme = driver.find_button(corner, "More actions"), driver.find_button(corner, "Switch theme")
    qtbot.waitUntil(more.isVisible)
    assert not theme.isVisible()
    window.resize(1200, 800)
    qtbot.waitUntil(theme.isVisible)
    assert not more.isVisible()


def test_buttons_of_a_small_window_are_not_truncated(make_window, session, engine, poll, qtbot):
    engine.write_blocks([1, 2])
    engine.request(1, [1, 2])
    poll(session)
    window = make_window(session, with_views=True, size=(640, 480))
    window.show_map()
    window.docks[
        "console"
    ].hide()  # at a screen width of 800 pixels, the console left of the map makes the window wider
    qtbot.waitUntil(lambda: window.minimumWidth() <= 640 and window.minimumSizeHint().width() <= 640, timeout=10_000)
    window.layout().activate()
    window.resize(640, 480)
    qtbot.waitUntil(lambda: window.width() == 640, timeout=10_000)
    window.reset_layout()
    qtbot.waitUntil(lambda: window.size().toTuple() == (640, 480), timeout=10_000)
    assert not window.docks["console"].isHidden()
    for name in ("requests", "events", "prefixes", "roofline", "heatmap", "memory", "console"):
        window.focus_view(name)
        view = window.views[name]
        qtbot.waitUntil(view.isVisible)
        qtbot.waitUntil(
            lambda show_sized=view: truncated_texts(show_sized) + truncated_texts(window.page_map) == [], timeout=5000
        )
        room = window.minimumSizeHint()
        assert (room.width() <= 640, room.height() <= 480) == (True, True), (name, room)


def truncated_texts(view):
    """Return the texts of buttons in `view` that are wider than their button or end outside the view."""
    icons = Qt.ToolButtonStyle.ToolButtonIconOnly
    shown = [
        part
        for part in view.findChildren(QAbstractButton)
        if part.isVisible() and not (isinstance(part, QToolButton) and part.toolButtonStyle() is icons)
    ]
    return [
        part.text()
        for part in shown
        if part.width() < part.fontMetrics().horizontalAdvance(part.text())
        or part.mapTo(view, QPoint(part.width(), 0)).x() > view.width()
    ]
