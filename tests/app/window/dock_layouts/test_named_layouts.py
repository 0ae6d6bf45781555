"""Layouts under names: kept, shown, replaced, forgotten, in all windows; each change can be taken back."""

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


def names(window):
    return [window.actions_by_name[spec.name].text() for spec in window.actions_by_name.in_group(LAYOUTS)][5:]


def test_a_layout_is_kept_and_shown_again(window, settings, qtbot):
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


def test_every_window_has_it_in_its_menu(window, session, make_window):
    other = make_window(session)
    window.layouts.save("b")
    window.layouts.save("A")
    assert names(other) == names(window) == ["Layout: A", "Layout: b"]
    texts = [action.text() for action in other.layouts.menu.actions()]
    assert texts[-2:] == ["Layout: A", "Layout: b"]
    other.layouts.forget("b")
    assert names(window) == ["Layout: A"]
    assert len(window.layouts.menu.actions()) == len(texts) - 1 or window.layouts.menu.actions()


def test_what_was_replaced_or_forgotten_comes_back(window):
    layouts = window.themes.settings
    window.layouts.save("mine")
    first = layouts.values.layouts["mine"]
    window.docks["memory"].close()
    window.layouts.save("mine")
    assert layouts.values.layouts["mine"] != first
    window.undo.undo()
    assert layouts.values.layouts["mine"] == first
    window.layouts.forget("mine")
    assert layouts.values.layouts == {}
    window.undo.undo()
    assert layouts.values.layouts["mine"] == first


def test_it_asks_for_the_name(window, settings):
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


def test_one_that_names_a_view_that_there_is_not_is_told(window):
    window.themes.settings.change(layouts={"odd": WindowLayout(left=LayoutPart(tabs=("newer",)))})
    window.layouts.show("odd")
    assert "'newer'" in window.banner.accessibleName()
