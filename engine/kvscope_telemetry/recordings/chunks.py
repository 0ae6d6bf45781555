"""A chunk of a recording's file, and the messages in it. All that it claims is checked before it is believed.

A chunk that cannot be read is inflated once: why it cannot is remembered with it. Knows bytes and channels, no
messages. Format: mcap.dev/spec.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec
import zstandard

MAGIC: Final = b"\x89MCAP0\r\n"
FOOTER, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX, METADATA = 2, 4, 5, 6, 7, 12
RECORD: Final = struct.Struct("<BQ")  # opcode, length
_MESSAGE: Final = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_WHOLE: Final = struct.Struct("<BQHIQQ")  # both
MAX_CHUNK_MESSAGES: Final = 1 << 17
"""A chunk of ours holds some hundreds; one of 4 MiB, as other tools write them, some tens of thousands."""
MAX_LOG_TIME_NS: Final = 1 << 62
"""The year 2116: later times are damage, and would not fit where they are added up."""


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
    """Channel -> messages, by the indexes that follow the chunk until it was read, then as it is."""
    indexed_ns: tuple[int, int] | None = None
    """First and last log time by those indexes."""
    num_bundled: int | None = None
    """Frames in its bundles, once that is known."""
    damage: str = ""
    """Why it cannot be read, once that is known."""
    is_read: bool = False
    """Whether counts and times are those of the messages in it."""

    def note_indexed(self, first_ns: int, last_ns: int) -> None:
        """One more index says when its messages were."""
        before = self.indexed_ns or (first_ns, last_ns)
        self.indexed_ns = min(before[0], first_ns), max(before[1], last_ns)

    @property
    def where(self) -> str:
        """Its place and its damage, for a person."""
        return f"in its chunk at byte {self.offset}, {self.damage}"

    @property
    def is_doubtful(self) -> bool:
        """Whether counts or times, which no checksum covers, contradict each other."""
        return self.indexed_ns != (self.start_ns, self.end_ns) or not 0 <= self.end_ns < MAX_LOG_TIME_NS


class RawMessage(msgspec.Struct, frozen=True, gc=False):
    """A message as it lies in a chunk."""

    channel: int
    log_time_ns: int
    data: bytes


def read_chunk(file: BinaryIO, chunk: Chunk, unzip: zstandard.ZstdDecompressor | None = None) -> list[RawMessage]:
    """The messages of a chunk. Raises DamagedChunk; the second time without looking. `unzip`: of who reads many small
    ones, for which to make one takes longer than they do."""
    if chunk.damage:
        raise DamagedChunk(chunk.damage)
    try:
        messages = _read(file, chunk, unzip or zstandard.ZstdDecompressor())
    except DamagedChunk as damage:
        chunk.damage = str(damage)
        raise
    if not chunk.is_read:
        chunk.counts, chunk.is_read = dict(Counter([message.channel for message in messages])), True
    return messages


def _read(file: BinaryIO, chunk: Chunk, unzip: zstandard.ZstdDecompressor) -> list[RawMessage]:
    file.seek(chunk.offset)
    data = _inflated(file.read(chunk.stored_bytes), chunk, unzip)
    if chunk.crc and zlib.crc32(data) != chunk.crc:
        raise DamagedChunk("its checksum does not match")
    return _messages(data)


def _inflated(stored: bytes, chunk: Chunk, unzip: zstandard.ZstdDecompressor) -> bytes:
    """The chunk's data, never more of it than it claims."""
    if len(stored) != chunk.stored_bytes:
        raise DamagedChunk("the file ends within it")
    data = stored
    if chunk.compression == "zstd":
        data = _unzipped(stored, chunk.inflated_bytes, unzip)
    elif chunk.compression:
        raise DamagedChunk(f"its compression {chunk.compression!r} is not known: zstd or none")
    if len(data) != chunk.inflated_bytes:
        raise DamagedChunk(f"it holds {len(data)} bytes and claims {chunk.inflated_bytes}")
    return data


def _unzipped(stored: bytes, claimed: int, unzip: zstandard.ZstdDecompressor) -> bytes:
    try:
        holds = zstandard.frame_content_size(stored)  # what the decompressor would set memory aside for
        if holds != claimed:
            raise DamagedChunk(f"it holds {holds} bytes and claims {claimed}")
        return unzip.decompress(stored, max_output_size=claimed)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedChunk(str(error) or "there is not enough memory for it") from None


def _messages(data: bytes) -> list[RawMessage]:
    """One loop without calls: a course of hours is hundreds of thousands of small messages."""
    messages: list[RawMessage] = []
    at, count, num_bytes = 0, 0, len(data)
    whole, whole_bytes, head_bytes = _WHOLE.unpack_from, _WHOLE.size, RECORD.size
    while at < num_bytes:
        if at + whole_bytes <= num_bytes:
            opcode, length, channel, _, log_time_ns, _ = whole(data, at)
        elif at + head_bytes <= num_bytes:
            opcode, length = RECORD.unpack_from(data, at)
        else:
            raise DamagedChunk("it ends within a record")
        end = at + head_bytes + length
        if end > num_bytes:
            raise DamagedChunk("it ends within a record")
        count += 1
        if not opcode:
            raise DamagedChunk("zeros where a record should be")
        if count > MAX_CHUNK_MESSAGES:
            raise DamagedChunk(f"it holds more than {MAX_CHUNK_MESSAGES} records")
        if opcode == MESSAGE:
            if length < _MESSAGE.size:
                raise DamagedChunk("a message of it is too short")
            messages.append(RawMessage(channel, log_time_ns, data[at + whole_bytes : end]))
        at = end
    return messages
