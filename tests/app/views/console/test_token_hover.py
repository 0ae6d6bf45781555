"""Tests of log-probabilities: requested, stored with the answer, and shown when the mouse is over a token."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QEvent, QPoint, Qt
from PySide6.QtGui import QHelpEvent, QTextCursor
from PySide6.QtWidgets import QApplication, QToolTip

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.scored_token import scored_tokens, token_at
from kvscope_app.views.console.source_alignment import source_offset
from kvscope_telemetry.messages.commands import TokenLogprobs, Tokens
from kvscope_telemetry.source import Update


def tokens_reply(request_id, text, logprob=-0.5, other="other", own_text=None):
    """Reply with one token, whose most likely alternative is `other`."""
    own_text = text if own_text is None else own_text
    scores = TokenLogprobs(token_id=1, logprob=logprob, top=((1, logprob), (2, -3.0)))
    return Tokens(
        request_id=request_id,
        token_ids=(1,),
        text=text,
        logprobs=(scores,),
        logprob_texts=((own_text, own_text, other),),
    )


def hover(body, word):
    """Return the tooltip for the first character of `word` in a text widget."""
    cursor = QTextCursor(body.document())
    cursor.setPosition(body.document().find(word).selectionStart())
    point = body.cursorRect(cursor).center() + QPoint(3, 0)
    QToolTip.hideText()
    QApplication.sendEvent(body.viewport(), QHelpEvent(QEvent.Type.ToolTip, point, body.viewport().mapToGlobal(point)))
    return QToolTip.text() if QToolTip.isVisible() else ""


def switch_logprobs_on(console, qtbot):
    console.page.head.settings.setChecked(True)
    qtbot.mouseClick(console.page.options.logprobs, Qt.MouseButton.LeftButton, pos=QPoint(8, 8))


def test_log_probabilities_are_not_requested_by_default(console):
    console.ask("Hello")
    assert console.submits[-1].sampling.logprobs is None


def test_hovering_a_token_shows_its_probability_and_alternatives_also_after_a_restart(console, make_console, qtbot):
    switch_logprobs_on(console, qtbot)
    console.ask("Hello")
    assert console.submits[-1].sampling.logprobs == 5
    for text, logprob in (("<think>", -0.1), ("hm", -0.2), ("</think>\n\n", -0.1), ("**Good", -0.5), (" day**", -9.9)):
        console.reply(tokens_reply(console.request_id, text, logprob))
    console.finish()
    console.view.hide()  # saves
    for each in (console, make_console()):
        each.view.show()
        each.card.reasoning_toggle.setChecked(True)
        qtbot.waitUntil(each.card.reasoning.isVisible)
        assert "“**Good”&nbsp; 60.7 %" in hover(each.card.body, "Good")
        assert "“other”&nbsp; 5.0 %" in hover(each.card.body, "Good")
        assert "“ day**”&nbsp; under 0.01 %" in hover(each.card.body, "day")
        assert "“hm”&nbsp; 81.9 %" in hover(each.card.reasoning, "hm")


def test_unlikely_tokens_are_underlined_when_the_answer_has_ended(console):
    console.ask("Hello")
    for text, logprob in (
        ("😀 **Good", -0.5),
        (" day**", -9.9),
        ("\n\n```py\nx", -0.1),
        (" = 1", -3.0),
        ("\n```", -0.1),
    ):
        console.reply(tokens_reply(console.request_id, text, logprob))
    assert underlined(console.card.body) == []
    console.finish()
    assert underlined(console.card.body) == [" day", " = 1"]
    console.view.apply_theme(THEMES["light"])
    assert underlined(console.card.body) == [" day", " = 1"]


def underlined(body):
    return [selection.cursor.selectedText() for selection in body.extraSelections()]


def test_answer_without_log_probabilities_shows_no_tooltip(console):
    console.ask("Hello", "Good day")
    assert hover(console.card.body, "day") == ""


def test_engine_with_an_api_of_its_own_gets_no_request_for_log_probabilities(console, engine, poll, qtbot):
    switch_logprobs_on(console, qtbot)
    engine.hello = replace(engine.hello, api="http://127.0.0.1:1")
    engine.source.updates.append(Update(snapshot=engine.snapshot()))
    poll(console.session)
    console.page.show_status()
    assert not console.page.options.logprobs.isEnabled()
    console.ask("Hello")
    assert console.submits[-1].sampling.logprobs is None


@pytest.mark.parametrize(
    ("source", "shown", "word", "expected"),
    [
        ("a **bold** word", "a bold word", "word", 11),
        ("1. one\n2. two", "one\ntwo", "two", 10),
        ("[text](http://x/text) text", "text text", " text", 21),
        ("![a](b) c", "Image: a c", "c", 8),
    ],
)
def test_shown_character_is_found_in_the_markdown_source(source, shown, word, expected):
    assert source_offset(source, shown, shown.index(word)) == expected


def test_text_held_back_for_a_stop_string_belongs_to_its_own_token():
    first = scored_tokens(tokens_reply("r", "", own_text=" foo"), 3)
    second = scored_tokens(tokens_reply("r", " foo bar", own_text=" bar"), 3)
    tokens = first + second
    assert token_at(tokens, 4, 11) == (tokens[0], 3, 7)
    assert token_at(tokens, 8, 11) == (tokens[1], 7, 11)
    assert token_at(tokens, 2, 11) is None
    assert token_at(tokens, 11, 11) is None


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_impossible_token_has_probability_zero_and_can_be_stored(console, make_console, logprob):
    console.ask("Hello")
    console.reply(tokens_reply(console.request_id, "Good", logprob))
    console.finish()
    console.view.hide()  # saves
    assert "“Good”&nbsp; under 0.01 %" in hover(make_console().card.body, "Good")
