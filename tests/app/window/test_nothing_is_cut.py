"""In small windows words and buttons fold or go; none is cut."""

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
def shown(qtbot):
    def show(widget, width, height):
        qtbot.addWidget(widget)
        widget.resize(width, height)
        widget.show()
        widget.layout().activate()
        return widget

    return show


@pytest.mark.parametrize(("width", "height"), [(900, 700), (420, 330), (300, 200)])
def test_the_welcome_shows_whole_buttons_and_whole_sentences(shown, width, height):
    welcome = Welcome()
    for text in ("Open the sample recording: an engine under memory pressure", "Recordings…"):
        welcome.offer(QAction(text, welcome))
    shown(welcome, width, height)
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


def test_there_is_room_for_the_list_of_views_where_there_is_room(shown):
    assert shown(Welcome(), 700, 600).steps_list.isVisible()


def test_no_key_is_cut_in_the_sheet(qtbot):
    parent = QWidget()
    qtbot.addWidget(parent)
    action = QAction("An action with a rather long name that says what it does", parent)
    action.setShortcuts(["Ctrl+Shift+Z", "Ctrl+Y"])
    sheet = shortcut_dialog(parent, [("Edit", action)], lambda: None)
    sheet.show()
    area = sheet.findChild(QScrollArea)
    area.widget().layout().activate()
    assert area.widget().width() <= area.viewport().width()
    keys = [label for label in area.widget().findChildren(QLabel) if label.property("look") == "key"]
    assert all(label.width() >= label.sizeHint().width() for label in keys)
    assert "Ctrl+Shift+Z, Ctrl+Y" in [label.text() for label in keys]


def test_buttons_go_below_words_where_it_is_narrow(shown):
    words, buttons = QHBoxLayout(), QHBoxLayout()
    words.addWidget(QLabel("words"))
    buttons.addWidget(QPushButton("Go there"))
    frame = shown(FoldingFrame(words, buttons, QToolButton()), 900, 60)
    assert not frame.is_folded
    frame.resize(300, 60)
    assert frame.is_folded
    frame.resize(900, 60)
    assert not frame.is_folded


def test_docks_take_a_part_of_a_smaller_window(qtbot):
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
    window.alarms.rang.emit(alarm)
    for dock in ("heatmap", "timeline"):
        window.focus_view(dock)
        qtbot.waitUntil(lambda name=dock: not window.docks[name].visibleRegion().isEmpty())
        window.layout().activate()
        assert window.minimumSizeHint().height() <= 700
        assert window.height() == 700


def test_at_twice_the_size_a_window_has_all_its_menus(make_window, session, qtbot):
    window = make_window(session, with_views=True, size=(1800, 1000))
    window.show_map()
    try:
        for _ in range(10):
            window.themes.zoom(1)
        qtbot.waitUntil(lambda: not driver.corner(window).findChildren(QToolButton)[0].isVisible())
        bar = window.menuBar()
        assert window.page_map.minimumSizeHint().width() < window.width() // 3
        assert all(bar.actionGeometry(action).right() <= driver.corner(window).x() for action in bar.actions())
    finally:
        window.themes.zoom(0)
    qtbot.waitUntil(driver.corner(window).findChildren(QToolButton)[0].isVisible)


@pytest.fixture
def small_window(make_window, session, engine, poll):
    engine.hold([1, 2])
    poll(session)
    window = make_window(session, with_views=("requests", "events", "timeline"), size=(640, 480))
    window.show_map()
    return window


def in_menus(menu_actions):
    """All actions that a menu bar leads to."""
    for action in menu_actions:
        yield action
        if action.menu() is not None:
            yield from in_menus(action.menu().actions())


def test_small_menu_bar_offers_its_buttons_in_a_menu_and_overlaps_nothing(small_window, qtbot):
    window, corner, bar = small_window, driver.corner(small_window), small_window.menuBar()
    more = driver.button(corner, "More")
    qtbot.waitUntil(more.isVisible)
    names = ("play", "record", "palette", "theme_toggle", "shortcuts")
    actions = [window.actions_by_name[name] for name in names]
    assert more.menu().actions() == actions
    assert set(actions) <= set(in_menus(bar.actions())), "each is in a menu of the bar as well"
    assert all(action.shortcuts() for action in actions)
    assert more.focusPolicy() & Qt.FocusPolicy.TabFocus
    assert all(bar.actionGeometry(action).right() < corner.x() for action in bar.actions())
    assert corner.geometry().right() <= bar.rect().right()
    shown = [part.geometry() for part in corner.findChildren(QWidget) if part.isVisible() and part.parent() is corner]
    assert all(corner.rect().contains(box) for box in shown)
    assert not any(a.intersects(b) for number, a in enumerate(shown) for b in shown[:number])


def test_menu_of_buttons_goes_when_the_buttons_have_their_space(small_window, qtbot):
    window, corner = small_window, driver.corner(small_window)
    more, theme = driver.button(corner, "More"), driver.button(corner, "Switch theme")
    qtbot.waitUntil(more.isVisible)
    assert not theme.isVisible()
    window.resize(1200, 800)
    qtbot.waitUntil(theme.isVisible)
    assert not more.isVisible()


def test_no_button_of_a_small_window_is_cut(make_window, session, engine, poll, qtbot):
    engine.hold([1, 2])
    engine.request(1, [1, 2])
    poll(session)
    window = make_window(session, with_views=True, size=(640, 480))
    window.show_map()
    window.docks["console"].hide()  # left of the map, for a screen of 800 pixels, it makes the window wider
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
        qtbot.waitUntil(lambda shown=view: cut_in(shown) + cut_in(window.page_map) == [], timeout=5000)
        room = window.minimumSizeHint()
        assert (room.width() <= 640, room.height() <= 480) == (True, True), (name, room)


def cut_in(view):
    """Texts of buttons in `view` that are wider than their button, or end right of the view."""
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
