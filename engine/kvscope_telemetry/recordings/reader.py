"""Reading a recording: what is in it, its frames, and the state at any time.

Owns the list of chunks; holds no file open between calls and at most one chunk in memory. Seconds count from the
first message. What is damaged is left out and counted once: a chunk whose checksum fails, a message that cannot be
read or is of another time than its chunk. What opening may cost is `effort`'s, what it finds `survey`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry.errors import BadInput, ProtocolError, UnknownMessage
from kvscope_telemetry.messages.telemetry import Frame, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recorded import RecordingInfo, StoredMessage
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.follower import Follower
from kvscope_telemetry.recordings.layout import FRAMES, KEYFRAMES, OTHERS, STATE
from kvscope_telemetry.recordings.regular_file import FollowedFile
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestReader, TimedMessage
from kvscope_telemetry.recordings.survey import Surveyor, survey
from kvscope_telemetry.state.mirror import Mirror

MAX_BAD_MESSAGES: Final = 100_000
"""So many at most are remembered and counted."""
_FOREVER_NS: Final = 1 << 63


class Recording:
    """A recording that was opened; `info` says what is in it."""

    def __init__(self, path: Path, watch: Watch | None = None) -> None:
        self._file = FollowedFile(path)
        self.unknowns = Unknowns()
        """What a later version recorded that has no name here, each time it was met."""
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, place in it)
        self._surveyor = Surveyor()
        self._found = self._surveyor.found
        self._damages, self._chunks = self._found.damages, self._found.chunks
        self._starts: list[int] = []
        self._end_ns = self._num_frames = 0
        self._is_written = self._file.is_written()  # asked first: who lets go has written all by then
        new = self._look(watch)
        self._is_written = self._is_written or self._file.is_written()  # it may have been begun between the two
        if not self._found.hellos:
            reason = self._found.limit or next(iter(self._damages), "")
            raise BadInput(
                f"recording {str(path)!r} holds no telemetry that can be read" + (f": {reason}" if reason else "")
            )
        self._start_ns = min(chunk.start_ns for chunk in self._chunks)
        self.info = self._info(new)

    @classmethod
    def open(cls, path: Path | str, watch: Watch | None = None) -> Recording:
        """A file that a `RecordingWriter` wrote or is writing. Raises BadInput, in one line, for any other.

        Takes at most the effort that `effort` states: a file that is larger than it looks is opened in part. `watch`
        is told how far it is, and may end it: then OpeningCancelled is raised.
        """
        return cls(Path(path), watch)

    @property
    def path(self) -> Path:
        """The file, by the name it has now."""
        return self._file.path

    @property
    def may_grow(self) -> bool:
        """Whether `grow` may find more: somebody writes, and all that there is was looked at."""
        return self._is_written and not (self._found.is_complete or self._found.limit)

    @property
    def is_gone(self) -> bool:
        """Whether somebody deleted the file."""
        return self._file.is_gone

    def grow(self) -> bool:
        """Look for what was written since; whether there was anything. Raises BadInput when the file is gone."""
        if not self.may_grow:
            return False
        self._is_written = self._file.is_written()
        if not self._file.has_grown():
            return False
        new = self._look(None)
        self.info = self._info(new)
        return bool(new) or self.info.is_complete

    @property
    def num_damaged(self) -> int:
        """Chunks and messages left out so far because they cannot be read, each once."""
        return len(self._damages) + len(self._bad_messages)

    @property
    def note(self) -> str:
        """What is wrong with the file, in a few words; empty when nothing was found so far."""
        if self._found.limit:
            return "opened in part"
        if self.num_damaged:
            return "damaged in places, which are left out"
        return "" if self.info.is_complete else "cut short: ends with its last whole chunk"

    @property
    def detail(self) -> str:
        """What was left out and why, a line each."""
        lines = [f"Opened in part: {self._found.limit}."] if self._found.limit else []
        if self._damages:
            lines.append(f"{len(self._damages)} damaged and left out: {self._damages[0]}.")
        if self._bad_messages:
            lines.append(f"{len(self._bad_messages)} messages cannot be read and are left out.")
        if self.unknowns.num_skipped:
            lines.append("Events and messages of kinds that only a newer kvscope knows are left out.")
        if not self.info.is_complete and not self._found.limit:
            lines.append("Cut short: ends with its last whole chunk.")
        return "\n".join(lines)

    @property
    def start_ns(self) -> int:
        """When it begins, by the wall clock: nanoseconds since 1970."""
        return self._start_ns

    @property
    def end_ns(self) -> int:
        """When the last message so far was, by the wall clock."""
        return self._end_ns

    @property
    def first_s(self) -> float:
        """A file begins at its start."""
        return 0.0

    def frames(self, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Frame]:
        """Frames from `from_s` until `until_s`, both included."""
        for _, message in self.messages(from_s, until_s):
            if isinstance(message, Frame):
                yield message

    def messages(
        self, from_s: float = 0.0, until_s: float | None = None, *, keyframes: bool = False
    ) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of all that was recorded in this time, as it came: without keyframes, unless asked."""
        from_ns, until_ns = self._log_time_ns(from_s), self._log_time_ns(until_s)
        for log_time_ns, message in self.timed_messages(from_ns, until_ns, keyframes=keyframes):
            yield (log_time_ns - self._start_ns) / 1e9, message

    def timed_messages(self, from_ns: int, until_ns: int, *, keyframes: bool) -> Iterator[TimedMessage]:
        """The same by the wall clock."""
        kinds = (FRAMES, STATE, OTHERS, KEYFRAMES) if keyframes else (FRAMES, STATE, OTHERS)
        for log_time_ns, message in self._read(self._first_chunk(from_ns), kinds, until_ns):
            if log_time_ns >= from_ns:
                yield log_time_ns, message

    def raw_messages(self, from_ns: int, until_ns: int) -> Iterator[StoredMessage]:
        """All that was written in this time, by the wall clock, keyframes too; it is not decoded."""
        kinds = {channel: kind for kind, channel in self._found.channels.items()}
        with self._file.open() as file:
            for chunk in self._chunks_from(self._first_chunk(from_ns), until_ns):
                for _, raw in self._raw(file, chunk, set(kinds), until_ns):
                    if max(from_ns, chunk.start_ns) <= raw.log_time_ns <= chunk.end_ns:
                        yield StoredMessage(kinds[raw.channel], raw.log_time_ns, raw.data)

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
        channels = {self._found.channels[STATE], self._found.channels[KEYFRAMES]}
        return next((at for at, found in self._backwards(channels, seconds) if isinstance(found, Snapshot)), None)

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""
        for _, message in self._backwards({self._found.channels[OTHERS]}, seconds):
            if isinstance(message, MemoryBreakdown) and message.epoch == epoch:
                return message
        return None

    def requests(self) -> list[RecordedRequest]:
        """Every request, in the order they were announced; reads the whole recording."""
        return RequestReader().read(self._read(0, (FRAMES, STATE, KEYFRAMES), _FOREVER_NS))

    def _read(self, first: int, kinds: tuple[int, ...], until_ns: int) -> Iterator[TimedMessage]:
        """Messages of these kinds from the chunk `first` on."""
        channels = {self._found.channels[kind] for kind in kinds}
        with self._file.open() as file:
            for chunk in self._chunks_from(first, until_ns):
                yield from self._messages(file, chunk, channels, until_ns)

    def _chunks_from(self, first: int, until_ns: int) -> Iterator[Chunk]:
        """Those that `grow` finds meanwhile as well."""
        while first < len(self._chunks) and self._chunks[first].start_ns <= until_ns:
            yield self._chunks[first]
            first += 1

    def _first_chunk(self, from_ns: int) -> int:
        """The first that may hold something of `from_ns` or after."""
        first = max(0, bisect_right(self._starts, from_ns) - 1)
        while first and self._chunks[first - 1].end_ns >= from_ns:
            first -= 1
        return first

    def _messages(self, file: BinaryIO, chunk: Chunk, channels: set[int], until_ns: int) -> Iterator[TimedMessage]:
        for place, message in self._raw(file, chunk, channels, until_ns):
            decoded = self._decoded(chunk, place, message)
            if decoded is not None:
                yield message.log_time_ns, decoded

    def _raw(self, file: BinaryIO, chunk: Chunk, channels: set[int], until_ns: int) -> Iterator[tuple[int, RawMessage]]:
        """Messages of these channels not after `until_ns`, with their places in the chunk."""
        if not channels & chunk.counts.keys() or chunk.damage:
            return
        try:
            raw = read_chunk(file, chunk)
        except DamagedChunk:
            self._damages.append(chunk.where)
            return
        for place, message in enumerate(raw):
            if message.channel in channels and message.log_time_ns <= until_ns:
                yield place, message

    def _decoded(self, chunk: Chunk, place: int, message: RawMessage) -> TelemetryMessage | None:
        try:
            if chunk.start_ns <= message.log_time_ns <= chunk.end_ns:
                return decode_telemetry(message.data, self.unknowns)
        except UnknownMessage:
            return None
        except ProtocolError:
            pass
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((chunk.offset, place))
        return None

    def _backwards(self, channels: set[int], seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and messages of these channels, the newest first, from `seconds` on."""
        until_ns = self._log_time_ns(seconds)
        with self._file.open() as file:
            for chunk in reversed(self._chunks[: bisect_right(self._starts, until_ns)]):
                for log_time_ns, message in reversed(list(self._messages(file, chunk, channels, until_ns))):
                    yield (log_time_ns - self._start_ns) / 1e9, message

    def _begins_state(self, chunk: Chunk, until_ns: int) -> bool:
        """Whether a snapshot is in the chunk, not after `until_ns`."""
        channels = {self._found.channels[STATE], self._found.channels[KEYFRAMES]}
        if not channels & chunk.counts.keys():
            return False
        with self._file.open() as file:
            found = self._messages(file, chunk, channels, until_ns)
            return any(isinstance(message, Snapshot) for _, message in found)

    def _log_time_ns(self, seconds: float | None) -> int:
        if seconds is None:
            return _FOREVER_NS
        return self._start_ns + max(0, min(round(seconds * 1e9), _FOREVER_NS - self._start_ns))

    def _look(self, watch: Watch | None) -> list[Chunk]:
        """Go over what was not looked at; what is new of it."""
        new = survey(self._file, self._surveyor, watch)
        self._starts += [chunk.start_ns for chunk in new]
        if len(self._chunks) > len(new) > 0 and self._chunks[-1] is not new[-1]:
            self._starts.sort()
        return new

    def _info(self, new: list[Chunk]) -> RecordingInfo:
        self._end_ns = max([self._end_ns, *(chunk.end_ns for chunk in new)])
        self._num_frames += sum(chunk.counts.get(self._found.channels[FRAMES], 0) for chunk in new)
        found = self._found
        return RecordingInfo(
            hello=found.hellos[0],
            epochs=tuple(dict.fromkeys(hello.epoch for hello in found.hellos)),
            duration_s=(self._end_ns - self._start_ns) / 1e9,
            num_frames=self._num_frames,
            num_chunks=len(self._chunks),
            is_complete=found.is_complete and not found.limit,
        )
