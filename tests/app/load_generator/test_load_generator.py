"""The load: bounded, stops what it started, survives refusals and an engine that ends."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PySide6.QtCore import QSettings
from PySide6.QtWidgets import QApplication, QLabel, QTabWidget
from tests.app import window_driver as driver

from kvscope_app.load_generator.generator import LoadGenerator
from kvscope_app.load_generator.load_settings import LoadSettings, Mix, Pace, make_request
from kvscope_app.load_generator.sample_prompts import long_prompts, sample_prompts, short_prompts
from kvscope_app.setting_names import LOAD
from kvscope_app.views.console.load_view import LoadView
from kvscope_telemetry.errors import BadInput, EngineDead
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Finished,
    LoadedAdapter,
    Refused,
    RequestTiming,
    Submit,
    Tokens,
    Usage,
)
from kvscope_telemetry.source import SourceState


@pytest.fixture
def generator(session):
    made = LoadGenerator(session, chance=random.Random(1))
    yield made
    made.stop()
    made.deleteLater()


@pytest.fixture
def clock(monkeypatch):
    """The generator's, in seconds, which stands still until a test moves it."""
    now_s = [1000.0]
    monkeypatch.setattr("kvscope_app.load_generator.generator.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def submitted(engine):
    return [command.request_id for command in engine.source.sent if isinstance(command, Submit)]


def finish(engine, request_id, reason="length"):
    timing = RequestTiming(total_s=1.0)
    engine.source.replies.append(
        Finished(request_id=request_id, finish_reason=reason, usage=Usage(completion_tokens=2), timing=timing)
    )


def test_holds_the_number_of_requests(engine, session, generator):
    generator.start(LoadSettings(concurrency=3))
    assert len(submitted(engine)) == 3
    generator.tick()
    assert len(submitted(engine)) == 3
    first = submitted(engine)[0]
    engine.source.replies.append(Accepted(request_id=first, numbers=(1,), num_prompt_tokens=4))
    engine.source.replies.append(Tokens(request_id=first, token_ids=(5, 6), text="a b"))
    finish(engine, first)
    session.poll()
    generator.tick()
    assert len(submitted(engine)) == 4
    assert generator.num_unfinished == 3
    assert (generator.counts.sent, generator.counts.finished, generator.counts.tokens) == (4, 1, 2)


def test_tokens_of_an_engine_that_tells_text_alone_are_counted_at_the_end(engine, session, generator):
    generator.start(LoadSettings(concurrency=1))
    (first,) = submitted(engine)
    engine.source.replies.append(Tokens(request_id=first, token_ids=(), text="a b"))
    finish(engine, first)
    session.poll()
    assert generator.counts.tokens == 2


def test_replies_of_others_are_not_counted(engine, session, generator):
    generator.start(LoadSettings(concurrency=1))
    finish(engine, "chat-1")
    session.poll()
    assert generator.counts.finished == 0


def test_stop_aborts_each_and_ends_when_the_engine_says_so(engine, session, generator, qtbot):
    generator.start(LoadSettings(concurrency=2))
    generator.stop()
    aborted = [command.request_id for command in engine.source.sent if isinstance(command, Abort)]
    assert sorted(aborted) == sorted(submitted(engine))
    assert generator.is_stopping
    for request_id in aborted:
        finish(engine, request_id, "abort")
    session.poll()
    assert not generator.is_stopping
    assert generator.counts.aborted == 2
    generator.tick()
    assert driver.is_at_rest(generator)


def test_a_refusal_is_told_and_not_repeated_at_once(engine, session, generator, clock):
    generator.start(LoadSettings(concurrency=1))
    engine.source.replies.append(Refused(request_id=submitted(engine)[0], reason="too long: 90 of 64 tokens"))
    session.poll()
    generator.tick()
    assert len(submitted(engine)) == 1
    assert generator.counts.refused == 1
    assert generator.message == "refused: too long: 90 of 64 tokens"
    clock[0] += 1.0
    generator.tick()
    assert len(submitted(engine)) == 2


def test_an_engine_that_ends_loses_its_requests(engine, session, generator):
    generator.start(LoadSettings(concurrency=2))
    engine.say(SourceState.ENDED, "killed")
    session.poll()
    assert not generator.is_running
    assert generator.counts.lost == 2
    assert generator.num_unfinished == 0
    assert generator.message == "The engine stopped."


def test_another_engine_ends_the_news_of_the_end(engine, session, poll, generator):
    generator.start(LoadSettings(concurrency=2))
    session.status_changed.emit()
    engine.say(SourceState.ENDED, "killed")
    session.poll()
    engine.begin(epoch=8)
    poll(session)
    session.status_changed.emit()
    assert generator.message == ""


def test_another_engine_does_not_know_them_either(engine, session, poll, generator):
    generator.start(LoadSettings(concurrency=2))
    session.status_changed.emit()
    engine.begin(epoch=8)
    poll(session)
    session.status_changed.emit()
    assert generator.counts.lost == 2


def test_a_connection_that_takes_nothing_more_stops_it(engine, session, generator, monkeypatch):
    def refuse(command):
        raise EngineDead("the connection is closed")

    monkeypatch.setattr(engine.source, "send", refuse)
    generator.start(LoadSettings(concurrency=2))
    assert not generator.is_running
    assert generator.message == "the engine accepts no requests now"


def test_a_rate_is_kept_on_average_and_bounded(engine, session, generator, clock):
    generator.start(LoadSettings(pace=Pace.RATE, rate=10.0))
    num_ended = 0
    for _ in range(400):
        clock[0] += 0.05
        generator.tick()
        for request_id in submitted(engine)[num_ended:]:
            finish(engine, request_id)
        num_ended = len(submitted(engine))
        session.poll()
    assert 160 < generator.counts.sent < 240


def test_prompts_of_each_mix():
    prompts, chance = sample_prompts(), random.Random(3)
    shared = [make_request(LoadSettings(mix=Mix.SHARED), prompts, "a", chance).prompt for _ in range(8)]
    assert len({prompt[:1000] for prompt in shared}) == 1
    assert len(set(shared)) > 1
    request = make_request(LoadSettings(mix=Mix.SHORT, min_output_tokens=5, max_output_tokens=6), prompts, "a", chance)
    assert len(request.prompt) < 150
    assert request.sampling.max_tokens in (5, 6)
    assert request.sampling.ignore_eos


def test_sample_prompts_are_varied_and_whole():
    prompts = sample_prompts()
    assert len(prompts) == 40
    assert len(set(prompts)) == 40
    assert len(short_prompts(prompts)) >= 12
    assert len(long_prompts(prompts)) >= 10


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"rate": 1e9}, {"min_output_tokens": 9, "max_output_tokens": 8}])
def test_absurd_settings_are_refused(wrong):
    with pytest.raises(BadInput, match="is not accepted"):
        LoadSettings(**wrong)


def test_load_settings_are_there_in_the_next_window(engine, session, qtbot, tmp_path):
    kept = QSettings(str(tmp_path / "kept.ini"), QSettings.Format.IniFormat)
    first, second, third = LoadView(session), LoadView(session), LoadView(session)
    for view in (first, second, third):
        qtbot.addWidget(view)
    chosen = LoadSettings(Pace.RATE, 7, 2.5, Mix.LONG, min_output_tokens=8, max_output_tokens=1024)
    first.pace.setCurrentText(chosen.pace)
    first.mix.setCurrentText(chosen.mix)
    first.concurrency.setValue(7)
    first.rate.setValue(2.5)
    first.longest.setValue(1024)
    first.shortest.setValue(8)
    first.remember(kept)
    second.recall(kept)
    assert second.settings() == chosen
    kept.setValue(LOAD, '{"pace": "no such thing"}')
    third.recall(kept)
    assert third.settings() == LoadSettings()


def test_the_panel_starts_and_stops_with_one_button(engine, session, qtbot):
    session.poll()
    view = LoadView(session)
    qtbot.addWidget(view)
    view.show()
    session.status_changed.emit()
    assert view.button.isEnabled()
    view.concurrency.setValue(2)
    session.select_request(1)
    view.button.click()
    assert session.selected_request is None, "the map shows all requests alike"
    assert len(submitted(engine)) == 2
    assert view.button.text() == "Stop"
    view.concurrency.setValue(3)
    assert len(submitted(engine)) == 3
    view.button.click()
    assert view.button.text() == "Stopping…"
    assert view.button.isEnabled(), "disabling it would move the focus to another dock"
    view.button.click()
    assert view.generator.is_stopping
    for request_id in submitted(engine):
        finish(engine, request_id, "abort")
    session.poll()
    view.refresh()
    assert view.button.text() == "Start load"
    assert view.counts["Aborted"].text() == "3"
    view.shortest.setValue(300)
    view.button.click()
    assert "maximum output tokens: 256 is not accepted" in view.message.text()
    assert not view.generator.is_running


def test_a_page_behind_another_tab_has_the_width_of_the_fields_that_are_seen(session, qtbot):
    tabs = QTabWidget()
    qtbot.addWidget(tabs)
    load = LoadView(session)
    tabs.addTab(QLabel("chat"), "Chat")
    tabs.addTab(load, "Load")
    tabs.resize(300, 500)
    with qtbot.waitExposed(tabs):
        tabs.show()
    tabs.setCurrentWidget(load)
    QApplication.processEvents()
    edge = load.mapToGlobal(load.rect().topRight()).x()
    for field in (load.concurrency, load.mix, load.longest, load.button):
        assert field.mapToGlobal(field.rect().topRight()).x() < edge


def test_adapters_are_asked_for_where_there_are_any(engine, session, qtbot):
    view = LoadView(session)
    qtbot.addWidget(view)
    view.show()
    assert not view.adapter.isVisible()
    loaded = tuple(LoadedAdapter(name=name, path="") for name in ("sql", "python"))
    engine.source.status = replace(engine.source.status, adapters=loaded)
    session.poll()
    assert view.adapter.isVisible()
    assert [view.adapter.itemText(index) for index in range(view.adapter.count())] == [
        "None",
        "Mixed: none and each adapter",
        "sql",
        "python",
    ]
    asked = {}
    for text in ("None", "sql", "Mixed: none and each adapter"):
        view.adapter.setCurrentText(text)
        settings = view.settings()
        chance, prompts = random.Random(2), sample_prompts()
        asked[text] = {make_request(settings, prompts, f"r{n}", chance).adapter for n in range(40)}
    assert asked == {"None": {""}, "sql": {"sql"}, "Mixed: none and each adapter": {"", "sql", "python"}}
    view.adapter.setCurrentText("sql")
    engine.source.status = replace(engine.source.status, adapters=loaded[1:])
    session.poll()
    assert view.settings().adapters == ("",), "it is gone"
