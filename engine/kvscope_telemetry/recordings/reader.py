"""Reading a recording: what is in it, its frames, and the state at any time.

Owns where seconds count from, the first message, and what is said of the file. What is damaged is left out and counted
once: a chunk whose checksum fails, a message that cannot be read or is of another time than its chunk. What opening may
cost is `read_budget`'s, what it finds `survey`'s, how chunks are read `stored_chunks`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import Fingerprints, Frame, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.recorded import RecordingInfo
from kvscope_telemetry.recordings.chunks import Chunk
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import HELLOS, KEYFRAMES, MESSAGES, SNAPSHOTS
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestReader, TimedMessage
from kvscope_telemetry.recordings.stored_chunks import CAME, StoredChunks
from kvscope_telemetry.state.continuity import StatePlace
from kvscope_telemetry.state.follower import Follower
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText

_FOREVER_NS: Final = 1 << 63
_DEVICES_NS: Final = 10_000_000_000
"""How the devices were longer ago is not how they are. An engine tells it each second."""


class Recording:
    """A recording that was opened; `info` says what is in it."""

    def __init__(self, path: Path, watch: ProgressCallback | None = None) -> None:
        self.chunks = StoredChunks(path)
        self._found, self._file = self.chunks.found, self.chunks.file
        self._end_ns = self._num_frames = 0
        self._is_written = self._file.is_written()  # asked first: who lets go has written all by then
        new = self.chunks.look(watch)
        self._is_written = self._is_written or self._file.is_written()  # it may have been begun between the two
        if not self._found.hellos:
            reason = self._found.limit or next(iter(self._found.damages), "")
            raise BadInput(
                f"recording {str(path)!r} holds no telemetry that can be read" + (f": {reason}" if reason else "")
            )
        self._start_ns = min(chunk.start_ns for chunk in self.chunks.message_chunks)
        self.info = self._info(new)

    @classmethod
    def open(cls, path: Path | str, watch: ProgressCallback | None = None) -> Recording:
        """A file that a `RecordingWriter` wrote or is writing. Raises BadInput, in one line, for any other.

        Reads within the bounds of `read_budget`: a file that is larger than it looks is opened in part. `watch` is told
        how far it is, and may end it: then OpeningCancelled is raised.
        """
        return cls(Path(path), watch)

    @property
    def path(self) -> Path:
        """The file, by the name it has now."""
        return self._file.path

    @property
    def unknowns(self) -> Unknowns:
        """What a later version recorded that has no name here, each time it was met."""
        return self.chunks.unknowns

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
        new = self.chunks.look()
        self.info = self._info(new)
        return bool(new) or self.info.is_complete

    @property
    def num_damaged(self) -> int:
        """Chunks and messages left out so far because they cannot be read, each once."""
        return len(self._found.damages) + self.chunks.num_bad_messages

    @property
    def note(self) -> str:
        """What is wrong with the file, in a few words; empty when nothing was found so far."""
        if self._found.limit:
            return "opened in part"
        if self.num_damaged:
            return "damaged parts left out"
        return "" if self.info.is_complete else "truncated; recovered to the last complete chunk"

    @property
    def detail(self) -> str:
        """What was left out and why, a line each."""
        lines = [f"Opened in part: {self._found.limit}."] if self._found.limit else []
        if self._found.damages:
            lines.append(f"{len(self._found.damages)} damaged and left out: {self._found.damages[0]}.")
        if self.chunks.num_bad_messages:
            lines.append(f"{self.chunks.num_bad_messages} unreadable messages left out.")
        if self.unknowns.num_skipped:
            lines.append("Events and messages of unknown kinds left out.")
        if not self.info.is_complete and not self._found.limit:
            lines.append("Truncated; recovered to the last complete chunk.")
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

    def overview_items(self, from_ns: int = 0) -> Iterator[Summary | TimedEvent]:
        """Summaries and events in the file, in the order they were written, of chunks that reach beyond `from_ns`."""
        return self.chunks.glances_from(from_ns)

    def bookmarks(self) -> list[Bookmark]:
        """All that was said of bookmarks, in the order it was written."""
        return self.chunks.bookmarks()

    @property
    def has_texts(self) -> bool:
        """Whether prompts and answers can be read in it."""
        return bool(self.chunks.texts)

    def fingerprints(self) -> Iterator[Fingerprints]:
        """What a deterministic engine told of its blocks and logits, in the order of its steps."""
        for _, message in self.chunks.messages((MESSAGES,), 0, _FOREVER_NS):
            if isinstance(message, Fingerprints):
                yield message

    def texts(self, from_ns: int = 0) -> Iterator[RecordedText]:
        """What blocks held, in the order it was written, from about `from_ns` on."""
        return self.chunks.texts_from(from_ns)

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
        return self._in_seconds(self.timed_messages(from_ns, until_ns, keyframes=keyframes))

    def timed_messages(self, from_ns: int, until_ns: int, *, keyframes: bool) -> Iterator[TimedMessage]:
        """The same by the wall clock. With keyframes there is one more behind each damage that delta checkpoints lead
        past."""
        kinds = (*CAME, KEYFRAMES) if keyframes else CAME
        messages = self.chunks.messages(kinds, from_ns, until_ns)
        return self._past_damage(messages, from_ns) if keyframes else messages

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """All that was written in this time, by the wall clock, keyframes too. Empty delta checkpoints are in the place
        of many frames that say nothing of the block."""
        return self.chunks.messages_about(block, from_ns, until_ns)

    def state_at(self, seconds: float) -> Mirror:
        """The state after the last frame until `seconds`; as it was before, where frames are missing then.

        Before the first snapshot the mirror has no blocks. Requests that had ended are known from the last keyframe on.
        """
        return self._state_at_ns(self._log_time_ns(seconds))

    def run_up(self, seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of what the state at `seconds` follows from: the newest snapshot, delta checkpoints from
        there and the frames after the last of them. Nothing before the first snapshot."""
        return self._in_seconds(self.timed_run_up(self._log_time_ns(seconds)))

    def timed_run_up(self, until_ns: int) -> Iterator[TimedMessage]:
        """The same by the wall clock."""
        begin = next(self._snapshots_before(until_ns), None)
        if begin is None:
            return
        from_ns, snapshot = begin
        place = StatePlace()
        place.go_to(snapshot)
        yield from_ns, snapshot
        yield from self.chunks.state_on(place, from_ns, until_ns)

    def snapshot_before(self, seconds: float) -> float | None:
        """When the newest snapshot or keyframe not after `seconds` was; None before the first."""
        found = next(self._snapshots_before(self._log_time_ns(seconds)), None)
        return None if found is None else (found[0] - self._start_ns) / 1e9

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""
        for _, message in self.chunks.newest_first((MESSAGES,), self._log_time_ns(seconds)):
            if isinstance(message, MemoryBreakdown) and message.epoch == epoch:
                return message
        return None

    def devices_before(self, seconds: float, epoch: int) -> Devices | None:
        """How the devices were, as an epoch told last not after `seconds`, and not long before."""
        until_ns = self._log_time_ns(seconds)
        for log_time_ns, message in self.chunks.newest_first((MESSAGES,), until_ns):
            if isinstance(message, Devices) and message.epoch == epoch:
                return message
            if log_time_ns < until_ns - _DEVICES_NS:
                break
        return None

    def requests(self) -> list[RecordedRequest]:
        """Every request, in the order they were announced; reads the whole recording."""
        return RequestReader().read(self.chunks.messages((*CAME, KEYFRAMES), 0, _FOREVER_NS))

    def _state_at_ns(self, until_ns: int) -> Mirror:
        follower = Follower()
        for _, message in self.timed_run_up(until_ns):
            follower.feed(message)
        follower.settle()
        return follower.mirror

    def _snapshots_before(self, until_ns: int) -> Iterator[tuple[int, Snapshot]]:
        for log_time_ns, found in self.chunks.newest_first((HELLOS, SNAPSHOTS, KEYFRAMES), until_ns):
            if isinstance(found, Snapshot):
                yield log_time_ns, found

    def _past_damage(self, messages: Iterator[TimedMessage], from_ns: int) -> Iterator[TimedMessage]:
        place, due_ns = StatePlace(), 0
        for log_time_ns, message in messages:
            if isinstance(message, Snapshot) and place.is_newer(message):
                place.go_to(message)
            elif isinstance(message, Frame) and not place.has(message):
                if place.epoch is None:
                    self._enter(place, message, from_ns)
                if not place.is_before(message) and log_time_ns >= due_ns:
                    state = self._state_before(message, log_time_ns)
                    if state is not None:
                        place.go_to(state)
                        yield log_time_ns, state
                    due_ns = 1 + (self.chunks.checkpoint_from(log_time_ns) or _FOREVER_NS)
                if place.is_before(message):
                    place.advance(message)
            yield log_time_ns, message

    def _enter(self, place: StatePlace, first: Frame, from_ns: int) -> None:
        """To where the state is from which somebody goes on at `from_ns`, whose first frame is `first`."""
        if self.num_damaged:
            mirror = self._state_at_ns(from_ns)
            place.epoch, place.seq = mirror.epoch, mirror.seq
        else:
            place.epoch, place.seq = first.epoch, first.seq - 1

    def _state_before(self, frame: Frame, log_time_ns: int) -> Snapshot | None:
        """None where it cannot be had."""
        mirror = self._state_at_ns(log_time_ns - 1)
        is_known = mirror.hello is not None and (mirror.epoch, mirror.seq) == (frame.epoch, frame.seq - 1)
        return snapshot_of(mirror) if is_known else None

    def _in_seconds(self, timed: Iterator[TimedMessage]) -> Iterator[tuple[float, TelemetryMessage]]:
        for log_time_ns, message in timed:
            yield (log_time_ns - self._start_ns) / 1e9, message

    def _log_time_ns(self, seconds: float | None) -> int:
        if seconds is None:
            return _FOREVER_NS
        return self._start_ns + max(0, min(round(seconds * 1e9), _FOREVER_NS - self._start_ns))

    def _info(self, new: list[Chunk]) -> RecordingInfo:
        self._end_ns = max([self._end_ns, *(chunk.end_ns for chunk in new)])
        self._num_frames += sum(chunk.num_frames or 0 for chunk in new)
        found = self._found
        return RecordingInfo(
            hello=found.hellos[0],
            epochs=tuple(dict.fromkeys(hello.epoch for hello in found.hellos)),
            duration_s=(self._end_ns - self._start_ns) / 1e9,
            num_frames=self._num_frames,
            num_chunks=len(self.chunks.message_chunks),
            is_complete=found.is_complete and not found.limit,
        )
