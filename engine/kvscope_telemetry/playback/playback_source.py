"""A recording as a `Source`: played at the pace it was recorded in, times a speed; stopped, and moved in.

Owns the thread and what it handed out. The thread reads and coalesces; whoever takes has only to apply. It never
skips: where the taker stays away, or the machine cannot keep up, it plays slower.
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
"""Who was away for longer than this, or cannot keep up, plays slower instead of skipping."""
MIN_SPEED, MAX_SPEED = 0.01, 1000.0
TICK_S: Final = 0.008
GROW_S: Final = 0.25
"""How often it is looked whether there is more, where somebody may be writing."""
MAX_WAITING: Final = 400
"""Updates that wait to be taken; with as many it stands still. A jump brings its past besides."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seek:
    """A place to go to: a time, or the frame that tells an event, or the one before that."""

    to_ns: int
    with_past: bool
    event: Event | None = None
    before: bool = False


class PlaybackSource:
    """Plays `recording` from its start; a context manager that closes at the end. What is still written is followed.

    Positions are seconds since the start. `clock` is monotonic, in ns.
    """

    def __init__(
        self, recording: Recording, *, is_playing: bool = True, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.recording = recording
        self.has_jumped = False
        """Whether the update taken last is the first after a seek: what was before is not its past."""
        self._duration_ns = round(recording.info.duration_s * 1e9)
        self._start_ns = recording.start_ns - (time.time_ns() - time.monotonic_ns())
        self._reader = PlaybackReader(recording)
        self._clock = PlaybackClock(self._duration_ns, clock)
        self._clock.is_playing, self._clock.waits_at_end = is_playing, recording.may_grow
        self._grown_s = time.monotonic()
        self._spans: deque[TimedUpdate] = deque()
        self._position_ns = 0  # up to where everything is in `_spans`, or was taken
        self._taken_ns = 0
        self._wanted: _Seek | None = _Seek(0, with_past=True)  # a seek that was not done
        self._num_steps = 0  # frames to go on, or back
        self._is_refused = False
        self._is_closing = False
        self._failure = ""
        self._changed = threading.Condition()
        """Guards all of the above but the reader, which is the thread's."""
        self._thread = threading.Thread(target=self._run, name="kvscope-playback", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path | str) -> PlaybackSource:
        """Raises BadInput, in one line, for what is no recording."""
        return cls(Recording.open(path))

    @property
    def name(self) -> str:
        """The file's name."""
        return self.recording.path.name

    @property
    def status(self) -> SourceStatus:
        """Always PLAYBACK; the reason says when and why it stands still."""
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
        """Why nothing is read any more: it stands where it is and goes nowhere. Empty while all is well."""
        with self._changed:
            return self._failure

    @property
    def note(self) -> str:
        """What is wrong with the file, in words; empty when nothing was found so far."""
        return self.recording.note

    @property
    def note_detail(self) -> str:
        """What was left out and why, a line each."""
        return self.recording.detail

    @property
    def duration(self) -> float:
        """Seconds of the whole recording, as far as it was written."""
        return self._duration_ns / 1e9

    @property
    def position(self) -> float:
        """Seconds since the start up to which everything was handed out, or where it was told to go."""
        with self._changed:
            return (self._position_ns if self._wanted is None else self._wanted.to_ns) / 1e9

    @property
    def now_ns(self) -> int:
        """`position` on this machine's monotonic clock: when it was, by the wall clock. Negative before the boot."""
        return self._start_ns + round(self.position * 1e9)

    @property
    def taken_ns(self) -> int:
        """The same of the update taken last."""
        return self._start_ns + self._taken_ns

    @property
    def is_playing(self) -> bool:
        """Whether it goes on by itself."""
        with self._changed:
            return self._clock.is_playing

    @property
    def is_seeking(self) -> bool:
        """Whether a seek is not done yet: what there is to take is not yet of the position."""
        with self._changed:
            return self._wanted is not None or self._num_steps != 0

    @property
    def is_at_end(self) -> bool:
        """Whether nothing comes after the position."""
        return self.position >= self.duration

    @property
    def speed(self) -> float:
        """Recorded seconds a second."""
        return self._clock.speed

    def play(self) -> None:
        """Play on; from the end, begin again."""
        if self.is_at_end:
            self.seek(0.0)
        with self._changed:
            if not self._failure:
                self._clock.play()
            self._changed.notify_all()

    def pause(self) -> None:
        """Stand still."""
        with self._changed:
            self._clock.pause()

    def set_speed(self, factor: float) -> None:
        """Play `factor` times as fast as it was. Raises BadInput for one that is not accepted."""
        if not MIN_SPEED <= factor <= MAX_SPEED:
            raise BadInput(f"speed {factor!r} is not accepted: a number from {MIN_SPEED} to {MAX_SPEED:.0f}")
        with self._changed:
            self._clock.speed = factor

    def seek(self, seconds: float, *, with_past: bool = True) -> None:
        """Go to `seconds`, or as near as there is; what is taken next begins with a snapshot of the state there.

        `with_past`: the minute before it comes along, in short updates, for curves. Without, it is quicker.
        """
        self._want(seconds, with_past=with_past)

    def seek_event(self, seconds: float, event: Event, *, before: bool = False) -> None:
        """Go to the frame that tells `event`, which was at `seconds`: the state is the one after it. `before`: to the
        frame before that one."""
        self._want(seconds, event=event, before=before)

    def _want(
        self, seconds: float, *, with_past: bool = False, event: Event | None = None, before: bool = False
    ) -> None:
        to_ns = max(0, min(round(seconds * 1e9), self._duration_ns))
        with self._changed:
            if self._failure:
                return
            self._num_steps = 0
            self._wanted = _Seek(to_ns, with_past, event, before)
            self._spans.clear()
            self._changed.notify_all()

    def step(self, num_frames: int) -> None:
        """Stand still `num_frames` further than now, or back with a negative number; steps that wait add up."""
        with self._changed:
            self._clock.pause()
            if self._failure:
                return
            self._num_steps += num_frames
            self._changed.notify_all()

    def resync(self) -> None:
        """What was taken could not be applied: nothing more until a snapshot."""
        with self._changed:
            self._is_refused = True

    def take_update(self) -> Update | None:
        """The next update, None when there is none yet. Take until then: each covers a short span of time."""
        with self._changed:
            if not self._spans:
                return None
            span = self._spans.popleft()
            self._taken_ns, self.has_jumped = span.until_ns, span.jumped
            return span.update

    def wait(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `predicate()` holds, looking again whenever the thread did something; whether it did in time."""
        with self._changed:
            return self._changed.wait_for(predicate, timeout_s)

    def close(self) -> None:
        """End the thread. Idempotent."""
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
            if self._clock.is_playing or self._wanted is not None:
                return ""
            return "at the end" if self._clock.is_at_end else "paused"

    # The thread.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._grow_when_due()
                wanted = self._wanted
                if wanted is not None:
                    self._jump(wanted)
                elif self._num_steps:
                    self._step()
                else:
                    self._go_on()
        except Exception as error:  # told in the status: a source that died silently looks like a quiet one
            words = str(error) if isinstance(error, BadInput) else f"the file cannot be read: {_why(error)}"
            with self._changed:
                self._failure = words[:300]
                self._wanted, self._num_steps = None, 0
                self._clock.pause()
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Until there is something to do; False when it is over."""
        with self._changed:
            if self._wanted is None and not self._num_steps and not self._is_closing:
                pause_s = GROW_S if self._clock.waits_at_end else None
                self._changed.wait(TICK_S if self._clock.is_playing else pause_s)
            return not self._is_closing

    def _grow_when_due(self) -> None:
        if not self._clock.waits_at_end or time.monotonic() - self._grown_s < GROW_S:
            return
        with contextlib.suppress(BadInput):  # what was read of it goes on being played
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
        to_ns = self._reader.frame_near(at_ns, num_frames)
        with self._changed:
            self._num_steps -= num_frames
            if self._wanted is None and to_ns != at_ns:
                self._wanted = _Seek(to_ns, with_past=False)
                self._spans.clear()
            self._changed.notify_all()

    def _jump(self, wanted: _Seek) -> None:
        def is_wanted() -> bool:
            return self._wanted is wanted and not self._is_closing

        to_ns = wanted.to_ns
        if wanted.event is not None:
            to_ns = self._reader.frame_with(wanted.event, to_ns)
            to_ns = self._reader.frame_near(to_ns, -1) if wanted.before else to_ns
        # Without the 1 ns a keyframe of the same moment would take the place of the frame that reports the event.
        past_ns = PAST_NS if wanted.with_past else int(wanted.event is not None)
        spans = self._reader.jump(to_ns, past_ns=past_ns, is_wanted=is_wanted)
        with self._changed:
            if spans is not None and is_wanted():
                to_ns = max(to_ns, spans[-1].until_ns) if spans else to_ns
                self._wanted, self._is_refused = None, False
                self._spans.extend(spans)
                self._clock.jump(to_ns)
                self._position_ns = to_ns
                self._changed.notify_all()

    def _go_on(self) -> None:
        with self._changed:
            if not self._clock.is_playing:
                return
            if len(self._spans) >= MAX_WAITING:
                self._clock.jump(self._position_ns)
                return
            until_ns = self._clock.tick()
            is_refused, self._is_refused = self._is_refused, False
        if is_refused:
            self._reader.lose()
        spans = self._reader.read_until(until_ns)
        with self._changed:
            if self._wanted is None:
                self._spans.extend(spans)
                self._position_ns = until_ns
                self._changed.notify_all()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else repr(error)


class PlaybackClock:
    """Where in a recording one is: goes on with a clock, times a speed, until the end.

    At the start and standing still, at first. `clock` is monotonic, in ns.
    """

    def __init__(self, duration_ns: int, clock: Callable[[], int]) -> None:
        self.position_ns = 0
        """Recorded time since the start, as of the last tick."""
        self.duration_ns = duration_ns
        self.is_playing = False
        self.waits_at_end = False
        """Whether the end is not the end: more may come, and then it goes on."""
        self.speed = 1.0
        self._clock = clock
        self._last_ns = clock()

    @property
    def is_at_end(self) -> bool:
        """Whether there is nothing after this."""
        return self.position_ns >= self.duration_ns

    def play(self) -> None:
        """Go on from here."""
        self._last_ns = self._clock()
        self.is_playing = True

    def pause(self) -> None:
        """Stand still."""
        self.is_playing = False

    def jump(self, position_ns: int) -> None:
        """Be at `position_ns`, and go on from there if it plays."""
        self.position_ns = max(0, min(position_ns, self.duration_ns))
        self._last_ns = self._clock()

    def tick(self) -> int:
        """The position now. At the end it stands still."""
        now_ns = self._clock()
        passed_ns, self._last_ns = min(now_ns - self._last_ns, MAX_TICK_NS), now_ns
        if self.is_playing:
            self.position_ns = min(self.position_ns + int(passed_ns * self.speed), self.duration_ns)
            self.is_playing = self.waits_at_end or not self.is_at_end
        return self.position_ns
