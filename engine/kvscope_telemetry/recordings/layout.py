"""What a recording looks like inside, and how large what it claims may be. docs/recording-format.md says it to others.

An MCAP file of profile `kvscope/2`: the frames of a second as one message of columns (`columns`, `frame_batch`), other
messages in msgpack as they went over the wire, on four channels; keyframes and delta checkpoints for seeking, which are
messages of columns too; summaries of seconds, events, bookmarks and, only where somebody asked for them, texts of
blocks in JSON with a JSON schema. Keyframes, delta checkpoints and what is JSON lie in chunks of their own. A metadata
record after each chunk with frames says how many there are, and from when to when. Log times are the engine's monotonic
clock set by the wall clock of its hello, and on the channels of what came never go back (`LogClock`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvents
from kvscope_telemetry.texts.block_texts import RecordedText

FORMAT_VERSION: Final = 2
PROFILE_NAME: Final = "kvscope"
PROFILE: Final = f"{PROFILE_NAME}/{FORMAT_VERSION}"
SUFFIX: Final = ".mcap"
PART_SUFFIX: Final = ".part"
"""Added to the name while the file is being written."""

FRAMES, HELLOS, SNAPSHOTS, KEYFRAMES, CHECKPOINTS, MESSAGES, SUMMARIES, EVENTS, BOOKMARKS, TEXTS = range(1, 11)
TOPICS: Final = {
    FRAMES: "/kvscope/frames",  # of about a second, as columns
    HELLOS: "/kvscope/hellos",  # and snapshots that no columns can hold
    SNAPSHOTS: "/kvscope/snapshots",  # those that came, as columns
    KEYFRAMES: "/kvscope/keyframes",  # snapshots that the writer made, for seeking, as columns
    CHECKPOINTS: "/kvscope/checkpoints",  # delta checkpoints: the frames of some seconds joined into one, as columns
    MESSAGES: "/kvscope/messages",  # all else that came, and frames that no columns can hold
    SUMMARIES: "/kvscope/summaries",
    EVENTS: "/kvscope/events",
    BOOKMARKS: "/kvscope/bookmarks",
    TEXTS: "/kvscope/texts",  # what blocks held, where somebody asked for it
}
"""Channel id -> topic. A file that another tool wrote anew may have other ids; its channel records say so."""
SCHEMAS: Final = {
    **dict.fromkeys((HELLOS, MESSAGES), ("kvscope.TelemetryMessage", "msgpack")),
    **dict.fromkeys((FRAMES, SNAPSHOTS, KEYFRAMES, CHECKPOINTS), ("kvscope.Columns", "zstd+msgpack")),
}
"""Channels that are not JSON: name of the schema, and the encoding."""
JSON_SCHEMAS: Final[dict[int, tuple[str, type[msgspec.Struct]]]] = {
    SUMMARIES: ("kvscope.Summary", Summary),
    EVENTS: ("kvscope.TimedEvents", TimedEvents),
    BOOKMARKS: ("kvscope.Bookmark", Bookmark),
    TEXTS: ("kvscope.RecordedText", RecordedText),
}
"""Channels that are JSON: name of the schema, and of what it is."""

CHUNK_BYTES: Final = 1 << 20
"""Of messages in a chunk, before frames become columns: what a killed process loses at most, and no more of them than
came in the last second."""
CHUNK_NS: Final = 900_000_000
"""Of many messages: from the first to the last in a chunk. See
docs/internals/decisions/0006-a-second-of-frames-is-one-chunk.md."""
FRAMES_RECORD: Final = "kvscope.frames"
"""Name of the metadata record after a chunk with frames."""
MAX_CHUNK_BYTES: Final = 128 << 20
"""Inflated. Chunks that claim more are refused before they are read."""
MAX_RECORDED_MESSAGE_BYTES: Final = min(MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES - CHUNK_BYTES)
MAX_CHUNKS: Final = 1 << 22
