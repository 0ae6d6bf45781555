"""Plays a recording as a `Source`: at the recorded pace times a speed factor, with pause, seek and single steps.

Owns the thread and the updates that it has queued. The thread reads and coalesces, so that the consumer only applies
updates. Playback never skips: if the consumer is absent or the machine is too slow, it plays more slowly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Event
from kvscope_telemetry.playback.playback_reader import PAST_NS, PlaybackReader, TimedUpdate
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import SourceState, SourceStatus, Update

MAX_TICK_NS: Final = 100_000_000
"""Longest time that one clock tick advances. After a longer delay, playback is late instead of skipping."""
MIN_SPEED, MAX_SPEED = 0.01, 1000.0
TICK_S: Final = 0.008
GROW_S: Final = 0.25
"""Interval at which a recording that may still be written is checked for new messages."""
MAX_QUEUED_UPDATES: Final = 400
"""Number of queued updates at which playback waits for the consumer. After a seek, more updates may be queued,
because all those of the minute before the target are delivered together.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Seek:
    """A seek target: a time, the frame that reports an event, or the frame before it."""

    to_ns: int
    with_past: bool
    event: Event | None = None
    before: bool = False


class PlaybackSource:
    """Plays `recording` from its start. A context manager that closes at the end. A recording that is still being
    written is followed.

    Positions are seconds since the start. `clock` is monotonic, in ns.
    """

    def __init__(
        self, recording: Recording, *, is_playing: bool = True, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.recording = recording
        self.has_jumped = False
        """Whether the newest update that `poll_update` returned is the first after a seek, and so does not
        continue the previous one.
        """
        self._duration_ns = round(recording.info.duration_s * 1e9)
        self._start_ns = recording.start_ns - (time.time_ns() - time.monotonic_ns())
        self._reader = PlaybackReader(recording)
        self._clock = PlaybackClock(self._duration_ns, clock)
        self._clock.is_playing, self._clock.waits_at_end = is_playing, recording.may_grow
        self._grown_s = time.monotonic()
        self._spans: deque[TimedUpdate] = deque()
        self._position_ns = 0  # updates up to this position are in `_spans`, or were taken
        self._consumed_ns = 0
        self._requested: _Seek | None = _Seek(0, with_past=True)  # pending seek
        self._num_steps = 0  # pending steps in frames; negative: backwards
        self._needs_snapshot = False
        self._is_closing = False
        self._failure = ""
        self._changed = threading.Condition()
        """Guards all attributes assigned above it, except the reader, which only the playback thread uses."""
        self._thread = threading.Thread(target=self._run, name="kvscope-playback", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path | str) -> PlaybackSource:
        """Open and play the recording at `path`. Raises BadInput, with a one-line message, if it is no recording."""
        return cls(Recording.open(path))

    @property
    def name(self) -> str:
        return self.recording.path.name

    @property
    def status(self) -> SourceStatus:
        """Status of the source. The state is always PLAYBACK; the reason says why playback is not advancing."""
        recording = self.recording
        return SourceStatus(
            SourceState.PLAYBACK,
            self._reason(),
            frames_received=recording.info.num_frames,
            num_skipped=recording.unknowns.num_skipped,
            num_unknown=recording.unknowns.values,
        )

    @property
    def failure(self) -> str:
        """Reason why the recording cannot be read any more; "" while it can. After a failure, playback cannot continue
        or seek.
        """
        with self._changed:
            return self._failure

    @property
    def damage_summary(self) -> str:
        return self.recording.damage_summary

    @property
    def damage_details(self) -> str:
        return self.recording.damage_details

    @property
    def duration(self) -> float:
        """Length in seconds of the part of the recording that has been written so far."""
        return self._duration_ns / 1e9

    @property
    def position(self) -> float:
        """Position in seconds up to which updates were queued, or the target of a pending seek."""
        with self._changed:
            return (self._position_ns if self._requested is None else self._requested.to_ns) / 1e9

    @property
    def now_ns(self) -> int:
        """Recorded wall-clock time of `position`, converted to this machine's monotonic clock. Negative if it was
        before the boot.
        """
        return self._start_ns + round(self.position * 1e9)

    @property
    def consumed_ns(self) -> int:
        """Recorded wall-clock time of the newest update that `poll_update` returned, converted to this
        machine's monotonic clock.
        """
        return self._start_ns + self._consumed_ns

    @property
    def is_playing(self) -> bool:
        with self._changed:
            return self._clock.is_playing

    @property
    def is_seeking(self) -> bool:
        """Whether a seek or step is pending. Queued updates do not yet belong to `position` then."""
        with self._changed:
            return self._requested is not None or self._num_steps != 0

    @property
    def is_at_end(self) -> bool:
        return self.position >= self.duration

    @property
    def speed(self) -> float:
        return self._clock.speed

    def play(self) -> None:
        """Start playing; at the end, restart from the beginning."""
        if self.is_at_end:
            self.seek(0.0)
        with self._changed:
            if not self._failure:
                self._clock.play()
            self._changed.notify_all()

    def pause(self) -> None:
        with self._changed:
            self._clock.pause()

    def set_speed(self, factor: float) -> None:
        """Set the speed factor. Raises BadInput outside `MIN_SPEED` to `MAX_SPEED`."""
        if not MIN_SPEED <= factor <= MAX_SPEED:
            raise BadInput(f"speed {factor!r} is not accepted: must be a number from {MIN_SPEED} to {MAX_SPEED:.0f}")
        with self._changed:
            self._clock.speed = factor

    def seek(self, seconds: float, *, with_past: bool = True) -> None:
        """Go to `seconds`, or the nearest recorded time. The next update starts with a snapshot of the state there.

        `with_past` also delivers the minute before, in short updates, for charts. A seek without it is faster.
        """
        self._request(seconds, with_past=with_past)

    def seek_event(self, seconds: float, event: Event, *, before: bool = False) -> None:
        """Go to the frame that reports `event`, which occurred at `seconds`; the state is the one after the event.
        With `before`, go to the preceding frame.
        """
        self._request(seconds, event=event, before=before)

    def _request(
        self, seconds: float, *, with_past: bool = False, event: Event | None = None, before: bool = False
    ) -> None:
        to_ns = max(0, min(round(seconds * 1e9), self._duration_ns))
        with self._changed:
            if self._failure:
                return
            self._num_steps = 0
            self._requested = _Seek(to_ns, with_past, event, before)
            self._spans.clear()
            self._changed.notify_all()

    def step(self, num_frames: int) -> None:
        """Pause and move `num_frames` forwards, or backwards if negative. Pending steps add up."""
        with self._changed:
            self._clock.pause()
            if self._failure:
                return
            self._num_steps += num_frames
            self._changed.notify_all()

    def resync(self) -> None:
        """Deliver no more updates until a snapshot, because an update could not be applied."""
        with self._changed:
            self._needs_snapshot = True

    def poll_update(self) -> Update | None:
        """Return the next update, or None if there is none yet. Each update covers a short time, so call this method
        until it returns None.
        """
        with self._changed:
            if not self._spans:
                return None
            span = self._spans.popleft()
            self._consumed_ns, self.has_jumped = span.until_ns, span.jumped
            return span.update

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, checking it after each change. Returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(predicate, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reason(self) -> str:
        with self._changed:
            if self._failure:
                return self._failure
            if self._clock.is_playing or self._requested is not None:
                return ""
            return "at the end" if self._clock.is_at_end else "paused"

    # private: runs in the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._grow_when_due()
                seek_target = self._requested
                if seek_target is not None:
                    self._jump(seek_target)
                elif self._num_steps:
                    self._step()
                else:
                    self._continue()
        except Exception as error:  # shown in the status: a source that failed silently would look idle
            reason = str(error) if isinstance(error, BadInput) else f"the file cannot be read: {_error_text(error)}"
            with self._changed:
                self._failure = reason[:300]
                self._requested, self._num_steps = None, 0
                self._clock.pause()
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        with self._changed:
            if self._requested is None and not self._num_steps and not self._is_closing:
                pause_s = GROW_S if self._clock.waits_at_end else None
                self._changed.wait(TICK_S if self._clock.is_playing else pause_s)
            return not self._is_closing

    def _grow_when_due(self) -> None:
        if not self._clock.waits_at_end or time.monotonic() - self._grown_s < GROW_S:
            return
        with contextlib.suppress(BadInput):  # what was read before is still played
            self._reader.grow()
        self._grown_s = time.monotonic()
        duration_ns, may_grow = round(self.recording.info.duration_s * 1e9), self.recording.may_grow
        if (duration_ns, may_grow) != (self._duration_ns, self._clock.waits_at_end):
            with self._changed:
                self._duration_ns = self._clock.duration_ns = duration_ns
                self._clock.waits_at_end = may_grow
                self._changed.notify_all()

    def _step(self) -> None:
        with self._changed:
            num_frames, at_ns = self._num_steps, self._position_ns
        to_ns = self._reader.nearby_frame_ns(at_ns, num_frames)
        with self._changed:
            self._num_steps -= num_frames
            if self._requested is None and to_ns != at_ns:
                self._requested = _Seek(to_ns, with_past=False)
                self._spans.clear()
            self._changed.notify_all()

    def _jump(self, seek_target: _Seek) -> None:
        def is_wanted() -> bool:
            return self._requested is seek_target and not self._is_closing

        to_ns = seek_target.to_ns
        if seek_target.event is not None:
            to_ns = self._reader.frame_reporting(seek_target.event, to_ns)
            to_ns = self._reader.nearby_frame_ns(to_ns, -1) if seek_target.before else to_ns
        # Without the 1 ns, a keyframe with the same time would replace the frame that reports the event.
        past_ns = PAST_NS if seek_target.with_past else int(seek_target.event is not None)
        spans = self._reader.jump(to_ns, past_ns=past_ns, is_wanted=is_wanted)
        with self._changed:
            if spans is not None and is_wanted():
                to_ns = max(to_ns, spans[-1].until_ns) if spans else to_ns
                self._requested, self._needs_snapshot = None, False
                self._spans.extend(spans)
                self._clock.jump(to_ns)
                self._position_ns = to_ns
                self._changed.notify_all()

    def _continue(self) -> None:
        with self._changed:
            if not self._clock.is_playing:
                return
            if len(self._spans) >= MAX_QUEUED_UPDATES:
                self._clock.jump(self._position_ns)
                return
            until_ns = self._clock.tick()
            needs_snapshot, self._needs_snapshot = self._needs_snapshot, False
        if needs_snapshot:
            self._reader.skip_to_snapshot()
        spans = self._reader.read_until(until_ns)
        with self._changed:
            if self._requested is None:
                self._spans.extend(spans)
                self._position_ns = until_ns
                self._changed.notify_all()


def _error_text(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)


class PlaybackClock:
    """Position in a recording, which advances with a clock times a speed factor, up to the end.

    Starts paused at position 0. `clock` is monotonic, in ns.
    """

    def __init__(self, duration_ns: int, clock: Callable[[], int]) -> None:
        self.position_ns = 0
        self.duration_ns = duration_ns
        self.is_playing = False
        self.waits_at_end = False
        """Whether the clock stays in play mode at the end, because the recording may grow."""
        self.speed = 1.0
        self._clock = clock
        self._last_ns = clock()

    @property
    def is_at_end(self) -> bool:
        return self.position_ns >= self.duration_ns

    def play(self) -> None:
        self._last_ns = self._clock()
        self.is_playing = True

    def pause(self) -> None:
        self.is_playing = False

    def jump(self, position_ns: int) -> None:
        """Set the position. The clock continues from there if it is playing."""
        self.position_ns = max(0, min(position_ns, self.duration_ns))
        self._last_ns = self._clock()

    def tick(self) -> int:
        """Advance and return the position. The clock pauses at the end, unless `waits_at_end`."""
        now_ns = self._clock()
        passed_ns, self._last_ns = min(now_ns - self._last_ns, MAX_TICK_NS), now_ns
        if self.is_playing:
            self.position_ns = min(self.position_ns + int(passed_ns * self.speed), self.duration_ns)
            self.is_playing = self.waits_at_end or not self.is_at_end
        return self.position_ns
