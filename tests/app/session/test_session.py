"""Tests of the session: applying updates, pausing, selection, commands and polling."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from kvscope_app.session import poll_timer
from kvscope_app.session.history import History
from kvscope_app.session.shown_memory import shown_memory
from kvscope_telemetry.messages.commands import Control, Done
from kvscope_telemetry.source import SourceState, Update


def test_poll_applies_updates_and_emits_updated(engine, session, qtbot):
    engine.write_blocks([3, 4], owner=2)
    with qtbot.waitSignal(session.timeline.updated) as signal:
        session.poll()
    assert signal.args[0].block_ids.tolist() == [3, 4]
    assert session.mirror.ledger.equals(engine.ledger)
    assert session.mirror.num_active == 2


def test_poll_without_updates_emits_nothing(session, qtbot):
    with qtbot.assertNotEmitted(session.timeline.updated, wait=20):
        session.poll()


def test_paused_mirror_is_frozen_while_the_live_mirror_is_updated(engine, session, poll):
    engine.write_blocks([1])
    poll(session)
    session.timeline.pause()
    engine.write_blocks([2, 3])
    poll(session)
    assert session.mirror.num_active == 1
    assert session.live_mirror.num_active == 3
    assert session.timeline.behind_seconds >= 0.0
    session.timeline.go_live()
    assert session.mirror.num_active == 3
    assert session.timeline.behind_seconds == 0.0


def test_memory_before_the_first_breakdown_uses_the_weights_of_a_later_one(engine, session, poll, monkeypatch):
    engine.memory(weights_bytes=300, kv_bytes=64, allocated_bytes=500)
    poll(session)
    assert shown_memory(session.timeline).allocated_bytes == 500
    monkeypatch.setattr(type(session.timeline), "history", History())  # history before the first breakdown
    assert (
        shown_memory(session.timeline).weights_bytes,
        shown_memory(session.timeline).kv_bytes,
        shown_memory(session.timeline).allocated_bytes,
    ) == (300, 64, -1)
    engine.restart(8)
    poll(session)
    assert shown_memory(session.timeline) is None, "weights of an earlier engine run"


def test_second_pause_keeps_the_first_frozen_mirror(engine, session, poll):
    session.timeline.pause()
    shown = session.mirror
    engine.write_blocks([5])
    poll(session)
    session.timeline.pause()
    assert session.mirror is shown


def test_engine_restart_clears_the_selection(engine, session, poll, qtbot):
    session.selection.select_request(4)
    engine.restart(epoch=8)
    with qtbot.waitSignal(session.selection.changed):
        poll(session)
    assert session.selection.request is None
    assert session.mirror.epoch == 8


def test_resync_keeps_the_selection(engine, session, poll):
    session.selection.select_request(4)
    engine.restart(epoch=7)
    poll(session)
    assert session.selection.request == 4


def test_selecting_the_same_request_again_emits_nothing(session, qtbot):
    session.selection.select_request(3)
    with qtbot.assertNotEmitted(session.selection.changed):
        session.selection.select_request(3)


def test_invalid_update_requests_a_snapshot(engine, session, qtbot):
    engine.frame([1])
    update = engine.source.updates.pop()
    wrong = Update(block_ids=np.array([10_000], np.uint32), block_columns=update.block_columns, series=update.series)
    engine.source.updates.append(wrong)
    with qtbot.assertNotEmitted(session.timeline.updated):
        session.poll()
    assert engine.source.num_resyncs == 1
    assert session.mirror.num_blocks == 64


def test_session_emits_the_replies_of_the_engine_when_polled(engine, session, qtbot):
    engine.source.replies.append(Done(tag=5))
    with qtbot.waitSignal(session.replies) as signal:
        session.poll()
    assert signal.args[0] == [Done(tag=5)]


def test_session_sends_commands_to_the_source(engine, session):
    assert session.send(Control(action="pause"))
    assert engine.source.sent == [Control(action="pause")]


def test_session_of_a_source_without_commands_sends_none(make_session, make_engine):
    class Recording:
        def __init__(self, source):
            self.source = source

        def __getattr__(self, name):
            if name in ("send", "poll_replies", "resync"):
                raise AttributeError(name)
            return getattr(self.source, name)

    engine = make_engine()
    engine.source = Recording(engine.source)
    session = make_session(engine)
    assert not session.accepts_commands
    assert not session.send(Control(action="pause"))
    assert session.mirror.num_blocks == 64


def test_status_changed_is_emitted_when_the_state_changes(engine, session, qtbot):
    engine.set_status(SourceState.STALE, "no telemetry for 2.0 s")
    with qtbot.waitSignal(session.status_changed):
        session.poll()
    assert session.status.state is SourceState.STALE


def test_started_session_polls_by_itself(engine, session, qtbot):
    engine.write_blocks([9])
    session.start()
    qtbot.waitUntil(lambda: session.mirror.num_active == 1, timeout=120_000)


def test_closing_the_session_closes_the_source(engine, session):
    session.close()
    session.close()
    assert engine.source.is_closed


def test_polling_slows_down_while_only_heartbeats_arrive(engine, session, poll, monkeypatch):
    now_ns = [time.monotonic_ns()]
    monkeypatch.setattr(poll_timer, "time", SimpleNamespace(monotonic_ns=lambda: now_ns[0]))

    def interval_ms(happens):
        now_ns[0] += 400_000_000
        happens()
        poll(session)
        return session.poll_timer.interval()

    assert interval_ms(engine.frame) == poll_timer.FRAME_MS
    assert [interval_ms(engine.heartbeat) for _ in range(4)] == [poll_timer.FRAME_MS] * 2 + [poll_timer.IDLE_MS] * 2
    assert interval_ms(engine.frame) == poll_timer.FRAME_MS
