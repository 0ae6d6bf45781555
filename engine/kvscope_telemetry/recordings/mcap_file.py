"""Writes the MCAP file of a recording with the `mcap` package, under a temporary name until it is complete.

Owns the file, its name, its channels and the contents of its chunks. Used by one thread. Must not depend on the queue
or the mirror.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from mcap.writer import CompressionType, Writer

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import DeltaCheckpoint, Frame, Hello, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.chunks import FOOTER, MAGIC, RECORD
from kvscope_telemetry.recordings.columns import MAX_RECORDS, pack
from kvscope_telemetry.recordings.frame_batch import TimedFrame, pack_frames
from kvscope_telemetry.recordings.layout import (
    CHECKPOINTS,
    CHUNK_BYTES,
    CHUNK_NS,
    FRAMES,
    FRAMES_RECORD,
    HELLOS,
    JSON_SCHEMAS,
    KEYFRAMES,
    MAX_CHUNK_BYTES,
    MESSAGES,
    PART_SUFFIX,
    PROFILE,
    SCHEMAS,
    SNAPSHOTS,
    SUFFIX,
    TOPICS,
)
from kvscope_telemetry.recordings.regular_file import hold_for_writing
from kvscope_telemetry.summaries.summary import schema_of

LIBRARY: Final = "kvscope"
Entry = tuple[int, int, bytes]
"""A message to be written: its channel, log time in ns, and data."""
_MAX_CHUNK_ENDS: Final = 8
"""Number of chunk ends whose offsets are remembered. If the disk has no space for the end of the file after the
last chunk, the file is truncated at an earlier chunk's end.
"""
_DATA_END: Final = 15
_NO_CRC: Final = struct.pack("<I", 0)
_NO_SUMMARY: Final = struct.pack("<QQ", 0, 0)
EARLY_END: Final = (
    RECORD.pack(_DATA_END, len(_NO_CRC))
    + _NO_CRC
    + RECORD.pack(FOOTER, len(_NO_SUMMARY + _NO_CRC))
    + _NO_SUMMARY
    + _NO_CRC
    + MAGIC
)
"""End of an MCAP file without an index, used when the disk is full. It may follow any chunk. Readers then find
the chunks by scanning the file.
"""


class RecordingFile(Protocol):
    """Destination of a recording's messages: one file, or a sequence of files."""

    @property
    def path(self) -> Path: ...

    @property
    def part(self) -> Path:
        """Path of the file under its temporary name, which it has until it is complete."""

    def wants_state(self, log_time_ns: int) -> bool:
        """Whether a new file should start before a message of `log_time_ns`. If so, call `start_segment` and add the
        complete state.
        """

    def start_segment(self) -> None: ...

    @property
    def has_unwritten(self) -> bool:
        """Whether added messages have not been passed to the operating system yet."""

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message of about `num_bytes`. `data` is its original encoding, if available."""

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None: ...

    def add_chunk(self, entries: Sequence[Entry]) -> None:
        """Append `entries` as a separate chunk."""

    def flush(self) -> None: ...

    def finish(self) -> None: ...

    def salvage(self) -> bool:
        """Complete the file after a write error, as far as it was written. Returns whether that succeeded.

        An empty file is deleted. If completing fails, the data stays under the temporary name.
        """


class McapFile:
    """Writes one MCAP file: `path` (ending in `.mcap`) once it is complete, `path` + `.part` until then.

    Raises BadInput if the path cannot be written or already exists; nothing is overwritten.

    The first state and each received snapshot are stored twice, in separate chunks, because later states depend on
    them. If one of the two chunks is damaged, the other one is read.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self.path = path
        self.part = path.with_name(path.name + PART_SUFFIX)
        try:
            self._stream = self.part.open("xb")
        except FileExistsError:
            raise BadInput(f"recording {str(self.part)!r} already exists: choose another name, or move it") from None
        except OSError as error:
            raise BadInput(f"recording {str(path)!r} cannot be written: {error.strerror}") from None
        hold_for_writing(self._stream)
        # Any: most of its methods are untyped. Only `flush` ends a chunk.
        self._writer: Any = Writer(self._stream, chunk_size=MAX_CHUNK_BYTES, compression=CompressionType.ZSTD)
        self._frames: list[TimedFrame] = []  # of the chunk in progress
        self._messages_before: list[int] = []  # one per frame
        self._frame_times: list[int] = []  # of `_frames`, and of frames stored unchanged in `_messages`
        self._messages: list[Entry] = []  # all other messages of the chunk
        self._begin_ns = self._unwritten_bytes = 0
        self._has_state = False
        self._writer.start(PROFILE, LIBRARY)
        self.num_bytes = 0
        """File size without the chunk in progress."""
        self._head_bytes = self._stream.tell()  # before the first chunk
        self._chunk_ends: deque[int] = deque(maxlen=_MAX_CHUNK_ENDS)  # file sizes after recent chunks, newest last
        self._register_channels()

    def wants_state(self, log_time_ns: int) -> bool:
        return False

    @property
    def has_unwritten(self) -> bool:
        return bool(self._frames or self._messages)

    def start_segment(self) -> None:
        raise AssertionError("one file is one file")

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message of about `num_bytes`. A snapshot gets separate chunks.

        `data` is stored unchanged if it has fields of a later protocol version, which columns would lose.
        """
        if data is not None and isinstance(message, Frame | Snapshot) and data == encode(message):
            data = None
        if isinstance(message, Snapshot):
            self._add_snapshot(message, log_time_ns, data)
            return
        if not self.has_unwritten:
            self._begin_ns = log_time_ns
        if isinstance(message, Frame):
            self._frame_times.append(log_time_ns)
        if isinstance(message, Frame) and data is None:
            self._frames.append((log_time_ns, message))
            self._messages_before.append(len(self._messages))
        else:
            channel = HELLOS if isinstance(message, Hello) else MESSAGES
            self._messages.append((channel, log_time_ns, encode(message) if data is None else data))
        self._unwritten_bytes += num_bytes
        is_long = log_time_ns - self._begin_ns >= CHUNK_NS or len(self._frames) >= MAX_RECORDS
        if is_long or self._unwritten_bytes >= CHUNK_BYTES:
            self.flush()

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None:
        """Append a keyframe or a delta checkpoint as a separate chunk. The first keyframe is stored twice."""
        self.flush()
        data = pack([state])
        is_first = isinstance(state, Snapshot) and not self._has_state
        for _ in range(1 + is_first):
            self._write([(KEYFRAMES if isinstance(state, Snapshot) else CHECKPOINTS, log_time_ns, data)])
        self._has_state = self._has_state or isinstance(state, Snapshot)

    def add_chunk(self, entries: Sequence[Entry]) -> None:
        if entries:
            self.flush()
            self._write(entries)

    def flush(self) -> None:
        frames, before, messages, times = self._frames, self._messages_before, self._messages, self._frame_times
        self._frames, self._messages_before, self._messages, self._frame_times = [], [], [], []
        self._unwritten_bytes = 0
        entries = messages
        if frames:
            try:
                entries = [(FRAMES, frames[0][0], pack_frames(frames, before)), *messages]
            except (ValueError, OverflowError):  # cannot be stored as columns
                entries = _unpacked_entries(frames, before, messages)
        self._write(entries, times)

    def _add_snapshot(self, snapshot: Snapshot, log_time_ns: int, data: bytes | None) -> None:
        self.flush()
        try:
            packed = pack([snapshot])
        except (ValueError, OverflowError):  # cannot be stored as columns
            self._write([(HELLOS, log_time_ns, encode(snapshot) if data is None else data)])
            return
        self._write([(SNAPSHOTS, log_time_ns, packed) if data is None else (HELLOS, log_time_ns, data)])
        self._write([(KEYFRAMES, log_time_ns, packed)])
        self._has_state = True

    def _write(self, entries: Sequence[Entry], frame_times: Sequence[int] = ()) -> None:
        for channel, log_time_ns, data in entries:
            self._writer.add_message(channel, log_time=log_time_ns, publish_time=log_time_ns, data=data)
        self._writer.flush()
        if frame_times:
            fields = {"count": str(len(frame_times)), "first_ns": str(frame_times[0]), "last_ns": str(frame_times[-1])}
            self._writer.add_metadata(
                FRAMES_RECORD, fields | {"crc32": str(zlib.crc32(" ".join(fields.values()).encode()))}
            )
            self._stream.flush()
        self.num_bytes = self._stream.tell()
        if self.num_bytes > (self._chunk_ends[-1] if self._chunk_ends else self._head_bytes):
            self._chunk_ends.append(self.num_bytes)

    def finish(self) -> None:
        self.flush()
        self._writer.finish()
        self.num_bytes = self._stream.tell()
        self._stream.close()
        operating_system.rename(self.part, self.path)

    def salvage(self) -> bool:
        """Complete the file after the last fully written chunk, when the disk is full or has been removed.

        The disk space for the end of the file comes from truncating the file at that chunk's end, or at an earlier one.
        It does not suffice for the index, which readers do not need.
        """
        if self._stream.closed:
            return False
        try:
            with open(os.dup(self._stream.fileno()), "wb", buffering=0) as raw:
                with contextlib.suppress(OSError):  # the buffered rest does not fit on the disk
                    self._stream.close()
                is_complete = self._truncate(raw)
            if is_complete:
                operating_system.rename(self.part, self.path)
            elif not self._chunk_ends:
                self.part.unlink()
        except OSError:
            return False
        return is_complete

    def _truncate(self, raw: FileIO) -> bool:
        """Return whether the file could be cut after one of its chunks and ended there."""
        for chunk_end in reversed(self._chunk_ends):
            raw.truncate(chunk_end)
            raw.seek(chunk_end)
            with contextlib.suppress(OSError):
                if raw.write(EARLY_END) == len(EARLY_END):
                    return True
        return False

    def _register_channels(self) -> None:
        for channel, topic in TOPICS.items():
            if channel in JSON_SCHEMAS:
                name, kind = JSON_SCHEMAS[channel]
                encoding, schema = "json", self._writer.register_schema(name, "jsonschema", schema_of(kind))
            else:
                name, encoding = SCHEMAS[channel]
                schema = self._writer.register_schema(name, "", b"")
            channel_id = self._writer.register_channel(topic, encoding, schema)
            assert channel_id == channel, f"channel {topic} got the id {channel_id}"


def check_path(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise BadInput(f"recording {str(path)!r} is not accepted: its name ends in {SUFFIX}")
    if os.path.lexists(path):  # too long a name does not exist here, and fails when it is opened
        raise BadInput(f"recording {str(path)!r} already exists: choose another name, or move it")


def _unpacked_entries(
    frames: Sequence[TimedFrame], messages_before: Sequence[int], messages: Sequence[Entry]
) -> list[Entry]:
    entries = list(messages)
    for (log_time_ns, frame), position in zip(reversed(frames), reversed(messages_before), strict=True):
        entries.insert(position, (MESSAGES, log_time_ns, encode(frame)))
    return entries
