"""The chunks of a recording's file, and the messages in each. All that a file claims is checked before it is believed.

Chunks are found by walking over the records: the file's own index at its end is not used, so a file that was cut off is
read like a whole one, and an index that lies is of no consequence. Where a record makes no sense, the walk goes on at
the next chunk that does, so that one wrong length costs one chunk. A chunk that cannot be read is inflated once: why it
cannot is remembered with it. Knows bytes, records and channels, no messages. Format: mcap.dev/spec.

The reader of the `mcap` package is not used, even for sound files, because nobody knows before reading which files are
sound. It cannot do this: read a file without its end, go on behind a damaged record, name and count what is left out,
refuse a size before decompressing, and stop at a number of records in a chunk. Its walk takes twice as long as ours.
See docs/internals/decisions/0007-recordings-have-their-own-reader.md.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec
import zstandard

from kvscope_telemetry.recordings.layout import (
    FRAMES_RECORD,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    PROFILE,
    PROFILE_NAME,
    TOPICS,
)
from kvscope_telemetry.recordings.read_budget import RECORD_BYTES, ReadBudget, ReadBudgetSpent

MAGIC: Final = b"\x89MCAP0\r\n"
HEADER, FOOTER, CHANNEL, MESSAGE, CHUNK, MESSAGE_INDEX, METADATA = 1, 2, 4, 5, 6, 7, 12
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
    num_frames: int | None = None
    """Frames in it, once that is known."""
    frames_ns: tuple[int, int] | None = None
    """When the first and the last of them were."""
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
        latest_ns = max(self.end_ns, *(self.frames_ns or (0, 0)))
        return self.indexed_ns != (self.start_ns, self.end_ns) or not 0 <= latest_ns < MAX_LOG_TIME_NS

    def reach_over_frames(self) -> None:
        """A batch of frames lies in it at the time of its first: the chunk is until the last."""
        if self.frames_ns is not None:
            self.start_ns, self.end_ns = min(self.start_ns, self.frames_ns[0]), max(self.end_ns, self.frames_ns[1])


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
    data = inflated(file.read(chunk.stored_bytes), chunk, unzip)
    if chunk.crc and zlib.crc32(data) != chunk.crc:
        raise DamagedChunk("checksum mismatch")
    return _messages(data)


def inflated(stored: bytes, chunk: Chunk, unzip: zstandard.ZstdDecompressor) -> bytes:
    """The chunk's data, never more of it than it claims."""
    if len(stored) != chunk.stored_bytes:
        raise DamagedChunk("the file ends inside it")
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
    """One loop without calls: an overview of hours is hundreds of thousands of small messages."""
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


_CHUNK_HEAD: Final = struct.Struct("<QQQII")
"""First and last log time, inflated size, CRC, length of the compression's name."""
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
_TEXT_BYTES: Final = struct.Struct("<I")


@dataclass(slots=True)
class ChunkList:
    """The whole chunks of a file."""

    chunks: list[Chunk] = field(default_factory=list)
    declared_topics: dict[str, int] = field(default_factory=dict)
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
        claims = list(self.declared_topics.values())
        clear = {channel for channel in claims if channel in self.used and claims.count(channel) == 1}
        found = {}
        for usual, topic in TOPICS.items():
            topics = self.declared_topics.get(topic, usual)
            found[topic] = topics if topics in clear else -1 - usual if usual in clear else usual
        return found


class OtherFormat(Exception):
    """A recording of another version of the format; says which."""


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
        self._budget: ReadBudget

    def run(self, file: BinaryIO, budget: ReadBudget) -> None:
        """Up to where `file` is cut off, or too much."""
        self._file, self._budget = file, budget
        end = os.fstat(file.fileno()).st_size
        try:
            while not self._walk(end):
                found = self._next_chunk()
                if found is None:  # it is cut off, or more is to come
                    return
                self._note_damage(f"{found - self._sound_at} bytes that make no sense")
                self._at = self._sound_at = found
        except ReadBudgetSpent as spent:
            self.found.limit = str(spent)

    def _walk(self, end: int) -> bool:
        """From record to record; whether it went well up to the end."""
        self._file.seek(self._at)
        while len(head := self._file.read(RECORD.size)) == RECORD.size:
            opcode, length = RECORD.unpack(head)
            body = self._at + RECORD.size
            if body + length > end:
                return False
            self._budget.is_at(body / end)
            self._budget.spend(RECORD_BYTES)
            try:
                self._note(opcode, body, length)
            except _Nonsense:
                return False
            self._file.seek(body + length)
            if opcode == FOOTER:  # stay at it: a writer may not have written the magic bytes behind it yet
                end_bytes = self._file.read(len(MAGIC))
                self.found.is_complete = end_bytes == MAGIC
                return MAGIC.startswith(end_bytes)
            self._at = body + length
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
        elif opcode == HEADER and length <= _MAX_CHANNEL_BYTES:
            _check_profile(self._file.read(length))
        elif opcode == CHANNEL and length <= _MAX_CHANNEL_BYTES:
            _note_channel(self._file.read(length), self.found.declared_topics)
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
            self._budget.spend(len(more))
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
        if self._num_inflated > self._budget.max_inflated:
            raise ReadBudgetSpent(f"its chunks claim more than {self._budget.max_inflated >> 20} MiB together")
        if len(self.found.chunks) >= MAX_CHUNKS:
            raise ReadBudgetSpent(f"it has more than {MAX_CHUNKS} chunks")
        self.found.chunks.append(chunk)

    def _chunk_at(self, body: int, length: int) -> Chunk:
        """By the head of a chunk record. Raises _Nonsense for one that contradicts itself."""
        if length < _CHUNK_HEAD.size + 8:
            raise _Nonsense
        start_ns, end_ns, inflated, crc, name_bytes = self._unpack(_CHUNK_HEAD)
        if name_bytes > 16 or length < _CHUNK_HEAD.size + name_bytes + 8:
            raise _Nonsense
        name = self._file.read(name_bytes).decode("ascii", "replace")
        (stored,) = self._unpack(_SIZE)
        offset = body + _CHUNK_HEAD.size + name_bytes + 8
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
            raise ReadBudgetSpent("it became shorter while it was opened")
        return form.unpack(data)


def _note_metadata(data: bytes, chunk: Chunk | None) -> None:
    """How many frames the chunk before has, and from when to when; only where it goes with its checksum."""
    texts: list[bytes] = []
    at = 0
    while at + _TEXT_BYTES.size <= len(data):
        (size,) = _TEXT_BYTES.unpack_from(data, at)
        at += _TEXT_BYTES.size
        if len(texts) != 1:  # after the name comes how long the map is, in bytes
            texts.append(data[at : at + size])
            at += size
        else:
            texts.append(b"")
    said = dict(zip(texts[2::2], texts[3::2], strict=False))
    numbers = [said.get(name, b"") for name in (b"count", b"first_ns", b"last_ns")]
    is_sound = b"%d" % zlib.crc32(b" ".join(numbers)) == said.get(b"crc32") and all(map(bytes.isdigit, numbers))
    if chunk is not None and is_sound and texts[0] == FRAMES_RECORD.encode():
        chunk.num_frames, *frames_ns = map(int, numbers)
        chunk.frames_ns = (frames_ns[0], frames_ns[1])


def _check_profile(data: bytes) -> None:
    """Raise OtherFormat for a recording of another version; what is no profile of ours says nothing."""
    (size,) = _TEXT_BYTES.unpack_from(data.ljust(_TEXT_BYTES.size, b"\0"))
    profile = data[_TEXT_BYTES.size :][:size].decode("utf-8", "replace")
    name, _, version = profile.partition("/")
    if name == PROFILE_NAME and profile != PROFILE and (version.isdigit() or not version):
        raise OtherFormat(version or "0")


def _note_channel(data: bytes, declared_topics: dict[str, int]) -> None:
    """A channel record: id, schema, topic, and more that is of no interest here."""
    if len(data) >= 8:
        channel, _, size = struct.unpack_from("<HHI", data)
        topic = data[8 : 8 + size].decode("utf-8", "replace")
        if topic in TOPICS.values():
            declared_topics[topic] = channel
