"""Reading a recording: what is in it, its frames, and the state at any time.

Owns the list of chunks; holds no file open between calls and at most one chunk in memory. Seconds count from the
first message. What is damaged is left out and counted: a chunk whose checksum fails, a message that cannot be read.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, find_chunks, read_chunk
from kvscope_telemetry.recordings.follower import Follower
from kvscope_telemetry.recordings.layout import FRAMES, KEYFRAMES, OTHERS, STATE, TOPICS
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestReader, TimedMessage
from kvscope_telemetry.state.mirror import Mirror

_FOREVER_NS = 1 << 63


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """What is in a recording."""

    hello: Hello
    """The first one."""
    epochs: tuple[int, ...]
    """Engine starts, in order."""
    duration_s: float
    num_frames: int
    num_chunks: int
    is_complete: bool
    """False for one that was cut short: it ends with its last whole chunk."""


class Recording:
    """A recording that was opened; `info` says what is in it."""

    def __init__(self, path: Path) -> None:
        found = find_chunks(path)
        self.path = path
        self.num_damaged = 0
        """Chunks and messages left out so far because they cannot be read, each time they were met."""
        self._first_damage = ""
        self._chunks = found.chunks
        self._channels = {kind: found.topics[topic] for kind, topic in TOPICS.items()}
        self._start_ns = min((chunk.start_ns for chunk in self._chunks), default=0)
        self._starts = [chunk.start_ns for chunk in self._chunks]
        self._count_again([chunk for chunk in self._chunks if not chunk.counts])
        if not found.is_complete:  # the file may end within the indexes of its last chunk
            self._count_again(self._chunks[-1:])
        hellos = self._hellos()
        if not hellos:
            raise BadInput(f"recording {str(path)!r} holds no telemetry that can be read{self._first_damage}")
        self.info = RecordingInfo(
            hello=hellos[0],
            epochs=tuple(dict.fromkeys(hello.epoch for hello in hellos)),
            duration_s=(max(chunk.end_ns for chunk in self._chunks) - self._start_ns) / 1e9,
            num_frames=sum(chunk.counts.get(self._channels[FRAMES], 0) for chunk in self._chunks),
            num_chunks=len(self._chunks),
            is_complete=found.is_complete,
        )

    @classmethod
    def open(cls, path: Path | str) -> Recording:
        """A file that a `RecordingWriter` wrote or was writing. Raises BadInput, in one line, for any other."""
        return cls(Path(path))

    @property
    def start_ns(self) -> int:
        """When it begins, by the wall clock: nanoseconds since 1970."""
        return self._start_ns

    def frames(self, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Frame]:
        """Frames from `from_s` until `until_s`, both included."""
        for _, message in self.messages(from_s, until_s):
            if isinstance(message, Frame):
                yield message

    def messages(
        self, from_s: float = 0.0, until_s: float | None = None, *, keyframes: bool = False
    ) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of all that was recorded in this time, as it came: without keyframes, unless asked."""
        kinds = (FRAMES, STATE, OTHERS, KEYFRAMES) if keyframes else (FRAMES, STATE, OTHERS)
        from_ns, until_ns = self._log_time_ns(from_s), self._log_time_ns(until_s)
        first = max(0, bisect_right(self._starts, from_ns) - 1)
        while first and self._chunks[first - 1].end_ns >= from_ns:
            first -= 1
        for log_time_ns, message in self._read(first, kinds, until_ns):
            if log_time_ns >= from_ns:
                yield (log_time_ns - self._start_ns) / 1e9, message

    def state_at(self, seconds: float) -> Mirror:
        """The state after the last frame until `seconds`; as it was before, where frames are missing then.

        Before the first snapshot the mirror has no blocks. Requests that had ended are known from the last keyframe on.
        """
        until_ns = self._log_time_ns(seconds)
        last = bisect_right(self._starts, until_ns) - 1
        follower = Follower()
        for first in range(last, -1, -1):
            if self._begins_state(self._chunks[first], until_ns):
                break
        else:
            return follower.mirror
        for _, message in self._read(first, (FRAMES, STATE, KEYFRAMES), until_ns):
            follower.feed(message)
        follower.settle()
        return follower.mirror

    def snapshot_before(self, seconds: float) -> float | None:
        """When the newest snapshot or keyframe not after `seconds` was; None before the first."""
        channels = {self._channels[STATE], self._channels[KEYFRAMES]}
        return next((at for at, found in self._backwards(channels, seconds) if isinstance(found, Snapshot)), None)

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""
        for _, message in self._backwards({self._channels[OTHERS]}, seconds):
            if isinstance(message, MemoryBreakdown) and message.epoch == epoch:
                return message
        return None

    def requests(self) -> list[RecordedRequest]:
        """Every request, in the order they were announced; reads the whole recording."""
        return RequestReader().read(self._read(0, (FRAMES, STATE, KEYFRAMES), _FOREVER_NS))

    def _read(self, first: int, kinds: tuple[int, ...], until_ns: int) -> Iterator[TimedMessage]:
        """Messages of these kinds from the chunk `first` on."""
        channels = {self._channels[kind] for kind in kinds}
        with self.path.open("rb") as file:
            for chunk in self._chunks[first:]:
                if chunk.start_ns > until_ns:
                    return
                yield from self._messages(file, chunk, channels, until_ns)

    def _messages(self, file: BinaryIO, chunk: Chunk, channels: set[int], until_ns: int) -> Iterator[TimedMessage]:
        if chunk.counts and not channels & chunk.counts.keys():
            return
        try:
            raw = read_chunk(file, chunk)
        except DamagedChunk as damage:
            self._note_damage(chunk, str(damage))
            return
        for message in raw:
            if message.channel not in channels or message.log_time_ns > until_ns:
                continue
            try:
                yield message.log_time_ns, decode_telemetry(message.data)
            except ProtocolError as error:
                self._note_damage(chunk, str(error))

    def _backwards(self, channels: set[int], seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and messages of these channels, the newest first, from `seconds` on."""
        until_ns = self._log_time_ns(seconds)
        with self.path.open("rb") as file:
            for chunk in reversed(self._chunks[: bisect_right(self._starts, until_ns)]):
                for log_time_ns, message in reversed(list(self._messages(file, chunk, channels, until_ns))):
                    yield (log_time_ns - self._start_ns) / 1e9, message

    def _begins_state(self, chunk: Chunk, until_ns: int) -> bool:
        """Whether a snapshot is in the chunk, not after `until_ns`."""
        channels = {self._channels[STATE], self._channels[KEYFRAMES]}
        if not channels & chunk.counts.keys():
            return False
        with self.path.open("rb") as file:
            found = self._messages(file, chunk, channels, until_ns)
            return any(isinstance(message, Snapshot) for _, message in found)

    def _count_again(self, chunks: Sequence[Chunk]) -> None:
        with self.path.open("rb") as file:
            for chunk in chunks:
                with contextlib.suppress(DamagedChunk):  # met again, and counted, when it is read
                    chunk.counts = dict(Counter(message.channel for message in read_chunk(file, chunk)))

    def _hellos(self) -> list[Hello]:
        """Of all epochs; from keyframes only when there are no others."""
        for kind in (STATE, KEYFRAMES):
            hellos = [
                message if isinstance(message, Hello) else message.hello
                for _, message in self._read(0, (kind,), _FOREVER_NS)
                if isinstance(message, Hello | Snapshot)
            ]
            if hellos:
                return hellos
        return []

    def _log_time_ns(self, seconds: float | None) -> int:
        if seconds is None:
            return _FOREVER_NS
        return self._start_ns + max(0, min(round(seconds * 1e9), _FOREVER_NS - self._start_ns))

    def _note_damage(self, chunk: Chunk, reason: str) -> None:
        self.num_damaged += 1
        self._first_damage = self._first_damage or f": in its chunk at byte {chunk.offset}, {reason}"
