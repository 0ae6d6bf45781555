"""mcap's writer, which copies a message whole five times, and beside it a way for messages too large for that.

Owns how such a message becomes a chunk: its pieces are compressed and summed up a slice at a time, and no other thread
of the process waits longer than a slice takes. It adds to the lists that the writer keeps for the end of the file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Final

import zstandard
from mcap.data_stream import RecordBuilder
from mcap.records import ChunkIndex, MessageIndex, MetadataIndex
from mcap.writer import CompressionType, Writer

from kvscope_telemetry.messages.pieces import Pieces
from kvscope_telemetry.recordings.chunks import CHUNK, MESSAGE, RECORD
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords
from kvscope_telemetry.recordings.layout import FRAMES_RECORD

SLICE_BYTES: Final = 256 << 10
COMPRESSION: Final = "zstd"
LEVEL: Final = 9
"""Of chunks of small messages: a tenth less than the usual 3, for a thousandth of a core at 200 frames a second."""
MAX_HARD_BYTES: Final = 4 << 20
"""Of a message in pieces that is compressed so too."""
_MESSAGE: Final = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_CHUNK: Final = struct.Struct(f"<QQQII{len(COMPRESSION)}sQ")
"""First and last time, inflated size, checksum, length of a word, the word, stored size."""


class PiecewiseWriter(Writer):
    """Writes to `stream`; chunks are compressed, and end where `flush` says so, or behind `chunk_bytes`."""

    def __init__(self, stream: IO[bytes], chunk_bytes: int) -> None:
        super().__init__(stream, chunk_size=chunk_bytes, compression=CompressionType.ZSTD)
        self._stream = stream

    def add_in_pieces(self, channel: int, log_time_ns: int, pieces: Pieces) -> None:
        """A message as a chunk of its own, which is written at once."""
        self.flush()  # type: ignore[no-untyped-call]
        num_bytes = sum(map(len, pieces))
        head = RECORD.pack(MESSAGE, _MESSAGE.size + num_bytes) + _MESSAGE.pack(channel, 0, log_time_ns, log_time_ns)
        stored, crc = _compressed((head, *pieces))
        index = ChunkIndex(
            message_start_time=log_time_ns,
            message_end_time=log_time_ns,
            chunk_start_offset=self._stream.tell(),
            chunk_length=RECORD.size + _CHUNK.size + sum(map(len, stored)),
            message_index_offsets={},
            message_index_length=0,
            compression=COMPRESSION,
            compressed_size=sum(map(len, stored)),
            uncompressed_size=len(head) + num_bytes,
        )
        self._write_chunk(index, crc, stored)
        self._write_indexes(index, [MessageIndex(channel, [(log_time_ns, 0)])])
        self._note(index, {channel: 1})

    def add_stored(self, stored: StoredRecords) -> None:
        """A chunk of another file whose channels are the same, as it lies there."""
        chunk, begin = stored.chunk, self._stream.tell()
        index = ChunkIndex(
            message_start_time=chunk.start_ns,
            message_end_time=chunk.end_ns,
            chunk_start_offset=begin,
            chunk_length=stored.chunk_length,
            message_index_offsets={channel: begin + at for channel, at in stored.indexes.items()},
            message_index_length=stored.index_length,
            compression=chunk.compression,
            compressed_size=chunk.stored_bytes,
            uncompressed_size=chunk.inflated_bytes,
        )
        self._stream.write(stored.data)
        self._note(index, chunk.counts)
        if stored.metadata_at is not None:
            own: Any = self
            length = len(stored.data) - stored.metadata_at
            told = MetadataIndex(offset=begin + stored.metadata_at, length=length, name=FRAMES_RECORD)
            own._Writer__metadata_indexes.append(told)
            own._Writer__statistics.metadata_count += 1

    def _Writer__finalize_chunk(self) -> None:
        """In the place of the writer's own, which knows no level."""
        own: Any = self
        builder = own._Writer__chunk_builder
        if not builder.num_messages:
            return
        data = builder.end()
        stored = zstandard.ZstdCompressor(level=LEVEL).compress(data)
        index = ChunkIndex(
            message_start_time=builder.message_start_time,
            message_end_time=builder.message_end_time,
            chunk_start_offset=self._stream.tell(),
            chunk_length=RECORD.size + _CHUNK.size + len(stored),
            message_index_offsets={},
            message_index_length=0,
            compression=COMPRESSION,
            compressed_size=len(stored),
            uncompressed_size=len(data),
        )
        self._write_chunk(index, zlib.crc32(data), [stored])
        self._write_indexes(index, builder.message_indices.values())
        own._Writer__chunk_indices.append(index)
        own._Writer__statistics.chunk_count += 1
        builder.reset()

    def _write_chunk(self, index: ChunkIndex, crc: int, stored: list[bytes]) -> None:
        self._stream.write(RECORD.pack(CHUNK, index.chunk_length - RECORD.size))
        word = COMPRESSION.encode()
        times = (index.message_start_time, index.message_end_time)
        self._stream.write(_CHUNK.pack(*times, index.uncompressed_size, crc, len(word), word, index.compressed_size))
        for part in stored:
            self._stream.write(part)

    def _write_indexes(self, index: ChunkIndex, messages: Iterable[MessageIndex]) -> None:
        builder: Any = RecordBuilder()  # one of its methods bears no types
        for each in messages:
            index.message_index_offsets[each.channel_id] = self._stream.tell() + builder.count
            each.write(builder)
        index.message_index_length = builder.count
        self._stream.write(builder.end())

    def _note(self, index: ChunkIndex, counts: Mapping[int, int]) -> None:
        """As the writer itself does of a chunk and its messages, so many a channel."""
        own: Any = self
        own._Writer__chunk_indices.append(index)
        statistics = own._Writer__statistics
        is_first = not statistics.message_count
        first_ns, last_ns = index.message_start_time, index.message_end_time
        statistics.message_start_time = first_ns if is_first else min(first_ns, statistics.message_start_time)
        statistics.message_end_time = max(last_ns, statistics.message_end_time)
        for channel, count in counts.items():
            statistics.channel_message_counts[channel] += count
            statistics.message_count += count
        statistics.chunk_count += 1


def _compressed(pieces: Pieces) -> tuple[list[bytes], int]:
    """One zstd frame that says how much it holds, in parts, and the checksum of what it holds."""
    crc = 0
    num_bytes = sum(map(len, pieces))
    level = LEVEL if num_bytes <= MAX_HARD_BYTES else 3
    compressor = zstandard.ZstdCompressor(level=level).compressobj(size=num_bytes)
    stored: list[bytes] = []
    for part in _slices(pieces):
        crc = zlib.crc32(part, crc)
        stored.append(compressor.compress(part))
    stored.append(compressor.flush())
    return stored, crc


def _slices(pieces: Pieces) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]
