"""A real engine with a tiny model over real sockets: interventions show in its ledger and in every mirror."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvscope_app.debugger.pin_limits import why_pins_refused
from kvscope_engine import Engine, EngineConfig
from kvscope_engine.server.service import EngineService
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import (
    Accepted,
    Command,
    Control,
    Done,
    Evict,
    Failed,
    Finished,
    GetAllocatorMap,
    Pin,
    Preempt,
    Refused,
    Reply,
    SetLimits,
    Submit,
    Unpin,
)
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.sources.live_source import LiveSource

WAIT_S = 60.0
SIZE = 4
NUM_BLOCKS = 64


class Client:
    """Follows an engine with a mirror and sends interventions to it."""

    def __init__(self, endpoint: str) -> None:
        self.source = LiveSource(endpoint)
        self.mirror = Mirror()
        self.causes: list[str] = []
        self.latencies_s: list[float] = []
        self.replies: list[Reply] = []
        self._tag = 0
        self.wait(lambda: self.mirror.hello is not None)

    def poll(self) -> None:
        self.replies += self.source.poll_replies()
        update = self.source.poll_update()
        if update is not None:
            self.mirror.apply(update)
            self.causes += [event.cause for event in update.events]
            self.latencies_s += (np.concatenate((update.first_token_ns, update.inter_token_ns)) / 1e9).tolist()

    def wait(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.poll()
            return condition()

        assert self.source.wait(holds, WAIT_S), "it did not happen"

    def send(self, kind: type[Command], **fields: Any) -> Done | Failed:
        self._tag += 1
        self.source.send(kind(tag=self._tag, **fields))
        found: list[Done | Failed] = []

        def answered() -> bool:
            found[:] = [r for r in self.replies if isinstance(r, Done | Failed) and r.tag == self._tag]
            return bool(found)

        self.wait(answered)
        return found[0]

    def result_of(self, kind: type[Command], **fields: Any) -> str:
        reply = self.send(kind, **fields)
        assert isinstance(reply, Done), reply
        return reply.what

    def refusal_of(self, kind: type[Command], **fields: Any) -> str:
        reply = self.send(kind, **fields)
        assert isinstance(reply, Failed), reply
        return reply.reason

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> Accepted | Refused:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.source.send(Submit(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
        self.wait(lambda: any(isinstance(r, Accepted | Refused) and r.request_id == name for r in self.replies))
        return next(r for r in self.replies if isinstance(r, Accepted | Refused) and r.request_id == name)

    def wait_finished(self, name: str) -> None:
        self.wait(lambda: any(isinstance(r, Finished) and r.request_id == name for r in self.replies))

    def state(self, number: int) -> RequestState | None:
        row = self.mirror.requests.row_of(number)
        return None if row is None else RequestState(self.mirror.requests.state[row])

    def cached_blocks(self) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.mirror.ledger.state[block] == BlockState.CACHED]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def serve(folder: Path, tiny_model: Callable[..., str]) -> Iterator[Callable[..., tuple[Client, Engine]]]:
    """Function that starts an engine and returns a client and the engine: `serve(**options)`."""
    running: list[tuple[EngineService, threading.Thread]] = []
    people: list[Client] = []

    def make(**options: Any) -> tuple[Client, Engine]:
        small = {"block_size": SIZE, "num_gpu_blocks_override": NUM_BLOCKS, "max_num_batched_tokens": 64}
        config = {"model": tiny_model(), "dtype": "float32", "device": "cpu", "max_num_seqs": 8} | small | options
        engines: list[Engine] = []

        def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
            engines.append(Engine(EngineConfig(**config), progress=progress, publish=publish))
            return engines[0]

        service = EngineService(f"ipc://{folder}", build)
        running.append((service, threading.Thread(target=service.run)))
        running[-1][1].start()
        people.append(Client(f"ipc://{folder}"))
        return people[-1], engines[0]

    yield make
    for person in people:
        person.source.close()
    for service, thread in running:
        service.stop()
        thread.join(timeout=60)


def test_clients_of_a_paused_engine_see_the_effect_of_every_intervention(
    serve: Callable[..., tuple[Client, Engine]],
) -> None:
    person, engine = serve(host_kv_memory_bytes=1 << 20)
    person.result_of(Control, action="pause")
    first = person.submit("a", list(range(1, 20)), 40)
    second = person.submit("b", list(range(30, 49)), 40)
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert person.result_of(Control, action="step", num_steps=3) == "steps 1 to 3 ran"
    person.wait(lambda: person.mirror.step == 3 and person.mirror.counters.num_running == 2)
    answer = person.result_of(Preempt, number=first.numbers[0], how="swap")
    assert "moved to a lower tier" in answer
    person.wait(lambda: person.state(first.numbers[0]) is RequestState.PREEMPTED)
    assert "waiting" in person.refusal_of(Preempt, number=first.numbers[0])
    assert "to be computed again" in person.result_of(Preempt, number=second.numbers[0], how="recompute")
    assert "has ended" in person.refusal_of(Preempt, number=99)
    person.wait(lambda: person.mirror.counters.preemptions == 2)
    assert any("requested by" in cause for cause in person.causes)
    person.wait(lambda: person.mirror.seq == engine.last_seq)
    whole = Mirror()
    whole.reset(engine.snapshot())
    assert person.mirror.ledger.equals(whole.ledger)
    person.result_of(Control, action="resume")
    person.wait_finished("a")
    person.wait_finished("b")


def test_preempted_request_gives_the_same_tokens_as_an_undisturbed_one(
    serve: Callable[..., tuple[Client, Engine]],
) -> None:
    person, _ = serve(enable_prefix_caching=False, host_kv_memory_bytes=1 << 20)
    person.submit("calm", list(range(1, 20)), 30)
    person.wait_finished("calm")
    person.result_of(Control, action="pause")
    accepted = person.submit("harried", list(range(1, 20)), 30)
    assert isinstance(accepted, Accepted)
    for how in ("swap", "recompute", "", "swap"):
        person.result_of(Control, action="step", num_steps=4)
        person.result_of(Preempt, number=accepted.numbers[0], how=how)
    person.result_of(Control, action="resume")
    person.wait_finished("harried")

    def token_ids_of(name: str) -> list[int]:
        return [i for r in person.replies if getattr(r, "request_id", "") == name for i in getattr(r, "token_ids", ())]

    assert token_ids_of("harried") == token_ids_of("calm")


def test_pinned_blocks_stay_and_a_request_that_does_not_fit_beside_them_is_refused(
    serve: Callable[..., tuple[Client, Engine]],
) -> None:
    person, engine = serve()
    person.submit("a", list(range(1, 41)), 1)
    person.wait_finished("a")
    person.wait(lambda: len(person.cached_blocks()) == 10)
    last = person.cached_blocks()[-1]
    answer = person.result_of(Pin, blocks=(last,), with_prefix=True)
    pinned = engine.interventions.pinned
    assert answer == f"{len(pinned)} blocks are pinned until you disconnect"
    assert len(pinned) == 10
    person.wait(lambda: person.mirror.pinned == frozenset(pinned))
    assert "pinned: unpin first" in person.refusal_of(Evict, blocks=(last,))
    refused = person.submit("too long", [90] * 100, 4 * NUM_BLOCKS - 100 - 36)
    assert isinstance(refused, Refused)
    assert "are pinned, and 1 of those must be unpinned first" in refused.reason
    for name in range(6):  # they take all other blocks, several times
        person.submit(f"filler {name}", [100 + name] * 100, 40)
        person.wait_finished(f"filler {name}")
    assert set(pinned) <= set(person.cached_blocks())
    assert isinstance(person.submit("same text", list(range(1, 45)), 4 * NUM_BLOCKS - 50), Accepted)
    person.wait_finished("same text")
    assert person.result_of(Unpin) == "10 blocks are unpinned"
    person.wait(lambda: not person.mirror.pinned)
    assert person.result_of(Evict, blocks=(last,)) == "1 block was evicted"
    person.wait(lambda: last not in person.cached_blocks())
    assert "nothing to evict" in person.refusal_of(Evict, blocks=(last,))


def test_pin_that_leaves_too_few_blocks_for_a_waiting_request_is_refused(
    serve: Callable[..., tuple[Client, Engine]],
) -> None:
    person, _ = serve()
    person.submit("a", list(range(1, 41)), 1)
    person.wait_finished("a")
    person.wait(lambda: len(person.cached_blocks()) == 10)
    person.result_of(Control, action="pause")
    person.submit("large", [90] * 100, 4 * NUM_BLOCKS - 100)
    assert "request 2 may need 64" in person.refusal_of(Pin, blocks=tuple(person.cached_blocks()))
    assert "not in the pool" in person.refusal_of(Pin, blocks=(NUM_BLOCKS,))
    free = next(block for block in range(NUM_BLOCKS) if block not in person.cached_blocks())
    assert "not in the prefix cache" in person.refusal_of(Pin, blocks=(free,))


def test_app_predicts_the_refusal_of_a_pin_beside_a_running_request(
    serve: Callable[..., tuple[Client, Engine]],
) -> None:
    person, _ = serve()
    person.submit("a", list(range(1, 41)), 1)
    person.wait_finished("a")
    person.wait(lambda: len(person.cached_blocks()) == 10)
    cached = person.cached_blocks()
    person.result_of(Control, action="pause")
    person.submit("large", [90] * 100, 4 * (NUM_BLOCKS - 3) - 100)
    person.result_of(Control, action="step")
    person.wait(lambda: person.state(2) is RequestState.RUNNING)
    ledger = person.mirror.ledger
    last = next(block for block in cached if ledger.hash[block] not in ledger.parent)  # of its text
    for blocks, with_prefix in ((tuple(cached[:3]), False), (tuple(cached[:4]), False), ((last,), True)):
        known = why_pins_refused(person.mirror, blocks, with_prefix=with_prefix)
        assert bool(known) == (len(blocks) > 3 or with_prefix)
        if known:
            assert person.refusal_of(Pin, blocks=blocks, with_prefix=with_prefix).lower() == known.lower()
        else:
            person.result_of(Pin, blocks=blocks, with_prefix=with_prefix)
            person.result_of(Unpin)


def test_new_limits_apply_from_the_next_step_on(serve: Callable[..., tuple[Client, Engine]]) -> None:
    person, _ = serve()
    assert "1 to 8" in person.refusal_of(SetLimits, max_num_seqs=9)
    assert person.result_of(SetLimits, max_num_seqs=2) == "max_num_seqs is 2, max_num_batched_tokens 64"
    person.result_of(Control, action="pause")
    for name in range(5):
        person.submit(f"r{name}", [name + 1] * 20, 4)
    person.result_of(Control, action="step", num_steps=3)
    person.wait(lambda: person.mirror.step == 3)
    assert person.mirror.counters.num_running == 2
    assert "2 run and end first" in person.result_of(SetLimits, max_num_seqs=1, max_num_batched_tokens=16)
    person.wait(lambda: person.mirror.limits == (1, 16))
    person.result_of(Control, action="resume")
    for name in range(5):
        person.wait_finished(f"r{name}")
    assert any("changed the limits of the batch" in cause for cause in person.causes)


def test_segments_of_torch_are_unavailable_on_a_cpu(serve: Callable[..., tuple[Client, Engine]]) -> None:
    person, engine = serve()
    assert "only on a GPU" in person.refusal_of(GetAllocatorMap)
    assert engine.hello.capabilities.allocator_map


def test_pause_is_shown_at_once_and_excluded_from_latencies(serve: Callable[..., tuple[Client, Engine]]) -> None:
    person, engine = serve()
    person.result_of(Control, action="pause")
    person.wait(lambda: person.mirror.stops.open is not None)
    assert any("paused by" in cause for cause in person.causes)
    person.submit("a", list(range(1, 20)), 6)
    time.sleep(2.0)
    assert person.result_of(Control, action="step", num_steps=2) == "steps 1 to 2 ran"
    late = Client(person.source.name)  # a client that connects during the pause knows it as well
    assert late.mirror.stops.open is not None
    late.source.close()
    time.sleep(2.0)
    person.result_of(Control, action="resume")
    person.wait_finished("a")
    person.wait(lambda: person.mirror.stops.open is None and len(person.mirror.stops) == 3)
    person.wait(lambda: len(person.latencies_s) >= 6)  # the last frame may arrive after the reply
    assert sum("requested by" in cause for cause in person.causes) == 2
    (resumed,) = [cause for cause in person.causes if cause.startswith("it was paused")]
    assert "resumed by" in resumed
    assert sum(stop.end_ns - stop.begin_ns for stop in person.mirror.stops) > 3.9e9
    (waited,) = [cause for cause in person.causes if cause.startswith("waited")]
    assert "paused or suspended)" in waited
    (finished,) = [reply for reply in person.replies if isinstance(reply, Finished)]
    timing = finished.timing
    assert timing.queue_s is not None
    assert timing.ttft_s is not None
    assert timing.queue_s <= timing.ttft_s < 2.0 < 3.9 < timing.stopped_s < timing.total_s
    assert max(person.latencies_s) < 2.0
    assert len(person.latencies_s) == 6
    assert engine.snapshot().stops == ()  # no request from that time is left
