"""The file under a recording: MCAP through the `mcap` package, under another name until it is whole.

Owns the file, its name and its channels; used by one thread. Knows neither queue nor mirror.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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
from kvscope_telemetry.summaries.summary import schema_of

LIBRARY: Final = "kvscope"
BIG_MESSAGE_BYTES: Final = CHUNK_BYTES // 2


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
        # Any: two of its methods bear no types.
        self._writer: Any = Writer(self._stream, chunk_size=CHUNK_BYTES, compression=CompressionType.ZSTD)
        self._writer.start(PROFILE, LIBRARY)
        schema = self._writer.register_schema(SCHEMA, "", b"")
        for channel, topic in TOPICS.items():
            given = self._register(channel, topic, schema)
            assert given == channel, f"channel {topic} got the id {given}"

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
