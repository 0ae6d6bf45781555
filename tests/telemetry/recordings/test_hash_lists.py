"""Hashes that lie once in a recording: bundles and leaps find them, those of earlier versions never needed to."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockRows, Ledger
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.bundles.hash_lists import (
    MAX_LISTED,
    HashesOf,
    HashList,
    HashLists,
    HashPart,
    no_lists,
)
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import pack_listed_leap
from kvscope_telemetry.recordings.bundles.leaps.opened_leaps import listed_leap
from kvscope_telemetry.recordings.bundles.leaps.packed_leaps import packed_leap
from kvscope_telemetry.recordings.layout import HASHES, LEAPS
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.synthetic.engine import SyntheticEngine

OLDER = Path(__file__).with_name("older_layout.mcap")
"""130 frames in bundles that tell their own hashes, packed leaps, and events one by one."""


def numbers(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def lists_of(told: HashList) -> HashesOf:
    return lambda name, count: told.hashes[:count] if name == told.name else no_lists(name, count)


def test_parts_make_up_the_list() -> None:
    written = HashList()
    assert written.take() is None
    parts = []
    for at_ns, some in ((50, numbers(7, -8)), (60, numbers(9))):
        assert written.places(some).tolist() == [-1] * some.size
        written.tell(some, at_ns)
        taken = written.take()
        assert taken is not None
        assert taken[0] == at_ns
        parts.append(taken[1])
    assert written.places(numbers(9, 1, 7)).tolist() == [2, -1, 0]
    written.begin_next()
    written.tell(numbers(1), 70)
    parts.append(written.take()[1])  # type: ignore[index]
    read = HashLists(lambda _: parts)
    assert read.hashes(50, 2).tolist() == [7, -8]
    assert read.hashes(50, 3).tolist() == [7, -8, 9]
    assert read.hashes(70, 1).tolist() == [1]
    assert read.hashes(60, 2).tolist() == [0, 0], "no list of this name"


def test_a_part_that_is_gone_leaves_a_hole_and_nothing_claims_memory() -> None:
    def part(name: int, first: int, hashes: bytes) -> bytes:
        return msgspec.msgpack.encode(HashPart(name, first, hashes))

    eight = b"\1" + bytes(7)
    parts = [part(5, 2, eight), b"\xc1", part(5, MAX_LISTED, eight), part(5, -1, eight), part(5, 3, b"\1")]
    read = HashLists(lambda _: parts)
    assert read.hashes(5, 4).tolist() == [0, 0, 1, 0]
    for count in (-1, MAX_LISTED + 1):
        with pytest.raises(ProtocolError):
            read.hashes(5, count)


def test_a_list_that_grows_is_read_again() -> None:
    written, parts = HashList(), []
    read = HashLists(lambda _: parts)
    for count in (1, 2, 3):
        written.tell(numbers(count), 9)
        parts.append(written.take()[1])  # type: ignore[index]
        assert read.hashes(9, count).tolist() == list(range(1, count + 1))


def a_leap(num_told: int) -> tuple[Leap, HashList]:
    """Of some blocks of an engine, of whose hashes only some were told."""
    engine = SyntheticEngine(num_blocks=400, num_running=8)
    for _ in range(60):
        engine.advance()
    ledger: Ledger = engine.ledger
    ledger.attention[::5] = 3
    blocks = ledger.pack(np.arange(0, 400, 2, dtype=np.uint32))
    told = HashList()
    hashes = np.unique(ledger.hash[ledger.hash != 0]).view(np.int64)
    np.random.default_rng(1).shuffle(hashes)
    told.tell(hashes[:num_told], 5)
    return Leap(epoch=1, seq=9, since_seq=3, step=engine.step, time_ns=9, blocks=blocks), told


@pytest.mark.parametrize("num_told", [0, 40, 400])
def test_a_leap_comes_back_whatever_was_told(num_told: int) -> None:
    leap, told = a_leap(num_told)
    assert listed_leap(pack_listed_leap(leap, told), lists_of(told)) == leap
    bare = msgspec.structs.replace(leap, blocks=msgspec.structs.replace(leap.blocks, parent=b""))
    assert listed_leap(pack_listed_leap(bare, told), lists_of(told)) == bare
    engine = SyntheticEngine(num_blocks=40, num_running=2)
    engine.advance()
    standing = engine.snapshot().requests
    right, all_told = (value * (len(standing.number) // 4) for value in (b"\1\0\0\0", b"\3\0\0\0"))
    guessed = msgspec.structs.replace(standing, num_draft_tokens=all_told, num_accepted_tokens=right)
    assert guessed.num_accepted_tokens
    with_guesses = msgspec.structs.replace(leap, requests=guessed)
    assert listed_leap(pack_listed_leap(with_guesses, told), lists_of(told)) == with_guesses


def test_a_leap_without_blocks_lies_otherwise() -> None:
    leap = Leap(epoch=1, seq=9, since_seq=3, step=1, time_ns=9, blocks=BlockRows())
    assert listed_leap(pack_listed_leap(leap, HashList()), no_lists) is None


def test_a_listed_leap_that_is_damaged_is_refused() -> None:
    leap, told = a_leap(100)
    good = msgspec.msgpack.decode(pack_listed_leap(leap, told))
    choose = random.Random(3)
    for name, data in good["columns"].items():
        without = {other: each for other, each in good["columns"].items() if other != name}
        if name != "parents":  # it may have none
            with pytest.raises(ProtocolError):
                listed_leap(msgspec.msgpack.encode(good | {"columns": without}), lists_of(told))
        for _ in range(20):
            bad = bytearray(data)
            bad[choose.randrange(len(bad))] ^= 1 << choose.randrange(8)
            with contextlib.suppress(ProtocolError):
                listed_leap(msgspec.msgpack.encode(good | {"columns": without | {name: bytes(bad)}}), lists_of(told))
    for change in ({"num_rows": 1 << 40}, {"num_rows": -1}, {"num_listed": 99}, {"list": 6}, {"message": b"\xc1"}):
        with pytest.raises(ProtocolError):
            listed_leap(msgspec.msgpack.encode(good | change), lists_of(told))


def test_a_part_is_there_twice_and_damage_to_both_costs_what_needs_it(record: Callable[..., Any]) -> None:
    recorded = record(900, keyframe_interval_ns=1 << 60)
    whole = Recording.open(recorded.path)
    channel = whole._found.channels[HASHES]
    parts = sorted([chunk for chunk in whole._found.chunks if channel in chunk.counts], key=lambda chunk: chunk.offset)
    assert len(parts) >= 8
    data = bytearray(recorded.path.read_bytes())
    data[parts[4].offset + parts[4].stored_bytes // 2] ^= 1
    recorded.path.write_bytes(data)
    assert list(Recording.open(recorded.path).frames()) == recorded.frames
    data[parts[5].offset + parts[5].stored_bytes // 2] ^= 1
    recorded.path.write_bytes(data)
    found = Recording.open(recorded.path)
    frames = list(found.frames())
    assert 0 < len(frames) < 900
    by_seq = {frame.seq: frame for frame in recorded.frames}
    assert all(frame == by_seq[frame.seq] for frame in frames)
    assert found.num_damaged > 1
    assert found.note == "damaged in places, which are left out"


def test_a_recording_of_an_earlier_version_opens() -> None:
    recording = Recording.open(OLDER)
    assert recording.note == ""

    def columns(blocks: BlockRows) -> bytes:
        return b"".join((blocks.ids, blocks.state, blocks.owner, blocks.last_used_step, blocks.hash, blocks.parent))

    frames = list(recording.frames())
    assert [frame.seq for frame in frames] == list(range(1, 131))
    digest = hashlib.sha256(b"".join(columns(frame.blocks) for frame in frames))
    assert digest.hexdigest() == "c0d68e0cfbecad3485fbcbfc04a500e78b553f324a3863121f94cedaeed8f675"
    leaps = [message for _, message in recording.run_up(1e9) if isinstance(message, Frame)]
    assert any(isinstance(each, Leap) for each in leaps)
    told, leaps = recording.chunks, recording.chunks.found.channels[LEAPS]
    with told.file.open() as file:
        raw = [each for chunk in told.leaps for each in told._read(file, chunk) if each.channel == leaps]
    listed = [listed_leap(each.data, told._lists.hashes) or packed_leap(each.data) for each in raw]
    digest = hashlib.sha256(b"".join(columns(each.blocks) for each in listed if each is not None))
    assert digest.hexdigest() == "3427a39ebec2418e3cbac01cb00a4204c9410539438ad3b65504ab1a1f2a329b"
    assert len(list(recording.glances())) > 10
    assert recording.num_damaged == 0
