"""Connection states shown to the user, by our own clock."""

from __future__ import annotations

from kvscope_telemetry.messages.commands import Status
from kvscope_telemetry.messages.telemetry import Heartbeat, Progress
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.liveness import Liveness

S = 1_000_000_000
START = 1_000 * S


def _live(*, is_local: bool = True) -> Liveness:
    liveness = Liveness(is_local=is_local)
    liveness.connection(True)
    liveness.record_snapshot()
    liveness.record_message(START)
    return liveness


def _beat(liveness: Liveness, now_s: float, step: int, *, unfinished: int = 1, step_age_s: float = 0.0) -> None:
    """Deliver a heartbeat at START + now_s. The engine has its own clock."""
    now_ns = START + int(now_s * S)
    engine_ns = 50 * S + int(now_s * S)
    started_ns = engine_ns - int(step_age_s * S) if step_age_s else 0
    liveness.record_message(now_ns)
    liveness.heartbeat(
        Heartbeat(
            epoch=1,
            time_ns=engine_ns,
            seq=step,
            step=step,
            num_unfinished=unfinished,
            step_started_ns=started_ns,
        ),
        now_ns,
    )


def _state(liveness: Liveness, now_s: float) -> SourceState:
    return liveness.state(START + int(now_s * S))[0]


def test_source_is_connecting_until_a_snapshot_arrives() -> None:
    liveness = Liveness(is_local=True)
    assert _state(liveness, 0) is SourceState.CONNECTING
    liveness.rejection = "the engine speaks protocol 2"
    assert liveness.state(START) == (SourceState.CONNECTING, "the engine speaks protocol 2")
    liveness.record_snapshot()
    liveness.record_message(START)
    assert _state(liveness, 0.1) is SourceState.LIVE


def test_engine_silent_for_one_and_a_half_seconds_is_shown_as_stale() -> None:
    liveness = _live()
    assert _state(liveness, 1.4) is SourceState.LIVE
    assert _state(liveness, 1.6) is SourceState.STALE
    _beat(liveness, 10, step=1)
    assert _state(liveness, 10.1) is SourceState.LIVE


def test_unfinished_step_is_stuck_after_five_seconds() -> None:
    liveness = _live()
    for half_seconds in range(30):
        now_s = half_seconds / 2
        _beat(liveness, now_s, step=7, step_age_s=now_s + 0.1)
        expected = SourceState.STUCK if now_s >= 5 else SourceState.LIVE
        assert _state(liveness, now_s) is expected, now_s
    _beat(liveness, 15, step=8, step_age_s=0.1)
    assert _state(liveness, 15) is SourceState.LIVE


def test_engine_without_a_step_for_five_seconds_is_stuck_unless_paused() -> None:
    liveness = _live()
    for now_s in range(7):
        _beat(liveness, now_s, step=7)
    assert _state(liveness, 6) is SourceState.STUCK
    assert liveness.may_be_paused(START + 6 * S)
    liveness.record_status(Status(phase="ready", telemetry_endpoint="e", paused=True))
    assert _state(liveness, 6) is SourceState.PAUSED


def test_heartbeat_reports_who_paused_the_engine() -> None:
    """An already open window learns of a pause by another client, and of its end."""
    liveness = _live()
    for names, wanted in (("alice", (SourceState.PAUSED, "by alice")), ("", (SourceState.LIVE, ""))):
        liveness.heartbeat(Heartbeat(epoch=1, time_ns=1, seq=1, step=1, num_unfinished=1, paused_by=names), START)
        assert liveness.state(START) == wanted


def test_long_prefill_steps_are_not_stuck() -> None:
    liveness = _live()
    for i in range(40):
        _beat(liveness, i / 2, step=i // 4, step_age_s=(i % 4) / 2 + 0.1)
        assert _state(liveness, i / 2) is SourceState.LIVE


def test_idle_engine_is_not_stuck() -> None:
    liveness = _live()
    for now_s in range(20):
        _beat(liveness, now_s, step=7, unfinished=0)
        assert _state(liveness, now_s) is SourceState.LIVE
    _beat(liveness, 20, step=7, unfinished=1, step_age_s=0.1)
    assert _state(liveness, 20) is SourceState.LIVE


def test_lost_local_connection_means_the_process_ended() -> None:
    liveness = _live()
    assert liveness.connection(False)
    assert not liveness.connection(False)
    assert _state(liveness, 0.5) is SourceState.LIVE
    state, reason = liveness.state(START + S)
    assert state is SourceState.ENDED
    assert "unexpectedly" in reason
    remote = _live(is_local=False)
    remote.connection(False)
    assert _state(remote, 1.0) is SourceState.LIVE
    assert _state(remote, 2.0) is SourceState.STALE


def test_goodbye_ends_the_source_and_a_snapshot_revives_it() -> None:
    liveness = _live()
    liveness.goodbye("forward raised")
    assert liveness.state(START) == (SourceState.ENDED, "forward raised")
    liveness.record_snapshot()
    assert _state(liveness, 0.1) is SourceState.LIVE
    liveness.goodbye("")
    assert liveness.state(START)[1] == "the engine stopped"


def test_loading_progress_is_shown() -> None:
    liveness = Liveness(is_local=True)
    progress = Progress(stage="load", detail="weights", done=1, total=4)
    liveness.record_status(Status(phase="loading", telemetry_endpoint="e", progress=progress))
    assert liveness.state(START) == (SourceState.LOADING, "loading weights 25%")
    liveness.record_status(Status(phase="failed", telemetry_endpoint="e", reason="no such model"))
    assert liveness.state(START) == (SourceState.ENDED, "no such model")
    liveness.progress(progress)
    assert _state(liveness, 0) is SourceState.LOADING
    liveness.record_snapshot()
    liveness.record_message(START)
    liveness.progress(progress)
    assert _state(liveness, 0.1) is SourceState.LIVE, "a running engine may load something else"
