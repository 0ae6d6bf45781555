"""The chunks of a recording's file: where they are, and the messages in one. All that a file claims is checked.

The file's own index at its end is not used: the chunks are found by walking over the records, so a file that was cut
off is read like a whole one, and an index that lies is of no consequence. Knows bytes and channels, no messages.
Format: mcap.dev/spec.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import zstandard

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.layout import MAX_CHUNK_BYTES, MAX_CHUNKS, TOPICS

MAGIC: Final = b"\x89MCAP0\r\n"
FOOTER, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX = 2, 4, 5, 6, 7
_RECORD: Final = struct.Struct("<BQ")  # opcode, length
_CHUNK: Final = struct.Struct("<QQQII")  # first and last log time, inflated size, CRC, length of the compression's name
_MESSAGE: Final = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_INDEX: Final = struct.Struct("<HI")  # channel, bytes of entries
_INDEX_ENTRY_BYTES: Final = 16
_MAX_CHANNEL_BYTES: Final = 4096


class DamagedChunk(Exception):
    """A chunk that cannot be read; says why."""


@dataclass(slots=True)
class Chunk:
    """Where a chunk is, and what is said of it."""

    offset: int
    """Of its data in the file."""
    stored_bytes: int
    inflated_bytes: int
    crc: int
    compression: str
    start_ns: int
    end_ns: int
    counts: dict[int, int] = field(default_factory=dict)
    """Channel -> messages, by the indexes that follow the chunk; empty when the file ends before them."""


@dataclass(slots=True)
class ChunkList:
    """The whole chunks of a file."""

    chunks: list[Chunk] = field(default_factory=list)
    topics: dict[str, int] = field(default_factory=lambda: {topic: channel for channel, topic in TOPICS.items()})
    """Topic -> channel."""
    is_complete: bool = False
    """Whether the file ends as it should."""


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message as it lies in a chunk."""

    channel: int
    log_time_ns: int
    data: bytes


def find_chunks(path: Path) -> ChunkList:
    """The chunks of `path` up to where it is cut off. Raises BadInput for what is no such file, or claims too much."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadInput(f"{str(path)!r} is not a recording: it does not begin as an MCAP file does")
            return _walk(path, file)
    except OSError as error:
        raise BadInput(f"recording {str(path)!r} cannot be read: {error.strerror}") from None


def read_chunk(file: BinaryIO, chunk: Chunk) -> list[RawMessage]:
    """The messages of a chunk. Raises DamagedChunk."""
    file.seek(chunk.offset)
    data = _inflated(file.read(chunk.stored_bytes), chunk)
    if chunk.crc and zlib.crc32(data) != chunk.crc:
        raise DamagedChunk("its checksum does not match")
    return [message for message in map(_message, _records(data)) if message is not None]


def _walk(path: Path, file: BinaryIO) -> ChunkList:
    found, end = ChunkList(), path.stat().st_size
    at = len(MAGIC)
    while head := file.read(_RECORD.size):
        if len(head) < _RECORD.size:
            break
        opcode, length = _RECORD.unpack(head)
        at += _RECORD.size
        if at + length > end:
            break
        found.is_complete = found.is_complete or opcode == FOOTER
        _note(path, file, opcode, at, length, found)
        at += length
        file.seek(at)
        if opcode == FOOTER:
            break
    return found


def _note(path: Path, file: BinaryIO, opcode: int, at: int, length: int, found: ChunkList) -> None:
    if opcode == CHUNK:
        if len(found.chunks) >= MAX_CHUNKS:
            raise BadInput(f"recording {str(path)!r} has more than {MAX_CHUNKS} chunks")
        chunk = _chunk(file, at, length)
        if chunk is not None:
            _check_size(path, chunk)
            found.chunks.append(chunk)
    elif opcode == MESSAGE_INDEX and found.chunks and length >= _INDEX.size:
        channel, num_bytes = _INDEX.unpack(file.read(_INDEX.size))
        found.chunks[-1].counts[channel] = min(num_bytes, length) // _INDEX_ENTRY_BYTES
    elif opcode == CHANNEL and length <= _MAX_CHANNEL_BYTES:
        _note_channel(file.read(length), found.topics)


def _chunk(file: BinaryIO, at: int, length: int) -> Chunk | None:
    """The head of a chunk record; None when it contradicts itself."""
    if length < _CHUNK.size + 8:
        return None
    start_ns, end_ns, inflated, crc, name_bytes = _CHUNK.unpack(file.read(_CHUNK.size))
    if name_bytes > 16 or length < _CHUNK.size + name_bytes + 8:
        return None
    name = file.read(name_bytes).decode("ascii", "replace")
    (stored,) = struct.unpack("<Q", file.read(8))
    offset = at + _CHUNK.size + name_bytes + 8
    if offset + stored != at + length:
        return None
    return Chunk(offset, stored, inflated, crc, name, start_ns, end_ns)


def _check_size(path: Path, chunk: Chunk) -> None:
    size = max(chunk.inflated_bytes, chunk.stored_bytes)
    if size > MAX_CHUNK_BYTES:
        raise BadInput(
            f"recording {str(path)!r} is refused: its chunk at byte {chunk.offset} claims {size} bytes,"
            f" at most {MAX_CHUNK_BYTES} are accepted"
        )


def _note_channel(data: bytes, topics: dict[str, int]) -> None:
    """A channel record: id, schema, topic, and more that is of no interest here."""
    if len(data) >= 8:
        channel, _, size = struct.unpack_from("<HHI", data)
        topic = data[8 : 8 + size].decode("utf-8", "replace")
        if topic in topics:
            topics[topic] = channel


def _inflated(stored: bytes, chunk: Chunk) -> bytes:
    """The chunk's data, never more of it than it claims."""
    if len(stored) != chunk.stored_bytes:
        raise DamagedChunk("the file ends within it")
    data = stored
    if chunk.compression == "zstd":
        data = _unzipped(stored, chunk.inflated_bytes)
    elif chunk.compression:
        raise DamagedChunk(f"its compression {chunk.compression!r} is not known: zstd or none")
    if len(data) != chunk.inflated_bytes:
        raise DamagedChunk(f"it holds {len(data)} bytes and claims {chunk.inflated_bytes}")
    return data


def _unzipped(stored: bytes, claimed: int) -> bytes:
    try:
        holds = zstandard.frame_content_size(stored)  # what the decompressor would set memory aside for
        if holds != claimed:
            raise DamagedChunk(f"it holds {holds} bytes and claims {claimed}")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=claimed)
    except zstandard.ZstdError as error:
        raise DamagedChunk(str(error)) from None


def _records(data: bytes) -> Iterator[tuple[int, memoryview]]:
    view, at = memoryview(data), 0
    while at < len(view):
        if at + _RECORD.size > len(view):
            raise DamagedChunk("it ends within a record")
        opcode, length = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        if at + length > len(view):
            raise DamagedChunk("it ends within a record")
        yield opcode, view[at : at + length]
        at += length


def _message(record: tuple[int, memoryview]) -> RawMessage | None:
    opcode, body = record
    if opcode != MESSAGE:
        return None
    if len(body) < _MESSAGE.size:
        raise DamagedChunk("a message of it is too short")
    channel, _, log_time_ns, _ = _MESSAGE.unpack_from(body)
    return RawMessage(channel, log_time_ns, bytes(body[_MESSAGE.size :]))
