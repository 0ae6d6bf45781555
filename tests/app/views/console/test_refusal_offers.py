"""What the console offers if a prompt was refused because it was too long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, PromptEstimate, Refused, Submit

LIMIT = 100
REASON = "the prompt has 120 tokens: send at most 99"


@pytest.fixture
def refused_console(console, engine, poll):
    """Console whose fourth prompt was too long. Each message has 15 tokens, and the engine accepts `LIMIT`."""
    engine.capabilities = replace(OWN_ENGINE, prompt_estimates=True)
    engine.restart(8)
    poll(console.session)
    console.page.current.system = "be brief"
    for number in ("1", "2", "3"):
        console.ask(f"prompt {number}", f"answer {number}")
    console.ask("prompt 4")
    console.reply(Refused(request_id=console.request_id, reason=REASON, is_too_long=True))
    console.page.show_status()
    return console


def estimate_questions(console, num_tokens_of=lambda messages: 15 * len(messages)):
    """Answer the questions what a prompt costs, until no new one is asked."""
    num_answered = 0
    while True:
        asked = [command for command in console.engine.source.sent if isinstance(command, EstimatePrompt)]
        if len(asked) == num_answered:
            return
        num_answered = len(asked)
        num_tokens = num_tokens_of(asked[-1].messages)
        console.reply(PromptEstimate(num_prompt_tokens=num_tokens, max_request_tokens=LIMIT, tag=asked[-1].tag))


def sent_texts(console):
    return [message.content for message in console.submits[-1].messages]


def test_prompt_is_sent_again_without_the_fewest_oldest_turns(refused_console, make_console):
    console = refused_console
    console.card.offers.shorten.click()
    estimate_questions(console)
    assert sent_texts(console) == ["be brief", "prompt 3", "answer 3", "prompt 4"]
    labels = [card.role_label.text() for card in console.page.transcript.cards if card.message.role == "user"]
    assert labels == [*["You  ·  left out of later prompts"] * 2, "You", "You"]
    console.token("re 4")
    console.finish()
    console.view.shut_down()
    again = make_console()
    again.ask("prompt 5")
    assert sent_texts(again) == ["be brief", "prompt 3", "answer 3", "prompt 4", "re 4", "prompt 5"]


def test_undo_of_leaving_out_turns_shows_the_refused_prompt_and_all_turns(refused_console):
    console, done = refused_console, []
    console.view.done.connect(lambda _text, undo, _redo: done.append(undo))
    console.card.offers.shorten.click()
    estimate_questions(console)
    console.token("re 4")
    console.finish()
    done[-1]()
    assert REASON.split(":")[0] in console.card.notice.text()
    prompts = [card for card in console.page.transcript.cards if card.message.role == "user"]
    assert [card.role_label.text() for card in prompts[:3]] == ["You"] * 3


def test_reason_is_shown_if_the_prompt_does_not_fit_even_alone(refused_console):
    console = refused_console
    console.card.offers.shorten.click()
    estimate_questions(console, lambda messages: 2 * LIMIT)
    assert console.page.notice.text().startswith("Even alone, this prompt does not fit")
    assert sum(isinstance(command, Submit) for command in console.engine.source.sent) == 4


def test_server_that_cannot_be_asked_is_not_taken_for_one_that_refuses(refused_console):
    console = refused_console
    console.card.offers.shorten.click()
    question = next(command for command in console.engine.source.sent if isinstance(command, EstimatePrompt))
    console.reply(Failed(reason="/tokenize not found", tag=question.tag, is_unanswered=True))
    assert console.page.notice.text() == "The engine did not say how many turns fit: try again."


def test_new_chat_has_the_prompt_as_its_draft_and_the_same_options(refused_console):
    console = refused_console
    before = console.page.current
    console.card.offers.new_chat.click()
    assert console.page.current is not before
    assert console.page.current.system == "be brief"
    assert console.page.composer.edit.toPlainText() == "prompt 4"
    assert [message.content for message in before.path][-2:] == ["prompt 4", ""]


def test_offers_are_shown_only_for_a_prompt_that_was_too_long(console):
    console.ask("one")
    console.reply(Refused(request_id=console.request_id, reason="the model is loading"))
    console.page.show_status()
    assert not console.card.offers.isVisible()
