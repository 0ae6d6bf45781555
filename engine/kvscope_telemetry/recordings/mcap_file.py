"""The file under a recording: MCAP through the `mcap` package, under another name until it is whole.

Owns the file, its name and its channels; used by one thread. Knows neither queue nor mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from mcap.writer import CompressionType, Writer

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.layout import (
    CHUNK_BYTES,
    JSON_SCHEMAS,
    MESSAGE_ENCODING,
    PART_SUFFIX,
    PROFILE,
    SCHEMA,
    SEEKABLE,
    SUFFIX,
    TOPICS,
)
from kvscope_telemetry.recordings.regular_file import hold_for_writing
from kvscope_telemetry.summaries.summary import schema_of

LIBRARY: Final = "kvscope"
BIG_MESSAGE_BYTES: Final = CHUNK_BYTES // 2


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

    def add(self, channel: int, log_time_ns: int, data: bytes) -> None:
        """Append a message."""

    def add_together(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Append messages (channel, log time, data) as a chunk, or chunks, of their own."""

    def flush(self) -> None:
        """Hand all to the system."""

    def finish(self) -> None:
        """Make it whole."""

    def abandon(self) -> None:
        """Leave it as it is."""


class McapFile:
    """`path` (ending in `.mcap`) once it is whole; `path` with `.part` until then.

    Raises BadInput for a path that cannot be written, or where something is already: nothing is overwritten.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
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
        self._writer: Any = Writer(self._stream, chunk_size=CHUNK_BYTES, compression=CompressionType.ZSTD)
        self._writer.start(PROFILE, LIBRARY)
        schema = self._writer.register_schema(SCHEMA, "", b"")
        for channel, topic in TOPICS.items():
            given = self._register(channel, topic, schema)
            assert given == channel, f"channel {topic} got the id {given}"

    @property
    def wants_state(self) -> bool:
        """It goes on in this one file."""
        return False

    @property
    def num_bytes(self) -> int:
        """Of the file so far, but for the chunk in progress."""
        return 0 if self._stream.closed else self._stream.tell()

    def begin_anew(self) -> None:
        """It never asks for that."""
        raise AssertionError("one file is one file")

    def add(self, channel: int, log_time_ns: int, data: bytes) -> None:
        """Append a message. A keyframe or a leap, like all that is big, gets a chunk of its own."""
        alone = channel in SEEKABLE or len(data) > BIG_MESSAGE_BYTES
        if alone:
            self._writer.flush()
        self._writer.add_message(channel, log_time=log_time_ns, publish_time=log_time_ns, data=data)
        if alone:
            self._writer.flush()

    def add_together(self, entries: Sequence[tuple[int, int, bytes]]) -> None:
        """Append messages (channel, log time, data) as a chunk, or chunks, of their own."""
        if not entries:
            return
        self._writer.flush()
        for channel, log_time_ns, data in entries:
            self._writer.add_message(channel, log_time=log_time_ns, publish_time=log_time_ns, data=data)
        self._writer.flush()

    def flush(self) -> None:
        """End the chunk in progress and hand all to the system."""
        self._writer.flush()

    def finish(self) -> None:
        """Write what belongs at the end; the file gets its name."""
        self._writer.finish()
        self._stream.close()
        self.part.rename(self.path)

    def abandon(self) -> None:
        """Leave the file as it is, with its chunks up to here, under its other name."""
        self._stream.close()

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
