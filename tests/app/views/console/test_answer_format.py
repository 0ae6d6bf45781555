"""Tests of the format that the console demands of answers: chosen in the options, sent, stored and validated."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt

from kvscope_app.views.console.answer_format import FORMATS
from kvscope_telemetry.messages.structured import Structured


def choose(console, qtbot, kind, text=""):
    """Choose a format with the keyboard, and type its text."""
    console.page.head.settings.setChecked(True)
    field = console.page.options.format
    names = [each.kind for each in FORMATS]
    field.kind.setFocus()
    qtbot.keyClick(field.kind, Qt.Key.Key_Home)
    for _ in range(names.index(kind)):
        qtbot.keyClick(field.kind, Qt.Key.Key_Down)
    for index, line in enumerate(text.split("\n")):
        if index:
            qtbot.keyClick(field.text, Qt.Key.Key_Return)
        qtbot.keyClicks(field.text, line)
    return field


def test_answers_may_have_any_text_by_default(console):
    console.ask("Hello")
    assert console.submits[-1].sampling.structured is None
    assert not console.page.options.format.text.isVisible()


@pytest.mark.parametrize(
    ("kind", "typed", "sent"),
    [
        ("json_object", "", ""),
        ("json_schema", '{"type": "integer"}', '{"type": "integer"}'),
        ("regex", r"\d{4}", r"\d{4}"),
        ("choice", "yes\n\n no ", '["yes","no"]'),
    ],
)
def test_chosen_format_is_sent_with_the_prompt_and_stored(console, make_console, qtbot, kind, typed, sent):
    field = choose(console, qtbot, kind, typed)
    assert field.text.isVisible() is bool(typed)
    console.ask("Hello", "4321")
    assert console.submits[-1].sampling.structured == Structured(kind=kind, text=sent)
    console.view.hide()  # saves
    reopened = make_console()
    assert reopened.page.options.format.read() == Structured(kind=kind, text=sent)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": ', "the JSON schema must be JSON"),
        ("json_schema", "3", "the JSON schema must be an object"),
        ("choice", "", "One of is empty"),
    ],
)
def test_invalid_format_is_named_and_prevents_sending(console, qtbot, kind, text, reason):
    choose(console, qtbot, kind, text)
    assert reason in console.page.options.problem
    assert console.page.why_blocked() == "Check the options"


def test_reset_demands_no_format(console, qtbot):
    choose(console, qtbot, "json_object")
    qtbot.mouseClick(console.page.options.reset, Qt.MouseButton.LeftButton)
    console.ask("Hello")
    assert console.submits[-1].sampling.structured is None
