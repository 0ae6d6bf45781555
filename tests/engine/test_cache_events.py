"""An engine publishes KV cache events: a subscriber has the same prefix cache, and engines with one seed agree."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvscope_engine import Engine
from kvscope_telemetry.errors import BadInput, EndpointInUse
from kvscope_telemetry.kv_events.batches import BlockStored
from kvscope_telemetry.kv_events.decoding import read_extra_keys
from kvscope_telemetry.kv_events.event_stream import KvEventStream
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig
from kvscope_telemetry.kv_events.stream_items import Received, StreamItem, StreamState
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams

MakeEngine = Callable[..., Engine]
WAIT_S = 120.0
ANY = "tcp://127.0.0.1:0"
ON = KvEventsConfig(enable_kv_cache_events=True, endpoint=ANY, replay_endpoint=ANY, bind=True)


@pytest.fixture
def follow_events() -> Iterator[Callable[[Engine], KvEventStream]]:
    """Function that subscribes to the KV cache events of an engine: `follow_events(engine)`."""
    streams: list[KvEventStream] = []

    def start(engine: Engine) -> KvEventStream:
        streams.append(KvEventStream(*published_endpoints(engine)))
        return streams[-1]

    yield start
    for stream in streams:
        stream.close()


def published_endpoints(engine: Engine) -> list[str]:
    """Return the endpoints in the notice of the engine: of events and of replays."""
    (note,) = engine.notes
    return re.findall(r"tcp://[\d.:]+", note)


def run(engine: Engine, *prompts: list[int], max_tokens: int = 8) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    submits = [
        Submit(request_id=f"r{i}", prompt_token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(prompts)
    ]
    for completion in engine.generate(submits):
        assert not completion.error


def published_items(engine: Engine, stream: KvEventStream) -> list[StreamItem]:
    """Return everything that was published so far."""
    assert engine.cache_events is not None
    last = engine.cache_events._publisher.next_seq - 1
    taken: list[StreamItem] = []
    deadline = time.monotonic() + WAIT_S
    while stream.status.seq < last or stream.status.state is not StreamState.LIVE:
        assert time.monotonic() < deadline, stream.status
        time.sleep(0.005)
        taken += stream.poll_items()
    return taken + stream.poll_items()


def cached_hashes(all_items: list[StreamItem]) -> set[int]:
    held: set[int] = set()
    for item in all_items:
        assert isinstance(item, Received)
        for event in item.batch.events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
            else:
                held.difference_update(getattr(event, "block_hashes", held.copy()))
    return held


def hashes_in_ledger(engine: Engine) -> set[int]:
    return set(engine.components.pool.ledger.hash.tolist()) - {0}


def test_early_and_late_subscribers_have_the_prefix_cache_of_the_engine(
    make_engine: MakeEngine, follow_events: Callable[[Engine], KvEventStream]
) -> None:
    engine = make_engine(kv_events_config=ON, num_gpu_blocks_override=24)
    early = follow_events(engine)
    for start in range(8):
        run(engine, list(range(3 + start, 43 + start)))
    engine.reset_prefix_cache()
    run(engine, list(range(5, 60)), list(range(5, 30)))
    held = hashes_in_ledger(engine)
    assert held
    assert cached_hashes(published_items(engine, early)) == held
    assert cached_hashes(published_items(engine, follow_events(engine))) == held


def test_prompts_with_different_salts_share_no_blocks(
    make_engine: MakeEngine, follow_events: Callable[[Engine], KvEventStream]
) -> None:
    engine = make_engine(kv_events_config=ON)
    stream = follow_events(engine)
    ids = tuple(range(3, 43))
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    shared = []
    for salt in ("", "mine", "yours", "mine", ""):
        submit = Submit(request_id="r", prompt_token_ids=ids, sampling=sampling, cache_salt=salt)
        (completion,) = engine.generate([submit])
        shared.append(completion.usage.cached_tokens > 0)
    assert shared == [False, False, False, True, True]
    received = [item for item in published_items(engine, stream) if isinstance(item, Received)]
    stored = [event for item in received for event in item.batch.events if isinstance(event, BlockStored)]
    keys = [read_extra_keys(event.extra_keys)[0] for event in stored if event.extra_keys is not None]
    assert keys == [("mine",), ("yours",)]
    assert any(event.extra_keys is None and event.parent_block_hash is None for event in stored), (
        "no event of a prompt without a salt"
    )


def test_engines_with_one_seed_give_a_text_the_same_hash(make_engine: MakeEngine) -> None:
    hashes = []
    for seed in (1, 1, 2):
        engine = make_engine(kv_events_config=ON, seed=seed)
        run(engine, list(range(3, 43)), max_tokens=1)
        hashes.append(hashes_in_ledger(engine))
    assert hashes[0] == hashes[1]
    assert not hashes[0] & hashes[2]


@pytest.mark.parametrize("config", [None, KvEventsConfig(enable_kv_cache_events=True, publisher="null")])
def test_engine_without_kv_events_logs_none_and_its_block_hashes_differ_per_engine(
    make_engine: MakeEngine, config: KvEventsConfig | None
) -> None:
    engines = [make_engine(kv_events_config=config) for _ in range(2)]
    for engine in engines:
        run(engine, list(range(3, 43)), max_tokens=1)
        assert engine.components.pool.cache_log is None
        assert not any("KV events" in note for note in engine.notes)
    assert not hashes_in_ledger(engines[0]) & hashes_in_ledger(engines[1])


def test_notice_names_the_endpoint_of_the_events(make_engine: MakeEngine) -> None:
    (note,) = make_engine(kv_events_config=ON).notes
    assert note.startswith("KV events, with the tokens of prompts, are published on tcp://127.0.0.1:")


def test_endpoint_in_use_is_reported_before_the_model_is_loaded(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_events_config=ON)
    taken = KvEventsConfig(enable_kv_cache_events=True, endpoint=published_endpoints(engine)[0], bind=True)
    with pytest.raises(EndpointInUse, match="in use"):
        make_engine(kv_events_config=taken, model="dummy:/nowhere.json")


def test_failed_model_load_leaves_no_publisher_thread(make_engine: MakeEngine) -> None:
    before = set(threading.enumerate())
    with pytest.raises(BadInput):
        make_engine(kv_events_config=ON, model="dummy:/nowhere.json")
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "kvscope-kv-events"]
