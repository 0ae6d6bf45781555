"""Tests that actions of the registry take their enabled, checked and text state from their callbacks."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QMainWindow

from kvscope_app.actions.action_registry import Actions, ActionSpec


@pytest.fixture
def actions(qtbot, themes):
    window = QMainWindow()
    qtbot.addWidget(window)
    return Actions(window, themes.settings)


def do_nothing(*_):
    """Accept any arguments and return None."""


def test_action_state_follows_its_callbacks_at_creation_and_on_refresh(actions):
    now = {"can": False, "on": True, "text": "Undo closing"}
    action = actions.add_action(
        ActionSpec(
            *("undo", "Undo", "Edit", do_nothing),
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


def test_disabled_action_shows_the_reason_as_tooltip_even_after_a_shortcut_change(actions, themes):
    now = {"why": "The engine is not paused"}
    spec = ActionSpec("step", "Run one step", "Debug", do_nothing, ("F10",), why_not=lambda: now["why"])
    action = actions.add_action(spec)
    assert (action.isEnabled(), action.toolTip()) == (False, "The engine is not paused")
    themes.settings.change(shortcuts={"step": ("F11",)})
    assert action.toolTip() == "The engine is not paused"
    now["why"] = ""
    actions.refresh()
    assert (action.isEnabled(), action.toolTip()) == (True, "Run one step (F11)")


def test_only_the_current_action_of_an_exclusive_group_is_checked(actions):
    now = {"theme": "dark"}
    for name in ("dark", "light"):
        actions.add_action(
            ActionSpec(
                *(name, name, "Theme", do_nothing),
                checkable=True,
                exclusive="theme",
                checked=lambda name=name: now["theme"] == name,
            )
        )
    assert [actions[name].isChecked() for name in ("dark", "light")] == [True, False]
    now["theme"] = "light"
    actions.refresh()
    assert [actions[name].isChecked() for name in ("dark", "light")] == [False, True]
