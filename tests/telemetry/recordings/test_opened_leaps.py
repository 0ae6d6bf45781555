"""Leaps that are read together as one: the same as one after another, whatever each has, and damage costs one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages.leap import Leap, check_leap
from kvscope_telemetry.messages.telemetry import Frame, RequestInfo, RequestRows, Snapshot
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList
from kvscope_telemetry.recordings.bundles.leaps import leap_run
from kvscope_telemetry.recordings.bundles.leaps.leap_run import JOINED_ROWS, LeapRun
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import pack_listed_leap
from kvscope_telemetry.recordings.bundles.leaps.opened_leaps import OpenedLeap, joined_leap, listed_leap, opened_leap
from kvscope_telemetry.recordings.layout import LEAPS
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.request_mirror import REQUEST_COLUMNS, equal_requests
from kvscope_telemetry.state.state_place import StatePlace
from kvscope_telemetry.synthetic.engine import SyntheticEngine

NUM_BLOCKS = 400


def lists_of(lists: dict[int, HashList]) -> HashesOf:
    return lambda name, count: lists[name].hashes[:count]


def a_walk(num_leaps: int) -> tuple[Snapshot, list[Leap], dict[int, HashList], list[bytes]]:
    """A state, leaps on from it of which few are alike in what they have, and those as they lie."""
    engine = SyntheticEngine(num_blocks=NUM_BLOCKS, num_running=8)
    for _ in range(30):
        engine.advance()
    snapshot = engine.snapshot()
    leaps, lying, lists, told = [], [], {}, HashList()
    choose = np.random.default_rng(7)
    for number in range(num_leaps):
        since = engine.seq
        frames = [engine.advance() for _ in range(int(choose.integers(1, 30)) if number % 3 else 1)]
        ledger = engine.ledger
        ledger.attention[::7] = number % 3
        if number % 4 == 0:  # a list of its own; some tell of hashes that are in none
            told = HashList()
            hashes = np.unique(ledger.hash[ledger.hash != 0]).view(np.int64)
            told.tell(choose.permutation(hashes)[: hashes.size // 2], 100 + number)
            lists[told.name] = told
        ids = np.unique(np.frombuffer(b"".join([frame.blocks.ids for frame in frames]), "<u4"))
        blocks = ledger.pack(ids)
        if number % 5 == 0:
            blocks = msgspec.structs.replace(blocks, parent=b"")
        standing = engine.snapshot().requests if number % 3 else RequestRows()
        drafts = b"\2\0\0\0" * (len(standing.number) // 4) if number % 2 else b""
        new = tuple(info for frame in frames for info in frame.new_requests)
        last = frames[-1]
        leap = Leap(
            epoch=last.epoch,
            seq=last.seq,
            since_seq=since,
            step=last.step,
            time_ns=last.time_ns,
            blocks=blocks,
            new_requests=new,
            requests=msgspec.structs.replace(standing, num_draft_tokens=drafts, num_accepted_tokens=drafts),
            counters=last.counters,
        )
        leaps.append(leap)
        lying.append(pack_listed_leap(leap, told))
    return snapshot, leaps, lists, lying


def opened(lying: list[bytes], lists: dict[int, HashList]) -> list[OpenedLeap]:
    found = [opened_leap(data, lists_of(lists)) for data in lying]
    assert all(found)
    return [each for each in found if each is not None]


def state_after(snapshot: Snapshot, leaps: list[Leap]) -> Mirror:
    follower = Follower()
    follower.feed(snapshot)
    for leap in leaps:
        follower.feed(leap)
    follower.settle()
    assert not follower.is_lost
    return follower.mirror


@pytest.mark.parametrize("together", [2, 3, 7, 20])
def test_joined_they_do_what_they_do_one_after_another(together: int) -> None:
    snapshot, leaps, lists, lying = a_walk(20)
    assert [listed_leap(data, lists_of(lists)) for data in lying] == leaps
    runs = [lying[at : at + together] for at in range(0, 20, together)]
    joined = [joined_leap(opened(run, lists)) for run in runs]
    for leap in joined:
        check_leap(leap)
    assert (joined[0].since_seq, joined[-1].seq) == (leaps[0].since_seq, leaps[-1].seq)
    assert [info for leap in joined for info in leap.new_requests] == [i for leap in leaps for i in leap.new_requests]
    one, other = state_after(snapshot, joined), state_after(snapshot, leaps)
    assert one.ledger.differences(other.ledger) == []
    names = [name for name in REQUEST_COLUMNS if name not in ("first_seen_ns", "finished_ns")]
    assert equal_requests(one.requests, other.requests, names)
    assert (one.seq, one.step, one.counters) == (other.seq, other.step, other.counters)


def test_one_field_that_few_requests_have() -> None:
    """A column that lies nowhere has its default."""
    snapshot, leaps, lists, _ = a_walk(3)
    plain = {"arrival_ns": 9, "num_prompt_tokens": 3, "max_tokens": 2}
    infos = [
        (RequestInfo(number=5, request_id="a", index=3, priority=-2, **plain),),
        (RequestInfo(number=6, request_id="b", **plain), RequestInfo(number=7, request_id="a", **plain)),
        (),
    ]
    changed = [msgspec.structs.replace(leap, new_requests=new) for leap, new in zip(leaps, infos, strict=True)]
    lying = [pack_listed_leap(leap, lists[100]) for leap in changed]
    joined = joined_leap(opened(lying, lists))
    assert joined.new_requests == (*infos[0], *infos[1])
    assert snapshot.seq == joined.since_seq


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_one_that_cannot_be_read_costs_what_comes_after_it(bad: int) -> None:
    snapshot, leaps, lists, lying = a_walk(6)
    good = msgspec.msgpack.decode(lying[bad])
    lying[bad] = msgspec.msgpack.encode(good | {"columns": good["columns"] | {"hashes": b"?"}})
    place = StatePlace()
    told_bad: list[int] = []
    place.go_to(snapshot)
    run = LeapRun(place, told_bad.append)
    for at, each in enumerate(opened(lying, lists)):
        run.add(10 * at, at, each)
    assert not run.is_full
    found = run.take()
    assert [leap for _, _, leap in found] == leaps[:bad]
    assert told_bad == [10 * bad]
    assert place.seq == (leaps[bad - 1].seq if bad else snapshot.seq), "it goes on from there"
    assert run.take() == []
    with pytest.raises(ProtocolError):
        joined_leap(opened(lying, lists))


def test_those_that_do_not_follow_are_passed_over() -> None:
    snapshot, leaps, lists, lying = a_walk(5)
    place = StatePlace()
    place.go_to(snapshot)
    told_bad: list[int] = []
    run, each = LeapRun(place, told_bad.append), opened(lying, lists)
    for at in (1, 0, 3, 1, 2, 1):
        run.add(at, at, each[at])
    ((where, at_ns, leap),) = run.take()
    assert (where, at_ns, leap.since_seq, leap.seq) == (2, 2, snapshot.seq, leaps[2].seq)
    assert run.take() == []
    run.add(4, 4, each[4])
    assert run.take() == [], "one is missing before it"
    assert run.go_on(leaps[3])
    assert not run.go_on(leaps[3])
    run.add(4, 4, each[4])
    assert [found[2] for found in run.take()] == [leaps[4]]
    assert told_bad == []


def test_lists_of_hashes_are_not_joined_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leap_run, "JOINED_HASHES", 300)
    snapshot, leaps, lists, lying = a_walk(12)
    place = StatePlace()
    place.go_to(snapshot)
    run, num_full = LeapRun(place, lambda _: None), 0
    found: list[leap_run.FoundLeap] = []
    for at, each in enumerate(opened(lying, lists)):
        run.add(at, at, each)
        if run.is_full:
            found += run.take()
            num_full += 1
    found += run.take()
    assert num_full > 2
    assert (found[0][2].since_seq, found[-1][2].seq) == (snapshot.seq, leaps[-1].seq)
    assert all(one[2].seq == other[2].since_seq for one, other in pairwise(found))


def test_what_was_joined_is_kept_for_the_next_seek(
    make_messages: Callable[..., Any], record: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope_telemetry.recordings.bundles.leaps.leap_run.JOINED_ROWS", 300)
    recorded = record(900, keyframe_interval_ns=1 << 60)
    recording = Recording.open(recorded.path)
    read: list[int] = []
    chunks = recording.chunks
    raw, channel = chunks._raw, chunks.found.channels[LEAPS]

    def counted(file: Any, chunk: Any, channels: Any, *others: Any) -> Any:
        read.extend([chunk.offset] * (channel in chunk.counts))
        return raw(file, chunk, channels, *others)

    monkeypatch.setattr(chunks, "_raw", counted)
    times = {message.seq: at for at, message in recording.messages() if isinstance(message, Frame)}
    at_s = times[880]
    first, num_read = recording.state_at(at_s), len(read)
    assert num_read == len(set(read)) > 10
    again = recording.state_at(at_s)
    assert len(read) - num_read < num_read / 2, "most of them are not read again"
    for mirror in (first, again):
        assert mirror.seq == 880
        assert mirror.ledger.differences(recorded.mirror_after(882).ledger) == []
    for seq in (100, 500, 700, 880):  # into what is kept, and beyond it
        assert recording.state_at(times[seq]).ledger.differences(recorded.mirror_after(seq + 2).ledger) == []
    assert JOINED_ROWS > 1000


def test_values_without_which_of_them_is_meant_are_refused() -> None:
    _, leaps, lists, _ = a_walk(2)
    new = (RequestInfo(number=5, request_id="a", arrival_ns=1, num_prompt_tokens=1, max_tokens=1),)
    good = msgspec.msgpack.decode(pack_listed_leap(msgspec.structs.replace(leaps[0], new_requests=new), lists[100]))
    columns = {name: data for name, data in good["columns"].items() if not name.endswith("_which")}
    assert len(columns) < len(good["columns"])
    with pytest.raises(ProtocolError):
        listed_leap(msgspec.msgpack.encode(good | {"columns": columns}), lists_of(lists))
