"""Tests of keyboard shortcuts: conflicts, the shortcut editor, and where shortcuts are shown."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QColor, QKeySequence, QShortcut
from PySide6.QtWidgets import QLabel, QPushButton

from kvscope_app.actions.keymap import Command, conflicts, keys_of, with_keys
from kvscope_app.actions.shortcut_editor import ShortcutEditor
from kvscope_app.settings.settings_store import read_settings
from kvscope_app.ui.sheet import Sheet

PLAY = Command("play", "Play", ("Space",))
OPEN = Command("open", "Open", ("Ctrl+O", "F3"))
NEW = Command("new", "New", ("Ctrl+N",), focus_dock="console")
ABORT = Command("abort", "Abort", ("Del",), focus_dock="requests")
ALL = (PLAY, OPEN, NEW, ABORT)


@pytest.fixture
def window(session, make_window):
    return make_window(session)


@pytest.fixture
def editor(window, qtbot):
    made = ShortcutEditor(window, window.actions_by_name, window.themes.settings, QColor("blue"))
    made.show()
    return made


def set_key(editor, name, keys):
    editor.select_command(name)
    editor.keys.setKeySequence(QKeySequence(keys))
    editor.set_button.click()


def test_rivals_finds_commands_with_the_same_key_in_an_overlapping_scope():
    assert conflicts(PLAY, ("f3",), ALL, {}) == [OPEN]
    assert conflicts(PLAY, ("F3",), ALL, {"open": ("Ctrl+O",)}) == []
    assert conflicts(PLAY, ("Del",), ALL, {}) == [ABORT], "a shortcut of the window also applies in each dock"
    assert conflicts(NEW, ("Del",), ALL, {}) == [], "shortcuts of different docks do not conflict"


def test_assigning_a_key_removes_it_from_its_previous_command():
    chosen = with_keys(PLAY, ("F3",), ALL, {})
    assert chosen == {"play": ("F3",), "open": ("Ctrl+O",)}
    back = with_keys(OPEN, OPEN.own_keys, ALL, chosen)
    assert back == {"play": ()}
    assert with_keys(PLAY, ("Space",), ALL, back) == {}
    assert keys_of("play", PLAY.own_keys, {"play": ()}) == ()


def test_changed_shortcut_takes_effect_and_is_saved(editor, window, session, settings, qtbot):
    set_key(editor, "play", "Ctrl+K")
    assert [k.toString() for k in window.actions_by_name["play"].shortcuts()] == ["Ctrl+K"]
    assert "(Ctrl+K)" in window.actions_by_name["play"].toolTip()
    assert read_settings(settings).shortcuts == {"play": ("Ctrl+K",)}
    editor.close()
    window.activateWindow()
    window.page_map.canvas.setFocus()
    qtbot.waitUntil(window.isActiveWindow)
    qtbot.keyClick(window.page_map.canvas, Qt.Key.Key_Space)
    assert not session.timeline.is_paused
    qtbot.keyClick(window.page_map.canvas, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    assert session.timeline.is_paused


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_selected_command_has_enough_contrast_with_and_without_focus(editor, window, qtbot, theme):
    window.themes.choose(theme)
    editor.select_command("play")
    for widget in (
        editor.command_list,
        editor.keys,
    ):  # the chosen command stays readable while the focus is in the key field
        widget.setFocus()
        qtbot.waitUntil(widget.hasFocus)
        row = editor.command_list.visualItemRect(editor.command_list.currentItem())
        image = editor.command_list.viewport().grab(row).toImage()
        lights = [image.pixelColor(x, y).lightness() for x in range(image.width()) for y in range(image.height())]
        behind = max(set(lights), key=lights.count)
        assert max(abs(light - behind) for light in lights) > 90, "the text does not stand out"
        below = row.translated(0, row.height())
        other = editor.command_list.viewport().grab(below).toImage().pixelColor(image.width() - 2, image.height() // 2)
        assert other.lightness() != image.pixelColor(image.width() // 2, 2).lightness(), (
            "the selected row looks like the others"
        )


def test_key_of_another_command_is_reassigned_only_after_confirmation(editor, window):
    set_key(editor, "fit", "Ctrl+W")
    assert "“Close window”" in editor.hint.text()
    assert window.actions_by_name["close"].shortcut().toString() == "Ctrl+W"
    editor.set_button.click()
    assert window.actions_by_name["close"].shortcut().isEmpty()
    assert window.actions_by_name["fit"].shortcut().toString() == "Ctrl+W"


def test_one_shortcut_or_all_shortcuts_can_be_reset(editor, window, settings):
    set_key(editor, "zoom_in", "Z")
    set_key(editor, "fit", "X")
    editor.select_command("zoom_in")
    editor.default_button.click()
    assert [k.toString() for k in window.actions_by_name["zoom_in"].shortcuts()] == ["+", "="]
    editor.select_command("zoom_in")
    editor.clear_button.click()
    assert window.actions_by_name["zoom_in"].shortcuts() == []
    editor.reset_button.click()
    assert read_settings(settings).shortcuts == {}
    assert window.actions_by_name["fit"].shortcut().toString() == "F"
    assert not editor.reset_button.isEnabled()


def test_changed_shortcut_applies_to_all_windows_and_their_tooltips(editor, window, session, make_window):
    other = make_window(session)
    set_key(editor, "zoom_in", "Ctrl+Up")
    assert other.actions_by_name["zoom_in"].shortcut().toString() == "Ctrl+Up"
    assert "Zoom in (Ctrl+Up)" in [button.toolTip() for button in other.page_map.zoom_buttons]


def test_shortcut_search_matches_command_names_and_keys(editor):
    def shown():
        items = [editor.command_list.topLevelItem(i) for i in range(editor.command_list.topLevelItemCount())]
        return [item.text(0) for item in items if not item.isHidden()]

    everything = len(shown())
    editor.search.setText("ctrl+shift+p")
    assert shown() == ["Command palette"]
    editor.search.setText("  reset PREFIX ")
    assert shown() == ["Reset prefix cache"]
    editor.search.clear()
    assert len(shown()) == everything > 60


def test_shortcuts_dialog_shows_current_keys_and_opens_the_editor(editor, window):
    set_key(editor, "play", "Ctrl+K")
    editor.close()
    window.actions_by_name["shortcuts"].trigger()
    dialog = next(s for s in window.findChildren(Sheet) if s.windowTitle() == "Keyboard shortcuts")
    assert "Ctrl+K" in [label.text() for label in dialog.findChildren(QLabel)]
    next(button for button in dialog.findChildren(QPushButton) if button.text() == "Change…").click()
    assert any(type(s) is ShortcutEditor and s.isVisible() for s in window.findChildren(Sheet))


def test_all_shortcuts_of_a_window_are_registered_and_do_not_conflict(session, make_window):
    window = make_window(session, with_views=True)
    registered = {id(window.actions_by_name[spec.name]) for spec in window.actions_by_name}
    assert window.findChildren(QShortcut) == []
    others = [a for a in window.findChildren(QAction) if a.shortcuts() and id(a) not in registered]
    assert [(a.text(), a.shortcut().toString()) for a in others] == []
    commands = window.actions_by_name.commands()
    meeting = {c.name: [r.name for r in conflicts(c, c.own_keys, commands, {})] for c in commands}
    assert {name: found for name, found in meeting.items() if found} == {}
