"""Layout of a recording file: channels, schemas, and the size limits that readers enforce.

docs/recording-format.md is the specification for other implementations.

A recording is an MCAP file with profile `kvscope/2`. Received messages are on four channels: the frames of about one
second as one columnar message (`columns`, `frame_batch`), snapshots as columnar messages, and hellos and all other
messages in msgpack as they were sent. Keyframes and delta checkpoints, for seeking, are columnar messages too.
Summaries of seconds, events, bookmarks and, only on request, block texts are JSON with a JSON schema. Keyframes, delta
checkpoints and JSON messages have separate chunks. A metadata record after each chunk with frames gives the number of
frames and the times of the first and last. Log times are the engine's monotonic clock, set by the wall clock of its
hello; on the channels of received messages they never decrease (`LogClock`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.block_texts.block_texts import RecordedText
from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvents

FORMAT_VERSION: Final = 2
PROFILE_NAME: Final = "kvscope"
PROFILE: Final = f"{PROFILE_NAME}/{FORMAT_VERSION}"
SUFFIX: Final = ".mcap"
PART_SUFFIX: Final = ".part"

FRAMES, HELLOS, SNAPSHOTS, KEYFRAMES, CHECKPOINTS, MESSAGES, SUMMARIES, EVENTS, BOOKMARKS, TEXTS = range(1, 11)
TOPICS: Final = {
    FRAMES: "/kvscope/frames",  # frames of about one second, as columns
    HELLOS: "/kvscope/hellos",  # also snapshots that cannot be stored as columns
    SNAPSHOTS: "/kvscope/snapshots",  # received snapshots, as columns
    KEYFRAMES: "/kvscope/keyframes",  # snapshots created by the writer for seeking, as columns
    CHECKPOINTS: "/kvscope/checkpoints",  # the frames of some seconds merged into one message, as columns
    MESSAGES: "/kvscope/messages",  # all other received messages, and frames that cannot be stored as columns
    SUMMARIES: "/kvscope/summaries",
    EVENTS: "/kvscope/events",
    BOOKMARKS: "/kvscope/bookmarks",
    TEXTS: "/kvscope/texts",  # block contents, only if requested
}
"""Topic of each channel id. Other tools may rewrite a file with other ids; the file's channel records are
authoritative.
"""
SCHEMAS: Final = {
    **dict.fromkeys((HELLOS, MESSAGES), ("kvscope.TelemetryMessage", "msgpack")),
    **dict.fromkeys((FRAMES, SNAPSHOTS, KEYFRAMES, CHECKPOINTS), ("kvscope.Columns", "zstd+msgpack")),
}
"""Schema name and message encoding of each channel that is not JSON."""
JSON_SCHEMAS: Final[dict[int, tuple[str, type[msgspec.Struct]]]] = {
    SUMMARIES: ("kvscope.Summary", Summary),
    EVENTS: ("kvscope.TimedEvents", TimedEvents),
    BOOKMARKS: ("kvscope.Bookmark", Bookmark),
    TEXTS: ("kvscope.RecordedText", RecordedText),
}

CHUNK_BYTES: Final = 1 << 20
"""Number of bytes of messages after which a chunk ends, counted before frames are packed into columns. If the
process is killed, at most these bytes are lost, and at most about one second of messages.
"""
CHUNK_NS: Final = 900_000_000
"""Length of recorded time after which a chunk ends. See
docs/internals/decisions/0006-a-second-of-frames-is-one-chunk.md.
"""
FRAMES_RECORD: Final = "kvscope.frames"
MAX_CHUNK_BYTES: Final = 128 << 20
"""Maximum uncompressed chunk size. Chunks that claim more are refused before they are read."""
MAX_RECORDED_MESSAGE_BYTES: Final = min(MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES - CHUNK_BYTES)
MAX_CHUNKS: Final = 1 << 22
