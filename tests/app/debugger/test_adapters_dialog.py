"""The sheet of LoRA adapters: what is loaded, what is asked of the engine, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

from kvscope_app.debugger.adapters_dialog import AdaptersDialog
from kvscope_telemetry.messages.commands import Done, Failed, LoadAdapter, LoadedAdapter, UnloadAdapter
from kvscope_telemetry.source import SourceStatus

NOT_ALLOWED = "The engine was started without --allow-runtime-lora-updating"


class Told:
    """A window, what its engine says, and what it was told."""

    def __init__(self, engine, session, window):
        self.engine, self.session = engine, session
        self.action = window.actions_by_name["adapters"]

    def be(self, *names, **status):
        loaded = tuple(LoadedAdapter(name=name, path=f"/adapters/{name}") for name in names)
        given = {"adapters": loaded, "takes_adapters": True, "role": "operator"} | status
        self.engine.source.status = replace(SourceStatus(self.engine.source.status.state), **given)
        self.session.poll()

    def open(self):
        self.action.trigger()
        return next(w for w in QApplication.topLevelWidgets() if isinstance(w, AdaptersDialog) and w.isVisible())

    @property
    def asked(self):
        return [each for each in self.engine.source.sent if isinstance(each, LoadAdapter | UnloadAdapter)]

    def answer(self, kind, number=-1, **fields):
        self.engine.source.replies.append(kind(tag=self.asked[number].tag, **fields))
        self.session.poll()


@pytest.fixture
def told(engine, session, make_window, poll):
    window = make_window(session)
    poll(session)
    return Told(engine, session, window)


def test_one_is_loaded_under_the_folder_s_name_or_another(told, qtbot):
    told.be("sql")
    sheet = told.open()
    assert not sheet.load.isEnabled()
    sheet.path.setText("/srv/java/")
    assert sheet.name.placeholderText() == "java"
    qtbot.keyClick(sheet.path, Qt.Key.Key_Return)
    assert sheet.isVisible()
    sheet.name.setText("mine")
    sheet.load.click()
    assert [(each.name, each.path) for each in told.asked] == [("java", "/srv/java/"), ("mine", "/srv/java/")]
    told.answer(Failed, 0, reason="there is no such folder")
    assert sheet.answer.text() == "There is no such folder"
    assert sheet.path.text() == "/srv/java/", "to be mended"
    told.answer(Done, what="LoRA adapter 'mine' was loaded from '/srv/java'")
    assert sheet.answer.text() == "LoRA adapter 'mine' was loaded from '/srv/java'"
    assert sheet.path.text() == ""


def test_one_is_unloaded_and_the_lines_follow_the_engine(told):
    told.be("sql", "python")
    sheet = told.open()
    assert [button.accessibleName() for button in sheet.unloads] == ["Unload sql", "Unload python"]
    sheet.unloads[1].click()
    assert [each.name for each in told.asked] == ["python"]
    told.be("sql")
    assert [button.accessibleName() for button in sheet.unloads] == ["Unload sql"]
    told.be()
    assert sheet.unloads == []


def test_where_it_is_not_allowed_what_is_loaded_is_seen(told):
    told.be("sql", takes_adapters=False)
    sheet = told.open()
    sheet.path.setText("/srv/java")
    assert not sheet.load.isEnabled()
    assert not sheet.unloads[0].isEnabled()
    assert sheet.unloads[0].toolTip() == NOT_ALLOWED
    assert sheet.answer.text() == NOT_ALLOWED


@pytest.mark.parametrize(
    ("names", "status", "why"),
    [
        ((), {"takes_adapters": False}, NOT_ALLOWED),
        ((), {"role": "viewer", "takes_adapters": False}, "Operators only: you are a viewer at this engine"),
        ((), {}, ""),
        (("sql",), {"role": "viewer"}, ""),
    ],
)
def test_why_there_is_nothing_to_see(told, names, status, why):
    told.be(*names, **status)
    assert told.action.isEnabled() == (not why)
    assert why in told.action.toolTip()
