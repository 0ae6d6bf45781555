"""Measure how many KV events per second one core applies to a mirror, from their encoded bytes.

The pool of 100,000 blocks of 16 tokens is full: every second event removes the blocks that the oldest event stored.
Events are decoded, translated to one frame per 10,000 events (100 ms at 100,000/s), coalesced and applied to a mirror.
Times are CPU times of this process; printed is the median of the rounds, and the median of each part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from typing import Final

from benchmarks.command_line import run_benchmark
from kvscope_telemetry.collectors.rank_translator import RankTranslator
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.collectors.vllm import VLLM
from kvscope_telemetry.kv_events.batches import BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.decoding import decode_batch
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.kv_events.stream_items import Received
from kvscope_telemetry.messages.telemetry import Frame, Snapshot
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Update

NUM_BLOCKS: Final = 100_000
BLOCK_SIZE: Final = 16
BATCH_EVENTS: Final = 1000
BATCHES_PER_FRAME: Final = 10
NUM_FRAMES: Final = 20
NUM_FILL_BATCHES: Final = 10
MIN_EVENTS_PER_S: Final = 100_000


class RequestHistory:
    """Generates batches of events as an engine with a full pool publishes them, with `blocks_per_event` blocks each."""

    def __init__(self, blocks_per_event: int) -> None:
        self._blocks_per_event = blocks_per_event
        self._next = 1 << 62
        self._stored: deque[tuple[int, ...]] = deque()

    def batch(self, num_events: int, *, with_removals: bool = True) -> bytes:
        events: list[KvEvent] = []
        while len(events) < num_events:
            hashes = tuple(range(self._next, self._next + self._blocks_per_event))
            self._next += self._blocks_per_event
            tokens = tuple([(self._next + offset) % 150_000 for offset in range(BLOCK_SIZE * self._blocks_per_event)])
            if with_removals:
                events.append(BlockRemoved(self._stored.popleft(), "GPU", 0))
            events.append(BlockStored(hashes, hashes[0] - 1, tokens, BLOCK_SIZE, medium="GPU", group_idx=0))
            self._stored.append(hashes)
        return encode_batch(EventBatch(1.0, tuple(events), 0))


def measure(blocks_per_event: int) -> tuple[float, float, float, float]:
    """Return events per second, and nanoseconds per event for decoding, translating and applying to the mirror."""
    history, translator, mirror = RequestHistory(blocks_per_event), RankTranslator(VLLM), Mirror()
    translator.apply_reading(
        EngineReading(num_blocks=NUM_BLOCKS + 64, block_size=BLOCK_SIZE), ServerFacts(), 1, are_events_live=True
    )
    for _ in range(NUM_FILL_BATCHES):
        payload = history.batch(NUM_BLOCKS // blocks_per_event // NUM_FILL_BATCHES, with_removals=False)
        translator.apply_events([Received(0, decode_batch(payload))], 1)
    apply_pending(mirror, translator, 2)
    parts: list[tuple[float, float, float]] = []
    for number in range(NUM_FRAMES):
        payloads = [history.batch(BATCH_EVENTS) for _ in range(BATCHES_PER_FRAME)]
        started = time.process_time()
        items = [Received(number, decode_batch(payload)) for payload in payloads]
        decoded = time.process_time()
        translator.apply_events(items, number + 3)
        update = pending_update(translator, number + 3)
        translated = time.process_time()
        mirror.apply(update)
        parts.append((decoded - started, translated - decoded, time.process_time() - translated))
    events = BATCH_EVENTS * BATCHES_PER_FRAME
    decode_s, translate_s, mirror_s = (statistics.median(part) / events for part in zip(*parts, strict=True))
    assert mirror.num_cached == NUM_BLOCKS // blocks_per_event // NUM_FILL_BATCHES * NUM_FILL_BATCHES * blocks_per_event
    total_s = statistics.median(sum(part) for part in parts) / events
    return 1 / total_s, decode_s * 1e9, translate_s * 1e9, mirror_s * 1e9


def pending_update(translator: RankTranslator, now_ns: int) -> Update:
    messages = translator.messages(now_ns, is_alive=False)
    snapshot = next((message for message in messages if isinstance(message, Snapshot)), None)
    return coalesce([message for message in messages if isinstance(message, Frame)], snapshot=snapshot)


def apply_pending(mirror: Mirror, translator: RankTranslator, now_ns: int) -> None:
    mirror.apply(pending_update(translator, now_ns))


def add_arguments(parser: argparse.ArgumentParser) -> None: ...


def run(args: argparse.Namespace) -> int:
    """Print a line per case. Returns 1 if fewer than `MIN_EVENTS_PER_S` events of one block are applied per
    second, else 0.
    """
    rates = []
    for run in (1, 4):
        rate, decode_ns, translate_ns, mirror_ns = measure(run)
        rates.append(rate)
        print(
            f"{run:2} blocks an event  {rate:>9,.0f} events/s a core  "
            f"(decode {decode_ns:,.0f} ns, translate {translate_ns:,.0f} ns, mirror {mirror_ns:,.0f} ns an event)"
        )
    return int(rates[0] < MIN_EVENTS_PER_S)


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
