"""Tests of the LoRA adapters dialog: the list of loaded adapters, load and unload commands, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

from kvscope_app.debugger.adapters_dialog import AdaptersDialog
from kvscope_telemetry.messages.commands import Done, Failed, LoadAdapter, LoadedAdapter, UnloadAdapter
from kvscope_telemetry.source import SourceStatus

NOT_ALLOWED = "The engine was started without --allow-runtime-lora-updating"


class AdapterSheetDriver:
    """Window of a scripted engine, and the adapter commands that were sent to the engine."""

    def __init__(self, engine, session, window):
        self.engine, self.session = engine, session
        self.action = window.actions_by_name["adapters"]

    def be(self, *names, **status):
        loaded = tuple(LoadedAdapter(name=name, path=f"/adapters/{name}") for name in names)
        given = {"adapters": loaded, "takes_adapters": True, "role": "operator"} | status
        self.engine.source.status = replace(SourceStatus(self.engine.source.status.state), **given)
        self.session.poll()

    def open_dialog(self):
        self.action.trigger()
        return next(w for w in QApplication.topLevelWidgets() if isinstance(w, AdaptersDialog) and w.isVisible())

    @property
    def sent_commands(self):
        return [each for each in self.engine.source.sent if isinstance(each, LoadAdapter | UnloadAdapter)]

    def answer(self, kind, number=-1, **fields):
        self.engine.source.replies.append(kind(tag=self.sent_commands[number].tag, **fields))
        self.session.poll()


@pytest.fixture
def adapters(engine, session, make_window, poll):
    window = make_window(session)
    poll(session)
    return AdapterSheetDriver(engine, session, window)


def test_adapter_is_loaded_under_the_folder_name_or_a_given_name(adapters, qtbot):
    adapters.be("sql")
    dialog = adapters.open_dialog()
    assert not dialog.load.isEnabled()
    dialog.path.setText("/srv/java/")
    assert dialog.name.placeholderText() == "java"
    qtbot.keyClick(dialog.path, Qt.Key.Key_Return)
    assert dialog.isVisible()
    dialog.name.setText("mine")
    dialog.load.click()
    assert [(sent.name, sent.path) for sent in adapters.sent_commands] == [
        ("java", "/srv/java/"),
        ("mine", "/srv/java/"),
    ]
    adapters.answer(Failed, 0, reason="there is no such folder")
    assert dialog.answer.text() == "There is no such folder"
    assert dialog.path.text() == "/srv/java/", "the path stays, to be corrected"
    adapters.answer(Done, what="LoRA adapter 'mine' was loaded from '/srv/java'")
    assert dialog.answer.text() == "LoRA adapter 'mine' was loaded from '/srv/java'"
    assert dialog.path.text() == ""


def test_unload_button_sends_the_command_and_rows_follow_the_engine(adapters):
    adapters.be("sql", "python")
    dialog = adapters.open_dialog()
    assert [button.accessibleName() for button in dialog.unload_buttons] == ["Unload sql", "Unload python"]
    dialog.unload_buttons[1].click()
    assert [each.name for each in adapters.sent_commands] == ["python"]
    adapters.be("sql")
    assert [button.accessibleName() for button in dialog.unload_buttons] == ["Unload sql"]
    adapters.be()
    assert dialog.unload_buttons == []


def test_loaded_adapters_are_listed_when_loading_is_not_allowed(adapters):
    adapters.be("sql", takes_adapters=False)
    dialog = adapters.open_dialog()
    dialog.path.setText("/srv/java")
    assert not dialog.load.isEnabled()
    assert not dialog.unload_buttons[0].isEnabled()
    assert dialog.unload_buttons[0].toolTip() == NOT_ALLOWED
    assert dialog.answer.text() == NOT_ALLOWED


@pytest.mark.parametrize(
    ("names", "status", "why"),
    [
        ((), {"takes_adapters": False}, NOT_ALLOWED),
        ((), {"role": "viewer", "takes_adapters": False}, "Operators only: you are a viewer at this engine"),
        ((), {}, ""),
        (("sql",), {"role": "viewer"}, ""),
    ],
)
def test_adapters_action_states_why_it_is_disabled(adapters, names, status, why):
    adapters.be(*names, **status)
    assert adapters.action.isEnabled() == (not why)
    assert why in adapters.action.toolTip()
