"""What an action's description says of its state is so, whenever it is looked at again."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QMainWindow

from kvscope_app.actions.action_registry import Actions, ActionSpec


@pytest.fixture
def actions(qtbot, themes):
    window = QMainWindow()
    qtbot.addWidget(window)
    return Actions(window, themes.settings)


def nothing(*_):
    """Nothing is done."""


def test_an_action_is_so_from_the_start_and_after_each_look(actions):
    now = {"can": False, "on": True, "text": "Undo closing"}
    action = actions.add_action(
        ActionSpec(
            *("undo", "Undo", "Edit", nothing),
            checkable=True,
            enabled=lambda: now["can"],
            checked=lambda: now["on"],
            text_now=lambda: now["text"],
        )
    )
    assert (action.isEnabled(), action.isChecked(), action.text()) == (False, True, "Undo closing")
    now.update(can=True, on=False, text="Undo")
    actions.refresh()
    assert (action.isEnabled(), action.isChecked(), action.text()) == (True, False, "Undo")


def test_why_not_is_its_tip_while_it_cannot_be_done_whatever_keys_it_has(actions, themes):
    now = {"why": "The engine is not paused"}
    spec = ActionSpec("step", "Run one step", "Debug", nothing, ("F10",), why_not=lambda: now["why"])
    action = actions.add_action(spec)
    assert (action.isEnabled(), action.toolTip()) == (False, "The engine is not paused")
    themes.settings.change(shortcuts={"step": ("F11",)})
    assert action.toolTip() == "The engine is not paused"
    now["why"] = ""
    actions.refresh()
    assert (action.isEnabled(), action.toolTip()) == (True, "Run one step (F11)")


def test_of_exclusive_actions_the_one_that_is_so_is_checked(actions):
    now = {"theme": "dark"}
    for name in ("dark", "light"):
        actions.add_action(
            ActionSpec(
                *(name, name, "Theme", nothing),
                checkable=True,
                exclusive="theme",
                checked=lambda name=name: now["theme"] == name,
            )
        )
    assert [actions[name].isChecked() for name in ("dark", "light")] == [True, False]
    now["theme"] = "light"
    actions.refresh()
    assert [actions[name].isChecked() for name in ("dark", "light")] == [False, True]
