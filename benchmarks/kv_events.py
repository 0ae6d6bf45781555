"""Measure how many KV events a second one core takes from their bytes into a mirror.

A pool of 100,000 blocks of 16 tokens that is full: each second event removes what the oldest one stored. Decoded,
given rows, translated to a frame each 10,000 events (100 ms at 100,000/s), coalesced and applied to a mirror. CPU time
of this process alone, so that neighbours do not count; the median of the rounds, and the parts of it.
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

BLOCKS: Final = 100_000
TOKENS: Final = 16
BATCH_EVENTS: Final = 1000
FRAME_BATCHES: Final = 10
FRAMES: Final = 20
FILLING: Final = 10
WANTED: Final = 100_000
"""Events a second."""


class RequestHistory:
    """Batches as an engine with a full pool sends them, `run` blocks an event."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._next = 1 << 62
        self._stored: deque[tuple[int, ...]] = deque()

    def batch(self, num_events: int, *, with_removals: bool = True) -> bytes:
        """The next one's bytes."""
        events: list[KvEvent] = []
        while len(events) < num_events:
            hashes = tuple(range(self._next, self._next + self._run))
            self._next += self._run
            tokens = tuple([(self._next + place) % 150_000 for place in range(TOKENS * self._run)])
            if with_removals:
                events.append(BlockRemoved(self._stored.popleft(), "GPU", 0))
            events.append(BlockStored(hashes, hashes[0] - 1, tokens, TOKENS, medium="GPU", group_idx=0))
            self._stored.append(hashes)
        return encode_batch(EventBatch(1.0, tuple(events), 0))


def measure(run: int) -> tuple[float, float, float, float]:
    """Events a second, and ns an event for decoding, translating and mirroring."""
    history, translator, mirror = RequestHistory(run), RankTranslator(VLLM), Mirror()
    translator.apply_reading(
        EngineReading(num_blocks=BLOCKS + 64, block_size=TOKENS), ServerFacts(), 1, are_events_live=True
    )
    for _ in range(FILLING):
        payload = history.batch(BLOCKS // run // FILLING, with_removals=False)
        translator.apply_events([Received(0, decode_batch(payload))], 1)
    apply(mirror, translator, 2)
    parts: list[tuple[float, float, float]] = []
    for number in range(FRAMES):
        payloads = [history.batch(BATCH_EVENTS) for _ in range(FRAME_BATCHES)]
        started = time.process_time()
        items = [Received(number, decode_batch(payload)) for payload in payloads]
        decoded = time.process_time()
        translator.apply_events(items, number + 3)
        update = updates(translator, number + 3)
        translated = time.process_time()
        mirror.apply(update)
        parts.append((decoded - started, translated - decoded, time.process_time() - translated))
    events = BATCH_EVENTS * FRAME_BATCHES
    decode_s, translate_s, mirror_s = (statistics.median(part) / events for part in zip(*parts, strict=True))
    assert mirror.num_cached == BLOCKS // run // FILLING * FILLING * run
    total_s = statistics.median(sum(part) for part in parts) / events
    return 1 / total_s, decode_s * 1e9, translate_s * 1e9, mirror_s * 1e9


def updates(translator: RankTranslator, now_ns: int) -> Update:
    """What is told now, as one update."""
    messages = translator.messages(now_ns, is_alive=False)
    snapshot = next((message for message in messages if isinstance(message, Snapshot)), None)
    return coalesce([message for message in messages if isinstance(message, Frame)], snapshot=snapshot)


def apply(mirror: Mirror, translator: RankTranslator, now_ns: int) -> None:
    """Bring the mirror up to date."""
    mirror.apply(updates(translator, now_ns))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print a line for each case; return 1 where one block an event is slower than `WANTED`."""
    rates = []
    for run in (1, 4):
        rate, decode_ns, translate_ns, mirror_ns = measure(run)
        rates.append(rate)
        print(
            f"{run:2} blocks an event  {rate:>9,.0f} events/s a core  "
            f"(decode {decode_ns:,.0f} ns, translate {translate_ns:,.0f} ns, mirror {mirror_ns:,.0f} ns an event)"
        )
    return int(rates[0] < WANTED)


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
