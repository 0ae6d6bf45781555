"""Ranks that die or stand still: the engine says which one and why, in time, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from kvscope_engine import Engine
from kvscope_engine.model.executor import leader
from kvscope_engine.model.executor.leader import MAX_BEHIND_S, MAX_SILENCE_S, RankLiveness
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

Make = Callable[..., Engine]
LIMIT_S = 10.0


def two_ranks(make_engine: Make, **options: Any) -> tuple[Engine, psutil.Process]:
    engine = make_engine(tensor_parallel_size=2, **options)
    assert engine.components.leader is not None
    (child,) = engine.components.leader.processes.children.values()
    return engine, psutil.Process(child.pid)


def begin(engine: Engine, num_tokens: int = 8) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.submit(Submit(request_id="r", prompt_token_ids=tuple(range(3, 3 + num_tokens)), sampling=params))


def steps_until_it_fails(engine: Engine) -> tuple[str, float]:
    """The reason, and how long it took."""
    started_s = time.monotonic()
    with pytest.raises(KvscopeError) as told:
        run_out(engine)
    return str(told.value), time.monotonic() - started_s


def run_out(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


class NeverDone:
    """An event of a GPU that does not come to it."""

    def query(self) -> bool:
        return False


def test_rank_that_stays_suspended_is_named_and_killed_after_the_limit(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays open, and no sum comes back from it."""
    monkeypatch.setattr(leader, "MAX_SUSPENDED_S", 1.0)
    engine, child = two_ranks(make_engine)
    begin(engine)
    engine.step()
    child.suspend()
    reason, took_s = steps_until_it_fails(engine)
    assert reason == "rank 1 of 2 has been suspended for 1 s: the engine cannot go on without it"
    assert engine.failure == reason
    engine.close()
    assert took_s < LIMIT_S
    assert not psutil.pid_exists(child.pid)


def test_silence_of_a_suspended_rank_is_not_counted() -> None:
    signs = RankLiveness()
    for _ in range(8):
        assert not signs.advance(1.0, 1, is_suspended=True), "suspended for longer than a running rank may be silent"
    assert not signs.advance(MAX_SILENCE_S - 0.5, 1), "it has time to report once it runs again"
    signs.record_message()
    for _ in range(round(leader.MAX_SUSPENDED_S) - 1):
        assert not signs.advance(1.0, 1, is_suspended=True)
    assert signs.advance(1.0, 1, is_suspended=True) == "has been suspended for 300 s"


def test_a_rank_without_memory_is_named(make_engine: Make) -> None:
    """It says why, or dies where not even that could be had."""
    engine, child = two_ranks(make_engine, max_num_batched_tokens=2048)
    begin(engine, num_tokens=240)
    resource.prlimit(child.pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    reason, took_s = steps_until_it_fails(engine)
    assert reason.startswith(("rank 1 of 2 failed: ", "rank 1 of 2 ended ")), reason
    assert took_s < LIMIT_S
    engine.close()
    assert not psutil.pid_exists(child.pid)


def test_a_gpu_that_waits_for_a_lost_rank_is_not_waited_for_and_signals_are_heard(make_engine: Make) -> None:
    engine, child = two_ranks(make_engine)
    assert engine.components.leader is not None
    heard: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(time.monotonic()))
    lost = threading.Event()
    engine.components.leader.call_when_lost(lost.set)
    signals = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    kills = threading.Timer(0.6, child.kill)
    try:
        signals.start()
        kills.start()
        with pytest.raises(KvscopeError, match="rank 1 of 2 ended by SIGKILL"):
            engine.components.leader.wait_for(NeverDone())  # type: ignore[arg-type]
        ended_s = time.monotonic()
    finally:
        signals.join()
        kills.join()
        signal.signal(signal.SIGUSR1, before)
    assert lost.is_set()
    assert heard
    assert heard[0] < ended_s
    begin(engine)
    with pytest.raises(KvscopeError, match="rank 1 of 2 ended by SIGKILL"):
        engine.step()


def test_who_lives_is_waited_for_unless_only_it_is_behind() -> None:
    """A suspended or slow rank 0, and a step that takes all ranks long, are nobody's fault."""
    signs = RankLiveness()
    for second in range(200):
        signs.record_message()
        signs.num_points = second
        assert not signs.advance(1.0, second + 1), "it is behind, and moves"
    signs.num_points = 500
    for _ in range(200):
        signs.record_message()
        assert not signs.advance(1.0, 500), "all are at the same point"
    why = ""
    for _ in range(round(MAX_BEHIND_S) + 1):
        signs.record_message()
        why = why or signs.advance(1.0, 501)
    assert why == "has been stuck in a step for 60 s"
    assert [bool(RankLiveness().advance(seconds, 0)) for seconds in (MAX_SILENCE_S - 0.5, MAX_SILENCE_S)] == [
        False,
        True,
    ]


def test_a_rank_that_comes_back_is_forgiven(make_engine: Make) -> None:
    engine, child = two_ranks(make_engine)
    begin(engine)
    engine.step()
    child.suspend()
    resumes = threading.Timer(1.0, child.resume)
    resumes.start()
    started_s = time.monotonic()
    engine.step()
    assert time.monotonic() - started_s > 0.5, "it is waited for"
    run_out(engine)
    resumes.join()
    assert engine.failure == ""
