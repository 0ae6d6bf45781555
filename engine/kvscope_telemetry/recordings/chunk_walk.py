"""Finds the chunks of a recording file. Checks every size that the file claims.

Chunks are found by walking over the records. The index at the end of the file is not used, so a truncated file is read
like a complete one, and a wrong index has no effect. After an invalid record the walk continues at the next valid
chunk, so that one wrong length costs one chunk. Handles bytes, records and channels; must not depend on message types.
Format: mcap.dev/spec.

The reader of the `mcap` package is not used, even for undamaged files, because damage is only known after reading. The
package's reader cannot read a file without its end, continue after a damaged record, name and count what was skipped,
refuse a size before decompression, or stop at a number of records in a chunk. It also takes twice as long to walk over
the records. See docs/internals/decisions/0007-recordings-have-their-own-reader.md.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from kvscope_telemetry.recordings.chunks import (
    CHANNEL,
    CHUNK,
    FOOTER,
    HEADER,
    MAGIC,
    MESSAGE_INDEX,
    METADATA,
    RECORD,
    Chunk,
)
from kvscope_telemetry.recordings.layout import (
    FRAMES_RECORD,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    PROFILE,
    PROFILE_NAME,
    TOPICS,
)
from kvscope_telemetry.recordings.read_budget import RECORD_BYTES, ReadBudget, ReadBudgetSpent

_CHUNK_HEAD: Final = struct.Struct("<QQQII")
"""Beginning of a chunk record: first and last log time, uncompressed size, CRC, and the length of the
compression's name.
"""
_SIZE: Final = struct.Struct("<Q")
_INDEX: Final = struct.Struct("<HI")  # channel, bytes of entries
_INDEX_ENTRY: Final = struct.Struct("<QQ")  # log time, offset in the chunk
_MAX_CHANNEL_BYTES: Final = 4096
_MAX_METADATA_BYTES: Final = 256
_FOOTER_BYTES: Final = 20
_LAST_OPCODE, _FIRST_PRIVATE_OPCODE = 15, 128
_CHUNK_START: Final = re.compile(rb"\x06.{36}\x04\0\0\0zstd.{8}\x28\xb5\x2f\xfd", re.DOTALL)
"""Pattern of the beginning of a compressed chunk, up to zstd's magic number. Used to find the next chunk after invalid
records.
"""
_CHUNK_START_BYTES: Final = 57
_SEARCH_BYTES: Final = 1 << 20
_MAX_SEARCH_BYTES: Final = MAX_CHUNK_BYTES
"""Maximum distance searched for the next chunk after a damaged one. Chunks after a larger hole are not found."""
_TEXT_BYTES: Final = struct.Struct("<I")


@dataclass(slots=True)
class ChunkList:
    chunks: list[Chunk] = field(default_factory=list)
    declared_topics: dict[str, int] = field(default_factory=dict)
    used_channels: set[int] = field(default_factory=set)
    """Channels that have messages according to the index records."""
    is_complete: bool = False
    limit: str = ""
    """Reason why only a part of the file was scanned; "" if all of it was."""
    damages: list[str] = field(default_factory=list)
    """One text for each byte range that was skipped as invalid, with its position."""

    @property
    def topics(self) -> dict[str, int]:
        """Channel of each topic.

        The declared channel is used if it has messages and no other topic declares it, otherwise this version's usual
        id. A topic that is not in the file maps to a channel that does not occur in it.
        """
        declared = list(self.declared_topics.values())
        unambiguous = {
            channel for channel in declared if channel in self.used_channels and declared.count(channel) == 1
        }
        channels: dict[str, int] = {}
        for default, topic in TOPICS.items():
            declared_channel = self.declared_topics.get(topic, default)
            if declared_channel in unambiguous:
                channels[topic] = declared_channel
            else:
                # Negative channels do not occur: the topic's usual channel is that of another topic in this file.
                channels[topic] = -1 - default if default in unambiguous else default
        return channels


class OtherFormat(Exception):
    """Raised for a recording with another format version. The message is that version."""


class _InvalidRecord(Exception): ...


class ChunkWalk:
    """Walks over the records of a file from offset `at`. If the file has grown, the next `run` continues where
    the previous one stopped.
    """

    def __init__(self, at: int) -> None:
        self.found = ChunkList()
        self._offset = at  # where the next record begins
        self._valid_end = at  # end of the last valid chunk
        self._chunk: Chunk | None = None  # the chunk that the next index records belong to
        self._num_inflated = 0
        self._file: BinaryIO
        self._budget: ReadBudget

    def run(self, file: BinaryIO, budget: ReadBudget) -> None:
        """Walk until the end of `file` (or the position where the file is truncated), or until `budget` is spent."""
        self._file, self._budget = file, budget
        end = os.fstat(file.fileno()).st_size
        try:
            while not self._walk(end):
                next_offset = self._next_chunk()
                if next_offset is None:  # truncated, or still being written
                    return
                self._record_damage(f"{next_offset - self._valid_end} bytes that make no sense")
                self._offset = self._valid_end = next_offset
        except ReadBudgetSpent as spent:
            self.found.limit = str(spent)

    def _walk(self, end: int) -> bool:
        """Process records until the end of the file or an invalid one. Returns whether all were valid."""
        self._file.seek(self._offset)
        while len(head := self._file.read(RECORD.size)) == RECORD.size:
            opcode, length = RECORD.unpack(head)
            body = self._offset + RECORD.size
            if body + length > end:
                return False
            self._budget.set_progress(body / end)
            self._budget.spend(RECORD_BYTES)
            try:
                self._process_record(opcode, body, length)
            except _InvalidRecord:
                return False
            self._file.seek(body + length)
            if opcode == FOOTER:  # do not advance: the writer may not have written the magic bytes after it yet
                end_bytes = self._file.read(len(MAGIC))
                self.found.is_complete = end_bytes == MAGIC
                return MAGIC.startswith(end_bytes)
            self._offset = body + length
        return True

    def _process_record(self, opcode: int, body: int, length: int) -> None:
        if not 0 < opcode <= _LAST_OPCODE and opcode < _FIRST_PRIVATE_OPCODE:  # a hole in the file reads as zeros
            raise _InvalidRecord
        if opcode == CHUNK:
            self._chunk = self._chunk_at(body, length)
            self._valid_end = body + length
            if self._chunk.inflated_bytes:
                self._add_chunk(self._chunk)
        elif opcode == MESSAGE_INDEX:
            self._read_index(length)
        elif opcode == METADATA and length <= _MAX_METADATA_BYTES:
            _read_metadata(self._file.read(length), self._chunk)
        elif opcode == HEADER and length <= _MAX_CHANNEL_BYTES:
            _check_profile(self._file.read(length))
        elif opcode == CHANNEL and length <= _MAX_CHANNEL_BYTES:
            _read_channel(self._file.read(length), self.found.declared_topics)
        elif opcode == FOOTER and length != _FOOTER_BYTES:
            raise _InvalidRecord
        if opcode not in (CHUNK, MESSAGE_INDEX):
            self._chunk = None

    def _next_chunk(self) -> int | None:
        """Return the offset of the next chunk after the last valid one, or None if there is none yet."""
        offset, data = self._valid_end, b""
        while offset - self._valid_end < _MAX_SEARCH_BYTES:
            self._file.seek(offset + len(data))
            more = self._file.read(_SEARCH_BYTES)
            if not more:
                return None
            self._budget.spend(len(more))
            data += more
            for match in _CHUNK_START.finditer(data):
                if self._is_chunk(offset + match.start()):
                    return offset + match.start()
            tail = data[-_CHUNK_START_BYTES:]
            offset, data = offset + len(data) - len(tail), tail
        return None

    def _record_damage(self, damage: str) -> None:
        """Record damage after the last valid chunk, at most once per position."""
        location = f"behind byte {self._valid_end}, "
        if not (self.found.damages and self.found.damages[-1].startswith(location)):
            self.found.damages.append(location + damage)

    def _is_chunk(self, offset: int) -> bool:
        self._file.seek(offset)
        _, length = RECORD.unpack(self._file.read(RECORD.size))
        try:
            self._chunk_at(offset + RECORD.size, length)
        except _InvalidRecord:
            return False
        num_bytes: int = RECORD.size + length
        return offset + num_bytes <= os.fstat(self._file.fileno()).st_size

    def _add_chunk(self, chunk: Chunk) -> None:
        size = max(chunk.inflated_bytes, chunk.stored_bytes)
        if size > MAX_CHUNK_BYTES:
            chunk.damage = f"it claims {size} bytes, at most {MAX_CHUNK_BYTES} are accepted"
        else:
            self._num_inflated += chunk.inflated_bytes
        if self._num_inflated > self._budget.max_inflated:
            raise ReadBudgetSpent(f"its chunks claim more than {self._budget.max_inflated >> 20} MiB together")
        if len(self.found.chunks) >= MAX_CHUNKS:
            raise ReadBudgetSpent(f"it has more than {MAX_CHUNKS} chunks")
        self.found.chunks.append(chunk)

    def _chunk_at(self, body: int, length: int) -> Chunk:
        """Parse the header of a chunk record. Raises _InvalidRecord if its lengths contradict each other."""
        if length < _CHUNK_HEAD.size + 8:
            raise _InvalidRecord
        start_ns, end_ns, inflated, crc, name_bytes = self._unpack(_CHUNK_HEAD)
        if name_bytes > 16 or length < _CHUNK_HEAD.size + name_bytes + 8:
            raise _InvalidRecord
        name = self._file.read(name_bytes).decode("ascii", "replace")
        (stored,) = self._unpack(_SIZE)
        offset = body + _CHUNK_HEAD.size + name_bytes + 8
        if offset + stored != body + length:
            raise _InvalidRecord
        return Chunk(offset, stored, inflated, crc, name, start_ns, end_ns)

    def _read_index(self, length: int) -> None:
        """Store the number of messages and the first and last log time of one channel, from an index record.
        The record's entries are sorted by time.
        """
        if length < _INDEX.size:
            raise _InvalidRecord
        channel, num_bytes = self._unpack(_INDEX)
        if num_bytes != length - _INDEX.size:
            raise _InvalidRecord
        if self._chunk is None:
            self._record_damage("an index without its chunk")
            return
        count = num_bytes // _INDEX_ENTRY.size
        self._chunk.counts[channel] = count
        self.found.used_channels.add(channel)
        if count:
            first_ns, _ = self._unpack(_INDEX_ENTRY)
            # From the end of the first entry to the start of the last. With one entry, back to the start of that entry.
            self._file.seek((count - 2) * _INDEX_ENTRY.size, os.SEEK_CUR)
            last_ns, _ = self._unpack(_INDEX_ENTRY)
            self._chunk.extend_index(first_ns, last_ns)

    def _unpack(self, record_format: struct.Struct) -> tuple[int, ...]:
        data = self._file.read(record_format.size)
        if len(data) < record_format.size:
            # The record was within the file. The error ends the walk as a spent budget does: the chunks found until
            # then are used.
            raise ReadBudgetSpent("it became shorter while it was opened")
        return record_format.unpack(data)


def _read_metadata(data: bytes, chunk: Chunk | None) -> None:
    """Store the number and times of the preceding chunk's frames, from a metadata record. The record is ignored
    if its checksum does not match.
    """
    name, offset = _text_at(data, 0)
    offset += _TEXT_BYTES.size  # the length of the map in bytes
    texts: list[bytes] = []
    while offset + _TEXT_BYTES.size <= len(data):
        text, offset = _text_at(data, offset)
        texts.append(text)
    fields = dict(zip(texts[::2], texts[1::2], strict=False))
    numbers = [fields.get(name, b"") for name in (b"count", b"first_ns", b"last_ns")]
    is_valid = b"%d" % zlib.crc32(b" ".join(numbers)) == fields.get(b"crc32") and all(map(bytes.isdigit, numbers))
    if chunk is not None and is_valid and name == FRAMES_RECORD.encode():
        chunk.num_frames, *frames_ns = map(int, numbers)
        chunk.frames_ns = (frames_ns[0], frames_ns[1])


def _text_at(data: bytes, offset: int) -> tuple[bytes, int]:
    """Return the text whose length and characters are at `offset`, and the offset after it. The end of `data` may cut
    the text off.
    """
    if offset + _TEXT_BYTES.size > len(data):
        return b"", len(data)
    (size,) = _TEXT_BYTES.unpack_from(data, offset)
    start = offset + _TEXT_BYTES.size
    return data[start : start + size], start + size


def _check_profile(data: bytes) -> None:
    """Raise OtherFormat for a kvscope recording of another version. Other profiles are accepted."""
    (size,) = _TEXT_BYTES.unpack_from(data.ljust(_TEXT_BYTES.size, b"\0"))
    profile = data[_TEXT_BYTES.size :][:size].decode("utf-8", "replace")
    name, _, version = profile.partition("/")
    if name == PROFILE_NAME and profile != PROFILE and (version.isdigit() or not version):
        raise OtherFormat(version or "0")


def _read_channel(data: bytes, declared_topics: dict[str, int]) -> None:
    """Store the channel of a known topic from a channel record (id, schema, topic; the rest is ignored)."""
    if len(data) >= 8:
        channel, _, size = struct.unpack_from("<HHI", data)
        topic = data[8 : 8 + size].decode("utf-8", "replace")
        if topic in TOPICS.values():
            declared_topics[topic] = channel
