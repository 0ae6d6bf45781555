"""Tests of functions that the model may call: their definitions, the calls shown, and the results that are sent."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from tests.app import window_driver as driver

from kvscope_app.views.console.text_body import TextBody
from kvscope_app.views.console.tools import read_tools
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.commands import EstimatePrompt, Failed, ToolCall

FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = json.dumps([{"type": "function", "function": FUNCTION}])
PARIS = ToolCall(id="c1", name="weather", arguments='{"city":"Paris"}')
TOKYO = ToolCall(id="c2", name="weather", arguments='{"city":"Tokyo"}')


@pytest.fixture
def called(console):
    """Console whose model has answered "Weather?" with a call for Paris."""
    console.page.options.tools.text.setPlainText(TOOLS)
    console.ask("Weather?")
    console.token("Let me see.<tool_call>…")
    console.finish(tool_calls=(PARIS,), content="Let me see.")
    return console


def test_result_of_a_call_continues_the_chat(called, make_console):
    assert json.loads(called.submits[-1].tools) == json.loads(TOOLS)
    assert called.texts == ["Weather?", "Let me see."]
    assert "Calls weather" in driver.visible_text(called.card)
    arguments = called.card.calls.findChild(TextBody)
    assert '"city": "Paris"' in arguments.toPlainText()
    called.view.shut_down()
    console = make_console()
    panel = console.card.calls
    assert not panel.send.isEnabled()
    panel.results[0].setPlainText("18 °C")
    panel.send.click()
    prompt, answer, result = console.submits[-1].messages
    assert (prompt.content, answer.content, answer.tool_calls) == ("Weather?", "Let me see.", (PARIS,))
    assert (result.role, result.content, result.tool_call_id, result.name) == ("tool", "18 °C", "c1", "weather")
    assert json.loads(console.submits[-1].tools) == json.loads(TOOLS)
    console.token("It is mild.")
    console.finish()
    assert console.texts == ["Weather?", "Let me see.", "18 °C", "It is mild."]
    assert "Result of weather" in driver.visible_text(console.page.transcript.cards[2])
    assert panel.results[0].isHidden(), "an old call cannot be answered again"


def test_answer_of_only_calls_needs_all_results_and_is_not_left_out(console):
    console.page.options.tools.text.setPlainText(TOOLS)
    console.ask("Weather?")
    console.finish(tool_calls=(PARIS, TOKYO), content="")
    panel = console.card.calls
    panel.results[1].setPlainText("25 °C")
    assert not panel.send.isEnabled()
    panel.results[0].setPlainText("18 °C")
    panel.send.click()
    assert [(m.role, m.content, m.tool_call_id) for m in console.submits[-1].messages] == [
        ("user", "Weather?", ""),
        ("assistant", "", ""),
        ("tool", "18 °C", "c1"),
        ("tool", "25 °C", "c2"),
    ]


def test_template_without_tools_is_reported_before_sending(console, engine, poll, qtbot):
    engine.capabilities = replace(OWN_ENGINE, prompt_estimates=True)
    engine.restart(8)
    poll(console.session)
    console.page.options.tools.text.setPlainText(TOOLS)
    console.page.composer.set_text("Weather?")
    questions = lambda: [each for each in engine.source.sent if isinstance(each, EstimatePrompt)]  # noqa: E731
    qtbot.waitUntil(lambda: bool(questions()))
    assert json.loads(questions()[-1].tools) == json.loads(TOOLS)
    reason = "tools are not accepted: the model's chat template does not show them to the model"
    console.reply(Failed(reason=reason, tag=questions()[-1].tag))
    assert console.page.context.price.longest.endswith(reason)


def test_invalid_tools_are_reported_in_one_line_and_nothing_is_sent(console):
    console.page.options.tools.text.setPlainText('{"name": 5}')
    console.ask("Weather?")
    assert not console.submits
    assert console.page.options.problem == (
        "Tools: name 5 of tool 1 is not accepted: 1 to 64 letters, digits, _, - or ."
    )


def test_tools_are_loaded_from_a_file(console, tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(FUNCTION))
    console.page.options.tools.load_file(str(path))
    console.ask("Weather?")
    assert json.loads(console.submits[-1].tools) == json.loads(TOOLS)
    console.page.options.tools.load_file(str(tmp_path / "none.json"))
    assert console.page.notice.text() == "none.json was not loaded: No such file or directory"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[{", "must be JSON, such as"),
        ("[5]", "tool 1 is not accepted: a function is an object"),
        ('[{"type": "web_search", "function": {}}]', "type 'web_search' of tool 1 is not accepted"),
        ('[{"name": "a b"}]', "name 'a b' of tool 1 is not accepted"),
        ('[{"name": "a"}, {"name": "a"}]', "two functions have the name 'a'"),
        ('[{"name": "a", "parameters": []}]', "the parameters of a must be a JSON schema"),
        (json.dumps([{"name": f"f{number}"} for number in range(129)]), "129 functions are not accepted, at most 128"),
    ],
)
def test_invalid_definition_is_refused_with_its_reason(text, reason):
    with pytest.raises(BadInput) as refusal:
        read_tools(text)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
