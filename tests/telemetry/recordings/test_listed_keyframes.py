"""Keyframes that tell no hash again that lies in the lists since the last of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockRows
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.bundles import hash_lists, listed_keyframes
from kvscope_telemetry.recordings.bundles.hash_lists import MAX_EARLIER_LISTS, HashesOf, HashList, ToldList, no_lists
from kvscope_telemetry.recordings.bundles.listed_keyframes import (
    ListedKeyframe,
    WholeState,
    hello_of,
    listed_keyframe,
    whole_pieces,
)
from kvscope_telemetry.recordings.chunks import read_chunk
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import HASHES, KEYFRAMES
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.synthetic.engine import SyntheticEngine

INTERVAL_NS = 300_000_000


def a_mirror(num_blocks: int) -> Mirror:
    engine = SyntheticEngine(num_blocks=num_blocks, num_running=max(1, num_blocks // 50))
    for _ in range(40):
        engine.advance()
    mirror = Mirror()
    mirror.reset(engine.snapshot())
    return mirror


def some_told(mirror: Mirror, num_told: int) -> list[ToldList]:
    """Two lists of some of its hashes, and of one that no block has."""
    hashes = np.unique(mirror.ledger.hash[mirror.ledger.hash != 0]).view(np.int64)
    np.random.default_rng(1).shuffle(hashes)
    half = num_told // 2
    return [ToldList(5, np.append(hashes[:half], 77)), ToldList(9, hashes[half:num_told])] if num_told else []


def lists_of(told: Sequence[ToldList]) -> HashesOf:
    by_name = {each.name: each.hashes for each in told}
    return lambda name, count: by_name[name][:count] if name in by_name else no_lists(name, count)


def written(mirror: Mirror, told: Sequence[ToldList]) -> bytes:
    bare = msgspec.structs.replace(snapshot_of(mirror), blocks=BlockRows())
    return b"".join(whole_pieces(WholeState(bare, mirror.ledger), told))


@pytest.mark.parametrize(("num_blocks", "num_told"), [(1, 0), (400, 0), (400, 60), (3_000, 3_000)])
def test_a_keyframe_comes_back_whatever_was_told(num_blocks: int, num_told: int) -> None:
    mirror = a_mirror(num_blocks)
    mirror.ledger.attention[::5] = 3
    told = some_told(mirror, num_told)
    data = written(mirror, told)
    read = listed_keyframe(data, lists_of(told))
    assert read is not None
    assert encode(read) == encode(snapshot_of(mirror))
    assert hello_of(data) == mirror.hello


def test_what_was_told_is_not_told_again() -> None:
    mirror = a_mirror(2_000)
    num_hashes = np.unique(mirror.ledger.hash[mirror.ledger.hash != 0]).size
    alone, behind = (written(mirror, some_told(mirror, count)) for count in (0, num_hashes))
    assert len(behind) < len(alone) - 5 * num_hashes


def test_a_state_of_many_rows_lies_as_views_of_its_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = a_mirror(400)
    monkeypatch.setattr(listed_keyframes, "MAX_LISTED_ROWS", 399)
    assert listed_keyframe(written(mirror, some_told(mirror, 60)), no_lists) is None


def test_a_keyframe_that_is_damaged_is_refused() -> None:
    mirror = a_mirror(400)
    told = some_told(mirror, 60)
    good = msgspec.msgpack.decode(written(mirror, told))
    choose = random.Random(3)
    for name, data in good["columns"].items():
        without = {other: each for other, each in good["columns"].items() if other != name}
        with pytest.raises(ProtocolError):
            listed_keyframe(msgspec.msgpack.encode(good | {"columns": without}), lists_of(told))
        for _ in range(20):
            bad = bytearray(data or b"\0")
            bad[choose.randrange(len(bad))] ^= 1 << choose.randrange(8)
            with contextlib.suppress(ProtocolError):
                listed_keyframe(
                    msgspec.msgpack.encode(good | {"columns": without | {name: bytes(bad)}}), lists_of(told)
                )
    too_many = [[5, 1]] * (MAX_EARLIER_LISTS + 2)
    changes: list[dict[str, object]] = [{"num_rows": size} for size in (0, -1, 399, 1 << 40)]
    changes += [{"lists": lists} for lists in ([], [[5, 1]], [[6, 60]], too_many)] + [{"message": b"\xc1"}]
    for change in changes:
        with pytest.raises(ProtocolError):
            listed_keyframe(msgspec.msgpack.encode(good | change), lists_of(told))
    with pytest.raises(ProtocolError):
        hello_of(msgspec.msgpack.encode(good | {"message": b"\xc1"}))
    holes = [ToldList(each.name, np.zeros_like(each.hashes)) for each in told]
    with pytest.raises(ProtocolError):
        listed_keyframe(msgspec.msgpack.encode(good), lists_of(holes))


def test_lists_that_are_over_are_a_keyframes_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_lists, "MAX_EARLIER", 5)
    told = HashList()
    for name in (10, 20, 30):
        told.begin_next()
        told.tell(np.arange(2) + name, name)
    assert [each.name for each in told.all_told] == [10, 20, 30]
    told.begin_next()
    assert [each.name for each in told.all_told] == [20, 30], "no more than so many"
    assert told.places(np.array([30])).tolist() == [-1], "another list refers to none before it"


def test_a_list_is_named_by_three_keyframes() -> None:
    told = HashList()

    def tell(*times_ns: int) -> list[int]:
        for name in times_ns:
            told.begin_next()
            told.tell(np.arange(2) + name, name)
        return [each.name for each in told.all_told]

    assert tell(10, 20) == [10, 20]
    told.begin_at_keyframe(25)
    assert tell(30, 40) == [10, 20, 30, 40]
    told.begin_at_keyframe(45)
    assert tell(50) == [10, 20, 30, 40, 50]
    told.begin_at_keyframe(55)
    assert tell(60) == [30, 40, 50, 60]
    told.begin_at_keyframe(65)
    assert tell() == [50, 60]


def test_lists_that_have_nothing_of_the_state_are_not_named() -> None:
    mirror = a_mirror(400)
    hashes = np.unique(mirror.ledger.hash[mirror.ledger.hash != 0]).view(np.int64)
    half = hashes.size // 2
    told = [
        ToldList(3, np.arange(1, 900)),
        ToldList(5, hashes[:half]),
        ToldList(6, np.arange(1, 9)),
        ToldList(7, hashes[half - 3 :]),
    ]
    data = written(mirror, told)
    assert [name for name, _ in msgspec.msgpack.decode(data, type=ListedKeyframe).lists] == [7, 5]
    read = listed_keyframe(data, lists_of(told))
    assert read is not None
    assert encode(read) == encode(snapshot_of(mirror))


def test_keyframes_of_a_file_name_lists_and_one_that_is_damaged_costs_no_state(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=INTERVAL_NS)
    whole = Recording.open(recorded.path)
    chunks = whole._found.chunks
    of_keyframes = [chunk for chunk in chunks if whole._found.channels[KEYFRAMES] in chunk.counts]
    of_keyframes = of_keyframes[1:]  # the first repeats the engine's own snapshot
    with whole._file.open() as file:
        keyframes = [read_chunk(file, chunk)[0].data for chunk in of_keyframes]
    lies = [msgspec.msgpack.decode(data, type=ListedKeyframe) for data in keyframes]
    assert any(each.lists for each in lies), "there are some that tell less"
    referred = next(place for place, each in enumerate(lies) if each.lists)
    moments = [(chunk.start_ns - whole.start_ns) / 1e9 + 1e-3 for chunk in of_keyframes]
    states = [whole.state_at(seconds) for seconds in moments]
    for data in (each.data for each in whole.raw_messages(0, 1 << 62) if each.kind == KEYFRAMES):
        assert not data.startswith(keyframes[0][:21]), "it is given as it came"

    channel = whole._found.channels[HASHES]
    parts = [chunk for chunk in chunks if channel in chunk.counts]
    before = [part for part in parts if part.offset < of_keyframes[referred].offset]
    data = bytearray(recorded.path.read_bytes())
    for part in before[-2:]:  # it is there twice
        data[part.offset + part.stored_bytes // 2] ^= 1
    recorded.path.write_bytes(data)
    damaged = Recording.open(recorded.path)
    for seconds, state in zip(moments, states, strict=True):
        found = damaged.state_at(seconds)
        assert found.seq <= state.seq
        if found.seq == state.seq:
            assert found.ledger.equals(state.ledger)
    assert damaged.num_damaged
