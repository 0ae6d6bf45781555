"""Reads recordings: a single file, or the recent history of a live session.

A recording is a list of segments, each a file that can be opened on its own. A file opened by the user is a recording
of one segment. Recent history is a folder of segments (`ring_folder`): the last one grows, and the first ones are
deleted during the session. `Recording` owns the list of segments and the time of second 0. `Segment` owns one file and
uses wall-clock times only. Damaged data is skipped and counted once. `read_budget` limits the cost of opening.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from kvscope_telemetry.block_texts.block_texts import RecordedText, decode_text
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, Snapshot, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.state_continuity import StatePosition
from kvscope_telemetry.recordings.chunk_decoder import PUBLISHED, ChunkDecoder, TimedMessage
from kvscope_telemetry.recordings.chunks import Chunk
from kvscope_telemetry.recordings.keyframes import snapshot_of
from kvscope_telemetry.recordings.layout import (
    BOOKMARKS,
    CHECKPOINTS,
    EVENTS,
    FRAMES,
    HELLOS,
    KEYFRAMES,
    MESSAGES,
    SNAPSHOTS,
    SUMMARIES,
    TEXTS,
)
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.regular_file import FollowedFile
from kvscope_telemetry.recordings.ring_folder import is_held, segments_in
from kvscope_telemetry.recordings.survey import Surveyor, survey
from kvscope_telemetry.summaries.bookmark import MAX_BOOKMARKS, Bookmark, decode_bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent, decode_event_list, decode_summary

_Item = TypeVar("_Item")
FOREVER_NS: Final = 1 << 62
"""A time later than any in a recording."""
_STATES: Final = (HELLOS, SNAPSHOTS, KEYFRAMES)
_MAX_DEVICES_AGE_NS: Final = 10_000_000_000
"""Age from which device readings are out of date. An engine publishes them once per second."""


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """Facts about a recording as of the time when it was opened or last grew."""

    hello: Hello
    """Hello of the first engine start."""
    epochs: tuple[int, ...]
    duration_s: float
    num_frames: int
    num_chunks: int
    is_complete: bool
    """Whether the recording has a valid end. False for a truncated recording, which ends with its last complete chunk,
    and for one that is still being written.
    """


class Recording:
    """An open recording, read by one thread. `info`, `damage_summary` and `damage_details` may be read by any thread.

    Positions are seconds since `start_ns`, which never changes. A recording that is being written grows (`grow`), and
    recent history loses its oldest segments: positions before `first_s` are then treated as `first_s`.
    """

    def __init__(self, path: Path, origin_ns: int | None = None, watch: ProgressCallback | None = None) -> None:
        self._path = path
        self._is_folder = os.path.isdir(path)  # False for an invalid file name
        self._segments: dict[int, Segment] = {}  # by number; never modified in place, so that any thread may read it
        self._unreadable: dict[int, str] = {}
        self._is_written = False
        self._scan(watch)
        first_ns = self.segments[0].start_ns
        self.start_ns: Final = first_ns if origin_ns is None else min(origin_ns, first_ns)
        """Wall-clock time of position 0, in nanoseconds since 1970."""
        self.info = self._info()

    @classmethod
    def open(
        cls, path: Path | str, watch: ProgressCallback | None = None, *, origin_ns: int | None = None
    ) -> Recording:
        """Open a file that a `RecordingWriter` wrote or is writing, or the folder of a `Ring`.

        Reads within the limits of `read_budget`: a file whose content is far larger than its size on disk is opened in
        part.

        Args:
            path: The file or the folder.
            watch: Called with the share done; returns whether to continue.
            origin_ns: Wall-clock time of position 0 (`Ring.origin_ns`). Default: the start of the oldest segment.

        Raises:
            BadInput: `path` is not a recording, or nothing in it can be read (yet); the message is one line.
            OpeningCancelled: `watch` returned False.
        """
        return cls(Path(path), origin_ns, watch)

    def reopened(self, watch: ProgressCallback | None = None) -> Recording:
        """Open the same recording again, for use by another thread."""
        return Recording(self.path, self.start_ns, watch)

    @property
    def path(self) -> Path:
        """Path of the folder of a ring, or of the file under its current name."""
        return self._path if self._is_folder else self.segments[-1].path

    @property
    def segments(self) -> list[Segment]:
        """Segments that were not deleted, oldest first."""
        return list(self._segments.values())

    @property
    def unknowns(self) -> Unknowns:
        """Counts of values from a later protocol version that this version cannot name."""
        total = Unknowns()
        for segment in self.segments:
            total.messages += segment.unknowns.messages
            total.events += segment.unknowns.events
            total.values += segment.unknowns.values
        return total

    @property
    def num_damaged(self) -> int:
        """Number of chunks and messages skipped so far because they are unreadable."""
        return sum(segment.num_damaged for segment in self.segments)

    @property
    def damage_summary(self) -> str:
        """Short text about damage in the recording; "" if none has been found so far."""
        notes = (segment.damage_summary for segment in self.segments)
        return next(filter(None, notes), "a segment cannot be read and is left out" if self._unreadable else "")

    @property
    def damage_details(self) -> str:
        """Text on what was skipped and why, one line per finding."""
        if not self._is_folder:
            return self.segments[-1].damage_details
        lines = [f"{number:06}.mcap is left out: {why}." for number, why in sorted(self._unreadable.items())]
        details = [(segment.path.name, segment.damage_details) for segment in self.segments]
        return "\n".join(lines + [f"{name}: {detail}" for name, detail in details if detail])

    @property
    def end_ns(self) -> int:
        """Wall-clock time of the newest message, in nanoseconds since 1970."""
        return self.start_ns + round(self.info.duration_s * 1e9)

    @property
    def first_s(self) -> float:
        """Position of the oldest message that was not deleted, in seconds."""
        return (self.segments[0].start_ns - self.start_ns) / 1e9

    @property
    def may_grow(self) -> bool:
        """Whether `grow` may find more messages, because the recording exists and is being written."""
        if self._is_folder:
            return self._is_written
        return self.segments[-1].may_grow and not self.segments[-1].is_deleted

    def grow(self) -> bool:
        """Read what was written since the last call, and remove deleted segments. Returns whether anything changed.

        Raises:
            BadInput: The recording cannot be read at present.
        """
        return self.may_grow and self._refresh()

    def frames(self, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Frame]:
        """Yield the frames from `from_s` to `until_s`, both inclusive."""
        for _, message in self.messages(from_s, until_s):
            if isinstance(message, Frame):
                yield message

    def messages(
        self, from_s: float = 0.0, until_s: float | None = None, *, keyframes: bool = False
    ) -> Iterator[tuple[float, TelemetryMessage]]:
        """Yield (seconds, message) for all published messages from `from_s` to `until_s`, both inclusive, in recorded
        order.

        With `keyframes`, keyframes are included. In addition, a snapshot follows each damaged part if delta checkpoints
        make the state after it known.
        """
        from_ns, until_ns = self._log_time_ns(from_s), self._log_time_ns(until_s)
        start_ns = self.start_ns
        for segment, is_continued in self._overlapping_segments(from_ns, until_ns):
            timed = (
                segment.messages_with_restored_states(from_ns, until_ns)
                if keyframes
                else segment.messages(PUBLISHED, from_ns, until_ns)
            )
            timed = _without_first_hello(segment, timed) if is_continued else timed
            for log_time_ns, message in self._unless_dropped(segment, timed):
                yield (log_time_ns - start_ns) / 1e9, message

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Yield the messages and keyframes between two wall-clock times, both inclusive. Runs of frames that do not
        contain `block` are replaced by empty delta checkpoints.
        """
        for segment, is_continued in self._overlapping_segments(from_ns, until_ns):
            timed = segment.messages_about(block, from_ns, until_ns)
            yield from self._unless_dropped(segment, _without_first_hello(segment, timed) if is_continued else timed)

    @property
    def has_texts(self) -> bool:
        return any(segment.text_chunks for segment in self.segments)

    def texts(self, from_ns: int = 0) -> Iterator[RecordedText]:
        """Yield the block texts in the order they were written, from approximately `from_ns` on."""
        for segment, _ in self._overlapping_segments(from_ns, FOREVER_NS):
            yield from self._unless_dropped(segment, segment.texts(from_ns))

    def overview_items(self, from_ns: int = 0) -> Iterator[Summary | TimedEvent]:
        """Yield summaries and events in the order they were written, from approximately `from_ns` on."""
        for segment, _ in self._overlapping_segments(from_ns, FOREVER_NS):
            try:  # not `_unless_dropped`: avoids a generator for hundreds of thousands of events
                yield from segment.overview_items(from_ns)
            except BadInput:
                if not self._is_dropped(segment):
                    raise

    def bookmarks(self) -> list[Bookmark]:
        """Return the revisions of all bookmarks in the order they were written, at most the newest `MAX_BOOKMARKS`.
        `newest_revisions` reduces them to the current bookmarks.
        """
        revisions: deque[Bookmark] = deque(maxlen=MAX_BOOKMARKS)
        for segment in self.segments:
            revisions.extend(self._unless_dropped(segment, segment.bookmarks()))
        return list(revisions)

    def state_messages(self, seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Yield (seconds, message) for the messages that determine the state at `seconds`: the newest snapshot, the
        delta checkpoints after it, and the frames after the last checkpoint. Empty before the first snapshot.
        """
        for log_time_ns, message in self._backwards(seconds, Segment.state_messages, until_found=True):
            yield (log_time_ns - self.start_ns) / 1e9, message

    def state_at(self, seconds: float) -> Mirror:
        """Return the state after the last frame up to `seconds`, or at `first_s` if that is later. If frames are
        missing at that time, the last known state before them is returned.

        Before the first snapshot, the mirror has no blocks. Finished requests are known from the last keyframe on.
        """
        return _state_after(message for _, message in self.state_messages(seconds))

    def snapshot_before(self, seconds: float) -> float | None:
        """Return the time of the newest snapshot or keyframe not after `seconds`, or None."""
        for log_time_ns, message in self._newest_first(_STATES, seconds):
            if isinstance(message, Snapshot):
                return (log_time_ns - self.start_ns) / 1e9
        return None

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Return the newest memory breakdown of `epoch` not after `seconds`, or None."""
        for _, message in self._newest_first((MESSAGES,), seconds):
            if isinstance(message, MemoryBreakdown) and message.epoch == epoch:
                return message
        return None

    def devices_before(self, seconds: float, epoch: int) -> Devices | None:
        """Return the newest device readings of `epoch` not after `seconds`, or None if they are out of date by then."""
        oldest_ns = self._log_time_ns(seconds) - _MAX_DEVICES_AGE_NS
        for log_time_ns, message in self._newest_first((MESSAGES,), seconds):
            if isinstance(message, Devices) and message.epoch == epoch:
                return message
            if log_time_ns < oldest_ns:
                break
        return None

    def _newest_first(self, kinds: Collection[int], seconds: float) -> Iterator[TimedMessage]:
        return self._backwards(seconds, lambda segment, until_ns: segment.newest_first(kinds, until_ns))

    def _overlapping_segments(self, from_ns: int, until_ns: int) -> Iterator[tuple[Segment, bool]]:
        """Yield the segments that overlap a time range, each with whether an earlier segment was yielded.
        Segments that `grow` adds meanwhile are included.
        """
        number, is_continued = 0, False
        while (number := next((at for at in self._segments if at >= number), -1)) >= 0:
            segment = self._segments[number]
            number += 1
            if segment.start_ns > until_ns:
                return
            if segment.end_ns >= from_ns or segment is self.segments[-1]:
                yield segment, is_continued
                is_continued = True

    def _backwards(
        self, seconds: float, read: Callable[[Segment, int], Iterator[_Item]], *, until_found: bool = False
    ) -> Iterator[_Item]:
        """Yield the items that `read(segment, time_ns)` returns for the segments up to `seconds`, newest
        segment first. With `until_found`, stop after the first segment that has an item.
        """
        until_ns, is_found = max(self._log_time_ns(seconds), self.segments[0].start_ns), False
        for segment in reversed(self.segments):
            if segment.start_ns > until_ns:
                continue
            try:
                for item in read(segment, until_ns):
                    is_found = True
                    yield item
            except BadInput:
                if not self._is_dropped(segment):
                    raise
                if until_ns < self.segments[0].start_ns:  # the remaining recording starts later now
                    yield from self._backwards(seconds, read, until_found=until_found)
                return
            if is_found and until_found:
                return

    def _unless_dropped(self, segment: Segment, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield `items` of `segment`; nothing if the segment was deleted before it was opened."""
        try:
            yield from items
        except BadInput:
            if not self._is_dropped(segment):
                raise

    def _is_dropped(self, segment: Segment) -> bool:
        """Whether `segment` was deleted from the start of the recent history while other segments remain."""
        if self._is_folder and segment.is_deleted:
            self._refresh()
        return segment not in self.segments

    def _refresh(self) -> bool:
        has_changed = self._scan(None)
        if has_changed:
            self.info = self._info()
        return has_changed

    def _scan(self, watch: ProgressCallback | None) -> bool:
        if not self._is_folder:
            if self._segments:
                return self.segments[-1].grow()
            self._segments = {1: Segment(self._path, watch)}
            return True
        self._is_written = is_held(self._path)  # before scanning: a writer that releases it has written everything
        paths = segments_in(self._path)
        segments = {number: segment for number, segment in self._segments.items() if number in paths}
        has_changed = len(segments) < len(self._segments)
        reason = "it is a folder, not a file"
        for index, (number, path) in enumerate(paths.items()):
            if number in segments:
                has_changed |= _has_grown(segments[number])
            elif number not in self._unreadable:
                try:
                    segments[number] = Segment(path, watch and _partial_progress(watch, index, len(paths)))
                    has_changed = True
                except BadInput as error:
                    reason = str(error)
                    if index < len(paths) - 1:  # the newest may have been created just now
                        self._unreadable[number] = reason
        if segments:
            self._segments = dict(sorted(segments.items()))
        elif not self._segments:
            raise BadInput(f"recording {str(self._path)!r} cannot be read: {reason}")
        return has_changed and bool(segments)

    def _info(self) -> RecordingInfo:
        segments = self.segments
        return RecordingInfo(
            hello=segments[0].hellos[0],
            epochs=tuple(dict.fromkeys(hello.epoch for segment in segments for hello in segment.hellos)),
            duration_s=(max(segment.end_ns for segment in segments) - self.start_ns) / 1e9,
            num_frames=sum(segment.num_frames for segment in segments),
            num_chunks=sum(len(segment.message_chunks) for segment in segments),
            is_complete=all(segment.is_complete for segment in segments),
        )

    def _log_time_ns(self, seconds: float | None) -> int:
        if seconds is None:
            return FOREVER_NS
        return self.start_ns + max(0, min(round(seconds * 1e9), FOREVER_NS - self.start_ns))


class Segment:
    """One file of a recording, addressed by wall-clock time. Owns the lists of its chunks by kind of content, and reads
    the messages in them.

    Keeps no file open between calls and, apart from the cache for seeking, at most one chunk in memory.
    """

    def __init__(self, path: Path, watch: ProgressCallback | None = None) -> None:
        self._file = FollowedFile(path)
        self._surveyor = Surveyor()
        self._survey = self._surveyor.found
        self._decoder = ChunkDecoder(self._survey)
        self.unknowns: Final = self._decoder.unknowns
        self.message_chunks: list[Chunk] = []
        """Chunks of published messages and keyframes, sorted by time."""
        self.checkpoints: list[Chunk] = []
        """Chunks of delta checkpoints, sorted by time."""
        self.overview_chunks: list[Chunk] = []
        """Chunks of summaries, events and bookmarks, in the order they were written: an event may be much older than
        its chunk.
        """
        self.text_chunks: list[Chunk] = []
        self.end_ns = self.num_frames = 0
        self._is_written = self._file.is_written()  # before scanning: a writer that releases it has written everything
        self._scan(watch)
        self._is_written = self._is_written or self._file.is_written()  # writing may have started in between
        if not self.hellos:
            reason = self._survey.limit or next(iter(self._survey.damages), "")
            raise BadInput(
                f"recording {str(path)!r} holds no telemetry that can be read" + (f": {reason}" if reason else "")
            )
        self.start_ns: Final = min(chunk.start_ns for chunk in self.message_chunks)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def hellos(self) -> list[Hello]:
        """All hellos in the file: one for each engine start, and the one in each snapshot."""
        return self._survey.hellos

    @property
    def is_complete(self) -> bool:
        """Whether all of the file was read and it has a valid end."""
        return self._survey.is_complete and not self._survey.limit

    @property
    def may_grow(self) -> bool:
        """Whether `grow` may find more: the file is being written, and all of it so far was scanned."""
        return self._is_written and not (self._survey.is_complete or self._survey.limit)

    @property
    def is_deleted(self) -> bool:
        return self._file.is_deleted

    def grow(self) -> bool:
        """Read what was written since the last call. Returns whether that added anything. Raises BadInput if the file
        was deleted.
        """
        if not self.may_grow:
            return False
        self._is_written = self._file.is_written()
        if not self._file.has_grown():
            return False
        return self._scan(None) or self.is_complete

    @property
    def num_damaged(self) -> int:
        return len(self._survey.damages) + self._decoder.num_bad_messages

    @property
    def damage_summary(self) -> str:
        if self._survey.limit:
            return "opened in part"
        if self.num_damaged:
            return "damaged parts left out"
        return "truncated; recovered to the last complete chunk" if self._is_truncated else ""

    @property
    def damage_details(self) -> str:
        lines = [f"Opened in part: {self._survey.limit}."] if self._survey.limit else []
        if self._survey.damages:
            lines.append(f"{len(self._survey.damages)} damaged and left out: {self._survey.damages[0]}.")
        if self._decoder.num_bad_messages:
            lines.append(f"{self._decoder.num_bad_messages} unreadable messages left out.")
        if self.unknowns.num_skipped:
            lines.append("Events and messages of unknown kinds left out.")
        if self._is_truncated:
            lines.append("Truncated; recovered to the last complete chunk.")
        return "\n".join(lines)

    def messages(self, kinds: Collection[int], from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Yield published messages and keyframes of `kinds` from `from_ns` to `until_ns`, both inclusive. Messages that
        `grow` finds meanwhile are included.
        """
        with self._file.open() as file:
            for chunk in self._overlapping_chunks(from_ns, until_ns):
                for timed in self._decoder.messages(file, chunk, kinds):
                    if from_ns <= timed[0] <= until_ns:
                        yield timed

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        with self._file.open() as file:
            for chunk in self._overlapping_chunks(from_ns, until_ns):
                is_whole = from_ns <= chunk.start_ns and chunk.end_ns <= until_ns
                about = block if is_whole else None
                for timed in self._decoder.messages(file, chunk, (*PUBLISHED, KEYFRAMES), about):
                    if from_ns <= timed[0] <= until_ns:
                        yield timed

    def messages_with_restored_states(self, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """Yield the published messages and keyframes in this time range. A snapshot is added after each damaged
        part if delta checkpoints make the state after it known.
        """
        position, retry_ns = StatePosition(), 0
        for log_time_ns, message in self.messages((*PUBLISHED, KEYFRAMES), from_ns, until_ns):
            if isinstance(message, Snapshot) and position.is_newer(message):
                position.move_to(message)
            elif isinstance(message, Frame) and not position.has(message):
                if position.epoch is None:
                    self._set_position_before(position, message, from_ns)
                if not position.is_before(message) and log_time_ns >= retry_ns:
                    state = self._state_before(message, log_time_ns)
                    if state is not None:
                        position.move_to(state)
                        yield log_time_ns, state
                    retry_ns = 1 + self._checkpoint_from(log_time_ns)
                if position.is_before(message):
                    position.advance(message)
            yield log_time_ns, message

    def newest_first(self, kinds: Collection[int], until_ns: int) -> Iterator[TimedMessage]:
        with self._file.open() as file:
            yield from self._newest_first(file, kinds, until_ns)

    def state_messages(self, until_ns: int) -> Iterator[TimedMessage]:
        """Yield the messages that determine the state at `until_ns`: the newest snapshot or keyframe that is not later,
        the delta checkpoints after it, and the frames after the last of these checkpoints.

        Yields nothing if there is no such snapshot.
        """
        with self._file.open() as file:
            for from_ns, snapshot in self._newest_first(file, _STATES, until_ns):
                if isinstance(snapshot, Snapshot):
                    position = StatePosition()
                    position.move_to(snapshot)
                    yield from_ns, snapshot
                    yield from self._state_updates(file, position, from_ns, until_ns)
                    return

    def overview_items(self, from_ns: int) -> Iterator[Summary | TimedEvent]:
        decoders: dict[int, Callable[[bytes], Iterable[Summary | TimedEvent]]] = {
            SUMMARIES: lambda data: (decode_summary(data),),
            EVENTS: decode_event_list,
        }
        with self._file.open() as file:
            for chunk in self.overview_chunks:
                if chunk.end_ns >= from_ns:
                    yield from self._decoder.items(file, chunk, decoders)

    def bookmarks(self) -> Iterator[Bookmark]:
        with self._file.open() as file:
            for chunk in self.overview_chunks:
                yield from self._decoder.items(file, chunk, {BOOKMARKS: lambda data: (decode_bookmark(data),)})

    def texts(self, from_ns: int) -> Iterator[RecordedText]:
        with self._file.open() as file:
            for chunk in list(self.text_chunks):
                if chunk.end_ns >= from_ns:
                    yield from self._decoder.items(file, chunk, {TEXTS: lambda data: (decode_text(data),)})

    @property
    def _is_truncated(self) -> bool:
        return not (self._survey.is_complete or self._survey.limit or self._is_written)

    def _scan(self, watch: ProgressCallback | None) -> bool:
        new_chunks = survey(self._file, self._surveyor, watch)
        messages, checkpoints, texts = (
            self._decoder.channels(kinds) for kinds in ((*PUBLISHED, KEYFRAMES), (CHECKPOINTS,), (TEXTS,))
        )
        published = [chunk for chunk in new_chunks if messages & chunk.counts.keys()]
        derived = [chunk for chunk in new_chunks if not messages & chunk.counts.keys()]
        _merge_chunks(self.message_chunks, published)
        _merge_chunks(self.checkpoints, [chunk for chunk in derived if checkpoints & chunk.counts.keys()])
        derived.sort(key=lambda chunk: chunk.offset)
        self.text_chunks += [chunk for chunk in derived if texts & chunk.counts.keys()]
        self.overview_chunks += [chunk for chunk in derived if not (texts | checkpoints) & chunk.counts.keys()]
        self.end_ns = max([self.end_ns, *(chunk.end_ns for chunk in published)])
        self.num_frames += sum(chunk.num_frames or 0 for chunk in published)
        return bool(published)

    def _overlapping_chunks(self, from_ns: int, until_ns: int) -> Iterator[Chunk]:
        first = max(0, bisect_right(self.message_chunks, from_ns, key=_start) - 1)
        while first and self.message_chunks[first - 1].end_ns >= from_ns:
            first -= 1
        while first < len(self.message_chunks) and self.message_chunks[first].start_ns <= until_ns:
            yield self.message_chunks[first]
            first += 1

    def _newest_first(self, file: BinaryIO, kinds: Collection[int], until_ns: int) -> Iterator[TimedMessage]:
        channels = self._decoder.channels(kinds)
        for chunk in reversed(self.message_chunks[: bisect_right(self.message_chunks, until_ns, key=_start)]):
            if chunk.counts.keys() & channels:
                for timed in reversed(self._decoder.messages(file, chunk, kinds)):
                    if timed[0] <= until_ns:
                        yield timed

    def _state_updates(
        self, file: BinaryIO, position: StatePosition, from_ns: int, until_ns: int
    ) -> Iterator[TimedMessage]:
        """Yield the delta checkpoints after a state until about `until_ns`, then the frames that continue from there.

        Unreadable delta checkpoints are replaced by the frames that they cover. `position` is the position of the
        state, and is advanced.
        """
        offset = 0
        previous_ns = from_ns  # time of the previous checkpoint, readable or not
        first = bisect_left(self.checkpoints, from_ns, key=_start)
        chunks = self.checkpoints[first : bisect_right(self.checkpoints, until_ns, key=_start)]
        for chunk, log_time_ns, checkpoint in self._decoder.checkpoints(file, chunks, position):
            if checkpoint is not None:
                if position.epoch == checkpoint.epoch and position.seq < checkpoint.since_seq:
                    for frame_ns, frame in self._frames_after(file, position, offset, from_ns, previous_ns):
                        yield frame_ns, frame
                        from_ns = frame_ns
                if position.is_before(checkpoint):
                    position.advance(checkpoint)
                    yield log_time_ns, checkpoint
                    offset, from_ns = chunk.offset, log_time_ns
            previous_ns = chunk.start_ns
        yield from self._frames_after(file, position, offset, from_ns, until_ns)

    def _frames_after(
        self, file: BinaryIO, position: StatePosition, offset: int, from_ns: int, until_ns: int
    ) -> Iterator[TimedMessage]:
        """Yield the frames that follow a state, and advance `position`.

        Chunks that precede the state's chunk (at `offset`) and end by `from_ns` are skipped. Frames of a batch that
        continues from `position` are merged into a delta checkpoint, except the very last frame.
        """
        channels = self._decoder.channels((FRAMES, MESSAGES))
        chunks = [chunk for chunk in self._overlapping_chunks(from_ns, until_ns) if chunk.counts.keys() & channels]
        chunks = [chunk for chunk in chunks if chunk.offset > offset or chunk.end_ns > from_ns]
        for chunk in chunks:
            is_whole = chunk.end_ns <= until_ns and chunk is not chunks[-1]
            merged = self._decoder.joined_frames(file, chunk, None if is_whole else until_ns)
            if merged is not None and (not merged or position.is_before(merged[0][1])):
                for log_time_ns, frame in merged:
                    position.advance(frame)
                    yield log_time_ns, frame
                continue
            for timed in self._decoder.messages(file, chunk, (FRAMES, MESSAGES)):
                if isinstance(timed[1], Frame) and from_ns <= timed[0] <= until_ns:
                    if position.is_before(timed[1]):
                        position.advance(timed[1])
                    yield timed

    def _checkpoint_from(self, at_ns: int) -> int:
        """Return the end time of the first delta checkpoint that ends at or after `at_ns`, or `FOREVER_NS`."""
        index = bisect_left(self.checkpoints, at_ns, key=_start)
        return self.checkpoints[index].start_ns if index < len(self.checkpoints) else FOREVER_NS

    def _set_position_before(self, position: StatePosition, first: Frame, from_ns: int) -> None:
        """Set `position` to the state before `first`, the first frame of a read that starts at `from_ns`."""
        if self.num_damaged:
            mirror = _state_after(message for _, message in self.state_messages(from_ns))
            position.epoch, position.seq = mirror.epoch, mirror.seq
        else:
            position.epoch, position.seq = first.epoch, first.seq - 1

    def _state_before(self, frame: Frame, log_time_ns: int) -> Snapshot | None:
        mirror = _state_after(message for _, message in self.state_messages(log_time_ns - 1))
        is_known = mirror.hello is not None and (mirror.epoch, mirror.seq) == (frame.epoch, frame.seq - 1)
        return snapshot_of(mirror) if is_known else None


def _state_after(messages: Iterator[TelemetryMessage]) -> Mirror:
    follower = Follower()
    for message in messages:
        follower.feed(message)
    follower.apply_pending()
    return follower.mirror


def _without_first_hello(segment: Segment, timed: Iterator[TimedMessage]) -> Iterator[TimedMessage]:
    """Yield the messages without the hello at the start of a segment. The writer repeats it in each segment;
    the engine did not publish it again.
    """
    first = next(timed, None)
    if first is not None and not (isinstance(first[1], Hello) and first[0] == segment.start_ns):
        yield first
    yield from timed


def _has_grown(segment: Segment) -> bool:
    try:
        return segment.grow()
    except BadInput:  # deleted after the folder was scanned: noticed next time
        return False


def _merge_chunks(chunks: list[Chunk], new: list[Chunk]) -> None:
    is_in_order = not (chunks and new) or chunks[-1].start_ns <= new[0].start_ns
    chunks += new
    if not is_in_order:
        chunks.sort(key=_start)


def _start(chunk: Chunk) -> int:
    return chunk.start_ns


def _partial_progress(watch: ProgressCallback, index: int, count: int) -> ProgressCallback:
    return lambda share: watch((index + share) / count)
