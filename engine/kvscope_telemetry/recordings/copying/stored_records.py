"""A chunk as it lies in a file, with the indexes behind it, to be put into another file byte for byte.

Owns what is checked before: that the chunk is whole and that its indexes are of it. Knows records, no messages. Format:
mcap.dev/spec.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

import zstandard

from kvscope_telemetry.recordings.chunk_walk import FRAMES_SAID
from kvscope_telemetry.recordings.chunks import (
    CHUNK,
    MESSAGE_INDEX,
    METADATA,
    RECORD,
    Chunk,
    DamagedChunk,
    RawMessage,
    read_chunk,
)

_HEAD: Final = struct.Struct("<QQQII")  # first and last log time, inflated size, CRC, length of the compression's name
_SIZE_BYTES: Final = 8
_INDEX: Final = struct.Struct("<HI")  # channel, bytes of entries
_ENTRY_BYTES: Final = 16
_MAX_METADATA_BYTES: Final = 256
_MAX_INDEX_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """A chunk's record and what follows of it; places are in `data`."""

    chunk: Chunk
    messages: list[RawMessage]
    data: bytes
    chunk_length: int
    indexes: Mapping[int, int]
    """Channel -> where its index begins."""
    index_length: int
    metadata_at: int | None
    """Where it is said how many frames are in its bundles; it goes to the end."""


def read_records(file: BinaryIO, chunk: Chunk, unzip: zstandard.ZstdDecompressor) -> StoredRecords:
    """Those of a chunk, inflated once to see that it is whole. Raises DamagedChunk for one that is not, or of which the
    indexes are not all there."""
    messages = read_chunk(file, chunk, unzip)
    begin = chunk.offset - _SIZE_BYTES - len(chunk.compression) - _HEAD.size - RECORD.size
    end = chunk.offset + chunk.stored_bytes
    file.seek(begin)
    data = [file.read(end - begin)]
    opcode, length = RECORD.unpack_from(data[0])
    if opcode != CHUNK or length != end - begin - RECORD.size:
        raise DamagedChunk("it is no record of its own")
    at, indexes, counts, metadata_at = end - begin, {}, {}, None
    for opcode, record in _behind(file):
        data.append(record)
        if opcode == METADATA:
            metadata_at = at
        else:
            channel, num_bytes = _INDEX.unpack_from(record, RECORD.size)
            indexes[channel], counts[channel] = at, num_bytes // _ENTRY_BYTES
        at += len(record)
    if counts != chunk.counts:
        raise DamagedChunk("its indexes are of other messages")
    index_end = at if metadata_at is None else metadata_at
    return StoredRecords(chunk, messages, b"".join(data), end - begin, indexes, index_end - (end - begin), metadata_at)


def _behind(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The records that belong to the chunk before: its indexes, then what is said of its frames."""
    while len(head := file.read(RECORD.size)) == RECORD.size:
        opcode, length = RECORD.unpack(head)
        limit = {MESSAGE_INDEX: _MAX_INDEX_BYTES, METADATA: _MAX_METADATA_BYTES}.get(opcode, -1)
        if not _INDEX.size <= length <= limit:
            return
        record = head + file.read(length)
        if len(record) < RECORD.size + length or (opcode == METADATA and not FRAMES_SAID.fullmatch(record[9:])):
            return
        yield opcode, record
        if opcode == METADATA:
            return
