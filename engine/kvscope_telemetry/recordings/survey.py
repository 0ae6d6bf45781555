"""What opening a recording finds out: its chunks, from when to when each is, and the engines it tells of.

Owns what becomes of a file that is damaged, hostile or too large: it is opened as far as it can be believed within
the effort there is, and what is left out is said. Holds no file open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.messages.telemetry import Hello, Snapshot
from kvscope_telemetry.messages.wire import decode_telemetry, encode
from kvscope_telemetry.recordings.bundles.bundle import span_of_bundle
from kvscope_telemetry.recordings.bundles.gathering import num_frames_at_end
from kvscope_telemetry.recordings.bundles.listed_keyframes import hello_of
from kvscope_telemetry.recordings.bundles.placed_parents import with_parents
from kvscope_telemetry.recordings.chunk_walk import ChunkList, ChunkWalk
from kvscope_telemetry.recordings.chunks import MAGIC, MAX_LOG_TIME_NS, Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.effort import RECORD_BYTES, Effort, EffortSpent, Watch
from kvscope_telemetry.recordings.layout import BUNDLES, KEYFRAMES, STATE, TOPICS
from kvscope_telemetry.recordings.regular_file import FollowedFile, stored_bytes


@dataclass(slots=True)
class Survey:
    """What is in a file."""

    chunks: list[Chunk] = field(default_factory=list)
    """Those with messages, in the order of their times."""
    channels: dict[int, int] = field(default_factory=dict)
    """Kind (`layout.FRAMES`, …) -> channel id."""
    hellos: list[Hello] = field(default_factory=list)
    is_complete: bool = False
    limit: str = ""
    """Why not all of the file was looked at; empty when it was."""
    damages: list[str] = field(default_factory=list)
    """Of each chunk, or place between chunks, that was left out, where it is and why."""

    def add(self, new: list[Chunk]) -> None:
        """More chunks, sorted."""
        in_order = not (self.chunks and new) or self.chunks[-1].start_ns <= new[0].start_ns
        self.chunks += new
        if not in_order:
            self.chunks.sort(key=lambda chunk: chunk.start_ns)


def survey(followed: FollowedFile, surveyor: Surveyor, watch: Watch | None = None) -> list[Chunk]:
    """What `surveyor` has not seen of a file. Raises BadInput in one line for what is no recording, OpeningCancelled if
    `watch` says so."""
    try:
        with followed.open() as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadInput(f"{str(followed.path)!r} is not a recording: it does not begin as an MCAP file does")
            followed.note_size(file)
            return surveyor.run(file, Effort(stored_bytes(file), watch))
    except OSError as error:
        raise BadInput(f"recording {str(followed.path)!r} cannot be read: {error.strerror}") from None


class Surveyor:
    """Looks at a file, and again once it is longer: then at what is new."""

    def __init__(self) -> None:
        self.found = Survey()
        self._walk = ChunkWalk(len(MAGIC))
        self._num_walked = self._num_damages = 0
        self._file: BinaryIO
        self._effort: Effort

    def run(self, file: BinaryIO, effort: Effort) -> list[Chunk]:
        """The chunks that are new and hold, in the order of their times; they are in `found` too."""
        self._file, self._effort = file, effort
        found, walked = self.found, self._walk.found
        effort.begin_step(0.0, 0.5)
        self._walk.run(file, effort)
        found.is_complete, found.limit = walked.is_complete, walked.limit
        found.damages += walked.damages[self._num_damages :]
        self._num_damages = len(walked.damages)
        channels = walked.topics
        found.channels = {kind: channels[topic] for kind, topic in TOPICS.items()}
        effort.begin_step(0.5, 0.9)
        new = self._believed(walked)
        self._num_walked = len(walked.chunks)
        effort.begin_step(0.9, 1.0)
        try:
            self._find_hellos(new)
        except EffortSpent as spent:
            found.limit = found.limit or str(spent)
        found.add(new)
        return new

    def _believed(self, walked: ChunkList) -> list[Chunk]:
        """The chunks whose times and counts hold, sorted. Where they are in doubt the messages themselves say."""
        believed: list[Chunk] = []
        new = walked.chunks[self._num_walked :]
        last = new[-1] if new and not walked.is_complete else None
        for place, chunk in enumerate(new):
            self._effort.is_at(place / len(new))
            if (
                chunk.is_doubtful or self._is_uncounted(chunk) or chunk is last
            ):  # a file may end within the indexes of its last chunk
                try:
                    self._settle(chunk)
                except EffortSpent as spent:
                    self.found.limit = self.found.limit or str(spent)
                    break
            if chunk.damage:
                self.found.damages.append(chunk.where)
            elif chunk.counts:
                believed.append(chunk)
        return sorted(believed, key=lambda chunk: chunk.start_ns)

    def _is_uncounted(self, chunk: Chunk) -> bool:
        """Whether it has bundles, and nothing beside it says of how many frames."""
        return chunk.num_bundled is None and self.found.channels[BUNDLES] in chunk.counts

    def _settle(self, chunk: Chunk) -> None:
        try:
            messages = self._read(chunk)
        except DamagedChunk:
            return
        times = [message.log_time_ns for message in messages]
        bundles = [message.data for message in messages if message.channel == self.found.channels[BUNDLES]]
        chunk.num_bundled, latest = _frames_in(bundles)
        times += latest
        if times and max(times) >= MAX_LOG_TIME_NS:
            chunk.damage = "its messages are of after the year 2116"
        elif times:
            chunk.start_ns, chunk.end_ns = min(times), max(times)

    def _find_hellos(self, new: list[Chunk]) -> None:
        """Of all epochs; from keyframes only when there are no others."""
        for kind in (STATE, KEYFRAMES):
            channel = self.found.channels[kind]
            holding = [chunk for chunk in new if channel in chunk.counts]
            for place, chunk in enumerate(holding):
                self._effort.is_at(place / len(holding))
                try:
                    messages = self._read(chunk)
                except DamagedChunk:
                    self.found.damages.append(chunk.where)
                    new.remove(chunk)
                    continue
                self.found.hellos += _hellos(message for message in messages if message.channel == channel)
            if self.found.hellos:
                return

    def _read(self, chunk: Chunk) -> list[RawMessage]:
        self._effort.spend(0 if chunk.damage else chunk.inflated_bytes)
        messages = read_chunk(self._file, chunk)
        self._effort.spend(2 * RECORD_BYTES * len(messages))
        return messages


def _frames_in(bundles: list[bytes]) -> tuple[int, list[int]]:
    """How many frames there are; and, where another tool put an end elsewhere, when the last was of each bundle."""
    said = [num_frames_at_end(data) for data in bundles]
    counts = [count for count in said[1::2] if count is not None]
    if said[::2] == [None] * len(counts):
        return sum(counts), []
    count, latest = 0, []
    for data in bundles:
        if num_frames_at_end(data) is None:
            with contextlib.suppress(ProtocolError):  # met again, and counted, when it is read
                num_frames, last_ns = span_of_bundle(data)
                count += num_frames
                latest.append(last_ns)
    return count, latest


def _hellos(messages: Iterable[RawMessage]) -> Iterator[Hello]:
    for raw in messages:
        try:
            told = hello_of(raw.data)
            message = decode_telemetry(with_parents(raw.data) if told is None else encode(told))
        except ProtocolError:  # met again, and counted, when it is read
            continue
        if isinstance(message, Hello | Snapshot):
            yield message if isinstance(message, Hello) else message.hello
