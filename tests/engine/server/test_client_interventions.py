"""Single steps, pins of clients that come and go, and answers to interventions, over real sockets."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from kvscope_engine.server.service import EngineService
from kvscope_telemetry.messages.commands import (
    Abort,
    Accepted,
    Control,
    Done,
    Evict,
    Failed,
    Finished,
    Pin,
    Preempt,
    SetLimits,
    Submit,
    Tokens,
    Unpin,
)
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Heartbeat

if TYPE_CHECKING:
    from conftest import Client

ENDLESS = 1_000_000


@pytest.fixture
def start(folder: Path, fake: ModuleType) -> Iterator[Callable[..., EngineService]]:
    running: list[tuple[EngineService, threading.Thread]] = []

    def make(**options: Any) -> EngineService:
        service = EngineService(f"ipc://{folder}", fake.builder(fake.FakeEngineOptions(**options)))
        running.append((service, threading.Thread(target=service.run)))
        running[-1][1].start()
        return service

    yield make
    for service, thread in running:
        service.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.fixture
def paused_engine_client(start: Callable[..., EngineService], client: Client) -> Client:
    """A client that has paused an engine with an endless request."""
    start()
    assert client.wait_ready().intervenes
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    client.ask(Control(action="pause", tag=1), Done)
    return client


def last_token(client: Client) -> int:
    """Return the last token, which is the number of its step."""
    return [reply for reply in client.replies if isinstance(reply, Tokens)][-1].token_ids[0]


def beat_with(client: Client, *blocks: int) -> Heartbeat:
    packed = struct.pack(f"<{len(blocks)}I", *blocks)
    return client.telemetry(Heartbeat, lambda beat: beat.pinned == packed)


def test_single_steps_run_while_the_engine_is_paused(paused_engine_client: Client) -> None:
    first = paused_engine_client.ask(Control(action="step", tag=2), Done)
    step = last_token(paused_engine_client)
    assert (first.tag, first.what) == (2, f"step {step} ran")
    more = paused_engine_client.ask(Control(action="step", tag=3, num_steps=10), Done)
    assert (last_token(paused_engine_client), more.what) == (step + 10, f"steps {step + 1} to {step + 10} ran")
    assert paused_engine_client.telemetry(Heartbeat, lambda beat: beat.step == step + 10).paused_by
    assert paused_engine_client.telemetry(Heartbeat).step == step + 10, "the engine must be paused again"


def test_no_step_is_in_flight_while_the_engine_is_paused(start: Callable[..., EngineService], client: Client) -> None:
    service = start()
    client.wait_ready()
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    engine: Any = service._engine
    client.receive(Tokens)
    assert engine.is_ahead
    client.ask(Control(action="pause", tag=1), Done)
    assert not engine.is_ahead
    client.ask(Control(action="step", tag=2), Done)
    assert not engine.is_ahead, "one step, and no part of another"
    step = last_token(client)
    client.ask(Control(action="resume", tag=3), Done)
    client.receive(Tokens, lambda tokens: tokens.token_ids[0] > step)
    assert engine.is_ahead


def test_single_steps_end_with_the_last_request(paused_engine_client: Client) -> None:
    paused_engine_client.send(Abort(request_id="a"))
    paused_engine_client.receive(Finished)
    paused_engine_client.ask(Submit(request_id="b", prompt="hello", sampling=SamplingParams(max_tokens=3)), Accepted)
    paused_engine_client.send(Control(action="step", tag=5, num_steps=50))
    assert paused_engine_client.receive(Done, lambda done: done.tag == 5).what.endswith("no unfinished request left")
    assert "no unfinished request" in paused_engine_client.ask(Control(action="step", tag=6), Failed).reason


def test_single_step_of_a_running_engine_is_refused(
    paused_engine_client: Client, new_client: Callable[[], Client]
) -> None:
    other = new_client()
    other.ask(Control(action="resume", tag=1), Done)
    assert "not paused" in paused_engine_client.ask(Control(action="step", tag=2), Failed).reason


def test_remaining_single_steps_end_when_another_client_resumes(
    start: Callable[..., EngineService], client: Client, new_client: Callable[[], Client]
) -> None:
    start(step_s=0.02)
    client.wait_ready()
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    client.ask(Control(action="pause", tag=1), Done)
    client.send(Control(action="step", tag=2, num_steps=1000))
    for _ in range(3):  # they have started: an earlier resume would have them refused
        client.receive(Tokens)
    new_client().ask(Control(action="resume", tag=1), Done)
    assert client.receive(Done, lambda done: done.tag == 2).what.endswith("engine resumed")


def test_pause_and_single_steps_end_with_their_client(
    start: Callable[..., EngineService], client: Client, new_client: Callable[[], Client]
) -> None:
    start(step_s=0.02)
    client.wait_ready()
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    other = new_client()
    other.ask(Control(action="pause", tag=1), Done)
    other.send(Control(action="step", tag=2, num_steps=1000))
    client.telemetry(Heartbeat, lambda beat: bool(beat.paused_by))
    other.dealer.close(linger=0)
    client.telemetry(Heartbeat, lambda beat: not beat.paused_by)
    client.receive(Tokens)


def test_every_intervention_is_answered_with_its_result_or_a_reason(paused_engine_client: Client) -> None:
    assert (
        paused_engine_client.ask(Preempt(number=2, how="swap", tag=5), Done).what == "request 2 was preempted by swap"
    )
    refused = paused_engine_client.ask(Preempt(number=3, tag=6), Failed)
    assert (refused.tag, refused.reason) == (6, "request 3 is odd")
    assert paused_engine_client.ask(Evict(blocks=(1, 2), tag=7), Done).what == "2 evicted"
    assert paused_engine_client.ask(SetLimits(max_num_seqs=3, tag=8), Done).what == "limits (3, 64)"
    beat = paused_engine_client.telemetry(Heartbeat, lambda beat: beat.max_num_seqs == 3)
    assert beat.max_num_batched_tokens == 64


def test_pins_are_reported_to_all_clients_and_end_with_unpin(paused_engine_client: Client) -> None:
    assert paused_engine_client.ask(Pin(blocks=(4, 2), tag=2), Done).what == "2 blocks are pinned until you disconnect"
    assert beat_with(paused_engine_client, 2, 4).pinned_by
    assert paused_engine_client.ask(Unpin(blocks=(4, 6), tag=3), Done).what == "1 block is unpinned"
    beat_with(paused_engine_client, 2)
    assert paused_engine_client.ask(Unpin(tag=4), Done).what == "1 block is unpinned"
    assert beat_with(paused_engine_client).pinned_by == ""


def test_blocks_pinned_by_a_client_that_leaves_are_unpinned_and_other_pins_stay(
    paused_engine_client: Client, new_client: Callable[[], Client]
) -> None:
    other = new_client()
    other.ask(Pin(blocks=(1, 2), tag=1), Done)
    paused_engine_client.ask(Pin(blocks=(2, 3), tag=2), Done)
    assert "none of these was pinned by you" in paused_engine_client.ask(Unpin(blocks=(1,), tag=3), Done).what
    beat_with(paused_engine_client, 1, 2, 3)
    other.dealer.close(linger=0)
    beat_with(paused_engine_client, 2, 3)
    assert paused_engine_client.ask(Unpin(tag=4, anyones=True), Done).what == "2 blocks are unpinned"


def test_reset_prefix_cache_removes_pins(paused_engine_client: Client) -> None:
    paused_engine_client.ask(Pin(blocks=(1,), tag=1), Done)
    paused_engine_client.ask(Control(action="reset_prefix_cache", tag=2), Done)
    assert "none of these" in paused_engine_client.ask(Unpin(tag=3), Done).what
