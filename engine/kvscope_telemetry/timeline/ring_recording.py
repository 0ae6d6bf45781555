"""The segments of a ring read as one recording, while the last grows and the first goes.

Owns which segments there are and where seconds count from: the start of the first segment that was ever seen, so that
positions do not move. Used by one thread; what is in a segment is `Recording`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import Frame, Hello, MemoryBreakdown, TelemetryMessage
from kvscope_telemetry.messages.unknown import Unknowns
from kvscope_telemetry.recorded import RecordingInfo
from kvscope_telemetry.recordings.read_budget import ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.request_index import RecordedRequest, RequestReader, TimedMessage
from kvscope_telemetry.state.mirror import Mirror
from kvscope_telemetry.summaries.bookmark import Bookmark
from kvscope_telemetry.summaries.summary import Summary, TimedEvent
from kvscope_telemetry.texts.block_texts import RecordedText
from kvscope_telemetry.timeline.ring_folder import is_held, segments_in

_Found = TypeVar("_Found")
_FOREVER_NS: Final = 1 << 63
_LONGEST_NS: Final = 1 << 62


class RingRecording:
    """The ring in `folder`, as far as it was written when it was opened, and later by `grow`.

    `origin_ns` is where seconds count from, by the wall clock (`Ring.origin_ns`); without it they count from the start
    of what is left. Raises BadInput, in one line, when nothing there can be read (yet); OpeningCancelled if `watch`
    says so.
    """

    def __init__(self, folder: Path, origin_ns: int | None = None, watch: ProgressCallback | None = None) -> None:
        self.path = folder
        self._segments: dict[int, Recording] = {}
        self._unreadable: dict[int, str] = {}
        self._is_written = False
        self._why_none = "there is no segment in it"
        self._look(watch)
        if not self._segments:
            raise BadInput(f"ring {str(folder)!r} cannot be read: {self._why_none}")
        self._start_ns = self._first.start_ns if origin_ns is None else min(origin_ns, self._first.start_ns)
        self.info = self._info()

    @classmethod
    def open(
        cls, folder: Path | str, origin_ns: int | None = None, watch: ProgressCallback | None = None
    ) -> RingRecording:
        """See `RingRecording`."""
        return cls(Path(folder), origin_ns, watch)

    @property
    def start_ns(self) -> int:
        """Where seconds count from, by the wall clock: nanoseconds since 1970."""
        return self._start_ns

    @property
    def end_ns(self) -> int:
        """When the last message so far was, by the wall clock."""
        return self._start_ns + round(self.info.duration_s * 1e9)

    @property
    def first_s(self) -> float:
        """Where what is left begins."""
        return (self._first.start_ns - self._start_ns) / 1e9

    @property
    def segments(self) -> list[Recording]:
        """Those that are left, in their order."""
        return list(self._segments.values())

    @property
    def num_segments(self) -> int:
        """Files that are left."""
        return len(self._segments)

    @property
    def unknowns(self) -> Unknowns:
        """What a later version recorded that has no name here, of the segments that are left."""
        total = Unknowns()
        for segment in list(self._segments.values()):
            total.messages += segment.unknowns.messages
            total.events += segment.unknowns.events
            total.values += segment.unknowns.values
        return total

    @property
    def note(self) -> str:
        """What is wrong with it, in a few words; empty when nothing was found so far."""
        segments = list(self._segments.values())
        notes = [segment.note for segment in segments if not segment.may_grow or segment is not segments[-1]]
        return next(filter(None, notes), "a segment cannot be read and is left out" if self._unreadable else "")

    @property
    def detail(self) -> str:
        """What was left out and why, a line each."""
        lines = [f"{number:06}.mcap is left out: {why}." for number, why in sorted(self._unreadable.items())]
        segments = list(self._segments.values())
        lines += [f"{each.path.name}: {each.detail}" for each in segments if each.num_damaged]
        return "\n".join(lines)

    @property
    def may_grow(self) -> bool:
        """Whether somebody writes the ring."""
        return self._is_written

    def grow(self) -> bool:
        """Look for new segments and for what was added to the last; forget those that are gone. Whether any changed."""
        return self._is_written and self._refresh()

    def frames(self, from_s: float = 0.0, until_s: float | None = None) -> Iterator[Frame]:
        """Frames from `from_s` until `until_s`, both included."""
        for _, message in self.messages(from_s, until_s):
            if isinstance(message, Frame):
                yield message

    def messages(
        self, from_s: float = 0.0, until_s: float | None = None, *, keyframes: bool = False
    ) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of all that is left of this time, as it came: without keyframes, unless asked."""
        from_ns, until_ns = self._log_time_ns(from_s), self._log_time_ns(until_s)
        for log_time_ns, message in self.timed_messages(from_ns, until_ns, keyframes=keyframes):
            yield (log_time_ns - self._start_ns) / 1e9, message

    def timed_messages(self, from_ns: int, until_ns: int, *, keyframes: bool) -> Iterator[TimedMessage]:
        """The same by the wall clock."""
        for segment, goes_on in self._from(from_ns, until_ns):
            timed = _unless_gone(segment, segment.timed_messages(from_ns, until_ns, keyframes=keyframes))
            yield from _without_head(timed, segment) if goes_on else timed

    def messages_about(self, block: int, from_ns: int, until_ns: int) -> Iterator[TimedMessage]:
        """All that was written in this time, by the wall clock, keyframes too. Empty delta checkpoints are in the place
        of many frames that say nothing of the block."""
        for segment, goes_on in self._from(from_ns, until_ns):
            timed = _unless_gone(segment, segment.messages_about(block, from_ns, until_ns))
            yield from _without_head(timed, segment) if goes_on else timed

    @property
    def has_texts(self) -> bool:
        """Whether prompts and answers can be read in what is left."""
        return any(segment.has_texts for segment in list(self._segments.values()))

    def texts(self, from_ns: int = 0) -> Iterator[RecordedText]:
        """What blocks held, in the order it was written, from about `from_ns` on."""
        for segment, _ in self._from(from_ns, _FOREVER_NS):
            yield from _unless_gone(segment, segment.texts(from_ns))

    def overview_items(self, from_ns: int = 0) -> Iterator[Summary | TimedEvent]:
        """Summaries and events that are left, in the order they were written, of about `from_ns` and later."""
        for segment, _ in self._from(from_ns, _FOREVER_NS):
            yield from _unless_gone(segment, segment.overview_items(from_ns))

    def bookmarks(self) -> list[Bookmark]:
        """All that was said of bookmarks in the segments that are left, in the order it was written."""
        said: list[Bookmark] = []
        for segment in list(self._segments.values()):
            try:
                said += segment.bookmarks()
            except BadInput:
                if not segment.is_gone:
                    raise
        return said

    def run_up(self, seconds: float) -> Iterator[tuple[float, TelemetryMessage]]:
        """Seconds and message of what the state at `seconds` follows from, or at the start of what is left when that is
        later."""
        runs = self._search(
            seconds, lambda segment, at_s: list(segment.timed_run_up(segment.start_ns + round(at_s * 1e9)))
        )
        for log_time_ns, message in next((run for run in runs if run), []):
            yield (log_time_ns - self._start_ns) / 1e9, message

    def state_at(self, seconds: float) -> Mirror:
        """The state after the last frame until `seconds`, or at the start of what is left when that is later."""
        states = self._search(seconds, lambda segment, at_s: segment.state_at(at_s))
        return next((mirror for mirror in states if mirror.hello is not None), Mirror())

    def snapshot_before(self, seconds: float) -> float | None:
        """When the newest snapshot or keyframe not after `seconds` was; None before the first."""

        def before(segment: Recording, at_s: float) -> float | None:
            found = segment.snapshot_before(at_s)
            return None if found is None else (round(found * 1e9) + segment.start_ns - self._start_ns) / 1e9

        return next((at_s for at_s in self._search(seconds, before) if at_s is not None), None)

    def memory_before(self, seconds: float, epoch: int) -> MemoryBreakdown | None:
        """Where the memory went, as an epoch told last not after `seconds`."""
        found = self._search(seconds, lambda segment, at_s: segment.memory_before(at_s, epoch))
        return next((memory for memory in found if memory is not None), None)

    def devices_before(self, seconds: float, epoch: int) -> Devices | None:
        """How the devices were, as an epoch told last not after `seconds`, and not long before."""
        found = self._search(seconds, lambda segment, at_s: segment.devices_before(at_s, epoch))
        return next((devices for devices in islice(found, 2) if devices is not None), None)

    def requests(self) -> list[RecordedRequest]:
        """Every request that is left, in the order they were announced; reads all of it."""
        return RequestReader().read(self.timed_messages(0, _FOREVER_NS, keyframes=True))

    @property
    def _first(self) -> Recording:
        return next(iter(self._segments.values()))

    def _from(self, from_ns: int, until_ns: int) -> Iterator[tuple[Recording, bool]]:
        """Segments from the one on that may hold `from_ns`, those that `grow` finds meanwhile as well; whether what is
        before each was told."""
        number, goes_on = 0, False
        while (number := next((at for at in self._segments if at >= number), -1)) >= 0:
            segment = self._segments[number]
            number += 1
            if segment.start_ns > until_ns:
                return
            if segment.end_ns >= from_ns or segment.may_grow:
                yield segment, goes_on
                goes_on = True

    def _search(self, seconds: float, look: Callable[[Recording, float], _Found]) -> Iterator[_Found]:
        """What `look` finds in each segment, the newest first, from `seconds` (in the segment's own count) on."""
        until_ns = max(self._log_time_ns(seconds), self._first.start_ns)
        for segment in reversed(self._segments.values()):
            if segment.start_ns <= until_ns:
                try:
                    yield look(segment, (until_ns - segment.start_ns) / 1e9)
                except BadInput:
                    if not segment.is_gone or not self._refresh():
                        raise
                    if until_ns < self._first.start_ns:  # what is left begins later now
                        yield from self._search(seconds, look)
                    return

    def _refresh(self) -> bool:
        has_changed = self._look(None)
        if has_changed:
            self.info = self._info()
        return has_changed

    def _look(self, watch: ProgressCallback | None) -> bool:
        """Bring the segments up to date; whether that changed anything."""
        self._is_written = is_held(self.path)  # asked first: who lets go has written all by then
        names = segments_in(self.path)
        if not names:  # all of them went: who reads is told so there
            return False
        segments = {number: segment for number, segment in self._segments.items() if number in names}
        changed = len(segments) < len(self._segments)
        for place, (number, path) in enumerate(names.items()):
            if number in segments:
                changed |= _has_grown(segments[number])
            elif number not in self._unreadable:
                share = None if watch is None else _part_of(watch, place, len(names))
                segment = self._opened(number, path, share, is_newest=place == len(names) - 1)
                if segment is not None:
                    segments[number] = segment
                    changed = True
        if segments:
            self._segments = dict(sorted(segments.items()))
        return changed

    def _opened(self, number: int, path: Path, watch: ProgressCallback | None, *, is_newest: bool) -> Recording | None:
        try:
            return Recording.open(path, watch)
        except BadInput as error:
            if not is_newest:  # the newest may have begun just now
                self._unreadable[number] = str(error)
            elif not self._segments:
                self._why_none = str(error)
            return None

    def _info(self) -> RecordingInfo:
        segments = list(self._segments.values())
        return RecordingInfo(
            hello=segments[0].info.hello,
            epochs=tuple(dict.fromkeys(epoch for segment in segments for epoch in segment.info.epochs)),
            duration_s=(max(segment.end_ns for segment in segments) - self._start_ns) / 1e9,
            num_frames=sum(segment.info.num_frames for segment in segments),
            num_chunks=sum(segment.info.num_chunks for segment in segments),
            is_complete=all(segment.info.is_complete for segment in segments),
        )

    def _log_time_ns(self, seconds: float | None) -> int:
        return _FOREVER_NS if seconds is None else self._start_ns + max(0, min(round(seconds * 1e9), _LONGEST_NS))


def _has_grown(segment: Recording) -> bool:
    try:
        return segment.grow()
    except BadInput:  # it went after the folder was looked at: seen next time
        return False


def _unless_gone(segment: Recording, items: Iterator[_Found]) -> Iterator[_Found]:
    """Nothing of a segment that was deleted before it was opened."""
    try:
        yield from items
    except BadInput:
        if not segment.is_gone:
            raise


def _without_head(timed: Iterator[TimedMessage], segment: Recording) -> Iterator[TimedMessage]:
    """Without the hello that every segment begins with: nothing was said anew."""
    first = next(timed, None)
    if first is not None and not (isinstance(first[1], Hello) and first[0] == segment.start_ns):
        yield first
    yield from timed


def _part_of(watch: ProgressCallback, place: int, count: int) -> ProgressCallback:
    return lambda share: watch((place + share) / count)
