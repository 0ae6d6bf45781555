"""Finding the chunks of a recording's file by walking over its records. All that a file claims is checked.

The file's own index at its end is not used: a file that was cut off is read like a whole one, and an index that lies is
of no consequence. Knows records and channels; inflates nothing. Format: mcap.dev/spec.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from kvscope_telemetry.recordings.chunks import CHANNEL, CHUNK, FOOTER, MESSAGE_INDEX, METADATA, RECORD, Chunk
from kvscope_telemetry.recordings.effort import RECORD_BYTES, Effort, EffortSpent
from kvscope_telemetry.recordings.layout import FRAMES_RECORD, MAX_CHUNK_BYTES, MAX_CHUNKS, TOPICS

_CHUNK: Final = struct.Struct("<QQQII")  # first and last log time, inflated size, CRC, length of the compression's name
_SIZE: Final = struct.Struct("<Q")
_INDEX: Final = struct.Struct("<HI")  # channel, bytes of entries
_INDEX_ENTRY: Final = struct.Struct("<QQ")  # log time, offset in the chunk
_MAX_CHANNEL_BYTES: Final = 4096
_MAX_METADATA_BYTES: Final = 256
FRAMES_SAID: Final = re.compile(rb".{4}%b.{8}frames.{4}(\d{1,6}).{4}again.{4}\1" % FRAMES_RECORD.encode(), re.DOTALL)
"""What such a metadata record says, without its head."""


@dataclass(slots=True)
class ChunkList:
    """The whole chunks of a file."""

    chunks: list[Chunk] = field(default_factory=list)
    topics: dict[str, int] = field(default_factory=lambda: {topic: channel for channel, topic in TOPICS.items()})
    """Topic -> channel."""
    is_complete: bool = False
    """Whether the file ends as it should."""
    limit: str = ""
    """Why not all of it was looked at; empty when it was."""


class ChunkWalk:
    """Goes over the records of a file from `at` on, and on from where it stopped once the file is longer."""

    def __init__(self, at: int) -> None:
        self.found = ChunkList()
        self._at = at  # where the next record begins
        self._num_inflated = 0
        self._file: BinaryIO
        self._effort: Effort

    def run(self, file: BinaryIO, effort: Effort) -> None:
        """Up to where `file` is cut off, or too much."""
        self._file, self._effort = file, effort
        try:
            self._run(os.fstat(file.fileno()).st_size)
        except EffortSpent as spent:
            self.found.limit = str(spent)

    def _run(self, end: int) -> None:
        self._file.seek(self._at)
        while len(head := self._file.read(RECORD.size)) == RECORD.size:
            opcode, length = RECORD.unpack(head)
            body = self._at + RECORD.size
            if not opcode or body + length > end:  # 0 is no record: a file's hole reads as zeros
                return
            self._effort.is_at(body / end)
            self._effort.spend(RECORD_BYTES)
            self._note(opcode, body, length)
            self._at = body + length
            self._file.seek(self._at)
            if opcode == FOOTER:
                self.found.is_complete = True
                return

    def _note(self, opcode: int, body: int, length: int) -> None:
        if opcode == CHUNK:
            chunk = self._chunk(body, length)
            if chunk is not None and chunk.inflated_bytes:
                self._add(chunk)
        elif opcode == MESSAGE_INDEX and self.found.chunks and length >= _INDEX.size:
            self._note_index(self.found.chunks[-1], length)
        elif opcode == METADATA and self.found.chunks and length <= _MAX_METADATA_BYTES:
            _note_metadata(self._file.read(length), self.found.chunks[-1])
        elif opcode == CHANNEL and length <= _MAX_CHANNEL_BYTES:
            _note_channel(self._file.read(length), self.found.topics)

    def _add(self, chunk: Chunk) -> None:
        size = max(chunk.inflated_bytes, chunk.stored_bytes)
        if size > MAX_CHUNK_BYTES:
            chunk.damage = f"it claims {size} bytes, at most {MAX_CHUNK_BYTES} are accepted"
        else:
            self._num_inflated += chunk.inflated_bytes
        if self._num_inflated > self._effort.max_inflated:
            raise EffortSpent(f"its chunks claim more than {self._effort.max_inflated >> 20} MiB together")
        if len(self.found.chunks) >= MAX_CHUNKS:
            raise EffortSpent(f"it has more than {MAX_CHUNKS} chunks")
        self.found.chunks.append(chunk)

    def _chunk(self, body: int, length: int) -> Chunk | None:
        """The head of a chunk record; None when it contradicts itself."""
        if length < _CHUNK.size + 8:
            return None
        start_ns, end_ns, inflated, crc, name_bytes = self._unpack(_CHUNK)
        if name_bytes > 16 or length < _CHUNK.size + name_bytes + 8:
            return None
        name = self._file.read(name_bytes).decode("ascii", "replace")
        (stored,) = self._unpack(_SIZE)
        offset = body + _CHUNK.size + name_bytes + 8
        if offset + stored != body + length:
            return None
        return Chunk(offset, stored, inflated, crc, name, start_ns, end_ns)

    def _note_index(self, chunk: Chunk, length: int) -> None:
        """How many messages of a channel, and from when to when: the entries come in the order of time."""
        channel, num_bytes = self._unpack(_INDEX)
        count = min(num_bytes, length - _INDEX.size) // _INDEX_ENTRY.size
        chunk.counts[channel] = count
        if count:
            first_ns, _ = self._unpack(_INDEX_ENTRY)
            self._file.seek((count - 2) * _INDEX_ENTRY.size, os.SEEK_CUR)
            last_ns, _ = self._unpack(_INDEX_ENTRY)
            chunk.note_indexed(first_ns, last_ns)

    def _unpack(self, form: struct.Struct) -> tuple[int, ...]:
        data = self._file.read(form.size)
        if len(data) < form.size:
            raise EffortSpent("it became shorter while it was opened")
        return form.unpack(data)


def _note_metadata(data: bytes, chunk: Chunk) -> None:
    """The number of frames in the bundles of a chunk, where it is said twice alike. Other metadata is left alone."""
    said = FRAMES_SAID.fullmatch(data)
    if said is not None:
        chunk.num_bundled = int(said[1])


def _note_channel(data: bytes, topics: dict[str, int]) -> None:
    """A channel record: id, schema, topic, and more that is of no interest here."""
    if len(data) >= 8:
        channel, _, size = struct.unpack_from("<HHI", data)
        topic = data[8 : 8 + size].decode("utf-8", "replace")
        if topic in topics:
            for other in [name for name, taken in topics.items() if taken == channel]:
                topics[other] = -1 - channel  # it is not in the file, or its own record comes yet
            topics[topic] = channel
