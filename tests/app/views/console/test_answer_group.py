"""Tests of several answers to one prompt: how they are requested, shown, stopped, chosen and stored."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.app import window_driver as driver

from kvscope_app.ui.theme import THEMES
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import Abort, Accepted, Finished, Refused, RequestTiming, Tokens, Usage


@pytest.fixture
def three(console, engine, poll):
    """Console at an engine that can abort one completion; three answers to "Why?" are being written."""
    engine.capabilities = replace(OWN_ENGINE, completion_aborts=True)
    engine.restart(8)
    poll(console.session)
    console.page.composer.answer_count.menu().actions()[2].trigger()
    console.ask("Why?")
    console.reply(Accepted(request_id=console.request_id, numbers=(3, 4, 5), num_prompt_tokens=11))
    for index, text in enumerate(("One", "Two", "Three")):
        console.reply(Tokens(request_id=console.request_id, token_ids=(1,), text=text, index=index))
    return console


def finish_all(console):
    for index in range(3):
        usage = Usage(prompt_tokens=11, cached_tokens=8, completion_tokens=4)
        timing = RequestTiming(ttft_s=0.25, total_s=1.75)
        console.reply(
            Finished(request_id=console.request_id, finish_reason="stop", usage=usage, timing=timing, index=index)
        )


def column_of(console, index):
    return console.page.transcript.cards[1 + index].parentWidget()


def test_three_answers_are_one_request_and_stand_side_by_side(three, qtbot):
    (submit,) = three.submits
    assert submit.sampling.n == 3
    assert three.texts == ["Why?", "One", "Two", "Three"]
    assert [card.message.stats.number for card in three.page.transcript.cards[1:]] == [3, 4, 5]
    group = column_of(three, 0).parentWidget()
    three.view.resize(1200, 560)
    qtbot.waitUntil(lambda: group.is_side_by_side)
    three.view.resize(300, 560)
    qtbot.waitUntil(lambda: not group.is_side_by_side)
    assert three.view.width() < 400, "several answers do not make a narrow dock wider"
    finish_all(three)
    for card in three.page.transcript.cards[1:]:
        assert "4 tokens" in driver.visible_text(card)


def test_one_of_three_answers_can_be_stopped(three):
    column_of(three, 1).stop.click()
    assert three.engine.source.sent[-1] == Abort(request_id=three.request_id, index=1)
    assert not column_of(three, 1).stop.isEnabled()
    three.page.composer.stop.click()
    assert three.engine.source.sent[-1] == Abort(request_id=three.request_id)
    finish_all(three)
    assert not three.chat.is_writing(three.page.current.key)
    assert all(column_of(three, index).stop.isHidden() for index in range(3))


def test_chat_continues_with_the_chosen_answer_and_keeps_the_others(three, make_console):
    finish_all(three)
    column_of(three, 2).choose.click()
    three.view.shut_down()
    console = make_console()
    assert console.texts == ["Why?", "One", "Two", "Three"], "all are there after a restart"
    assert column_of(console, 2).choose.isChecked()
    console.page.composer.answer_count.menu().actions()[0].trigger()
    console.ask("And?", "Because")
    assert [message.content for message in console.submits[-1].messages] == ["Why?", "Three", "And?"]
    assert console.texts == ["Why?", "Three", "And?", "Because"]
    versions = console.page.transcript.cards[1].versions
    assert versions.version.text() == "3/3"
    versions.previous.click()
    assert console.texts == ["Why?", "One", "Two", "Three"]
    assert column_of(console, 1).choose.isChecked()


def test_engine_that_cannot_abort_one_completion_gets_a_request_for_each_answer(console):
    console.page.options.fields["seed"].setText("7")
    console.page.options.fields["seed"].textEdited.emit("7")
    console.page.composer.answer_count.menu().actions()[1].trigger()
    console.ask("Why?")
    first, second = console.submits
    assert (first.sampling.n, second.sampling.n) == (1, 1)
    assert first.sampling.seed != second.sampling.seed
    assert first.messages == second.messages
    console.token("One", first.request_id)
    console.reply(Refused(request_id=second.request_id, reason="the queue is full"))
    assert console.texts == ["Why?", "One", ""]
    assert "the queue is full" in driver.visible_text(console.card)
    column_of(console, 0).stop.click()
    assert console.engine.source.sent[-1] == Abort(request_id=first.request_id)


def test_greedy_options_warn_that_all_answers_are_the_same(console):
    console.page.options.fields["temperature"].setText("0")
    console.page.options.fields["temperature"].textEdited.emit("0")
    console.page.composer.answer_count.menu().actions()[1].trigger()
    assert "At temperature 0" in driver.visible_text(console.view)


def test_columns_follow_the_theme(three):
    three.view.apply_theme(THEMES["light"])
    assert THEMES["light"].accent in column_of(three, 0).styleSheet()
    assert THEMES["light"].border in column_of(three, 1).styleSheet()
