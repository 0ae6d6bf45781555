"""Recordings that would cost unbounded time or memory: refused early, or opened in part within a stated budget."""

from __future__ import annotations

import socket
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from tests.processes import make_named_pipe

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Goodbye, Hello
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings import chunks as chunk_files
from kvscope_telemetry.recordings import read_budget as budgets
from kvscope_telemetry.recordings import survey as surveys
from kvscope_telemetry.recordings.chunks import MAGIC, MAX_CHUNK_MESSAGES
from kvscope_telemetry.recordings.layout import (
    CHECKPOINTS,
    FORMAT_VERSION,
    FRAMES,
    HELLOS,
    KEYFRAMES,
    MESSAGES,
    PROFILE,
    SNAPSHOTS,
)
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ReadBudget, ReadBudgetSpent
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.regular_file import open_regular, stored_bytes

CHUNK_HEAD = struct.Struct("<QQQII")
Record = Callable[..., Any]


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        Recording.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def chunk(data: bytes, *, times: tuple[int, int] = (0, 1)) -> bytes:
    stored = zstandard.compress(data)
    body = CHUNK_HEAD.pack(*times, len(data), 0, 4) + b"zstd" + struct.pack("<Q", len(stored)) + stored
    return struct.pack("<BQ", 6, len(body)) + body


def message(channel: int, data: bytes, log_time_ns: int = 0) -> bytes:
    return struct.pack("<BQHIQQ", 5, 22 + len(data), channel, 0, log_time_ns, log_time_ns) + data


def good_chunk(make_messages: Callable[..., Any]) -> bytes:
    hello, snapshot, *_ = make_messages(5)
    at = 1_000
    return chunk(b"".join(message(HELLOS, encode(each), at) for each in (hello, snapshot)), times=(at, at))


def find_pipe(path: Path) -> Path:
    make_named_pipe(path)
    return path


def find_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def find_link_to_pipe(path: Path) -> Path:
    path.symlink_to(find_pipe(path.with_name("pipe")))
    return path


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (find_pipe, "it is a named pipe"),
        (find_link_to_pipe, "it is a named pipe"),
        (find_socket, "it is a socket"),
        (lambda path: Path("/dev/zero"), "it is a device"),
        (lambda path: path.parent, "it is a folder"),
    ],
)
def test_path_that_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], Path], named: str
) -> None:
    path = make(tmp_path / "odd.mcap")
    assert refusal(path) == f"recording {str(path)!r} cannot be read: {named}, not a file"


def test_impossible_file_name_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "a\0b.mcap")
    assert "File name too long" in refusal(tmp_path / ("x" * 5000))


def test_sparse_hole_of_10_gib_ends_the_recording(record: Record, tmp_path: Path) -> None:
    data = record(50).path.read_bytes()
    whole, empty = tmp_path / "whole.mcap", tmp_path / "empty.mcap"
    for path, start in ((whole, data[: -len(data) // 4]), (empty, MAGIC)):
        with path.open("wb") as file:
            file.write(start)
            file.truncate(10 << 30)
    recording = Recording.open(whole)
    assert 0 < len(list(recording.frames())) <= 50
    assert recording.damage_summary, "the chunk that runs into the hole is damaged, or there is none"
    assert "looked at" not in recording.damage_details, "the hole is not walked through"
    with open_regular(whole) as file:
        assert len(data) // 2 < stored_bytes(file) < 16 << 20, "a hole does not add to the read budget"
    assert "holds no telemetry" in refusal(empty)


def test_recording_of_empty_records_is_refused_before_too_much_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "MAX_STEP_BYTES", 1 << 20)
    monkeypatch.setattr(budgets, "STEP_BYTES_A_STORED_BYTE", 8)
    path = tmp_path / "nothing.mcap"
    path.write_bytes(MAGIC + struct.pack("<BQ", 128, 0) * 100_000)
    assert refusal(path).endswith("MiB would have to be read")


def test_millions_of_tiny_messages_in_a_chunk_are_refused(tmp_path: Path, make_messages: Callable[..., Any]) -> None:
    tiny = message(HELLOS, b"\x80") * 200_000
    path = tmp_path / "tiny.mcap"
    path.write_bytes(MAGIC + chunk(tiny))
    assert f"it holds more than {MAX_CHUNK_MESSAGES} records" in refusal(path)
    path.write_bytes(MAGIC + good_chunk(make_messages) + chunk(tiny))
    recording = Recording.open(path)
    assert recording.num_damaged == 1
    assert recording.damage_summary == "damaged parts left out"
    assert f"more than {MAX_CHUNK_MESSAGES} records" in recording.damage_details


def test_chunks_of_zeros_are_inflated_once_within_a_budget(
    tmp_path: Path, make_messages: Callable[..., Any], monkeypatch: Any
) -> None:
    """100 chunks of 16 MiB: only some of them are inflated, none of them twice."""
    monkeypatch.setattr(budgets, "MAX_STEP_BYTES", 64 << 20)
    path = tmp_path / "zeros.mcap"
    zeros = chunk(bytes(16 << 20))
    path.write_bytes(MAGIC + good_chunk(make_messages) + zeros * 100)
    inflated: list[int] = []
    decompressor = zstandard.ZstdDecompressor

    class Counted:
        def decompress(self, data: bytes, max_output_size: int) -> bytes:
            inflated.append(max_output_size)
            return decompressor().decompress(data, max_output_size=max_output_size)

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Counted)
    recording = Recording.open(path)
    assert recording.damage_summary == "opened in part"
    assert "MiB would have to be read" in recording.damage_details
    assert sum(inflated) < 2 * ((64 << 20) + 32 * path.stat().st_size)
    count = len(inflated)
    list(recording.messages(keyframes=True))
    recording.state_at(1e9)
    assert max(inflated[count:]) < 1 << 20, "a damaged chunk must be inflated once"


def test_damaged_chunk_of_a_recording_is_decompressed_only_once(
    record: Record, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its times and counts are valid, so that opening does not inflate it; every pass over the file reads it."""
    recorded = record(300)
    bad = [chunk for chunk in Recording.open(recorded.path).segments[0].message_chunks if chunk.num_frames][1]
    data = bytearray(recorded.path.read_bytes())
    data[bad.offset + bad.stored_bytes // 2] ^= 1
    path = tmp_path / "bad.mcap"
    path.write_bytes(data)
    times: Counter[int] = Counter()
    inflate = chunk_files.inflated

    def counted(stored: bytes, chunk: chunk_files.Chunk, *rest: Any) -> bytes:
        times[chunk.offset] += 1
        return inflate(stored, chunk, *rest)

    monkeypatch.setattr(chunk_files, "inflated", counted)
    recording = Recording.open(path)
    for _ in range(3):
        assert 0 < len(list(recording.frames())) < len(recorded.frames)
        recording.state_at(recording.info.duration_s)
    assert recording.num_damaged == 1
    assert times[bad.offset] == 1


def test_total_claimed_size_of_chunks_is_bounded(
    tmp_path: Path, make_messages: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr(budgets, "MAX_INFLATED_BYTES", 1 << 20)
    path = tmp_path / "many.mcap"
    path.write_bytes(MAGIC + good_chunk(make_messages) + chunk(bytes(1 << 20)) * 100)
    assert "its chunks claim more than" in Recording.open(path).damage_details


def test_opening_reports_progress_and_can_be_cancelled(record: Record, monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "_PROGRESS_EVERY", 1)
    path = record(200).path
    shares: list[float] = []
    Recording.open(path, lambda share: shares.append(share) is None)
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] < shares[-1] <= 1.0
    with pytest.raises(OpeningCancelled):
        Recording.open(path, lambda share: share < 0.3)


def test_opening_that_takes_too_long_returns_a_part(record: Record, monkeypatch: Any) -> None:
    monkeypatch.setattr(budgets, "_PROGRESS_EVERY", 1)
    now = iter(range(1 << 30))
    monkeypatch.setattr(surveys, "ReadBudget", lambda stored, watch: ReadBudget(stored, watch, clock=now.__next__))
    assert "it took longer than 30 s" in Recording.open(record(2_000).path).damage_details
    spent = ReadBudget(0, max_seconds=0.5, clock=now.__next__)
    with pytest.raises(ReadBudgetSpent):
        spent.spend(1)


def test_flipped_byte_in_chunk_times_changes_nothing(record: Record, tmp_path: Path) -> None:
    """Chunk times are not covered by the checksum; the times of the messages count."""
    recorded = record(300)
    data = recorded.path.read_bytes()
    whole = Recording.open(recorded.path)
    path = tmp_path / "flipped.mcap"
    for each in whole.segments[0].message_chunks[:6] + whole.segments[0].message_chunks[-1:]:
        head = data.rindex(struct.pack("<QII", each.inflated_bytes, each.crc, 4), 0, each.offset) - 16
        for byte in range(16):
            flipped = bytearray(data)
            flipped[head + byte] ^= 0x40
            path.write_bytes(flipped)
            found = Recording.open(path)
            assert found.info == whole.info
            assert (found.start_ns, found.num_damaged) == (whole.start_ns, 0)
    assert found.state_at(3.0).ledger.equals(whole.state_at(3.0).ledger)
    assert list(found.frames()) == recorded.frames


def test_message_times_beyond_the_year_2116_in_a_recording_are_ignored(
    tmp_path: Path, make_messages: Callable[..., Any]
) -> None:
    """Without an index, message times are used; a time in the year 2300 is damage."""
    hello, snapshot, *_ = make_messages(1)
    state = b"".join(message(HELLOS, encode(each), 10**18) for each in (hello, snapshot))
    late = message(MESSAGES, encode(Goodbye(epoch=1)), 10**19)
    path = tmp_path / "late.mcap"
    path.write_bytes(MAGIC + chunk(late) + chunk(state, times=(0, 1 << 63)) + chunk(late))
    recording = Recording.open(path)
    assert (recording.info.duration_s, recording.start_ns, recording.num_damaged) == (0.0, 10**18, 2)
    assert "after the year 2116" in recording.damage_details


def test_message_outside_the_times_of_its_chunk_is_skipped(record: Record) -> None:
    recording = Recording.open(record(100).path)
    assert isinstance(next(iter(recording.messages()))[1], Hello)
    first = next(each for each in recording.segments[0].message_chunks if each.num_frames)
    first.end_ns = first.start_ns
    before = len(list(recording.frames()))
    damaged = recording.num_damaged
    assert before < 100
    assert damaged > 0
    list(recording.frames())
    assert recording.num_damaged == damaged


def columns(num_records: int, columns: dict[str, tuple[str, bytes]], kind: str = "Frame") -> bytes:
    """Return a columns message with arbitrary contents."""
    stored = {"kind": kind, "num_records": num_records, "columns": columns}
    return zstandard.compress(msgspec.msgpack.encode(stored))


def without_end(path: Path) -> tuple[bytes, int]:
    """Return a file up to its last chunk, and the end time of that chunk."""
    recording = Recording.open(path)
    last = max(recording.segments[0]._survey.chunks, key=lambda each: each.offset)
    return path.read_bytes()[: last.offset + last.stored_bytes], recording.end_ns


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        zstandard.compress(b"\xc1"),
        b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\1\0\0",  # claims a tebibyte
        columns(0, {}),
        columns(1 << 40, {}),
        columns(1 << 16, {}, "Snapshot"),
        columns(2, {"seq": ("<i8", b"1")}),
        columns(2, {"seq": ("<f8", bytes(16))}),
        columns(1, {"blocks#": ("<u4", b"\xff" * 4)}),
        columns(1, {"blocks#": ("<u4", b"\0\1\0\0"), "blocks.ids": ("<u4", bytes(4))}),
        columns(1, {"blocks#": ("<u4", b"\1\0\0\0"), "blocks.hash": ("=<u4", b"\1\0\0\0")}),
        columns(1, {"blocks#": ("<u4", b"\1\0\0\0"), "blocks.hash": ("=<u4", b"\7\0\0\0")}),
        columns(1, {"moves.evicted#": ("<u4", b"\xff" * 4)}),
        columns(1, {"events": ("msgpack", b"\xdd\xff\xff\xff\xff")}),
        columns(1, {"events": ("msgpack", b"\x90")}),
    ],
)
def test_invalid_columns_are_skipped_cheaply(record: Record, tmp_path: Path, data: bytes) -> None:
    whole, at_ns = without_end(record(100).path)
    path = tmp_path / "lies.mcap"
    for channel in (FRAMES, SNAPSHOTS, KEYFRAMES, CHECKPOINTS):
        path.write_bytes(whole + chunk(message(channel, data, at_ns), times=(at_ns, at_ns)))
        recording = Recording.open(path)
        tracemalloc.start()
        assert len(list(recording.messages(keyframes=True))) >= 102
        recording.state_at(recording.info.duration_s)
        assert recording.num_damaged == 1
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 20


def test_total_claimed_size_of_columns_is_bounded(record: Record, tmp_path: Path, monkeypatch: Any) -> None:
    whole, at_ns = without_end(record(100).path)
    monkeypatch.setattr(budgets, "MAX_INFLATED_BYTES", 8 << 20)
    monkeypatch.setattr(budgets, "INFLATED_BYTES_A_STORED_BYTE", 0)
    zeros = columns(1, {"unknown": ("<i8", bytes(1 << 20))})
    path = tmp_path / "many.mcap"
    path.write_bytes(whole + chunk(message(FRAMES, zeros, at_ns), times=(at_ns, at_ns)) * 100)
    recording = Recording.open(path)
    list(recording.messages())
    assert recording.num_damaged > 90


@pytest.mark.parametrize("profile", ["kvscope", "kvscope/0", "kvscope/999"])
def test_other_format_version_is_refused_with_advice(record: Record, tmp_path: Path, profile: str) -> None:
    data = record(20).path.read_bytes()
    length = 4 + len(PROFILE) + 4 + len("kvscope")
    head = struct.pack("<I", len(profile)) + profile.encode() + struct.pack("<I7s", 7, b"kvscope")
    path = tmp_path / "other.mcap"
    path.write_bytes(MAGIC + struct.pack("<BQ", 1, len(head)) + head + data[len(MAGIC) + 9 + length :])
    said = refusal(path)
    assert f"has format {profile.partition('/')[2] or 0}, this version reads format {FORMAT_VERSION}" in said
    assert "open it with the version that recorded it" in said
