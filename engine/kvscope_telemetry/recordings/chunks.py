"""Reads the raw messages in a chunk of a recording file. Checks every size that the chunk claims.

An unreadable chunk is decompressed only once: the reason is stored with it. Handles bytes, records and channels; must
not depend on message types. `chunk_walk` finds the chunks. Format: mcap.dev/spec. See
docs/internals/decisions/0007-recordings-have-their-own-reader.md.
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
HEADER, FOOTER, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX, METADATA = 1, 2, 4, 5, 6, 7, 12
RECORD: Final = struct.Struct("<BQ")  # opcode, length
_MESSAGE: Final = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_MESSAGE_RECORD: Final = struct.Struct("<BQHIQQ")  # record and message header together
MAX_CHUNK_MESSAGES: Final = 1 << 17
"""Maximum number of records in a chunk. Chunks of this writer hold some hundreds; 4 MiB chunks written by other tools
hold some tens of thousands.
"""
MAX_LOG_TIME_NS: Final = 1 << 62
"""First log time that is treated as damage (year 2116). Larger values could overflow when they are summed."""


class DamagedChunk(Exception):
    """Raised for a chunk that cannot be read. The message gives the reason."""


@dataclass(slots=True)
class Chunk:
    """Location of a chunk in the file, and its metadata as far as it is known."""

    offset: int
    stored_bytes: int
    inflated_bytes: int
    crc: int
    compression: str
    start_ns: int
    end_ns: int
    counts: dict[int, int] = field(default_factory=dict)
    """Number of messages by channel. Until the chunk has been read, the numbers are those of the index records after
    it.
    """
    indexed_ns: tuple[int, int] | None = None
    """First and last log time according to the index records."""
    num_frames: int | None = None
    frames_ns: tuple[int, int] | None = None
    """Log times of the first and last frame, or None while unknown."""
    damage: str = ""
    is_read: bool = False
    """Whether `counts` has the actual numbers of messages instead of those from the index records."""

    def extend_index(self, first_ns: int, last_ns: int) -> None:
        known = self.indexed_ns or (first_ns, last_ns)
        self.indexed_ns = min(known[0], first_ns), max(known[1], last_ns)

    @property
    def damage_text(self) -> str:
        return f"in its chunk at byte {self.offset}, {self.damage}"

    @property
    def is_doubtful(self) -> bool:
        """Whether the chunk's times and those in its index records contradict each other. No checksum covers
        these times.
        """
        latest_ns = max(self.end_ns, *(self.frames_ns or (0, 0)))
        return self.indexed_ns != (self.start_ns, self.end_ns) or not 0 <= latest_ns < MAX_LOG_TIME_NS

    def extend_to_frames(self) -> None:
        """Extend the chunk's time range to its last frame: the batch message only has the log time of
        its first frame.
        """
        if self.frames_ns is not None:
            self.start_ns, self.end_ns = min(self.start_ns, self.frames_ns[0]), max(self.end_ns, self.frames_ns[1])


class RawMessage(msgspec.Struct, frozen=True, gc=False):
    channel: int
    log_time_ns: int
    data: bytes


def read_chunk(
    file: BinaryIO, chunk: Chunk, decompressor: zstandard.ZstdDecompressor | None = None
) -> list[RawMessage]:
    """Return the messages of a chunk.

    Args:
        decompressor: Decompressor to reuse. Creating one takes longer than decompressing a small chunk.

    Raises:
        DamagedChunk: The chunk is unreadable. Later calls raise it again without reading.
    """
    if chunk.damage:
        raise DamagedChunk(chunk.damage)
    try:
        messages = _read_messages(file, chunk, decompressor or zstandard.ZstdDecompressor())
    except DamagedChunk as damage:
        chunk.damage = str(damage)
        raise
    if not chunk.is_read:
        chunk.counts, chunk.is_read = dict(Counter([message.channel for message in messages])), True
    return messages


def _read_messages(file: BinaryIO, chunk: Chunk, decompressor: zstandard.ZstdDecompressor) -> list[RawMessage]:
    file.seek(chunk.offset)
    data = inflated(file.read(chunk.stored_bytes), chunk, decompressor)
    if chunk.crc and zlib.crc32(data) != chunk.crc:
        raise DamagedChunk("checksum mismatch")
    return _split_messages(data)


def inflated(stored: bytes, chunk: Chunk, decompressor: zstandard.ZstdDecompressor) -> bytes:
    """Return the uncompressed data of `chunk`, or raise DamagedChunk. Never decompresses more than
    `chunk.inflated_bytes`.
    """
    if len(stored) != chunk.stored_bytes:
        raise DamagedChunk("the file ends inside it")
    data = stored
    if chunk.compression == "zstd":
        data = _decompressed(stored, chunk.inflated_bytes, decompressor)
    elif chunk.compression:
        raise DamagedChunk(f"its compression {chunk.compression!r} is not known: zstd or none")
    if len(data) != chunk.inflated_bytes:
        raise DamagedChunk(f"it holds {len(data)} bytes and claims {chunk.inflated_bytes}")
    return data


def _decompressed(stored: bytes, claimed_bytes: int, decompressor: zstandard.ZstdDecompressor) -> bytes:
    try:
        content_bytes = zstandard.frame_content_size(stored)  # the size that the decompressor would allocate
        if content_bytes != claimed_bytes:
            raise DamagedChunk(f"it holds {content_bytes} bytes and claims {claimed_bytes}")
        return decompressor.decompress(stored, max_output_size=claimed_bytes)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedChunk(str(error) or "there is not enough memory for it") from None


def _split_messages(data: bytes) -> list[RawMessage]:
    """Split the data of a chunk into its messages.

    A single loop without calls is fast enough for an overview of hours, which has hundreds of thousands of small
    messages.
    """
    messages: list[RawMessage] = []
    offset, count, num_bytes = 0, 0, len(data)
    unpack_message, message_bytes, head_bytes = _MESSAGE_RECORD.unpack_from, _MESSAGE_RECORD.size, RECORD.size
    while offset < num_bytes:
        if offset + message_bytes <= num_bytes:
            opcode, length, channel, _, log_time_ns, _ = unpack_message(data, offset)
        elif offset + head_bytes <= num_bytes:
            opcode, length = RECORD.unpack_from(data, offset)
        else:
            raise DamagedChunk("it ends within a record")
        end = offset + head_bytes + length
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
            messages.append(RawMessage(channel, log_time_ns, data[offset + message_bytes : end]))
        offset = end
    return messages
