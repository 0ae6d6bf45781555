"""Tests of the load generator and its view: pace, limits, stopping, refusals and engines that end."""

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
    made = LoadGenerator(session, rng=random.Random(1))
    yield made
    made.stop()
    made.deleteLater()


@pytest.fixture
def clock_s(monkeypatch):
    """Replace the generator's monotonic clock by one that the test moves, in seconds."""
    now_s = [1000.0]
    monkeypatch.setattr("kvscope_app.load_generator.generator.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def submitted_ids(engine):
    return [command.request_id for command in engine.source.sent if isinstance(command, Submit)]


def finish(engine, request_id, reason="length"):
    timing = RequestTiming(total_s=1.0)
    engine.source.replies.append(
        Finished(request_id=request_id, finish_reason=reason, usage=Usage(completion_tokens=2), timing=timing)
    )


def test_generator_keeps_the_set_number_of_requests_running(engine, session, generator):
    generator.start(LoadSettings(concurrency=3))
    assert len(submitted_ids(engine)) == 3
    generator.tick()
    assert len(submitted_ids(engine)) == 3
    first = submitted_ids(engine)[0]
    engine.source.replies.append(Accepted(request_id=first, numbers=(1,), num_prompt_tokens=4))
    engine.source.replies.append(Tokens(request_id=first, token_ids=(5, 6), text="a b"))
    finish(engine, first)
    session.poll()
    generator.tick()
    assert len(submitted_ids(engine)) == 4
    assert generator.num_unfinished == 3
    assert (generator.counts.sent, generator.counts.finished, generator.counts.tokens) == (4, 1, 2)


def test_tokens_are_counted_from_usage_if_the_engine_streams_only_text(engine, session, generator):
    generator.start(LoadSettings(concurrency=1))
    (first,) = submitted_ids(engine)
    engine.source.replies.append(Tokens(request_id=first, token_ids=(), text="a b"))
    finish(engine, first)
    session.poll()
    assert generator.counts.tokens == 2


def test_replies_to_other_requests_are_not_counted(engine, session, generator):
    generator.start(LoadSettings(concurrency=1))
    finish(engine, "chat-1")
    session.poll()
    assert generator.counts.finished == 0


def test_stop_aborts_all_requests_and_waits_for_the_replies(engine, session, generator, qtbot):
    generator.start(LoadSettings(concurrency=2))
    generator.stop()
    aborted = [command.request_id for command in engine.source.sent if isinstance(command, Abort)]
    assert sorted(aborted) == sorted(submitted_ids(engine))
    assert generator.is_stopping
    for request_id in aborted:
        finish(engine, request_id, "abort")
    session.poll()
    assert not generator.is_stopping
    assert generator.counts.aborted == 2
    generator.tick()
    assert driver.has_no_running_timer(generator)


def test_refused_request_is_reported_and_retried_after_a_delay(engine, session, generator, clock_s):
    generator.start(LoadSettings(concurrency=1))
    engine.source.replies.append(Refused(request_id=submitted_ids(engine)[0], reason="too long: 90 of 64 tokens"))
    session.poll()
    generator.tick()
    assert len(submitted_ids(engine)) == 1
    assert generator.counts.refused == 1
    assert generator.message == "refused: too long: 90 of 64 tokens"
    clock_s[0] += 1.0
    generator.tick()
    assert len(submitted_ids(engine)) == 2


def test_requests_are_lost_when_the_engine_ends(engine, session, generator):
    generator.start(LoadSettings(concurrency=2))
    engine.set_status(SourceState.ENDED, "killed")
    session.poll()
    assert not generator.is_running
    assert generator.counts.lost == 2
    assert generator.num_unfinished == 0
    assert generator.message == "The engine stopped."


def test_message_about_the_ended_engine_is_cleared_by_a_new_engine(engine, session, poll, generator):
    generator.start(LoadSettings(concurrency=2))
    session.status_changed.emit()
    engine.set_status(SourceState.ENDED, "killed")
    session.poll()
    engine.restart(epoch=8)
    poll(session)
    session.status_changed.emit()
    assert generator.message == ""


def test_requests_are_lost_when_the_engine_restarts(engine, session, poll, generator):
    generator.start(LoadSettings(concurrency=2))
    session.status_changed.emit()
    engine.restart(epoch=8)
    poll(session)
    session.status_changed.emit()
    assert generator.counts.lost == 2


def test_closed_connection_stops_the_generator(engine, session, generator, monkeypatch):
    def refuse(command):
        raise EngineDead("the connection is closed")

    monkeypatch.setattr(engine.source, "send", refuse)
    generator.start(LoadSettings(concurrency=2))
    assert not generator.is_running
    assert generator.message == "the engine accepts no requests now"


def test_requests_are_sent_at_the_set_rate_on_average(engine, session, generator, clock_s):
    generator.start(LoadSettings(pace=Pace.RATE, rate=10.0))
    num_ended = 0
    for _ in range(400):
        clock_s[0] += 0.05
        generator.tick()
        for request_id in submitted_ids(engine)[num_ended:]:
            finish(engine, request_id)
        num_ended = len(submitted_ids(engine))
        session.poll()
    assert 160 < generator.counts.sent < 240


def test_load_generator_prompts_share_a_prefix_or_are_short_as_the_mix_setting_says():
    prompts, rng = sample_prompts(), random.Random(3)
    shared = [make_request(LoadSettings(mix=Mix.SHARED), prompts, "a", rng).prompt for _ in range(8)]
    assert len({prompt[:1000] for prompt in shared}) == 1
    assert len(set(shared)) > 1
    request = make_request(LoadSettings(mix=Mix.SHORT, min_output_tokens=5, max_output_tokens=6), prompts, "a", rng)
    assert len(request.prompt) < 150
    assert request.sampling.max_tokens in (5, 6)
    assert request.sampling.ignore_eos


def test_sample_prompts_are_distinct_and_of_several_lengths():
    prompts = sample_prompts()
    assert len(prompts) == 40
    assert len(set(prompts)) == 40
    assert len(short_prompts(prompts)) >= 12
    assert len(long_prompts(prompts)) >= 10


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"rate": 1e9}, {"min_output_tokens": 9, "max_output_tokens": 8}])
def test_invalid_load_settings_are_refused(wrong):
    with pytest.raises(BadInput, match="is not accepted"):
        LoadSettings(**wrong)


def test_load_settings_are_saved_and_restored(engine, session, qtbot, tmp_path):
    kept = QSettings(str(tmp_path / "kept.ini"), QSettings.Format.IniFormat)
    first, second, third = LoadView(session), LoadView(session), LoadView(session)
    for view in (first, second, third):
        qtbot.addWidget(view)
    chosen = LoadSettings(Pace.RATE, 7, 2.5, Mix.LONG, min_output_tokens=8, max_output_tokens=1024)
    first.pace.setCurrentText(chosen.pace)
    first.mix.setCurrentText(chosen.mix)
    first.concurrency.setValue(7)
    first.rate.setValue(2.5)
    first.max_output.setValue(1024)
    first.min_output.setValue(8)
    first.save_settings(kept)
    second.restore_settings(kept)
    assert second.settings() == chosen
    kept.setValue(LOAD, '{"pace": "no such thing"}')
    third.restore_settings(kept)
    assert third.settings() == LoadSettings()


def test_load_view_starts_and_stops_with_one_button(engine, session, qtbot):
    session.poll()
    view = LoadView(session)
    qtbot.addWidget(view)
    view.show()
    session.status_changed.emit()
    assert view.button.isEnabled()
    view.concurrency.setValue(2)
    session.selection.select_request(1)
    view.button.click()
    assert session.selection.request is None, "starting the load clears the selection"
    assert len(submitted_ids(engine)) == 2
    assert view.button.text() == "Stop"
    view.concurrency.setValue(3)
    assert len(submitted_ids(engine)) == 3
    view.button.click()
    assert view.button.text() == "Stopping…"
    assert view.button.isEnabled(), "disabling it would move the focus to another dock"
    view.button.click()
    assert view.generator.is_stopping
    for request_id in submitted_ids(engine):
        finish(engine, request_id, "abort")
    session.poll()
    view.refresh()
    assert view.button.text() == "Start load"
    assert view.counts["Aborted"].text() == "3"
    view.min_output.setValue(300)
    view.button.click()
    assert "maximum output tokens: 256 is not accepted" in view.message.text()
    assert not view.generator.is_running


def test_fields_of_a_hidden_tab_fit_when_the_tab_is_shown(session, qtbot):
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
    for field in (load.concurrency, load.mix, load.max_output, load.button):
        assert field.mapToGlobal(field.rect().topRight()).x() < edge


def test_adapter_choice_is_shown_and_used_if_the_engine_has_adapters(engine, session, qtbot):
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
        rng, prompts = random.Random(2), sample_prompts()
        asked[text] = {make_request(settings, prompts, f"r{n}", rng).adapter for n in range(40)}
    assert asked == {"None": {""}, "sql": {"sql"}, "Mixed: none and each adapter": {"", "sql", "python"}}
    view.adapter.setCurrentText("sql")
    engine.source.status = replace(engine.source.status, adapters=loaded[1:])
    session.poll()
    assert view.settings().adapters == ("",), "the adapter was unloaded"
