"""Steps one by one, pins of clients that come and go, and the answers to interventions, over real sockets."""

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
        service = EngineService(f"ipc://{folder}", fake.builder(fake.Options(**options)))
        running.append((service, threading.Thread(target=service.run)))
        running[-1][1].start()
        return service

    yield make
    for service, thread in running:
        service.stop()
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.fixture
def held(start: Callable[..., EngineService], client: Client) -> Client:
    """A client that holds an engine with an endless request."""
    start()
    assert client.wait_ready().intervenes
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    client.ask(Control(action="pause", tag=1), Done)
    return client


def last_token(client: Client) -> int:
    """The fake engine's tokens are the numbers of its steps."""
    return [reply for reply in client.replies if isinstance(reply, Tokens)][-1].token_ids[0]


def beat_with(client: Client, *blocks: int) -> Heartbeat:
    packed = struct.pack(f"<{len(blocks)}I", *blocks)
    return client.telemetry(Heartbeat, lambda beat: beat.pinned == packed)


def test_steps_run_one_by_one_while_the_engine_is_paused(held: Client) -> None:
    first = held.ask(Control(action="step", tag=2), Done)
    step = last_token(held)
    assert (first.tag, first.what) == (2, f"step {step} ran")
    more = held.ask(Control(action="step", tag=3, num_steps=10), Done)
    assert (last_token(held), more.what) == (step + 10, f"steps {step + 1} to {step + 10} ran")
    assert held.telemetry(Heartbeat, lambda beat: beat.step == step + 10).paused_by
    assert held.telemetry(Heartbeat).step == step + 10, "it is held again"


def test_nothing_is_in_flight_while_the_engine_is_paused(start: Callable[..., EngineService], client: Client) -> None:
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


def test_steps_end_with_the_last_request(held: Client) -> None:
    held.send(Abort(request_id="a"))
    held.receive(Finished)
    held.ask(Submit(request_id="b", prompt="hello", sampling=SamplingParams(max_tokens=3)), Accepted)
    held.send(Control(action="step", tag=5, num_steps=50))
    assert held.receive(Done, lambda done: done.tag == 5).what.endswith("no unfinished request left")
    assert "no unfinished request" in held.ask(Control(action="step", tag=6), Failed).reason


def test_an_engine_that_goes_on_has_no_single_steps(held: Client, new_client: Callable[[], Client]) -> None:
    other = new_client()
    other.ask(Control(action="resume", tag=1), Done)
    assert "not paused" in held.ask(Control(action="step", tag=2), Failed).reason


def test_steps_that_are_left_are_told_when_somebody_lets_the_engine_go_on(
    start: Callable[..., EngineService], client: Client, new_client: Callable[[], Client]
) -> None:
    start(step_s=0.02)
    client.wait_ready()
    client.ask(Submit(request_id="a", prompt="hello", sampling=SamplingParams(max_tokens=ENDLESS)), Accepted)
    client.ask(Control(action="pause", tag=1), Done)
    client.send(Control(action="step", tag=2, num_steps=1000))
    for _ in range(3):  # they have begun: a resume that overtakes them would have them refused
        client.receive(Tokens)
    new_client().ask(Control(action="resume", tag=1), Done)
    assert client.receive(Done, lambda done: done.tag == 2).what.endswith("engine resumed")


def test_a_hold_ends_with_its_holder_and_so_do_its_steps(
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


def test_every_intervention_is_answered_by_what_was_done_or_why_not(held: Client) -> None:
    assert held.ask(Preempt(number=2, how="swap", tag=5), Done).what == "request 2 was preempted by swap"
    refused = held.ask(Preempt(number=3, tag=6), Failed)
    assert (refused.tag, refused.reason) == (6, "request 3 is odd")
    assert held.ask(Evict(blocks=(1, 2), tag=7), Done).what == "2 evicted"
    assert held.ask(SetLimits(max_num_seqs=3, tag=8), Done).what == "limits (3, 64)"
    beat = held.telemetry(Heartbeat, lambda beat: beat.max_num_seqs == 3)
    assert beat.max_num_batched_tokens == 64


def test_pins_are_told_to_all_and_end_when_their_client_says_so(held: Client) -> None:
    assert held.ask(Pin(blocks=(4, 2), tag=2), Done).what == "2 blocks are pinned until you disconnect"
    assert beat_with(held, 2, 4).pinned_by
    assert held.ask(Unpin(blocks=(4, 6), tag=3), Done).what == "1 block is unpinned"
    beat_with(held, 2)
    assert held.ask(Unpin(tag=4), Done).what == "1 block is unpinned"
    assert beat_with(held).pinned_by == ""


def test_pins_end_with_their_client_but_not_those_of_others(held: Client, new_client: Callable[[], Client]) -> None:
    other = new_client()
    other.ask(Pin(blocks=(1, 2), tag=1), Done)
    held.ask(Pin(blocks=(2, 3), tag=2), Done)
    assert "none of these was pinned by you" in held.ask(Unpin(blocks=(1,), tag=3), Done).what
    beat_with(held, 1, 2, 3)
    other.dealer.close(linger=0)
    beat_with(held, 2, 3)
    assert held.ask(Unpin(tag=4, anyones=True), Done).what == "2 blocks are unpinned"


def test_an_emptied_cache_has_no_pins(held: Client) -> None:
    held.ask(Pin(blocks=(1,), tag=1), Done)
    held.ask(Control(action="reset_prefix_cache", tag=2), Done)
    assert "none of these" in held.ask(Unpin(tag=3), Done).what
