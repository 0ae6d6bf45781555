"""The file under a recording: MCAP through the `mcap` package, under another name until it is whole.

Owns the file, its name, its channels and what goes into a chunk; used by one thread. Knows neither queue nor mirror.
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
"""Channel, log time in ns, data."""
_PLACES: Final = 8
"""Of ends of chunks that are remembered: where the last leaves no room for the end of the file, one before does."""
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
"""The end of an MCAP file that has no room for its index: behind the last chunk it makes a whole file, which readers go
through from its beginning. Format: mcap.dev/spec, "Data End" and "Footer" with no summary section."""


class RecordingFile(Protocol):
    """Where a recording's messages go: one file, or one after another."""

    @property
    def path(self) -> Path:
        """What it is called once it is whole."""

    @property
    def part(self) -> Path:
        """What it is called until then."""

    def wants_state(self, log_time_ns: int) -> bool:
        """Whether a new file should begin before a message of `log_time_ns`: `begin_anew` it with the whole state."""

    def begin_anew(self) -> None:
        """End this file; what is added from now on goes into the next."""

    @property
    def holds_back(self) -> bool:
        """Whether something was added that is not handed to the system."""

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message of about so many bytes; `data` where it came as those."""

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None:
        """Append a keyframe or a delta checkpoint."""

    def add_together(self, entries: Sequence[Entry]) -> None:
        """Append messages as a chunk, or chunks, of their own."""

    def flush(self) -> None:
        """Hand all to the system."""

    def finish(self) -> None:
        """Make it whole."""

    def end_early(self) -> bool:
        """Nothing more can be written: make it whole as far as it goes, and whether that could be done. Where nothing
        was written nothing is left; else what is there keeps its other name."""


class McapFile:
    """`path` (ending in `.mcap`) once it is whole; `path` with `.part` until then.

    Raises BadInput for a path that cannot be written, or where something is already: nothing is overwritten.

    What much else follows from is there twice, in chunks of their own, so that one damaged chunk costs no more than its
    own second: the first state, and each snapshot that came.
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
        # Any: most of its methods bear no types. A chunk ends where `flush` says so.
        self._writer: Any = Writer(self._stream, chunk_size=MAX_CHUNK_BYTES, compression=CompressionType.ZSTD)
        self._frames: list[TimedFrame] = []  # for the chunk in progress
        self._messages_before: list[int] = []  # each of them
        self._frame_times: list[int] = []  # of those, and of frames that lie as they came
        self._messages: list[Entry] = []  # beside them
        self._begin_ns = self._gathered_bytes = 0
        self._has_state = False
        self._writer.start(PROFILE, LIBRARY)
        self.num_bytes = 0
        """Of the file so far, but for the chunk in progress."""
        self._head_bytes = self._stream.tell()  # before the first chunk
        self._whole_bytes: deque[int] = deque(maxlen=_PLACES)  # so much was handed over whole, the newest last
        self._register_channels()

    def wants_state(self, log_time_ns: int) -> bool:
        """It goes on in this one file."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether there is a chunk in progress."""
        return bool(self._frames or self._messages)

    def begin_anew(self) -> None:
        """It never asks for that."""
        raise AssertionError("one file is one file")

    def add_message(
        self, message: TelemetryMessage, log_time_ns: int, num_bytes: int, data: bytes | None = None
    ) -> None:
        """Append a message of about so many bytes. A snapshot has chunks of its own. What a later version said, and
        columns would lose, stays as it came."""
        if data is not None and isinstance(message, Frame | Snapshot) and data == encode(message):
            data = None
        if isinstance(message, Snapshot):
            self._add_snapshot(message, log_time_ns, data)
            return
        if not self.holds_back:
            self._begin_ns = log_time_ns
        if isinstance(message, Frame):
            self._frame_times.append(log_time_ns)
        if isinstance(message, Frame) and data is None:
            self._frames.append((log_time_ns, message))
            self._messages_before.append(len(self._messages))
        else:
            channel = HELLOS if isinstance(message, Hello) else MESSAGES
            self._messages.append((channel, log_time_ns, encode(message) if data is None else data))
        self._gathered_bytes += num_bytes
        is_long = log_time_ns - self._begin_ns >= CHUNK_NS or len(self._frames) >= MAX_RECORDS
        if is_long or self._gathered_bytes >= CHUNK_BYTES:
            self.flush()

    def add_state(self, log_time_ns: int, state: Snapshot | DeltaCheckpoint) -> None:
        """Append a keyframe or a delta checkpoint, as a chunk of its own; the first keyframe twice."""
        self.flush()
        data = pack([state])
        is_first = isinstance(state, Snapshot) and not self._has_state
        for _ in range(1 + is_first):
            self._write([(KEYFRAMES if isinstance(state, Snapshot) else CHECKPOINTS, log_time_ns, data)])
        self._has_state = self._has_state or isinstance(state, Snapshot)

    def add_together(self, entries: Sequence[Entry]) -> None:
        """Append messages as a chunk, or chunks, of their own."""
        if entries:
            self.flush()
            self._write(entries)

    def flush(self) -> None:
        """End the chunk in progress and hand all to the system."""
        frames, before, messages, times = self._frames, self._messages_before, self._messages, self._frame_times
        self._frames, self._messages_before, self._messages, self._frame_times = [], [], [], []
        self._gathered_bytes = 0
        entries = messages
        if frames:
            try:
                entries = [(FRAMES, frames[0][0], pack_frames(frames, before)), *messages]
            except (ValueError, OverflowError):  # columns cannot hold them
                entries = _in_order(frames, before, messages)
        self._write(entries, times)

    def _add_snapshot(self, snapshot: Snapshot, log_time_ns: int, data: bytes | None) -> None:
        self.flush()
        try:
            packed = pack([snapshot])
        except (ValueError, OverflowError):  # columns cannot hold it
            self._write([(HELLOS, log_time_ns, encode(snapshot) if data is None else data)])
            return
        self._write([(SNAPSHOTS, log_time_ns, packed) if data is None else (HELLOS, log_time_ns, data)])
        self._write([(KEYFRAMES, log_time_ns, packed)])
        self._has_state = True

    def _write(self, entries: Sequence[Entry], frame_times: Sequence[int] = ()) -> None:
        """A chunk, and what is said of the frames in it."""
        for channel, log_time_ns, data in entries:
            self._writer.add_message(channel, log_time=log_time_ns, publish_time=log_time_ns, data=data)
        self._writer.flush()
        if frame_times:
            said = {"count": str(len(frame_times)), "first_ns": str(frame_times[0]), "last_ns": str(frame_times[-1])}
            self._writer.add_metadata(
                FRAMES_RECORD, said | {"crc32": str(zlib.crc32(" ".join(said.values()).encode()))}
            )
            self._stream.flush()
        self.num_bytes = self._stream.tell()
        if self.num_bytes > (self._whole_bytes[-1] if self._whole_bytes else self._head_bytes):
            self._whole_bytes.append(self.num_bytes)

    def finish(self) -> None:
        """Write what belongs at the end; the file gets its name."""
        self.flush()
        self._writer.finish()
        self.num_bytes = self._stream.tell()
        self._stream.close()
        self.part.rename(self.path)

    def end_early(self) -> bool:
        """The disk is full or gone: end the file behind the last chunk that is there whole. The few bytes of that end
        have the room of what is cut off; the index, which nobody needs who reads a file from its beginning, has not."""
        if self._stream.closed:
            return False
        try:
            with open(os.dup(self._stream.fileno()), "wb", buffering=0) as raw:
                with contextlib.suppress(OSError):  # what it still held has no room
                    self._stream.close()
                return self._cut(raw)
        except OSError:
            return False

    def _cut(self, raw: FileIO) -> bool:
        for place in reversed(self._whole_bytes):
            raw.truncate(place)
            raw.seek(place)
            with contextlib.suppress(OSError):
                if raw.write(EARLY_END) == len(EARLY_END):
                    self.part.rename(self.path)
                    return True
        if not self._whole_bytes:
            self.part.unlink()
        return False

    def _register_channels(self) -> None:
        for channel, topic in TOPICS.items():
            if channel in JSON_SCHEMAS:
                name, kind = JSON_SCHEMAS[channel]
                encoding, schema = "json", self._writer.register_schema(name, "jsonschema", schema_of(kind))
            else:
                name, encoding = SCHEMAS[channel]
                schema = self._writer.register_schema(name, "", b"")
            given = self._writer.register_channel(topic, encoding, schema)
            assert given == channel, f"channel {topic} got the id {given}"


def check_path(path: Path) -> None:
    """Raise BadInput unless a recording may be called so."""
    if path.suffix != SUFFIX:
        raise BadInput(f"recording {str(path)!r} is not accepted: its name ends in {SUFFIX}")
    if os.path.lexists(path):  # a name that is too long is not there, and cannot be opened
        raise BadInput(f"recording {str(path)!r} already exists: choose another name, or move it")


def _in_order(frames: Sequence[TimedFrame], before: Sequence[int], messages: Sequence[Entry]) -> list[Entry]:
    """All as they came, one a message."""
    entries = list(messages)
    for (log_time_ns, frame), place in zip(reversed(frames), reversed(before), strict=True):
        entries.insert(place, (MESSAGES, log_time_ns, encode(frame)))
    return entries
