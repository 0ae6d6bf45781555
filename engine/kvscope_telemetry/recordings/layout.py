"""What a recording looks like inside, and how large what it claims may be.

An MCAP file of profile `kvscope`: chunks of messages in msgpack, as they went over the wire (schema
`kvscope.TelemetryMessage`, described by `kvscope_telemetry.messages.telemetry`), on four channels, but that the frames
of a second are together in a bundle (schema `kvscope.Bundle`, described by `bundles.bundle` and `bundles.gathering`),
which gives each back byte for byte; a metadata record after their chunk says how many there are. Hashes of blocks lie
before what needs them, in lists (schema `kvscope.HashPart`, `bundles.hash_lists`; each part is there twice, in two
chunks, as are the first state and each snapshot that came, on the channel of keyframes), which bundles and leaps refer
to (`bundles.leaps.listed_leaps`), and keyframes to those since the third before (`bundles.listed_keyframes`; very
large ones lie without those that they tell twice, `bundles.placed_parents`). And, in chunks of their own, leaps over
some seconds (`leaps`), a summary a second, events in lists, what was said of bookmarks and, only where somebody asked
for them, texts of blocks (`texts`), these as JSON with a JSON schema. Log times are the engine's monotonic clock set by
the wall clock of its hello, and on the first four channels never go back (`log_clock`). Every keyframe begins a chunk.

Earlier versions wrote frames and events one a message, told hashes in each bundle and keyframe, named the columns of
bundles (`bundles.column_names`) and foretold less of them, and packed leaps otherwise (`bundles.leaps.packed_leaps`):
all of it is read.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope_telemetry.messages.telemetry import MAX_MESSAGE_BYTES, Frame, Hello, Snapshot, TelemetryMessage
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, TimedEvents
from kvscope_telemetry.texts.block_texts import RecordedText

PROFILE: Final = "kvscope"
SCHEMA: Final = "kvscope.TelemetryMessage"
BUNDLE_SCHEMA: Final = "kvscope.Bundle"
HASHES_SCHEMA: Final = "kvscope.HashPart"
MESSAGE_ENCODING: Final = "msgpack"
SUFFIX: Final = ".mcap"
PART_SUFFIX: Final = ".part"
"""Added to the name while the file is being written."""

FRAMES, STATE, KEYFRAMES, OTHERS, SUMMARIES, EVENTS, LEAPS, BOOKMARKS, TEXTS, BUNDLES = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
EVENT_LISTS, HASHES = 11, 12
TOPICS: Final = {
    FRAMES: "/kvscope/frames",
    STATE: "/kvscope/state",  # hellos, and snapshots that somebody asked for
    KEYFRAMES: "/kvscope/keyframes",  # snapshots that the writer made, for seeking
    OTHERS: "/kvscope/others",
    SUMMARIES: "/kvscope/summaries",
    EVENTS: "/kvscope/events",  # one a message, as earlier versions wrote them
    LEAPS: "/kvscope/leaps",  # the frames of some seconds joined into one, for seeking
    BOOKMARKS: "/kvscope/bookmarks",
    TEXTS: "/kvscope/texts",  # what blocks held, where somebody asked for it
    BUNDLES: "/kvscope/bundles",  # frames, their columns side by side
    EVENT_LISTS: "/kvscope/event_lists",
    HASHES: "/kvscope/hashes",  # of blocks, each once: bundles and leaps say by a number which they mean
}
"""Channel id -> topic. A file that another tool wrote anew may have other ids; its channel records say so."""
SEEKABLE: Final = (KEYFRAMES, LEAPS)
"""Channels of which each message has a chunk of its own."""
JSON_SCHEMAS: Final[dict[int, tuple[str, type[msgspec.Struct]]]] = {
    SUMMARIES: ("kvscope.Summary", Summary),
    EVENTS: ("kvscope.TimedEvent", TimedEvent),
    EVENT_LISTS: ("kvscope.TimedEvents", TimedEvents),
    BOOKMARKS: ("kvscope.Bookmark", Bookmark),
    TEXTS: ("kvscope.RecordedText", RecordedText),
}
"""Channels that are JSON: name of the schema, and of what it is."""

CHUNK_BYTES: Final = 1 << 20
"""Of messages in a chunk, before frames become bundles: what a killed process loses at most, and no more of them than
came in the last second."""
CHUNK_NS: Final = 900_000_000
"""Of many messages: from the first to the last in a chunk."""
FRAMES_RECORD: Final = "kvscope.frames"
"""Name of the metadata record after a chunk with bundles: the number of frames in them, twice."""
MAX_CHUNK_BYTES: Final = 128 << 20
"""Inflated; a keyframe of 4 million blocks is 104 MB. Chunks that claim more are refused before they are read."""
MAX_RECORDED_MESSAGE_BYTES: Final = min(MAX_MESSAGE_BYTES, MAX_CHUNK_BYTES - CHUNK_BYTES)
MAX_CHUNKS: Final = 1 << 22


def channel_of(message: TelemetryMessage) -> int:
    """Where a message as it came belongs."""
    if isinstance(message, Frame):
        return FRAMES
    return STATE if isinstance(message, Hello | Snapshot) else OTHERS
