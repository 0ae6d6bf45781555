"""The file under a recording: MCAP through the `mcap` package, under another name until it is whole.

Owns the file, its name and its channels; used by one thread. Knows neither queue nor mirror.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.leap import Leap
from kvscope_telemetry.messages.telemetry import Snapshot, TelemetryMessage
from kvscope_telemetry.recordings.bundles.gathering import Entry, num_frames_at_end, with_bundles
from kvscope_telemetry.recordings.bundles.hash_lists import MAX_LISTED, HashList, ToldList
from kvscope_telemetry.recordings.bundles.leaps.listed_leaps import pack_listed_leap
from kvscope_telemetry.recordings.bundles.listed_keyframes import WholeState, untold_hashes, whole_pieces
from kvscope_telemetry.recordings.copying.stored_records import StoredRecords
from kvscope_telemetry.recordings.early_end import EARLY_END
from kvscope_telemetry.recordings.layout import (
    BUNDLE_SCHEMA,
    BUNDLES,
    CHUNK_BYTES,
    CHUNK_NS,
    FRAMES_RECORD,
    HASHES,
    HASHES_SCHEMA,
    JSON_SCHEMAS,
    KEYFRAMES,
    LEAPS,
    MESSAGE_ENCODING,
    PART_SUFFIX,
    PROFILE,
    SCHEMA,
    SEEKABLE,
    SUFFIX,
    TOPICS,
)
from kvscope_telemetry.recordings.piecewise_writer import PiecewiseWriter
from kvscope_telemetry.recordings.regular_file import hold_for_writing
from kvscope_telemetry.summaries.summary import schema_of

LIBRARY: Final = "kvscope"
BIG_MESSAGE_BYTES: Final = CHUNK_BYTES // 8
_RECORD_BYTES: Final = 31
"""What a message takes in a chunk besides its data."""
LIST_NS: Final = 20_000_000_000
"""A list of hashes is of so much: what refers to an older one tells it again."""
_PLACES: Final = 8
"""Of ends of chunks that are remembered: where the last leaves no room for the end of the file, one before does."""


class RecordingFile(Protocol):
    """Where a recording's messages go: one file, or one after another."""

    @property
    def path(self) -> Path:
        """What it is called once it is whole."""

    @property
    def part(self) -> Path:
        """What it is called until then."""

    @property
    def wants_state(self) -> bool:
        """Whether a new file should begin: `begin_anew` it with the whole state."""

    def begin_anew(self) -> None:
        """End this file; what is added from now on goes into the next."""

    @property
    def since_s(self) -> float | None:
        """When the oldest came that was not handed to the system, by the monotonic clock; None: all was."""

    def add(
        self, channel: int, log_time_ns: int, data: bytes | WholeState | Leap, read: TelemetryMessage | None = None
    ) -> None:
        """Append a message. `read`: what was read of it, where that is known."""

    def add_together(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Append messages (channel, log time, data) as a chunk, or chunks, of their own."""

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
    `is_copy`: chunks of another file are copied into it, whose lists of hashes stand for themselves.

    What much else follows from is there twice, in chunks of their own, so that one damaged chunk costs no more than its
    own second: the first state, each snapshot that came, and the hashes of blocks.
    """

    def __init__(self, path: Path, *, is_copy: bool = False) -> None:
        check_path(path)
        self._is_copy = is_copy
        self._copied: Sequence[ToldList] = ()
        self.path = path
        self.part = path.with_name(path.name + PART_SUFFIX)
        try:
            self._stream = self.part.open("xb")
        except FileExistsError:
            raise BadInput(f"recording {str(self.part)!r} exists already: choose another name, or move it") from None
        except OSError as error:
            raise BadInput(f"recording {str(path)!r} cannot be written: {error.strerror}") from None
        hold_for_writing(self._stream)
        # Any: two of its methods bear no types.
        self._writer: Any = PiecewiseWriter(self._stream, chunk_bytes=4 * CHUNK_BYTES)
        self._gathered: list[Entry] = []  # for the chunk in progress
        self._read: list[TelemetryMessage | None] = []  # of them
        self._gathered_bytes = 0
        self._hashes = HashList()
        self._has_state = False
        self._writer.start(PROFILE, LIBRARY)
        self._since_s = 0.0
        self.num_bytes = 0
        """Of the file so far, but for the chunk in progress."""
        self._head_bytes = self._stream.tell()  # before the first chunk
        self._whole_bytes: deque[int] = deque(maxlen=_PLACES)  # so much was handed over whole, the newest last
        schemas = dict.fromkeys(TOPICS, self._writer.register_schema(SCHEMA, "", b""))
        for channel, name in ((BUNDLES, BUNDLE_SCHEMA), (HASHES, HASHES_SCHEMA)):
            schemas[channel] = self._writer.register_schema(name, "", b"")
        for channel, topic in TOPICS.items():
            given = self._register(channel, topic, schemas[channel])
            assert given == channel, f"channel {topic} got the id {given}"

    @property
    def wants_state(self) -> bool:
        """It goes on in this one file."""
        return False

    @property
    def since_s(self) -> float | None:
        """When the chunk in progress began, by the monotonic clock; None: there is none."""
        return self._since_s if self._gathered else None

    def begin_anew(self) -> None:
        """It never asks for that."""
        raise AssertionError("one file is one file")

    def add(
        self, channel: int, log_time_ns: int, data: bytes | WholeState | Leap, read: TelemetryMessage | None = None
    ) -> None:
        """Append a message. A keyframe or a leap, like all that is big, gets a chunk of its own."""
        if isinstance(data, Leap):
            self._add_leap(log_time_ns, data)
            return
        if isinstance(data, WholeState):
            self._add_state(channel, log_time_ns, data)
            return
        alone = channel in SEEKABLE or len(data) > BIG_MESSAGE_BYTES
        if alone:
            self.flush()
        if not self._gathered:
            self._since_s = time.monotonic()
        self._gathered.append((channel, log_time_ns, data))
        self._read.append(read)
        self._gathered_bytes += len(data) + _RECORD_BYTES
        is_long = log_time_ns - self._gathered[0][1] >= CHUNK_NS
        if alone or is_long or self._gathered_bytes >= CHUNK_BYTES:
            self.flush()
        if isinstance(read, Snapshot):
            self.flush()
            self._has_state = True
            self._write([(KEYFRAMES, log_time_ns, data)])
            self._hashes.begin_at_keyframe(log_time_ns)

    def refer_to(self, lists: Sequence[ToldList]) -> None:
        """Lists of hashes that were copied into it, which the next state may name."""
        self._copied = lists

    def _add_state(self, channel: int, log_time_ns: int, state: WholeState) -> None:
        self.flush()
        if not self._is_copy and len(self._hashes):  # one that begins here might have the name of the next
            fresh = untold_hashes(state, self._hashes.all_told)
            if fresh.size:
                self._hashes.tell(fresh, log_time_ns)
                self.flush()
        told = (*self._copied, *self._hashes.all_told)
        self._copied = ()
        pieces = whole_pieces(state, told)
        self._writer.add_in_pieces(channel, log_time_ns, pieces)
        if not self._has_state:
            self._has_state = True
            self._writer.add_in_pieces(KEYFRAMES, log_time_ns, pieces)
        self.flush()
        self._hashes.begin_at_keyframe(log_time_ns)

    def _add_leap(self, log_time_ns: int, leap: Leap) -> None:
        self.flush()
        self._write([(LEAPS, log_time_ns, pack_listed_leap(leap, self._hashes))])
        if log_time_ns - self._hashes.name >= LIST_NS or len(self._hashes) >= MAX_LISTED // 8:
            self._hashes.begin_next()

    def add_together(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Append messages (channel, log time, data) as a chunk, or chunks, of their own."""
        if not entries:
            return
        self.flush()
        self._write(entries)

    def copy(self, stored: StoredRecords) -> None:
        """Append a chunk of another file as it lies there; the list of hashes that is written here is not its own."""
        if self._gathered:
            self.flush()
        self._writer.add_stored(stored)
        self._note_place()

    def flush(self) -> None:
        """End the chunk in progress and hand all to the system."""
        gathered, read = self._gathered, self._read
        self._gathered, self._read, self._gathered_bytes = [], [], 0
        entries = with_bundles(gathered, self._hashes, read)
        part = self._hashes.take()
        if part is not None:
            for _ in range(2):
                self._write([(HASHES, *part)])
        self._write(entries)

    def _write(self, entries: Sequence[Entry]) -> None:
        """A chunk."""
        num_bundled = 0
        for channel, log_time_ns, data in entries:
            self._writer.add_message(channel, log_time=log_time_ns, publish_time=log_time_ns, data=data)
            num_bundled += (channel == BUNDLES and num_frames_at_end(data)) or 0
        self._writer.flush()
        if num_bundled:
            self._writer.add_metadata(FRAMES_RECORD, {"frames": str(num_bundled), "again": str(num_bundled)})
            self._stream.flush()
        self._note_place()

    def _note_place(self) -> None:
        """All up to here is there whole."""
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

    def _register(self, channel: int, topic: str, schema: int) -> int:
        """The id that the channel got."""
        encoding = MESSAGE_ENCODING
        if channel in JSON_SCHEMAS:
            name, kind = JSON_SCHEMAS[channel]
            encoding, schema = "json", self._writer.register_schema(name, "jsonschema", schema_of(kind))
        given: int = self._writer.register_channel(topic, encoding, schema)
        return given


def check_path(path: Path) -> None:
    """Raise BadInput unless a recording may be called so."""
    if path.suffix != SUFFIX:
        raise BadInput(f"recording {str(path)!r} is not accepted: its name ends in {SUFFIX}")
    if path.exists():
        raise BadInput(f"recording {str(path)!r} exists already: choose another name, or move it")
