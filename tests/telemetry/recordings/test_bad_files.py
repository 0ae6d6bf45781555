"""Truncated, damaged and malicious recordings: they open up to the damage, or are refused in one line."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from mcap.writer import CompressionType, Writer

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Hello
from kvscope_telemetry.recordings.chunks import MAGIC
from kvscope_telemetry.recordings.layout import MAX_CHUNK_BYTES
from kvscope_telemetry.recordings.reader import Recording

CHUNK = struct.Struct("<BQQQQI")


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        Recording.open(path)
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text
    return text


def chunk_record(stored: bytes, claimed: int, *, compression: bytes = b"zstd", crc: int = 0) -> bytes:
    body = struct.pack("<QQQI", 0, 1, claimed, crc) + struct.pack("<I", len(compression)) + compression
    body += struct.pack("<Q", len(stored)) + stored
    return struct.pack("<BQ", 6, len(body)) + body


def test_truncated_file_opens_up_to_its_last_whole_chunk(
    record: Callable[..., Any], tmp_path: Path, storm: Callable[[int, int], int]
) -> None:
    recorded = record(num_frames := 200)
    data = recorded.path.read_bytes()
    ends = [chunk.offset + chunk.stored_bytes for chunk in Recording.open(recorded.path).segments[0].message_chunks]
    frames, cut_path = recorded.frames, tmp_path / "cut.mcap"
    rng = random.Random(0)
    cuts = {rng.randrange(len(data)) for _ in range(storm(20, 60))} | {
        end + shift for end in ends for shift in (-1, 0, 1, 40)
    }
    before = 0
    for cut in sorted(cuts):
        cut_path.write_bytes(data[:cut])
        if cut < ends[0]:
            refusal(cut_path)
            continue
        recording = Recording.open(cut_path)
        found = list(recording.frames())
        assert found == frames[: len(found)]
        assert len(found) == recording.info.num_frames >= before
        assert recording.info.num_chunks == sum(end <= cut for end in ends)
        assert recording.state_at(1e9).seq == len(found)
        assert recording.num_damaged == 0
        before = len(found)
    assert before == num_frames


def test_flipped_bit_never_changes_a_frame(
    record: Callable[..., Any], tmp_path: Path, storm: Callable[[int, int], int]
) -> None:
    recorded = record(150)
    data, frames = recorded.path.read_bytes(), {frame.seq: frame for frame in recorded.frames}
    rng, num_opened, num_flips = random.Random(1), 0, storm(20, 100)
    for _ in range(num_flips):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path = tmp_path / "flipped.mcap"
        path.write_bytes(damaged)
        try:
            recording = Recording.open(path)
        except BadInput:
            continue
        num_opened += 1
        assert all(frame == frames[frame.seq] for frame in recording.frames())
        recording.state_at(1e9)
    assert num_opened > 0.6 * num_flips


@pytest.mark.parametrize("data", [b"", b"MCAP", MAGIC[:-1], b"\x00" * 4096, b"{}\n" * 100])
def test_file_that_is_no_mcap_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.mcap"
    path.write_bytes(data)
    assert refusal(path).endswith("odd.mcap' is not a recording: it does not start like an MCAP file")


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nowhere.mcap")
    assert "it is a folder, not a file" in refusal(tmp_path)


def test_mcap_of_another_tool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "robot.mcap"
    writer = Writer(str(path), compression=CompressionType.NONE)
    writer.start("ros2")
    channel = writer.register_channel("/camera", "json", 0)
    writer.add_message(channel, 5, b"{}", 5)
    writer.finish()
    assert "holds no telemetry that can be read" in refusal(path)


@pytest.mark.parametrize("claimed", [MAX_CHUNK_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_absurd_chunk_size_is_refused_before_reading(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "huge.mcap"
    path.write_bytes(MAGIC + chunk_record(zstandard.compress(b"x"), claimed))
    assert f"claims {claimed} bytes, at most {MAX_CHUNK_BYTES} are accepted" in refusal(path)


@pytest.mark.parametrize("claimed", [1000, 64 << 20])
def test_decompression_bomb_is_not_inflated(tmp_path: Path, claimed: int) -> None:
    """A 16 KB zstd frame that would become 512 MiB, with a modest claimed size."""
    path = tmp_path / "bomb.mcap"
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(512 << 20))
    assert len(bomb) < 100_000
    path.write_bytes(MAGIC + chunk_record(bomb, claimed))
    tracemalloc.start()
    text = refusal(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert f"it holds {512 << 20} bytes and claims {claimed}" in text


@pytest.mark.parametrize(
    ("record_bytes", "named"),
    [
        (chunk_record(b"abc", 3, compression=b"lz4"), "compression 'lz4' is not known"),
        (chunk_record(b"no zstd", 7), "in its chunk at byte"),
        (chunk_record(b"abc", 4, compression=b""), "holds 3 bytes and claims 4"),
        (chunk_record(b"\x05\xff\xff\xff\xff\xff\xff\xff\xff", 9, compression=b""), "ends within a record"),
        (chunk_record(b"\x05\x01" + bytes(8), 10, compression=b""), "a message of it is too short"),
        (chunk_record(b"abc", 3, compression=b"", crc=7), "checksum"),
        (struct.pack("<BQ", 6, 1 << 62) + b"abc", "holds no telemetry"),
        (struct.pack("<BQ", 6, 3) + b"abc", "holds no telemetry"),
        (struct.pack("<BQ", 7, 8) + b"\xff" * 8, "holds no telemetry"),
        (struct.pack("<BQ", 4, 9) + b"\xff" * 9, "holds no telemetry"),
    ],
)
def test_recording_with_a_contradictory_chunk_is_refused(tmp_path: Path, record_bytes: bytes, named: str) -> None:
    path = tmp_path / "bad.mcap"
    path.write_bytes(MAGIC + record_bytes)
    assert named in refusal(path)


def test_damaged_index_is_ignored(record: Callable[..., Any], tmp_path: Path) -> None:
    """Everything after the data section is overwritten; chunks are found without it."""
    recorded = record(100)
    data = recorded.path.read_bytes()
    last = Recording.open(recorded.path).segments[0].message_chunks[-1]
    end = last.offset + last.stored_bytes
    path = tmp_path / "lies.mcap"
    path.write_bytes(data[:end] + b"\x08" * (len(data) - end))
    assert Recording.open(path).info.num_frames == 100


def test_undecodable_messages_are_counted(record: Callable[..., Any], tmp_path: Path) -> None:
    messages = record(3).messages
    assert isinstance(messages[0], Hello)
    from kvscope_telemetry.recordings.writer import RecordingWriter

    with RecordingWriter(tmp_path / "mixed.mcap") as writer:
        for message in messages[:4]:
            writer.write(message)
        writer.write(messages[4], b"\xc1 not msgpack")
    recording = Recording.open(tmp_path / "mixed.mcap")
    assert [frame.seq for frame in recording.frames()] == [1, 2]
    assert recording.num_damaged == 1
