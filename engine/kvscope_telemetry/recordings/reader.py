"""Reading a recording: what is in it, its frames, and the state at any time.

Owns the list of chunks; holds no file open between calls and at most one chunk in memory. Seconds count from the
first message. What is damaged is left out and counted once: a chunk whose checksum fails, a message that cannot be
read or is of another time than its chunk. What opening may cost is `effort`'s, what it finds `survey`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kvscope_telemetry.errors import ProtocolError, UnknownMessage
from kvscope_telemetry.messages.leap import Leap, decode_leap
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.messages.wire import decode_telemetry
from kvscope_telemetry.recordings.chunks import Chunk, DamagedChunk, RawMessage, read_chunk
from kvscope_telemetry.recordings.effort import Watch
from kvscope_telemetry.recordings.layout import EVENTS, FRAMES, KEYFRAMES, LEAPS, OTHERS, STATE, SUMMARIES
from kvscope_telemetry.recordings.regular_file import open_regular
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestReader, TimedMessage
from kvscope_telemetry.recordings.survey import survey
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.state.state_place import StatePlace
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, decode_event, decode_summary

MAX_BAD_MESSAGES: Final = 100_000
"""So many at most are remembered and counted."""
_FOREVER_NS: Final = 1 << 63
_GLANCE_DECODERS: Final[dict[int, Callable[[bytes], Summary | TimedEvent]]] = {
    SUMMARIES: decode_summary,
    EVENTS: decode_event,
}


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

    def __init__(self, path: Path, watch: Watch | None = None) -> None:
        found = survey(path, watch)
        self.path = path
        self.unknowns = Unknowns()
        """What a later version recorded that has no name here, each time it was met."""
        self._limit = found.limit
        self._damages = found.damages
        self._bad_messages: set[tuple[int, int]] = set()  # (offset of the chunk, place in it)
        self._channels = found.channels
        told = {self._channels[kind] for kind in (FRAMES, STATE, KEYFRAMES, OTHERS)}
        self._chunks = [chunk for chunk in found.chunks if told & chunk.counts.keys()]
        made = [chunk for chunk in found.chunks if not told & chunk.counts.keys()]
        """Chunks that hold only what was made of the messages in the others."""
        self._leaps = [chunk for chunk in made if self._channels[LEAPS] in chunk.counts]
        self._glances = [chunk for chunk in made if self._channels[LEAPS] not in chunk.counts]
        self._start_ns = min(chunk.start_ns for chunk in self._chunks)
        self._starts = [chunk.start_ns for chunk in self._chunks]
        self.info = RecordingInfo(
            hello=found.hellos[0],
            epochs=tuple(dict.fromkeys(hello.epoch for hello in found.hellos)),
            duration_s=(max(chunk.end_ns for chunk in self._chunks) - self._start_ns) / 1e9,
            num_frames=sum(chunk.counts.get(self._channels[FRAMES], 0) for chunk in self._chunks),
            num_chunks=len(self._chunks),
            is_complete=found.is_complete and not found.limit,
        )

    @classmethod
    def open(cls, path: Path | str, watch: Watch | None = None) -> Recording:
        """A file that a `RecordingWriter` wrote or was writing. Raises BadInput, in one line, for any other.

        Takes at most the effort that `effort` states: a file that is larger than it looks is opened in part. `watch`
        is told how far it is, and may end it: then OpeningCancelled is raised.
        """
        return cls(Path(path), watch)

    @property
    def num_damaged(self) -> int:
        """Chunks and messages left out so far because they cannot be read, each once."""
        return len(self._damages) + len(self._bad_messages)

    @property
    def note(self) -> str:
        """What is wrong with the file, in a few words; empty when nothing was found so far."""
        if self._limit:
            return "opened in part"
        if self.num_damaged:
            return "damaged in places, which are left out"
        return "" if self.info.is_complete else "cut short: ends with its last whole chunk"

    @property
    def detail(self) -> str:
        """What was left out and why, a line each."""
        lines = [f"Opened in part: {self._limit}."] if self._limit else []
        if self._damages:
            lines.append(f"{len(self._damages)} damaged and left out: {self._damages[0]}.")
        if self._bad_messages:
            lines.append(f"{len(self._bad_messages)} messages cannot be read and are left out.")
        if self.unknowns.num_skipped:
            lines.append("Events and messages of kinds that only a newer kvscope knows are left out.")
        if not self.info.is_complete and not self._limit:
            lines.append("Cut short: ends with its last whole chunk.")
        return "\n".join(lines)

    @property
    def start_ns(self) -> int:
        """When it begins, by the wall clock: nanoseconds since 1970."""
        return self._start_ns

    @property
    def end_ns(self) -> int:
        """When its last message was, by the same clock."""
        return self._start_ns + round(self.info.duration_s * 1e9)

    def glances(self, from_ns: int = 0) -> Iterator[Summary | TimedEvent]:
        """Summaries and events in the file, in the order they were written, of chunks that reach beyond `from_ns`.

        What cannot be read is left out and counted as other messages are.
        """
        channels = {self._channels[kind]: decode for kind, decode in _GLANCE_DECODERS.items()}
        with open_regular(self.path) as file:
            for chunk in self._glances:
                if chunk.end_ns < from_ns or not channels.keys() & chunk.counts.keys():
                    continue
                for place, raw in enumerate(self._raw(file, chunk)):
                    if raw.channel in channels:
                        try:
                            yield channels[raw.channel](raw.data)
                        except ProtocolError:
                            self._note_bad(chunk, place)

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
        for log_time_ns, message in self._read(self._first_chunk(from_ns), kinds, until_ns):
            if log_time_ns >= from_ns:
                yield (log_time_ns - self._start_ns) / 1e9, message

    def state_at(self, seconds: float) -> Mirror:
        """The state after the last frame until `seconds`; as it was before, where frames are missing then.

        Before the first snapshot the mirror has no blocks. Requests that had ended are known from the last keyframe on.
        """
        follower = Follower()
        for _, message in self.run_up(seconds):
            follower.feed(message)
        follower.settle()
        return follower.mirror

    def run_up(self, seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of what the state at `seconds` follows from: the newest snapshot, leaps from there and
        the frames after the last of them. Nothing before the first snapshot."""
        until_ns = self._log_time_ns(seconds)
        begin = next(((at, m) for at, m in self._newest_first(until_ns) if isinstance(m, Snapshot)), None)
        if begin is None:
            return
        from_ns, snapshot = begin
        place = StatePlace()
        place.go_to(snapshot)
        yield (from_ns - self._start_ns) / 1e9, snapshot
        for log_time_ns, leap in self._leaps_between(from_ns, until_ns):
            if isinstance(leap, Leap) and place.is_before(leap):
                place.advance(leap)
                yield (log_time_ns - self._start_ns) / 1e9, leap
                from_ns = log_time_ns
        for log_time_ns, message in self._read(self._first_chunk(from_ns), (FRAMES,), until_ns):
            if log_time_ns >= from_ns:
                yield (log_time_ns - self._start_ns) / 1e9, message

    def snapshot_before(self, seconds: float) -> float | None:
        """When the newest snapshot or keyframe not after `seconds` was; None before the first."""
        newest = self._newest_first(self._log_time_ns(seconds))
        return next(((at - self._start_ns) / 1e9 for at, found in newest if isinstance(found, Snapshot)), None)

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""
        for _, message in self._newest_first(self._log_time_ns(seconds), (OTHERS,)):
            if isinstance(message, MemoryBreakdown) and message.epoch == epoch:
                return message
        return None

    def requests(self) -> list[RecordedRequest]:
        """Every request, in the order they were announced; reads the whole recording."""
        return RequestReader().read(self._read(0, (FRAMES, STATE, KEYFRAMES), _FOREVER_NS))

    def _read(self, first: int, kinds: tuple[int, ...], until_ns: int) -> Iterator[TimedMessage]:
        """Messages of these kinds from the chunk `first` on."""
        channels = {self._channels[kind] for kind in kinds}
        with open_regular(self.path) as file:
            for chunk in self._chunks[first:]:
                if chunk.start_ns > until_ns:
                    return
                yield from self._messages(file, chunk, channels, until_ns)

    def _messages(self, file: BinaryIO, chunk: Chunk, channels: set[int], until_ns: int) -> Iterator[TimedMessage]:
        if not channels & chunk.counts.keys():
            return
        for place, message in enumerate(self._raw(file, chunk)):
            if message.channel not in channels or message.log_time_ns > until_ns:
                continue
            decoded = self._decoded(chunk, place, message)
            if decoded is not None:
                yield message.log_time_ns, decoded

    def _raw(self, file: BinaryIO, chunk: Chunk) -> list[RawMessage]:
        """What lies in the chunk; nothing where it is damaged."""
        if chunk.damage:
            return []
        try:
            return read_chunk(file, chunk)
        except DamagedChunk:
            self._damages.append(chunk.where)
            return []

    def _decoded(self, chunk: Chunk, place: int, message: RawMessage) -> TelemetryMessage | None:
        try:
            if chunk.start_ns <= message.log_time_ns <= chunk.end_ns:
                if message.channel == self._channels[LEAPS]:
                    return decode_leap(message.data)
                return decode_telemetry(message.data, self.unknowns)
        except UnknownMessage:
            return None
        except ProtocolError:
            pass
        self._note_bad(chunk, place)
        return None

    def _note_bad(self, chunk: Chunk, place: int) -> None:
        if len(self._bad_messages) < MAX_BAD_MESSAGES:
            self._bad_messages.add((chunk.offset, place))

    def _newest_first(self, until_ns: int, kinds: tuple[int, ...] = (STATE, KEYFRAMES)) -> Iterator[TimedMessage]:
        """Messages of these kinds, from `until_ns` backwards."""
        channels = {self._channels[kind] for kind in kinds}
        with open_regular(self.path) as file:
            for chunk in reversed(self._chunks[: bisect_right(self._starts, until_ns)]):
                yield from reversed(list(self._messages(file, chunk, channels, until_ns)))

    def _leaps_between(self, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        first = bisect_left(self._leaps, from_ns, key=lambda chunk: chunk.start_ns)
        with open_regular(self.path) as file:
            for chunk in self._leaps[first:]:
                if chunk.start_ns > until_ns:
                    return
                yield from self._messages(file, chunk, {self._channels[LEAPS]}, until_ns)

    def _first_chunk(self, from_ns: int) -> int:
        """The first that has anything of `from_ns` or later."""
        first = max(0, bisect_right(self._starts, from_ns) - 1)
        while first and self._chunks[first - 1].end_ns >= from_ns:
            first -= 1
        return first

    def _log_time_ns(self, seconds: float | None) -> int:
        if seconds is None:
            return _FOREVER_NS
        return self._start_ns + max(0, min(round(seconds * 1e9), _FOREVER_NS - self._start_ns))
