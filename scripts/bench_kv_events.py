"""How many KV events a second one core decodes: `python scripts/bench_kv_events.py`.

Of blocks of 16 tokens, every other event a removal, in batches of a thousand, in both layouts. CPU time of this process
alone, so that neighbours do not count; the best of five rounds.
"""

from __future__ import annotations

import time
from typing import Final

from kvscope_telemetry.kv_events.batches import BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.decoding import decode_batch
from kvscope_telemetry.kv_events.encoding import encode_batch

EVENTS: Final = 1000
ROUNDS: Final = 5
ROUND_BATCHES: Final = 100
TOKENS: Final = 16


def payload(blocks: int, *, arrays: bool) -> bytes:
    """A batch; each stored event has so many blocks."""
    events: list[KvEvent] = []
    for number in range(EVENTS):
        first = (1 << 63) + number
        if number % 2:
            events.append(BlockRemoved((first,), "GPU", 0))
        else:
            tokens = tuple(range(1000, 1000 + TOKENS * blocks))
            hashes = tuple(range(first, first + blocks))
            events.append(BlockStored(hashes, 5, tokens, TOKENS, medium="GPU", group_idx=0))
    return encode_batch(EventBatch(1.0, tuple(events), 0), arrays=arrays)


def events_a_second(data: bytes) -> float:
    """The best round."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for _ in range(ROUND_BATCHES):
            decode_batch(data)
        seconds.append(time.process_time() - started)
    return EVENTS * ROUND_BATCHES / min(seconds)


def main() -> None:
    """Print a line a case."""
    for arrays in (False, True):
        for blocks in (1, 4):
            data = payload(blocks, arrays=arrays)
            layout = "arrays (vLLM 0.23)" if arrays else "maps (vLLM 0.33)  "
            print(f"{layout}  {blocks} blocks an event  {events_a_second(data):>9,.0f} events/s  {len(data):>7,} bytes")


if __name__ == "__main__":
    main()
