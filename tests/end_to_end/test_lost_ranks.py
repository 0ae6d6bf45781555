"""A service that loses a rank: clients and apps get the rank and the reason, and no process is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from kvscope_telemetry import SourceState

WORDS = "executor.follower"
LIMIT_S = 10.0
WAIT_S = 240.0


@pytest.fixture
def served_ranks(
    start_engine: Callable[..., Any], connect_client: Callable[..., Any], tiny_model: Callable[..., str]
) -> tuple[Any, Any, psutil.Process]:
    """An engine with two ranks, a client, and the process of the other rank."""
    model = tiny_model(max_position_embeddings=65536)
    options = ("--model", model, "--dtype", "float32", "--tensor-parallel-size", "2")
    engine = start_engine(*options, "--num-gpu-blocks-override", "8192")
    talk = connect_client(engine)
    (follower,) = (
        child
        for child in psutil.Process(engine.process.pid).children(recursive=True)
        if WORDS in " ".join(child.cmdline())
    )
    return engine, talk, follower


def wait_for_end(engine: Any, children: list[psutil.Process]) -> tuple[int, str]:
    """Return the exit code and the last line; check that no child process is left."""
    code: int = engine.process.wait(WAIT_S)
    _, left = psutil.wait_procs(children, WAIT_S)
    assert not left
    return code, engine.process.stderr.read()


@pytest.mark.parametrize("is_idle", [False, True])
def test_service_ends_with_the_reason_if_a_rank_is_killed(
    is_idle: bool, served_ranks: tuple[Any, Any, psutil.Process]
) -> None:
    engine, talk, follower = served_ranks
    reason = "rank 1 of 2 ended by SIGKILL: the engine cannot go on without it"
    children = psutil.Process(engine.process.pid).children(recursive=True)
    if not is_idle:
        talk.submit_ids("long", (5, 6, 7), max_tokens=60000)
        talk.wait_for(lambda: len(talk.token_ids("long")) > 2)
    follower.kill()
    lost_s = time.monotonic()
    if not is_idle:
        talk.wait_for(lambda: "long" in talk.finished())
        assert talk.finished()["long"].finish_reason == "error"
        assert talk.finished()["long"].error.startswith(reason)
    talk.wait_for(lambda: talk.source.status.state is SourceState.ENDED)
    assert reason in talk.source.status.reason
    assert time.monotonic() - lost_s < LIMIT_S
    code, words = wait_for_end(engine, children)
    assert code == 1
    assert reason in words


def test_shutdown_is_served_while_a_rank_is_waited_for(served_ranks: tuple[Any, Any, psutil.Process]) -> None:
    engine, talk, follower = served_ranks
    children = psutil.Process(engine.process.pid).children(recursive=True)
    talk.submit_ids("long", (5, 6, 7), max_tokens=60000)
    talk.wait_for(lambda: len(talk.token_ids("long")) > 2)
    follower.suspend()
    asked_s = time.monotonic()
    engine.process.send_signal(signal.SIGTERM)
    wait_for_end(engine, children)
    assert time.monotonic() - asked_s < LIMIT_S + 2


@pytest.mark.parametrize("is_follower", [False, True])
def test_process_suspended_for_longer_than_the_rank_timeout_continues(
    is_follower: bool, served_ranks: tuple[Any, Any, psutil.Process]
) -> None:
    engine, talk, follower = served_ranks
    suspended = follower if is_follower else engine.process
    talk.submit_ids("before", (5, 6, 7), max_tokens=60000)
    talk.wait_for(lambda: len(talk.token_ids("before")) > 2)
    suspended.send_signal(signal.SIGSTOP)
    time.sleep(7)
    suspended.send_signal(signal.SIGCONT)
    talk.submit_ids("after", (5, 6, 7), max_tokens=3)
    talk.wait_for(lambda: "after" in talk.finished())
    assert talk.finished()["after"].finish_reason == "length"
