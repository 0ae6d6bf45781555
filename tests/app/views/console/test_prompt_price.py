"""What the draft would cost, shown below the prompt field before Send."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from PySide6.QtCore import QTimer

from kvscope_app.ui.theme import THEMES
from kvscope_app.views.console.price_text import price_texts
from kvscope_app.views.console.prompt_estimator import DELAY_MS
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, PromptEstimate


@pytest.fixture
def priced_console(console, engine, poll):
    """Console on an engine that estimates prompts."""
    engine.capabilities = replace(OWN_ENGINE, prompt_estimates=True)
    engine.restart(8)
    poll(console.session)
    return console


def questions(console):
    return [command for command in console.engine.source.sent if isinstance(command, EstimatePrompt)]


def type_and_wait(console, qtbot, text):
    """Type a draft and wait for the question about it."""
    console.page.composer.set_text(text)
    qtbot.waitUntil(lambda: bool(questions(console)) and questions(console)[-1].messages[-1].content == text)


def is_delay_over(console):
    """Whether the estimator has noticed that the draft no longer changes."""
    timers = console.page.estimator.findChildren(QTimer)
    return not any(timer.isActive() and timer.interval() == DELAY_MS for timer in timers)


def answer(console, **fields):
    values = {"num_prompt_tokens": 345, "num_cached_tokens": 288, "max_request_tokens": 2048, "num_draft_tokens": 12}
    console.reply(PromptEstimate(tag=questions(console)[-1].tag, **(values | fields)))


def test_price_of_the_draft_is_shown_and_replaced_by_the_context_fill_after_send(priced_console, qtbot):
    console = priced_console
    console.ask("first", "re first")
    type_and_wait(console, qtbot, "second")
    assert [message.content for message in questions(console)[-1].messages] == ["first", "re first", "second"]
    answer(console, ttft_s=0.21)
    assert console.page.context.price.longest == (
        "draft 12 tokens · prompt 345 tokens, 288 cached · first token in about 210 ms · 1\u202f703 left for the answer"
    )
    assert not console.page.context.text.isVisible()
    console.page.composer.button.click()
    assert not console.page.context.price.isVisible()
    assert console.page.context.text.isVisible()


def test_price_is_asked_one_question_at_a_time_and_again_for_the_newest_draft(priced_console, qtbot):
    console = priced_console
    type_and_wait(console, qtbot, "one")
    console.page.composer.set_text("one two")
    qtbot.waitUntil(lambda: is_delay_over(console))
    assert len(questions(console)) == 1
    answer(console)
    assert questions(console)[-1].messages[-1].content == "one two"
    assert len(questions(console)) == 2


def test_answer_to_the_draft_of_another_conversation_is_ignored(priced_console, qtbot):
    console = priced_console
    console.ask("first", "re first")
    type_and_wait(console, qtbot, "draft")
    console.page.new_conversation()
    answer(console)
    assert not console.page.context.price.isVisible()


def test_engine_without_estimates_is_never_asked(console, qtbot):
    console.page.composer.set_text("draft")
    qtbot.waitUntil(lambda: is_delay_over(console))
    assert questions(console) == []


def test_warning_has_text_and_color_if_the_answer_would_be_cut(priced_console, qtbot):
    console = priced_console
    type_and_wait(console, qtbot, "draft")
    answer(console, num_prompt_tokens=1_992)
    price = console.page.context.price
    assert price.longest.startswith("only 56 left for an answer of 512 tokens")
    assert THEMES["dark"].warn in price.styleSheet()
    console.page.options.fields["max_tokens"].clear()
    qtbot.keyClicks(console.page.options.fields["max_tokens"], "56")
    assert price.longest.endswith("56 left for the answer")


def test_reason_is_shown_if_the_engine_would_refuse_the_draft(priced_console, qtbot):
    console = priced_console
    type_and_wait(console, qtbot, "draft")
    console.reply(Failed(tag=questions(console)[-1].tag, reason="the prompt is too long"))
    assert console.page.context.price.longest == "This prompt would not be accepted: the prompt is too long"


def test_nothing_is_shown_if_the_server_cannot_be_asked(priced_console, qtbot):
    console = priced_console
    type_and_wait(console, qtbot, "draft")
    console.reply(Failed(tag=questions(console)[-1].tag, reason="/tokenize not found", is_unanswered=True))
    assert not console.page.context.price.isVisible()


@pytest.mark.parametrize(
    ("fields", "limit", "text"),
    [
        ({}, 0, "prompt 9 tokens, – cached · first token in – · – left for the answer"),
        (
            {"ttft_s": 2.0, "num_waiting": 2, "num_cached_tokens": 0},
            10,
            "prompt 9 tokens, 0 cached · first token in about 2.00 s behind 2 waiting requests · 1 left for the answer",
        ),
        ({}, 8, "the prompt is 2 tokens too long · prompt 9 tokens, – cached · first token in –"),
    ],
)
def test_unknown_parts_of_the_price_are_dashes(fields, limit, text):
    assert price_texts(PromptEstimate(num_prompt_tokens=9, **fields), limit, None).texts[0] == text
