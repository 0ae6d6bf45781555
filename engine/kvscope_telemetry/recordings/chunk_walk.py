"""Finding the chunks of a recording's file by walking over its records. All that a file claims is checked.

The file's own index at its end is not used: a file that was cut off is read like a whole one, and an index that lies is
of no consequence. Where a record makes no sense, the walk goes on at the next chunk that does, so that one wrong length
costs one chunk. Knows records and channels; inflates nothing. Format: mcap.dev/spec.
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
_FOOTER_BYTES: Final = 20
_LAST_OPCODE, _FIRST_PRIVATE_OPCODE = 15, 128
_CHUNK_BEGINS: Final = re.compile(rb"\x06.{36}\x04\0\0\0zstd.{8}\x28\xb5\x2f\xfd", re.DOTALL)
"""How a compressed chunk begins, up to the magic number of zstd: found by it where the records before make no sense."""
_CHUNK_BEGIN_BYTES: Final = 57
_SEARCH_BYTES: Final = 1 << 20
_MAX_SEARCH_BYTES: Final = MAX_CHUNK_BYTES
"""What one damaged chunk may take: a hole is not searched for what comes after it."""
FRAMES_SAID: Final = re.compile(rb".{4}%b.{8}frames.{4}(\d{1,6}).{4}again.{4}\1" % FRAMES_RECORD.encode(), re.DOTALL)
"""What such a metadata record says, without its head."""


@dataclass(slots=True)
class ChunkList:
    """The whole chunks of a file."""

    chunks: list[Chunk] = field(default_factory=list)
    told_topics: dict[str, int] = field(default_factory=dict)
    """Topic -> channel, as the file says."""
    used: set[int] = field(default_factory=set)
    """Channels of which there are messages."""
    is_complete: bool = False
    """Whether the file ends as it should."""
    limit: str = ""
    """Why not all of it was looked at; empty when it was."""
    damages: list[str] = field(default_factory=list)
    """Of each place that was passed over because it makes no sense, where it is."""

    @property
    def topics(self) -> dict[str, int]:
        """Topic -> channel: what the file says, where that has messages and no other topic claims it, else what this
        version writes. A topic that is not in the file has a channel that is not either."""
        claims = list(self.told_topics.values())
        clear = {channel for channel in claims if channel in self.used and claims.count(channel) == 1}
        found = {}
        for usual, topic in TOPICS.items():
            told = self.told_topics.get(topic, usual)
            found[topic] = told if told in clear else -1 - usual if usual in clear else usual
        return found


class _Nonsense(Exception):
    """A record that cannot be one."""


class ChunkWalk:
    """Goes over the records of a file from `at` on, and on from where it stopped once the file is longer."""

    def __init__(self, at: int) -> None:
        self.found = ChunkList()
        self._at = at  # where the next record begins
        self._sound_at = at  # behind the last chunk that makes sense
        self._chunk: Chunk | None = None  # whose index comes
        self._num_inflated = 0
        self._file: BinaryIO
        self._effort: Effort

    def run(self, file: BinaryIO, effort: Effort) -> None:
        """Up to where `file` is cut off, or too much."""
        self._file, self._effort = file, effort
        end = os.fstat(file.fileno()).st_size
        try:
            while not self._walk(end):
                found = self._next_chunk()
                if found is None:  # it is cut off, or more is to come
                    return
                self._note_damage(f"{found - self._sound_at} bytes that make no sense")
                self._at = self._sound_at = found
        except EffortSpent as spent:
            self.found.limit = str(spent)

    def _walk(self, end: int) -> bool:
        """From record to record; whether it went well up to the end."""
        self._file.seek(self._at)
        while len(head := self._file.read(RECORD.size)) == RECORD.size:
            opcode, length = RECORD.unpack(head)
            body = self._at + RECORD.size
            if body + length > end:
                return False
            self._effort.is_at(body / end)
            self._effort.spend(RECORD_BYTES)
            try:
                self._note(opcode, body, length)
            except _Nonsense:
                return False
            self._at = body + length
            self._file.seek(self._at)
            if opcode == FOOTER:
                self.found.is_complete = True
                break
        return True

    def _note(self, opcode: int, body: int, length: int) -> None:
        if not 0 < opcode <= _LAST_OPCODE and opcode < _FIRST_PRIVATE_OPCODE:  # 0: a file's hole reads as zeros
            raise _Nonsense
        if opcode == CHUNK:
            self._chunk = self._chunk_at(body, length)
            self._sound_at = body + length
            if self._chunk.inflated_bytes:
                self._add(self._chunk)
        elif opcode == MESSAGE_INDEX:
            self._note_index(length)
        elif opcode == METADATA and length <= _MAX_METADATA_BYTES:
            _note_metadata(self._file.read(length), self._chunk)
        elif opcode == CHANNEL and length <= _MAX_CHANNEL_BYTES:
            _note_channel(self._file.read(length), self.found.told_topics)
        elif opcode == FOOTER and length != _FOOTER_BYTES:
            raise _Nonsense
        if opcode not in (CHUNK, MESSAGE_INDEX):
            self._chunk = None

    def _next_chunk(self) -> int | None:
        """Where the next one begins behind the last that makes sense; None: there is none, so far."""
        at, data = self._sound_at, b""
        while at - self._sound_at < _MAX_SEARCH_BYTES:
            self._file.seek(at + len(data))
            more = self._file.read(_SEARCH_BYTES)
            if not more:
                return None
            self._effort.spend(len(more))
            data += more
            for match in _CHUNK_BEGINS.finditer(data):
                if self._is_chunk(at + match.start()):
                    return at + match.start()
            kept = data[-_CHUNK_BEGIN_BYTES:]
            at, data = at + len(data) - len(kept), kept
        return None

    def _note_damage(self, what: str) -> None:
        """Of what lies behind the last chunk that makes sense; once."""
        where = f"behind byte {self._sound_at}, "
        if not (self.found.damages and self.found.damages[-1].startswith(where)):
            self.found.damages.append(where + what)

    def _is_chunk(self, at: int) -> bool:
        self._file.seek(at)
        _, length = RECORD.unpack(self._file.read(RECORD.size))
        try:
            self._chunk_at(at + RECORD.size, length)
        except _Nonsense:
            return False
        num_bytes: int = RECORD.size + length
        return at + num_bytes <= os.fstat(self._file.fileno()).st_size

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

    def _chunk_at(self, body: int, length: int) -> Chunk:
        """By the head of a chunk record. Raises _Nonsense for one that contradicts itself."""
        if length < _CHUNK.size + 8:
            raise _Nonsense
        start_ns, end_ns, inflated, crc, name_bytes = self._unpack(_CHUNK)
        if name_bytes > 16 or length < _CHUNK.size + name_bytes + 8:
            raise _Nonsense
        name = self._file.read(name_bytes).decode("ascii", "replace")
        (stored,) = self._unpack(_SIZE)
        offset = body + _CHUNK.size + name_bytes + 8
        if offset + stored != body + length:
            raise _Nonsense
        return Chunk(offset, stored, inflated, crc, name, start_ns, end_ns)

    def _note_index(self, length: int) -> None:
        """How many messages of a channel, and from when to when: the entries come in the order of time."""
        if length < _INDEX.size:
            raise _Nonsense
        channel, num_bytes = self._unpack(_INDEX)
        if num_bytes != length - _INDEX.size:
            raise _Nonsense
        if self._chunk is None:
            self._note_damage("an index without its chunk")
            return
        count = num_bytes // _INDEX_ENTRY.size
        self._chunk.counts[channel] = count
        self.found.used.add(channel)
        if count:
            first_ns, _ = self._unpack(_INDEX_ENTRY)
            self._file.seek((count - 2) * _INDEX_ENTRY.size, os.SEEK_CUR)
            last_ns, _ = self._unpack(_INDEX_ENTRY)
            self._chunk.note_indexed(first_ns, last_ns)

    def _unpack(self, form: struct.Struct) -> tuple[int, ...]:
        data = self._file.read(form.size)
        if len(data) < form.size:
            raise EffortSpent("it became shorter while it was opened")
        return form.unpack(data)


def _note_metadata(data: bytes, chunk: Chunk | None) -> None:
    """The number of frames in the bundles of a chunk, where it is said twice alike. Other metadata is left alone."""
    said = FRAMES_SAID.fullmatch(data)
    if said is not None and chunk is not None:
        chunk.num_bundled = int(said[1])


def _note_channel(data: bytes, told_topics: dict[str, int]) -> None:
    """A channel record: id, schema, topic, and more that is of no interest here."""
    if len(data) >= 8:
        channel, _, size = struct.unpack_from("<HHI", data)
        topic = data[8 : 8 + size].decode("utf-8", "replace")
        if topic in TOPICS.values():
            told_topics[topic] = channel
