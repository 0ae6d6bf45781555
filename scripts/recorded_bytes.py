"""Where the bytes of a recording go: a table for `bench_recording.py`.

A message of columns is compressed as a whole. Here each column is compressed alone, and the bytes of the message are
shared out as these are; those of a chunk as its messages take them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import zstandard

from kvscope_telemetry.recordings.chunks import MAGIC, read_chunk
from kvscope_telemetry.recordings.layout import SCHEMAS, TOPICS
from kvscope_telemetry.recordings.read_budget import ReadBudget
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.survey import Surveyor

_PARTS = {
    "hashes": "hashes (random: no fewer bytes)",
    "blocks.hash": "where hashes and parents are from",
    "blocks.parent": "where hashes and parents are from",
    "blocks": "which blocks",
    "blocks.ids": "which blocks",
    "new_requests": "requests that came, events",
    "requests_info": "requests that came, events",
    "events": "requests that came, events",
}
"""Name of a column -> what the table calls it; others by what they are of."""
Sizes = Mapping[str, Mapping[str, float]]


def recorded_bytes(recording: Recording) -> Sizes:
    """Bytes in the file, by what was written and by part of it."""
    found: dict[str, Counter[str]] = {}
    surveyor = Surveyor()
    with recording.path.open("rb") as file:
        file.seek(len(MAGIC))
        chunks = surveyor.run(file, ReadBudget(recording.path.stat().st_size))
        kinds = {surveyor.found.channels[kind]: kind for kind in TOPICS}
        for chunk in chunks:
            messages = read_chunk(file, chunk)
            total = max(sum(len(message.data) for message in messages), 1)
            for message in messages:
                kind = kinds[message.channel]
                parts = dict(_parts(message.data)) if SCHEMAS.get(kind, ("", ""))[1] == "zstd+msgpack" else {"": 1}
                share = chunk.stored_bytes * len(message.data) / total / max(sum(parts.values()), 1)
                sizes = found.setdefault(TOPICS[kind].rpartition("/")[2], Counter())
                for name, size in parts.items():
                    sizes[_called(name)] += size * share
    return found


def print_table(sizes: Sizes, minutes: float) -> None:
    """In MB a minute, the most first."""
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        print(f"  {name:<11} {sum(parts.values()) / 1e6 / minutes:6.3f} MB a minute")
        for part, size in sorted(parts.items(), key=lambda item: -item[1]):
            if part:
                print(f"  {size / 1e6 / minutes:18.3f} {part}")
    random = sum(size for parts in sizes.values() for part, size in parts.items() if part.startswith("hashes"))
    print(f"  hashes alone are {random / 1e6 / minutes:.3f} MB a minute")


def _parts(data: bytes) -> Iterator[tuple[str, int]]:
    """Each column, and what it takes alone."""
    for name, (_, column) in msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data))["columns"].items():
        yield name, len(zstandard.compress(column)) if len(column) > 64 else len(column)


def _called(column: str) -> str:
    name = column.rstrip("#")
    table = name.partition(".")[0]
    if not name or name in _PARTS:
        return _PARTS.get(name, "")
    if table in ("requests", "batch", "moves"):
        return "requests, who ran, what moved"
    return "what else changed of blocks" if table == "blocks" else "times, counters"
