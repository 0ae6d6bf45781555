"""KV events and readings translated into our messages without sockets: their order, and that a mirror can
follow them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.collectors import rank_translator as module
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.external_engines import find_engine
from kvscope_telemetry.collectors.rank_translator import SEVERAL_ENGINES, RankTranslator
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.scraped_page import ScrapedPage
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.collectors.sglang import SGLANG
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.decoding import decode_batch
from kvscope_telemetry.kv_events.stream_items import Gap, Received, Reset
from kvscope_telemetry.ledger import BlockState, Tier
from kvscope_telemetry.messages.telemetry import (
    Frame,
    Heartbeat,
    KVGroup,
    MemoryBreakdown,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.wire import accepted, decode_telemetry, encode
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.summaries.summarizer import Summarizer

MS = 1_000_000
READING = EngineReading(model="m", num_blocks=32, block_size=2, num_running=1, prompt_tokens=10, generation_tokens=5)
CAPTURED = Path(__file__).parents[1] / "kv_events" / "captured.txt"


class TranslatorDriver:
    """A translator whose messages are validated like those of a socket and followed by a mirror."""

    def __init__(self, engine: ExternalEngine = VLLM) -> None:
        self.translator = RankTranslator(engine)
        self.follower = Follower()
        self.messages: list[TelemetryMessage] = []
        self.now_ns = 1000 * MS
        self.seq = 0

    def read_metrics(self, reading: EngineReading = READING, *, are_events_live: bool = True) -> None:
        self.translator.apply_reading(reading, ServerFacts(version="1"), self.now_ns, are_events_live=are_events_live)
        self.publish_messages()

    def apply_events(self, *events: KvEvent) -> None:
        self.seq += 1
        self.translator.apply_events([Received(self.seq, EventBatch(1.0, events))], self.now_ns)
        self.publish_messages()

    def publish_messages(self) -> list[TelemetryMessage]:
        self.now_ns += 100 * MS
        messages = self.translator.messages(self.now_ns, is_alive=True)
        for message in messages:
            self.follower.feed(accepted(message, Unknowns()))
        self.follower.apply_pending()
        assert not self.follower.is_lost or not messages
        self.messages += messages
        return messages

    def cached(self, tier: Tier = Tier.HBM) -> set[int]:
        ledger = self.follower.mirror.ledger
        hashes = ledger.hash[(ledger.state == BlockState.CACHED) & (ledger.tier == tier)]
        assert len(hashes) == len(set(hashes.tolist()))
        return set(hashes.tolist())

    def causes(self) -> list[str]:
        return [event.cause for message in self.messages if isinstance(message, Frame) for event in message.events]

    def messages_of_type(self, kind: type[TelemetryMessage]) -> list[TelemetryMessage]:
        return [message for message in self.messages if isinstance(message, kind)]


def stored(*hashes: int, parent: int | None = None, medium: str = "GPU", size: int = 2) -> BlockStored:
    return BlockStored(hashes, parent, tuple(range(size * len(hashes))), size, medium=medium)


def test_watched_server_is_published_only_after_the_first_metrics_reading() -> None:
    driver = TranslatorDriver()
    assert driver.publish_messages() == []
    driver.read_metrics()
    first = driver.messages[0]
    assert isinstance(first, Snapshot)
    assert first.hello.cache.num_blocks == 32
    driver.publish_messages()
    count = len(driver.messages_of_type(Frame))
    for _ in range(3):
        driver.publish_messages()
    assert len(driver.messages_of_type(Frame)) == count
    assert driver.messages_of_type(Heartbeat)


def test_frame_from_kv_events_contains_only_blocks_that_really_changed() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1, 2), stored(3, parent=2))
    driver.apply_events(BlockRemoved((2,), "GPU"), BlockRemoved((77,), "GPU"), stored(3, parent=2))
    frame = driver.messages_of_type(Frame)[-1]
    assert isinstance(frame, Frame)
    assert len(frame.blocks.state) == 1
    assert np.frombuffer(frame.moves.evicted, "<u4").tolist() == [1]
    assert driver.cached() == {1, 3}
    assert driver.follower.mirror.counters.evicted_blocks == 1


def test_block_stored_and_removed_between_frames_leaves_a_free_row() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1), BlockRemoved((1,), "GPU"), stored(2), BlockRemoved((2,), "GPU"), stored(3))
    assert driver.cached() == {3}


def test_event_gap_is_reported_and_keeps_the_blocks() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1))
    driver.translator.apply_events([Gap(2, 4, "not kept any more")], driver.now_ns)
    driver.publish_messages()
    assert driver.cached() == {1}
    assert "3 batches, 2 to 4, of KV events are lost (not kept any more)" in driver.causes()[-1]


def in_group(event: BlockStored, index: int, kind: str, window: int | None = None) -> BlockStored:
    return msgspec.structs.replace(event, group_idx=index, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window)


def test_new_kv_group_in_events_is_announced_and_its_blocks_are_assigned_to_it() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    first = driver.follower.mirror
    assert first.hello is not None
    assert not first.hello.capabilities.groups
    full = in_group(stored(1, 2), 0, "full_attention")
    driver.apply_events(full, in_group(stored(1, 2, size=8), 1, "sliding_window", 64))
    mirror = driver.follower.mirror
    assert mirror.hello is not None
    assert mirror.hello.capabilities.groups
    assert mirror.hello.cache.groups == (
        KVGroup(kind="full", block_size=2),
        KVGroup(kind="window", block_size=8, window=64),
    )
    rows = np.flatnonzero(mirror.ledger.hash)
    assert mirror.ledger.group[rows].tolist() == [0, 0, 1, 1]
    assert mirror.ledger.filled[rows].tolist() == [2, 2, 8, 8]
    epoch = mirror.epoch
    driver.apply_events(full)
    driver.translator.request_snapshot()
    driver.publish_messages()
    assert driver.follower.mirror.epoch == epoch


def test_pool_tokens_of_several_groups_are_unknown_unless_reported() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    hello = driver.follower.mirror.hello
    assert hello is not None
    assert hello.cache.pool_tokens == 64
    driver.apply_events(in_group(stored(1), 0, "full_attention"), in_group(stored(1, size=8), 1, "mamba"))
    assert driver.follower.mirror.hello is not None
    assert driver.follower.mirror.hello.cache.pool_tokens == 0
    driver.read_metrics(replace(READING, pool_tokens=40))
    assert driver.follower.mirror.hello.cache.pool_tokens == 40


@pytest.mark.parametrize("is_store_first", [True, False])
def test_chunks_of_an_external_store_do_not_set_the_block_size(is_store_first: bool) -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    events = [stored(50, medium="cpu", size=256), stored(1, 2)]
    for event in events if is_store_first else events[::-1]:
        driver.apply_events(event)
    mirror = driver.follower.mirror
    assert mirror.hello is not None
    assert (mirror.hello.cache.block_size, sorted(mirror.hello.cache.block_sizes)) == (2, [2, 256])
    by_hash = {
        int(mirror.ledger.hash[row]): int(mirror.ledger.filled[row]) for row in np.flatnonzero(mirror.ledger.hash)
    }
    assert by_hash == {50: 256, 1: 2, 2: 2}


def test_unknown_medium_is_reported_once() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1, medium="FRIDGE"))
    driver.apply_events(stored(2, medium="fridge"))
    assert driver.cached(Tier.UNKNOWN) == {1, 2}
    assert [cause for cause in driver.causes() if "'fridge'" in cause] == driver.causes()[-1:]


def test_reset_of_kv_events_starts_a_new_engine_run() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1))
    epoch = driver.follower.mirror.epoch
    driver.translator.apply_events(
        [Reset("the engine restarted"), Received(0, EventBatch(1.0, (stored(9),)))], driver.now_ns
    )
    driver.publish_messages()
    assert driver.cached() == {9}
    assert driver.follower.mirror.epoch != epoch
    assert "the engine restarted" in driver.causes()[-1]


@pytest.mark.parametrize("are_events_live", [True, False])
def test_falling_counters_are_a_restart(are_events_live: bool) -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.apply_events(stored(1))
    epoch = driver.follower.mirror.epoch
    driver.read_metrics(replace(READING, prompt_tokens=1, generation_tokens=0), are_events_live=are_events_live)
    mirror = driver.follower.mirror
    assert mirror.epoch != epoch
    assert (mirror.counters.prompt_tokens, mirror.counters.generation_tokens) == (1, 0)
    assert driver.cached() == ({1} if are_events_live else set())
    assert "the engine restarted" in driver.causes()[-1]


def test_several_engines_behind_one_address_cause_few_restarts() -> None:
    driver = TranslatorDriver()
    for number in range(40):
        driver.read_metrics(replace(READING, generation_tokens=500 * (number % 2)))
    assert driver.translator.restarts.are_doubtful
    assert (
        len({snapshot.hello.epoch for snapshot in driver.messages_of_type(Snapshot) if isinstance(snapshot, Snapshot)})
        <= 5
    )


SMALL = replace(READING, prompt_tokens=1_000, generation_tokens=500, preemptions=3, finished=10)
LARGE = replace(SMALL, prompt_tokens=150_000_000, generation_tokens=9_000_000, preemptions=302_000, finished=90_000)
LARGER = replace(SMALL, prompt_tokens=1_000_000, generation_tokens=40_000, preemptions=900, finished=4_000)


@pytest.mark.parametrize(
    "readings",
    [
        [SMALL, LARGE] * 20,
        [LARGE, SMALL] * 20,
        [SMALL, SMALL, LARGER, LARGER, LARGER] * 8,
        [replace(SMALL, started_s=1.0), replace(LARGER, started_s=2.0)] * 20,
    ],
)
def test_alternating_counters_of_several_engines_are_reported_and_not_counted(
    readings: list[EngineReading], tmp_path: Path
) -> None:
    driver = TranslatorDriver()
    for number, reading in enumerate(readings):
        driver.now_ns = (1 + number) * 1000 * MS
        driver.read_metrics(reading)
    with RecordingWriter(tmp_path / "several.mcap") as writer:
        for message in driver.messages:
            writer.write(message, wait=True)
    overview = read_overview(Recording.open(writer.path))
    for name in ("prefill_tokens", "decode_tokens", "preemptions", "cached_tokens", "finished"):
        assert np.isnan(overview.column(name)[-5:]).all(), name
    assert np.nansum(overview.column("preemptions")) <= 900 - 3
    assert driver.translator.restarts.are_doubtful
    assert SEVERAL_ENGINES in driver.causes()
    assert driver.follower.mirror.hello is not None
    assert not driver.follower.mirror.hello.capabilities.counters
    batches = [frame.batch for frame in driver.messages_of_type(Frame) if isinstance(frame, Frame)]
    first_jump = 1_000_000 + 40_000  # without a start time, the jump cannot be told from real work
    assert sum(batch.num_prefill_tokens + batch.num_decode_tokens for batch in batches) <= first_jump


def test_restart_after_which_counters_grow_again_is_one_engine() -> None:
    driver = TranslatorDriver()
    for started_s, counts in ((1.0, (10, 500, 9_000)), (2.0, (0, 700, 12_000))):
        for count in counts:
            driver.read_metrics(replace(SMALL, prompt_tokens=count, generation_tokens=count, started_s=started_s))
    assert not driver.translator.restarts.are_doubtful
    assert driver.translator.restarts.count == 1
    batches = [frame.batch for frame in driver.messages_of_type(Frame) if isinstance(frame, Frame)]
    assert sum(batch.num_decode_tokens for batch in batches) == 8_990 + 12_000


def test_metric_counters_that_jumped_back_and_forth_are_used_again_after_a_minute() -> None:
    driver = TranslatorDriver()
    for reading in (SMALL, LARGE) * 3:
        driver.read_metrics(reading)
    driver.now_ns += 61_000 * MS
    driver.read_metrics(LARGE)
    driver.read_metrics(replace(LARGE, generation_tokens=9_000_008))
    hello = driver.follower.mirror.hello
    assert hello is not None
    assert hello.capabilities.counters
    batches = [frame.batch for frame in driver.messages_of_type(Frame) if isinstance(frame, Frame)]
    assert sum(batch.num_decode_tokens for batch in batches) == 8


@pytest.mark.parametrize("value", ["1e300", "1e19", "+Inf", "NaN", "-5"])
def test_absurd_metric_values_are_unknown(value: str) -> None:
    config = f'vllm:cache_config_info{{num_gpu_blocks="{value}",block_size="{value}"}} 1'
    names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_preemptions_total")
    buckets = [f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} {value}' for bound in ("1.0", "+Inf")]
    page = "\n".join([*(f"vllm:{name} {value}" for name in names), config, *buckets, ""])
    driver = TranslatorDriver()
    driver.read_metrics(VLLM.read_metrics(ScrapedPage.parse(page.replace(value, "1"), ("vllm:",))))
    driver.read_metrics(VLLM.read_metrics(ScrapedPage.parse(page, ("vllm:",))))
    for message in driver.messages:
        assert decode_telemetry(encode(message)) == message
    assert driver.follower.mirror.counters.prompt_tokens <= 1


def test_tokens_between_readings_are_counted_once() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    driver.read_metrics(replace(READING, prompt_tokens=30, cached_tokens=5, generation_tokens=8))
    driver.apply_events(stored(1))
    batches = [frame.batch for frame in driver.messages_of_type(Frame) if isinstance(frame, Frame)]
    assert sum(batch.num_prefill_tokens for batch in batches) == 15
    assert sum(batch.num_decode_tokens for batch in batches) == 3


def test_blocks_are_shown_from_kv_events_before_metrics_arrive() -> None:
    driver = TranslatorDriver()
    driver.apply_events(stored(1, 2, size=4))
    mirror = driver.follower.mirror
    assert mirror.hello is not None
    assert (mirror.num_blocks, mirror.hello.cache.block_size) == (4096, 4)
    driver.read_metrics()
    assert (driver.follower.mirror.num_blocks, driver.cached()) == (32, {1, 2})
    assert driver.follower.mirror.hello is not None
    assert driver.follower.mirror.hello.cache.block_size == 4


def test_changed_pool_size_starts_an_epoch_and_keeps_the_blocks() -> None:
    driver = TranslatorDriver()
    driver.read_metrics(replace(READING, num_blocks=4, host_tokens=8))
    driver.apply_events(stored(1, 2, 3), stored(1, medium="CPU"))
    epoch = driver.follower.mirror.epoch
    driver.apply_events(stored(4, 5, 6))
    assert driver.cached() == {1, 2, 3, 4, 5, 6}
    assert driver.cached(Tier.HOST) == {1}
    assert driver.follower.mirror.epoch != epoch


def test_no_frame_is_lost_while_the_pool_grows() -> None:
    driver = TranslatorDriver()
    driver.read_metrics(replace(READING, num_blocks=4))
    summarizer, follower = Summarizer(Follower()), 0
    for number in range(1, 40):
        driver.apply_events(stored(3 * number, 3 * number + 1), stored(number, medium="CPU"))
        driver.translator.request_snapshot()
        driver.translator.apply_reading(
            READING, ServerFacts(version=str(number // 9)), driver.now_ns, are_events_live=True
        )
        driver.publish_messages()
    for message in driver.messages:
        follower += sum(summary.num_lost_frames for summary in summarizer.add_message(message, driver.now_ns))
    lost = follower + sum(summary.num_lost_frames for summary in summarizer.close())
    assert lost == 0


def test_many_changes_are_split_into_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_ROWS", 4)
    driver = TranslatorDriver()
    driver.read_metrics()
    count = len(driver.messages_of_type(Frame))
    driver.apply_events(stored(*range(1, 11)))
    assert len(driver.messages_of_type(Frame)) == count + 3
    assert driver.cached() == set(range(1, 11))


def test_memory_breakdown_is_published_if_the_engine_reports_it() -> None:
    driver = TranslatorDriver(SGLANG)
    driver.read_metrics(replace(READING, weights_bytes=1 << 30, kv_bytes=1 << 29))
    (memory,) = driver.messages_of_type(MemoryBreakdown)
    assert isinstance(memory, MemoryBreakdown)
    assert (memory.weights_bytes, memory.kv_bytes, memory.graphs_bytes) == (1 << 30, 1 << 29, -1)


def test_unreadable_events_are_reported() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    batch = EventBatch(1.0, (stored(1),), num_unreadable_events=2, unreadable="expected int")
    driver.translator.apply_events([Received(1, batch)], driver.now_ns)
    driver.publish_messages()
    assert "2 KV events could not be read (expected int)" in driver.causes()[-1]
    assert driver.cached() == {1}


@pytest.mark.parametrize("line", [line for line in CAPTURED.read_text().splitlines() if not line.startswith("#")])
def test_captured_events_of_each_publisher_can_be_followed(line: str) -> None:
    name, _, data = line.partition(" ")
    batch = decode_batch(bytes.fromhex(data))
    driver = TranslatorDriver(find_engine(name.partition("-")[0]) or VLLM)
    driver.read_metrics()
    driver.apply_events(*batch.events)
    there: dict[Tier, set[int]] = {tier: set() for tier in (Tier.HBM, Tier.HOST, Tier.DISK)}
    for event in batch.events:
        if isinstance(event, BlockStored):
            there[module_tier(event.medium)] |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            there[module_tier(event.medium)] -= set(event.block_hashes)
        else:
            there = {tier: set() for tier in there}
    assert {tier: driver.cached(tier) for tier in there} == there


def module_tier(medium: str | None) -> Tier:
    return {"CPU": Tier.HOST, "CPU_PINNED": Tier.HOST, "STORAGE": Tier.DISK}.get(medium or "", Tier.HBM)


def random_event_batches(seed: int) -> Iterable[list[KvEvent]]:
    chance = random.Random(seed)
    for _ in range(150):
        batch: list[KvEvent] = []
        for _ in range(chance.randrange(1, 12)):
            number = chance.randrange(1, 200)
            medium = chance.choice(("GPU", "GPU", "CPU"))
            kind = chance.randrange(40)
            if kind == 0:
                batch.append(AllBlocksCleared())
            elif kind < 25:
                batch.append(stored(number, number + 1, parent=number - 1 or None, medium=medium))
            else:
                batch.append(BlockRemoved((number,), medium))
        yield batch


def test_recorded_session_replays_identically(tmp_path: Path) -> None:
    driver = TranslatorDriver()
    path = tmp_path / "external.mcap"
    with RecordingWriter(path) as writer:
        reading = replace(READING, num_blocks=1024, host_tokens=2048)
        driver.read_metrics(reading)
        for number, batch in enumerate(random_event_batches(3)):
            driver.apply_events(*batch)
            if number % 10 == 0:
                driver.read_metrics(replace(reading, generation_tokens=5 + number, num_waiting=number))
            if number == 70:
                driver.translator.apply_events([Reset("asked again")], driver.now_ns)
        for message in driver.messages:
            assert writer.write(message, wait=True)
    live = driver.follower.mirror
    recording = Recording.open(path)
    played = recording.state_at(recording.info.duration_s)
    assert played.ledger.differences(live.ledger) == []
    assert (played.counters, played.hello, played.seq) == (live.counters, live.hello, live.seq)
    assert len(recording.info.epochs) == 2
    assert recording.info.hello.capabilities.engine == "vllm"
    assert len(list(recording.frames())) == len(driver.messages_of_type(Frame))


def test_abort_capability_is_published_when_it_becomes_known() -> None:
    driver = TranslatorDriver()
    driver.read_metrics()
    hello = driver.follower.mirror.hello
    assert hello is not None
    assert not hello.capabilities.aborts
    driver.read_metrics(replace(READING, aborted=0))
    after = driver.follower.mirror.hello
    assert after is not None
    assert after.capabilities.aborts
    assert after.epoch != hello.epoch
    driver.read_metrics(replace(READING, aborted=3))
    assert driver.follower.mirror.hello is after
