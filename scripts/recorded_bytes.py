"""Where the bytes of a recording go: a table for `bench_recording.py`.

A chunk is compressed whole. Here each part of it is compressed alone, and its bytes are shared out as these are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import zstandard

from kvscope_telemetry.ledger import COLUMNS
from kvscope_telemetry.messages.leap import Leap, decode_leap
from kvscope_telemetry.messages.telemetry import Snapshot
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recordings.bundles.bundle import unpack_bundle
from kvscope_telemetry.recordings.bundles.column_names import named
from kvscope_telemetry.recordings.bundles.gathering import num_frames_at_end
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import ListedLeap
from kvscope_telemetry.recordings.bundles.leaps.opened_leaps import listed_leap
from kvscope_telemetry.recordings.bundles.leaps.packed_leaps import PackedLeap, packed_leap
from kvscope_telemetry.recordings.bundles.listed_keyframes import ListedKeyframe, listed_keyframe
from kvscope_telemetry.recordings.bundles.placed_parents import PlacedParents, stated
from kvscope_telemetry.recordings.chunks import read_chunk
from kvscope_telemetry.recordings.layout import BUNDLES, KEYFRAMES, LEAPS, TOPICS
from kvscope_telemetry.recordings.reader import Recording

_MADE: Final = {"bundles": BUNDLES, "leaps": LEAPS, "keyframes": KEYFRAMES}
_PARTS: Final = {
    "blocks.hashes": "hashes (random: no fewer bytes)",
    "hash": "hashes (random: no fewer bytes)",
    "hashes": "hashes (random: no fewer bytes)",
    "parents_in_full": "parents that are no hash told",
    "blocks.parents": "parents that are no hash told",
    "told": "parents that are no hash told",
    "blocks.hash_list": "where hashes and parents are from",
    "blocks.hash_places": "where hashes and parents are from",
    "parents": "where hashes and parents are from",
    "blocks.hash": "where hashes and parents are from",
    "blocks.parent": "where hashes and parents are from",
    "blocks.parent_places": "where hashes and parents are from",
    "places": "where hashes and parents are from",
    "codes": "where hashes and parents are from",
    "blocks.ids": "which blocks",
    "blocks.new_ids": "which blocks",
    "ids": "which blocks",
    "rows": "which blocks, and what else of them (leaps)",
    "new_requests": "requests that came, events",
    "events": "requests that came, events",
    "requests_info": "requests that came, events",
}
"""Name of a column -> what the table calls it; others by what they are of."""
Sizes = Mapping[str, Mapping[str, float]]


def recorded_bytes(recording: Recording) -> Sizes:
    """Bytes in the file, by what was written and by part of it."""
    found: dict[str, Counter[str]] = {}
    chunks = recording._chunks
    names = {chunks.found.channels[kind]: topic.rpartition("/")[2] for kind, topic in TOPICS.items()}
    with chunks.file.open() as file:
        for chunk in chunks.found.chunks:
            parts: Counter[tuple[str, str]] = Counter()
            for message in read_chunk(file, chunk):
                name = names[message.channel]
                for part, data in _parts(name, message.data, chunks._lists.hashes):
                    parts[name, part] += len(zstandard.compress(data)) if len(data) > 64 else len(data)
            share = chunk.stored_bytes / max(parts.total(), 1)
            for (name, part), size in parts.items():
                found.setdefault(name, Counter())[part] += size * share
    return found


def print_table(sizes: Sizes, minutes: float) -> None:
    """In MB a minute, the most first."""
    for name, parts in sorted(sizes.items(), key=lambda item: -sum(item[1].values())):
        print(f"  {name:<10} {sum(parts.values()) / 1e6 / minutes:6.3f} MB a minute")
        for part, size in sorted(parts.items(), key=lambda item: -item[1]):
            if part:
                print(f"  {size / 1e6 / minutes:17.3f} {part}")
    random = sum(size for parts in sizes.values() for part, size in parts.items() if part.startswith("hashes"))
    print(f"  hashes alone are {random / 1e6 / minutes:.3f} MB a minute, those of keyframes among them")


def _parts(name: str, data: bytes, lists: HashesOf) -> Iterator[tuple[str, bytes]]:
    if name == "bundles" and num_frames_at_end(data) is None:
        unpack_bundle(data, lists)  # it holds
        raw = msgspec.msgpack.decode(data)
        yield from ((_called(column), packed) for column, packed in named(raw["columns"]).items())
        for part in raw.keys() & {"events", "new_requests"}:  # of an earlier version
            yield _called(part), msgspec.msgpack.encode(raw[part])
    elif name in _MADE and name != "bundles":
        if listed_leap(data, lists) is not None or listed_keyframe(data, lists) is not None:
            yield from _listed_parts(data)
        else:
            yield from _stated_parts(data)
    elif name == "hashes":
        yield _PARTS["hash"], data
    else:
        yield "", data


def _listed_parts(data: bytes) -> Iterator[tuple[str, bytes]]:
    lies = msgspec.msgpack.decode(data, type=ListedLeap | ListedKeyframe)
    if isinstance(lies, ListedKeyframe):
        yield _called("requests."), lies.message
    yield from ((_called(column), packed) for column, packed in lies.columns.items())


def _stated_parts(data: bytes) -> Iterator[tuple[str, bytes]]:
    packed = packed_leap(data)
    placed = packed or stated(data)
    message = placed or (decode_leap(data) if b"Leap" in data[:16] else decode_telemetry(data))
    assert isinstance(message, Leap | Snapshot), "keyframes and leaps alone state how things are"
    blocks = msgspec.structs.asdict(message.blocks)
    if placed is not None:
        del blocks["parent"]
        lies = msgspec.msgpack.decode(data, type=PlacedParents if packed is None else PackedLeap)
        blocks |= {"places": lies.places, "told": lies.told}
        if isinstance(lies, PackedLeap):
            blocks |= {"ids": lies.ids, "owner": lies.owner, "last_used_step": lies.age}
    yield from ((_called(column), packed) for column, packed in blocks.items())
    yield _called("requests."), msgspec.msgpack.encode(message.requests)
    infos = message.new_requests if isinstance(message, Leap) else message.requests_info
    yield _called("new_requests"), msgspec.msgpack.encode(infos)


def _called(column: str) -> str:
    if column in _PARTS:
        return _PARTS[column]
    table, dot, _ = column.partition(".")
    if dot and table in ("events", "new_requests"):
        return _PARTS[table]
    if table in ("requests", "batch", "moves"):
        return "requests, who ran, what moved"
    is_of_blocks = table == "blocks" or (not dot and column in COLUMNS)
    return "what else changed of blocks" if is_of_blocks else "times, counters"
