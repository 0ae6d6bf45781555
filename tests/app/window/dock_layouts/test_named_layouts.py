"""Tests of named layouts: saving, applying, replacing, forgetting and undo, in all windows."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QInputDialog

from kvscope_app.settings.layout_value import LayoutPart, WindowLayout
from kvscope_app.settings.settings_store import read_settings
from kvscope_app.window.dock_layouts.named_layouts import LAYOUTS


@pytest.fixture
def window(session, make_window):
    made = make_window(session, size=(1500, 900))
    made._on_all_loaded()
    return made


def layout_names(window):
    return [window.actions_by_name[spec.name].text() for spec in window.actions_by_name.in_group(LAYOUTS)][5:]


def test_saved_layout_can_be_applied_and_undone(window, settings, qtbot):
    window.docks["memory"].close()
    window.layouts.save("  no memory & more ")
    assert list(read_settings(settings).layouts) == ["no memory & more"]
    window.actions_by_name["reset_layout"].trigger()
    assert not window.docks["memory"].isHidden()
    qtbot.waitUntil(lambda: window.undo.count() > 0)
    window.actions_by_name["layout_no memory & more"].trigger()
    assert window.docks["memory"].isHidden()
    qtbot.waitUntil(lambda: window.undo.undoText() == "applying the layout “no memory & more”")
    window.undo.undo()
    assert not window.docks["memory"].isHidden()


def test_saved_layout_is_in_the_menu_of_every_window(window, session, make_window):
    other = make_window(session)
    window.layouts.save("b")
    window.layouts.save("A")
    assert layout_names(other) == layout_names(window) == ["Layout: A", "Layout: b"]
    texts = [action.text() for action in other.layouts.menu.actions()]
    assert texts[-2:] == ["Layout: A", "Layout: b"]
    other.layouts.delete("b")
    assert layout_names(window) == ["Layout: A"]
    assert len(window.layouts.menu.actions()) == len(texts) - 1 or window.layouts.menu.actions()


def test_replaced_or_forgotten_layout_is_restored_by_undo(window):
    layouts = window.themes.settings
    window.layouts.save("mine")
    first = layouts.values.layouts["mine"]
    window.docks["memory"].close()
    window.layouts.save("mine")
    assert layouts.values.layouts["mine"] != first
    window.undo.undo()
    assert layouts.values.layouts["mine"] == first
    window.layouts.delete("mine")
    assert layouts.values.layouts == {}
    window.undo.undo()
    assert layouts.values.layouts["mine"] == first


def test_save_and_forget_ask_for_the_name_of_the_layout(window, settings):
    assert not window.actions_by_name["forget_layout"].isEnabled()
    window.actions_by_name["save_layout"].trigger()
    (dialog,) = window.findChildren(QInputDialog)
    dialog.setTextValue("asked")
    dialog.accept()
    assert list(read_settings(settings).layouts) == ["asked"]
    window.actions_by_name["forget_layout"].trigger()
    dialog = next(d for d in window.findChildren(QInputDialog) if d.isVisible())
    assert dialog.comboBoxItems() == ["asked"]
    dialog.accept()
    assert read_settings(settings).layouts == {}


def test_layout_with_an_unknown_view_is_reported(window):
    window.themes.settings.change(layouts={"odd": WindowLayout(left=LayoutPart(tabs=("newer",)))})
    window.layouts.show("odd")
    assert "'newer'" in window.banner.accessibleName()
