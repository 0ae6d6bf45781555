"""Tests of the console's commands, which menus, keys and the command palette run."""

from __future__ import annotations

from PySide6.QtGui import QGuiApplication

from kvscope_telemetry.messages.commands import Abort


def test_last_answer_is_copied_as_the_model_wrote_it(console):
    console.view.run_command("copy_answer")
    assert "no answer" in console.page.notice.text()
    console.ask("One", "**re** One")
    console.view.run_command("copy_answer")
    assert QGuiApplication.clipboard().text() == "**re** One"


def test_last_answer_is_regenerated_as_another_version(console):
    console.ask("One", "first")
    console.view.run_command("regenerate")
    console.token("second")
    console.finish()
    assert console.texts == ["One", "second"]
    assert len(console.page.current.messages) == 3


def test_next_and_previous_conversation_follow_the_list_and_stop_at_its_ends(console):
    console.ask("One", "re One")
    console.page.new_conversation()
    console.ask("Two", "re Two")
    for command, title in (
        ("show_next", "One"),
        ("show_next", "One"),
        ("show_previous", "Two"),
        ("show_previous", "Two"),
    ):
        console.view.run_command(command)
        assert console.page.current.title == title


def test_stop_aborts_the_answer(console):
    console.ask("One")
    console.token("half")
    console.view.run_command("stop")
    assert console.engine.source.sent[-1] == Abort(request_id=console.request_id)
