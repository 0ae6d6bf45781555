"""Bundles: frames side by side give back every byte, in the order they came, and are never believed unchecked."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader
from mcap.writer import CompressionType, Writer
from tests.conftest import examples

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import BlockRows, Ledger
from kvscope_telemetry.messages.leap import Leap, check_leap, decode_leap, encode_leap
from kvscope_telemetry.messages.telemetry import (
    Batch,
    Counters,
    Event,
    Frame,
    Heartbeat,
    Moves,
    RequestInfo,
    RequestRows,
    Timings,
    Work,
)
from kvscope_telemetry.messages.validity import check_frame
from kvscope_telemetry.messages.wire import decode_telemetry, encode
from kvscope_telemetry.recordings.bundles import placed_parents
from kvscope_telemetry.recordings.bundles.bundle import (
    _NEWER,
    TimedFrame,
    bundled_frame,
    leap_over,
    pack_bundle,
    span_of_bundle,
    unpack_bundle,
)
from kvscope_telemetry.recordings.bundles.column_names import NAMES, named
from kvscope_telemetry.recordings.bundles.gathering import Entry, num_frames_at_end, with_bundles
from kvscope_telemetry.recordings.bundles.hash_lists import HashesOf, HashList, no_lists
from kvscope_telemetry.recordings.bundles.leaps.packed_leaps import pack_leap, packed_leap
from kvscope_telemetry.recordings.bundles.numbers import TABLES, pack_table, unpack_table
from kvscope_telemetry.recordings.bundles.placed_parents import keyframe_pieces, with_parents, without_parents
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import BUNDLES, FRAMES, OTHERS, TOPICS
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter
from kvscope_telemetry.state.coalesce import state_after
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.synthetic.engine import SyntheticEngine

NAMED = Path(__file__).with_name("named_columns.mcap")
"""120 frames in bundles whose columns have names, each told by itself."""
U2, U4, U8 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
I8 = (1 << 63) - 1
FEW_IDS = st.integers(0, 9) | st.integers(0, U4)


def packed(values: list[int], form: str) -> bytes:
    return np.array(values, form).tobytes()


@st.composite
def block_rows(draw: st.DrawFn) -> BlockRows:
    count = draw(st.integers(0, 6))

    def column(form: str, most: int, few: int = 3) -> bytes:
        values = st.integers(0, few) | st.integers(0, most)
        return packed(draw(st.lists(values, min_size=count, max_size=count)), form)

    hashes = draw(st.lists(st.integers(0, 5) | st.integers(0, U8), min_size=count, max_size=count))
    parents = draw(st.lists(st.integers(0, 5) | st.integers(0, U8), min_size=count, max_size=count))
    told = [parent for parent, own in zip(parents, hashes, strict=True) if own]
    attention, measured = column("<u4", U4), column("<u4", U4)
    owners = draw(st.lists(st.integers(-1, 5) | st.integers(-1, (1 << 31) - 1), min_size=count, max_size=count))
    return BlockRows(
        ids=packed(draw(st.lists(FEW_IDS, min_size=count, max_size=count)), "<u4"),
        state=column("u1", 2, 2),
        ref_count=column("<i4", (1 << 31) - 1),
        filled=column("<u2", U2),
        owner=packed(owners, "<i4"),
        tier=column("u1", 2, 2),
        last_used_step=column("<u4", U4),
        prefix_hits=column("<u2", U2),
        hash=packed(hashes, "<u8"),
        parent=packed(told, "<u8") if any(told) or draw(st.booleans()) else b"",
        attention=attention if any(attention) else b"",
        attention_step=measured if any(measured) else b"",
    )


@st.composite
def request_rows(draw: st.DrawFn) -> RequestRows:
    count = draw(st.integers(0, 4))
    columns = [
        packed(draw(st.lists(st.integers(0, 4) | st.integers(0, most), min_size=count, max_size=count)), form)
        for form, most in (("<u4", U4), ("u1", 3), ("<u4", U4), ("<u4", U4), ("<u4", U4), ("<u2", U2), ("<u4", 9))
    ]
    table = draw(st.lists(FEW_IDS, max_size=6)) if count else []
    counts = [len(table), *[0] * (count - 1)] if count else []
    drafts = [packed(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), "<u4") for _ in range(2)]
    told = (column if any(column) else b"" for column in drafts)
    return RequestRows(*columns, packed(counts, "<u4"), packed(table, "<u4"), *told)


IDS = st.lists(FEW_IDS, max_size=4).map(lambda ids: packed(ids, "<u4"))
TIMES = st.lists(st.integers(0, U8), max_size=3).map(lambda times: packed(times, "<u8"))
COUNTS = st.integers(0, 5) | st.integers(0, I8)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    ran = draw(st.lists(FEW_IDS, max_size=4))
    tokens = [draw(FEW_IDS) for _ in ran]
    return Batch(packed(ran, "<u4"), packed(tokens, "<u4"), draw(COUNTS), draw(COUNTS))


FRAMES_OF = st.builds(
    Frame,
    epoch=st.just(7),
    seq=st.integers(1, I8),
    step=COUNTS,
    time_ns=COUNTS,
    blocks=st.just(Frame.__struct_defaults__[0]) | block_rows(),
    new_requests=st.lists(
        st.builds(
            RequestInfo, number=FEW_IDS, request_id=st.text(max_size=3), arrival_ns=COUNTS, num_prompt_tokens=COUNTS
        ),
        max_size=1,
    ).map(tuple),
    requests=request_rows(),
    batch=batches(),
    timings=st.builds(Timings, *[COUNTS] * len(Timings.__struct_fields__)),
    counters=st.builds(Counters, *[COUNTS] * len(Counters.__struct_fields__)),
    events=st.lists(st.builds(Event, kind=st.sampled_from(["admitted", "of later"]), time_ns=COUNTS), max_size=1).map(
        tuple
    ),
    first_token_ns=TIMES,
    inter_token_ns=TIMES,
    moves=st.builds(Moves, IDS, IDS, IDS, IDS),
    work=st.just(Frame.__struct_defaults__[-1]) | st.builds(Work, *[COUNTS] * len(Work.__struct_fields__)),
)


def lists_of(told: HashList) -> HashesOf:
    """What a reader has of it."""
    return lambda name, count: told.hashes[:count] if name == told.name else no_lists(name, count)


def packed_and_back(timed: list[TimedFrame]) -> list[TimedFrame]:
    told = HashList()
    return unpack_bundle(pack_bundle(timed, told), lists_of(told))


def is_sound(frame: Frame) -> bool:
    try:
        check_frame(frame)
    except ProtocolError:
        return False
    return True


@settings(max_examples=examples(50), deadline=None)
@given(frames=st.lists(FRAMES_OF.filter(is_sound), min_size=1, max_size=6), late=st.lists(st.integers(0, 9)))
def test_every_byte_comes_back(frames: list[Frame], late: list[int]) -> None:
    data = [encode(frame) for frame in frames]
    found = [bundled_frame(each) for each in data]
    timed = [(sum(late[:place]), frame) for place, frame in enumerate(found) if frame is not None]
    assert len(timed) == len(frames)
    unpacked = packed_and_back(timed)
    assert unpacked == timed
    assert [encode(frame) for _, frame in unpacked] == data


@settings(max_examples=examples(50), deadline=None)
@given(frames=st.lists(FRAMES_OF.filter(is_sound), min_size=1, max_size=6), first=st.integers(1, 9))
def test_a_leap_over_a_bundle_says_what_its_frames_do(frames: list[Frame], first: int) -> None:
    timed = [(at, msgspec.structs.replace(frame, seq=first + at)) for at, frame in enumerate(frames)]
    told = HashList()
    over = leap_over(pack_bundle(timed, told), lists_of(told))
    assert over is not None
    at_ns, leap = over
    check_leap(leap)
    last_at, last = timed[-1]
    assert (at_ns, leap.epoch, leap.since_seq, leap.seq) == (last_at, 7, first - 1, last.seq)
    found, expected = state_after([leap]), state_after([frame for _, frame in timed])
    assert found.block_ids.tolist() == expected.block_ids.tolist()
    assert found.block_columns.keys() == expected.block_columns.keys()
    assert all(np.array_equal(column, expected.block_columns[name]) for name, column in found.block_columns.items())
    assert (found.requests, found.new_requests) == (expected.requests, expected.new_requests)
    assert (found.counters, leap.step, leap.time_ns) == (expected.counters, last.step, last.time_ns)
    hole = [*timed, (last_at, msgspec.structs.replace(last, seq=last.seq + 2))]
    told = HashList()
    assert leap_over(pack_bundle(hole, told), lists_of(told)) is None


def test_a_bundle_of_before_work_was_told_opens() -> None:
    engine = SyntheticEngine(num_blocks=30, num_running=2)
    timed = [(at_ns, engine.advance()) for at_ns in range(3)]
    older = [(at_ns, msgspec.structs.replace(frame, work=Frame.__struct_defaults__[-1])) for at_ns, frame in timed]
    told = HashList()
    bundle = msgspec.msgpack.decode(pack_bundle(older, told))
    bundle["columns"] = {name: data for name, data in bundle["columns"].items() if name not in _NEWER}
    assert unpack_bundle(msgspec.msgpack.encode(bundle), lists_of(told)) == older


def test_a_recording_whose_columns_have_names_opens() -> None:
    recording = Recording.open(NAMED)
    frames = list(recording.frames())
    assert [frame.seq for frame in frames] == list(range(1, 121))
    digest = hashlib.sha256()
    for frame in frames:
        blocks, requests = frame.blocks, frame.requests
        digest.update(b"".join((blocks.ids, blocks.state, blocks.filled, blocks.owner, blocks.hash, blocks.parent)))
        digest.update(b"".join((requests.number, requests.num_computed_tokens, requests.num_output_tokens)))
        digest.update(b"".join((requests.table_start, requests.table_count, requests.table_blocks)))
        numbers = (frame.time_ns, frame.timings.run_ns, frame.counters.prompt_tokens, frame.work.flops)
        digest.update(repr((*numbers, frame.work.kv_read_bytes, frame.batch.num_prefill_tokens)).encode())
    assert digest.hexdigest() == "f8f54b1601c1f02165a1b57d850bcac83ae5d2892c462cbf3e05e5b55d74e5a0"
    assert recording.num_damaged == 0


def test_columns_have_numbers_that_stay() -> None:
    assert len(set(NAMES)) == len(NAMES)
    digest = hashlib.sha256(" ".join(NAMES[:83]).encode()).hexdigest()
    assert digest == "e9b5ca0eed97ee4a48ec811a2ed0a9f973d08cea434abb7708d5426242ad73ed", (
        "a number means another column now"
    )
    told = HashList()
    engine = SyntheticEngine(num_blocks=300, num_running=12, num_host_blocks=40)
    bundle = msgspec.msgpack.decode(pack_bundle([(at_ns, engine.advance()) for at_ns in range(60)], told))
    assert all(isinstance(number, int) for number in bundle["columns"])
    structs = {"events": Event, "new_requests": RequestInfo}
    assert {f"{name}.{field}" for name, kind in structs.items() for field in kind.__struct_fields__} <= set(NAMES)
    later = bundle | {"columns": bundle["columns"] | {len(NAMES) + 5: b"\0"}}
    with pytest.raises(ProtocolError, match=f"column {len(NAMES) + 5}: 0 to"):
        unpack_bundle(msgspec.msgpack.encode(later), lists_of(told))


def test_what_others_foretell_takes_next_to_nothing_and_comes_back() -> None:
    choose = np.random.default_rng(1)
    tokens, context = choose.integers(1, 500, 100), choose.integers(1, 1 << 40, 100)
    tokens[choose.random(100) < 0.7] = 32  # most steps decode
    others = {"tokens": tokens, "ran": tokens // 7, "context": context, "attended": context * 3}
    columns = [np.zeros(100, np.int64)] * len(TABLES["work"])
    columns[:6] = [270 * tokens + 12 * context, 12 * context, tokens * 0 + 9, 46 * context, 46 * tokens, tokens * 7 + 3]
    wild = choose.integers(-I8, I8, 100)
    wild[:3] = -I8 - 1, 0, -I8 - 1
    for last in (columns[5], wild):
        columns[5] = last
        data = pack_table("work", columns, others)
        told = unpack_table("work", data, 100, others)
        assert all(np.array_equal(told[name], column) for name, column in zip(TABLES["work"], columns, strict=True))
        assert len(data) < (250 if last is not wild else 1100)


def test_a_table_of_an_earlier_version_has_fewer_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    names = TABLES["counters"]
    columns = [np.array([place, 3 * place]) for place in range(len(names))]
    others = {"all_prefilled": np.array([0, 1]), "all_decoded": np.array([0, 2])}
    whole = pack_table("counters", columns, others)
    monkeypatch.setitem(TABLES, "counters", names[:-2])
    fewer = pack_table("counters", columns[:-2], others)
    with pytest.raises(ProtocolError, match="columns of counters: 1 to"):
        unpack_table("counters", whole, 2, others)
    monkeypatch.setitem(TABLES, "counters", names)
    told = unpack_table("counters", fewer, 2, others)
    assert [column.tolist() for column in told.values()] == [*(each.tolist() for each in columns[:-2]), [0, 0], [0, 0]]


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_an_engines_frames_take_a_fraction(num_host_blocks: int) -> None:
    engine = SyntheticEngine(num_blocks=300, num_running=12, num_host_blocks=num_host_blocks, num_disk_blocks=20)
    timed = [(at_ns, engine.advance()) for at_ns in range(300)]
    data = [encode(frame) for _, frame in timed]
    assert all(bundled_frame(each) for each in data)
    told = HashList()
    bundle = pack_bundle(timed, told)
    assert [encode(frame) for _, frame in unpack_bundle(bundle, lists_of(told))] == data
    assert len(bundle) + 8 * len(told) < sum(map(len, data)) / 4


def test_what_a_bundle_could_not_give_back_stays_as_it_came() -> None:
    data = encode(Frame(epoch=1, seq=1, step=1, time_ns=1))
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(data) | {"later": 1})
    fields = list(msgspec.msgpack.decode(data).items())
    in_another_order = msgspec.msgpack.encode(dict([fields[0], *fields[:0:-1]]))
    for each in (newer, in_another_order, b"\xc1", b"", encode(Heartbeat(epoch=1, time_ns=1, seq=1, step=1))):
        assert bundled_frame(each) is None
    assert bundled_frame(data) is not None
    assert bundled_frame(newer, decode_telemetry(newer)) is None


HASHED = BlockRows(
    ids=bytes(4),
    state=b"\1",
    ref_count=bytes(4),
    filled=bytes(2),
    owner=bytes(4),
    tier=b"\0",
    last_used_step=bytes(4),
    prefix_hits=bytes(2),
    hash=b"\7" * 8,
    parent=b"\5" * 8,
)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": BlockRows(ids=bytes(4))},
        {"blocks": msgspec.structs.replace(HASHED, hash=b"\7" * 16)},
        {"blocks": msgspec.structs.replace(HASHED, parent=bytes(7))},
        {"blocks": msgspec.structs.replace(HASHED, hash=bytes(8))},
        {"requests": RequestRows(number=bytes(4))},
        {"batch": Batch(number=bytes(8), num_tokens=bytes(4))},
        {"moves": Moves(evicted=bytes(3))},
        {"first_token_ns": bytes(9)},
        {"time_ns": 1 << 63},
    ],
)
def test_frames_that_contradict_themselves_stay_as_they_came(change: dict[str, Any]) -> None:
    """Whoever recorded them."""
    frames = [Frame(epoch=1, seq=seq, step=seq, time_ns=seq, blocks=HASHED) for seq in range(1, 7)]
    assert len(with_bundles([(FRAMES, seq, encode(frame)) for seq, frame in enumerate(frames)], HashList())) == 2
    frames[3] = msgspec.structs.replace(frames[3], **change)
    entries = [(FRAMES, seq, encode(frame)) for seq, frame in enumerate(frames)]
    assert with_bundles(entries, HashList()) == entries
    assert with_bundles(entries, HashList(), frames) == entries


def in_order(written: list[Entry]) -> list[Entry]:
    """As a reader gives the messages of a chunk."""
    found: list[Entry] = []
    for channel, at_ns, data in written:
        if channel != BUNDLES:
            found.append((channel, at_ns, data))
        elif num_frames_at_end(data) is None:
            found += [(FRAMES, frame_ns, encode(frame)) for frame_ns, frame in unpack_bundle(data, no_lists)]
    return sorted(found, key=lambda entry: entry[1]) if any(each[0] == BUNDLES for each in written) else found


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("fffffoou"), st.integers(0, 2)), max_size=30))
def test_messages_keep_their_order(told: list[tuple[str, int]]) -> None:
    """Frames, other messages and frames of a later version, some of them at the same time."""
    entries: list[Entry] = []
    at_ns = 0
    for seq, (kind, later_ns) in enumerate(told, 1):
        at_ns += later_ns
        frame = encode(Frame(epoch=1 + seq // 12, seq=seq, step=seq, time_ns=seq))
        newer = msgspec.msgpack.encode(msgspec.msgpack.decode(frame) | {"later": 1})
        channel = OTHERS if kind == "o" else FRAMES
        entries.append((channel, at_ns, newer if kind == "u" else b"%d" % seq if kind == "o" else frame))
    written = with_bundles(entries, HashList())
    assert in_order(written) == entries
    for (channel, begin_ns, head), (_, end_ns, _) in pairwise(written):
        if channel == BUNDLES and num_frames_at_end(head) is None:
            times = [frame_ns for frame_ns, _ in unpack_bundle(head, no_lists)]
            assert span_of_bundle(head) == (len(times), end_ns)
            assert (times[0], times[-1]) == (begin_ns, end_ns)


def test_damage_is_refused_and_nothing_worse() -> None:
    engine = SyntheticEngine(num_blocks=100, num_running=4)
    told = HashList()
    good = pack_bundle([(at_ns, engine.advance()) for at_ns in range(30)], told)
    lists = lists_of(told)
    choose = random.Random(2)
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(choose.choice((1, 1, 4))):
            bad[choose.randrange(len(bad))] = choose.randrange(256)
        with contextlib.suppress(ProtocolError):
            unpack_bundle(bytes(bad[: choose.choice((len(bad), choose.randrange(len(bad))))]), lists)
    columns = msgspec.msgpack.decode(good)
    by_name = named(columns["columns"])
    of_few = [name for name in by_name if name.startswith(("events.", "new_requests."))]  # absent: defaults
    assert of_few
    for name in by_name.keys() - _NEWER.keys() - set(of_few):
        less = columns | {"columns": {other: data for other, data in by_name.items() if other != name}}
        with pytest.raises(ProtocolError):
            unpack_bundle(msgspec.msgpack.encode(less), lists)
    for count in (0, -1, 1 << 40):
        with pytest.raises(ProtocolError):
            unpack_bundle(msgspec.msgpack.encode(columns | {"num_frames": count}), lists)


def test_rows_that_take_no_bytes_are_bounded() -> None:
    """A column of zeros takes a byte however long it is."""
    good = msgspec.msgpack.decode(pack_bundle([(1, Frame(epoch=1, seq=1, step=1, time_ns=1))], HashList()))
    many = b"\x05" + (1 << 37).to_bytes(5, "little")
    for name in ("rows", "requests.rows", "batch.ran_rows", "moves.saved_rows", "inter_token_ns_rows"):
        claimed = good | {"columns": named(good["columns"]) | {name: many}}
        with pytest.raises(ProtocolError, match="more rows than are accepted"):
            unpack_bundle(msgspec.msgpack.encode(claimed), no_lists)


def test_a_file_that_another_tool_wrote_anew(record: Callable[..., Any], tmp_path: Path) -> None:
    """Its chunks are others, and the numbers of frames beside them are gone."""
    recorded = record(300)
    path = tmp_path / "anew.mcap"
    with recorded.path.open("rb") as file, path.open("wb") as into:
        writer = Writer(into, chunk_size=60_000, compression=CompressionType.ZSTD)
        writer.start("kvscope")
        channels: dict[int, int] = {}
        for _, channel, message in make_reader(file).iter_messages(log_time_order=True):
            if channel.id not in channels:
                channels[channel.id] = writer.register_channel(channel.topic, channel.message_encoding, 0)
            writer.add_message(channels[channel.id], message.log_time, message.data, message.publish_time)
        writer.finish()
    found = Recording.open(path)
    assert found.info.num_frames == 300
    assert list(found.frames()) == recorded.frames
    assert found.state_at(1e9).ledger.equals(recorded.mirror_after(302).ledger)


def test_a_recording_of_before_bundles_opens(record: Callable[..., Any], tmp_path: Path) -> None:
    """Its frames lie one by one, each as it came."""
    messages = record(120).messages
    path = tmp_path / "older.mcap"
    with path.open("wb") as into:
        writer = Writer(into, chunk_size=40_000, compression=CompressionType.ZSTD)
        writer.start("kvscope")
        channels = {name: writer.register_channel(name, "msgpack", 0) for name in list(TOPICS.values())[:4]}
        for place, message in enumerate(messages):
            topic = "/kvscope/frames" if isinstance(message, Frame) else "/kvscope/state"
            writer.add_message(channels[topic], 10**18 + place, encode(message), 10**18 + place)
        writer.finish()
    found = Recording.open(path)
    assert found.info.num_frames == 120
    assert [message for _, message in found.messages()] == messages


def test_frames_that_are_few_or_newer_lie_beside_bundles(record: Callable[..., Any], tmp_path: Path) -> None:
    messages = record(200).messages
    newer = {60, 61, 62, 150}
    with RecordingWriter(tmp_path / "mixed.mcap") as writer:
        for message in messages:
            data = encode(message)
            if isinstance(message, Frame) and message.seq in newer:
                data = msgspec.msgpack.encode(msgspec.msgpack.decode(data) | {"later": 1})
            assert writer.write(message, data, wait=True)
    found = Recording.open(tmp_path / "mixed.mcap")
    assert [message for _, message in found.messages()] == messages
    assert found.info.num_frames == 200
    raw = [each.data for each in found.raw_messages(0, 1 << 62) if each.kind == FRAMES]
    assert [msgspec.msgpack.decode(data).get("later") is not None for data in raw].count(True) == len(newer)


def test_parents_lie_once_and_come_back() -> None:
    engine = SyntheticEngine(num_blocks=2000, num_running=12, num_host_blocks=40, num_disk_blocks=20)
    for _ in range(200):
        engine.advance()
    whole = engine.snapshot()
    some = engine.ledger.pack(np.arange(0, 2000, 3, np.uint32))
    leap = Leap(epoch=1, seq=9, since_seq=3, step=9, time_ns=9, blocks=some)
    for message, data in ((whole, encode(whole)), (leap, encode_leap(leap))):
        assert message.blocks.parent
        bare = without_parents(message)
        assert with_parents(bare) == data
        assert with_parents(data) == data
    assert len(without_parents(whole)) < len(encode(whole)) - len(whole.blocks.parent) // 2


@settings(max_examples=examples(100), deadline=None)
@given(blocks=block_rows())
def test_any_parents_come_back(blocks: BlockRows) -> None:
    leap = Leap(epoch=1, seq=9, since_seq=3, step=9, time_ns=9, blocks=blocks)
    assert with_parents(without_parents(leap)) == encode_leap(leap)


def test_parents_that_stand_nowhere_are_refused() -> None:
    engine = SyntheticEngine(num_blocks=200, num_running=4)
    good = msgspec.msgpack.decode(without_parents(engine.snapshot()))
    for change in ({"places": b"\x01\x04"}, {"told": b"\0" * 8}, {"message": b"\xc1"}, {"places": b"\x00"}):
        with pytest.raises(ProtocolError):
            with_parents(msgspec.msgpack.encode(good | change))


@settings(max_examples=examples(100), deadline=None)
@given(blocks=block_rows(), step=st.integers(0, (1 << 32) - 1))
def test_any_packed_leap_comes_back(blocks: BlockRows, step: int) -> None:
    leap = Leap(epoch=1, seq=9, since_seq=3, step=step, time_ns=9, blocks=blocks)
    assert (packed_leap(pack_leap(leap)) or decode_leap(pack_leap(leap))) == leap
    assert packed_leap(encode_leap(leap)) is None
    assert packed_leap(without_parents(leap)) is None


GOLDEN_LEAP = """
87a474797065aa5061636b65644c656170a76d657373616765c4a3de0007a474797065a44c656170a565706f636801a373657109a47374
657029a774696d655f6e7309a6626c6f636b7386a57374617465c403000000a97265665f636f756e74c40c000000000000000000000000
a666696c6c6564c406000000000000a474696572c403000000a468656174c406000000000000a468617368c41811111111111111112222
2222222222223333333333333333a973696e63655f73657103a3696473c407020a02fc000006a56f776e6572c404010e000fa3616765c4
040102004ea6706c61636573c40401000200a4746f6c64c41000000000000000004444444444444444
"""
"""Rows 5, 6 and 900; the second and the third after the first in their text."""


def test_golden_bytes_of_a_packed_leap() -> None:
    rows = Ledger(1000)
    rows.owner[[5, 6, 900]] = 7, 7, -1
    rows.last_used_step[[5, 6, 900]] = 40, 41, 2
    rows.hash[[5, 6, 900]] = 0x1111111111111111, 0x2222222222222222, 0x3333333333333333
    rows.parent[[6, 900]] = 0x1111111111111111, 0x4444444444444444
    blocks = rows.pack(np.array([5, 6, 900], np.uint32))
    leap = Leap(epoch=1, seq=9, since_seq=3, step=41, time_ns=9, blocks=blocks)
    golden = bytes.fromhex(GOLDEN_LEAP.replace("\n", ""))
    assert pack_leap(leap) == golden
    assert packed_leap(golden) == leap


def test_a_packed_leap_that_is_damaged_is_refused() -> None:
    engine = SyntheticEngine(num_blocks=200, num_running=4)
    leap = Leap(epoch=1, seq=9, since_seq=3, step=9, time_ns=9, blocks=engine.ledger.pack(np.arange(99, dtype="<u4")))
    good = msgspec.msgpack.decode(pack_leap(leap))
    assert set(good) == {"type", "message", "ids", "owner", "age", "places", "told"}
    damages: list[dict[str, object]] = [{name: b"\x01\x04"} for name in ("ids", "owner", "age", "places")]
    for change in (*damages, {"told": b"\0" * 8}, {"message": b"\xc1"}, {"message": None}, {"ids": b""}):
        with pytest.raises(ProtocolError):
            packed_leap(msgspec.msgpack.encode(good | change))


@pytest.mark.parametrize("num_blocks", [1, 200, 20_000])
def test_a_keyframe_lies_without_what_it_tells_twice(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = Mirror()
    mirror.reset(SyntheticEngine(num_blocks=num_blocks, num_running=num_blocks // 8).snapshot())
    whole = encode(snapshot_of(mirror))
    pieces = b"".join(keyframe_pieces(snapshot_of(mirror), mirror.ledger))
    assert with_parents(pieces) == whole
    assert (len(pieces) < len(whole)) is bool(mirror.ledger.parent.any())
    monkeypatch.setattr(placed_parents, "MAX_PLACED_ROWS", num_blocks - 1)
    assert b"".join(keyframe_pieces(snapshot_of(mirror), mirror.ledger)) == whole
