"""Reads a recording forward from any time, as updates with the recorded times at which they end.

`PlaybackReader` owns the position in the file. `UpdateBuilder` converts messages to updates: frames and snapshots that
continue the current state, and the samples and memory of that engine. It drops messages that only a live client needs.
Used by one thread; must not depend on the playback clock or the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from kvscope_telemetry.messages.devices import Devices
from kvscope_telemetry.messages.telemetry import (
    DeviceSample,
    Event,
    Frame,
    Heartbeat,
    MemoryBreakdown,
    Reading,
    Snapshot,
    TelemetryMessage,
)
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.state_continuity import Continuity
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import Update

PAST_NS: Final = 60_000_000_000
"""Length of the time before a seek target whose updates are delivered along with the state, so that charts can
show it.
"""
_PROGRESS_EVERY: Final = 64
_FRAME_LOOKBACK_NS: Final = 250_000_000
_MAX_REPORT_DELAY_NS: Final = 10_000_000_000
"""How long after an event a frame that reports it is searched for. Events are reported at the end of their step."""
SPAN_NS: Final = 1_000_000_000
"""Length of recorded time that one update covers: it ends with the first frame at least this long after the end
of the previous update. Charts cannot have a finer resolution.
"""
HEARTBEAT_NS: Final = 500_000_000


class PlaybackReader:
    """Reads a recording as timed updates. Has no position before the first `jump`."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._spans = UpdateBuilder(self._memory_before)
        self._messages: Iterator[tuple[float, TelemetryMessage]] = iter(())
        self._ahead: tuple[int, TelemetryMessage] | None = None
        self._has_unread = False
        """Whether the recording has grown but its new messages were not read yet, because reading raised an error."""
        self._is_behind = False  # `_ahead` is not up to date; read lazily, as a seek does not need it
        self._last_read = (0, 0)  # time of the last message read, and the number of messages read with it
        self._memories: dict[int, MemoryBreakdown] = {}
        self._searched_ns: dict[int, int] = {}  # epoch -> time before which the file has no memory breakdown

    def jump(
        self, to_ns: int, *, past_ns: int = 0, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[TimedUpdate] | None:
        """Return the updates that restore the state at `to_ns` since the start: a snapshot, then the updates of the
        `past_ns` before it in short spans.

        Before the first snapshot in the recording, the state at that snapshot is returned, which is later than
        requested. Returns None once `is_wanted()` is False, and an empty list if the recording has no state.
        """
        base_ns = max(0, to_ns - past_ns)
        self._spans = UpdateBuilder(self._memory_before)
        self._messages = iter(self._recording.state_messages(base_ns / 1e9))
        self._last_read, self._is_behind = (0, 0), True
        if not self._read(base_ns, is_wanted):
            return None
        # Messages after that state; all messages if there is none.
        has_state = self._spans.continuity.epoch is not None
        self._report_devices(base_ns)
        self._messages = self._recording.messages(base_ns / 1e9 if has_state else 0.0, keyframes=True)
        self._is_behind = True
        if not has_state and not self._read(base_ns, is_wanted):
            return None
        self._spans.begin_short(base_ns)
        if to_ns > base_ns and not self._read(to_ns, is_wanted):
            return None
        while self._spans.continuity.epoch is None and (ahead := self._next()) is not None:
            self._apply(ahead)
        self._spans.pass_time(to_ns)
        spans = self._spans.drain_spans()
        return [replace(spans[0], jumped=True), *spans[1:]] if spans else []

    def read_until(self, until_ns: int) -> list[TimedUpdate]:
        self._read(until_ns, lambda: True)
        self._spans.pass_time(until_ns)
        return self._spans.drain_spans()

    def nearby_frame_ns(self, at_ns: int, num_frames: int) -> int:
        """Return the time of a frame relative to the one shown at `at_ns`: `num_frames` later, or earlier if
        negative. Stops at the first and last frame.
        """
        if num_frames >= 0:
            nearest_ns = at_ns
            for frame_ns in self._frame_times(at_ns, None):
                if frame_ns > at_ns:
                    nearest_ns, num_frames = frame_ns, num_frames - 1
                if num_frames <= 0:
                    break
            return nearest_ns
        back_ns = _FRAME_LOOKBACK_NS
        while True:
            times = [frame_ns for frame_ns in self._frame_times(at_ns - back_ns, at_ns) if frame_ns <= at_ns]
            if len(times) > -num_frames:
                return times[num_frames - 1]
            if back_ns > at_ns:
                return times[0] if times else 0
            back_ns *= 4

    def frame_reporting(self, event: Event, at_ns: int) -> int:
        """Return the time of the frame that reports `event`, which occurred at about `at_ns`. The state at that time
        includes the effect of the event.

        If no frame reports it, return the time of the first frame at or after `at_ns`.
        """
        after_ns = None
        from_s, until_s = max(0, at_ns - _FRAME_LOOKBACK_NS) / 1e9, (at_ns + _MAX_REPORT_DELAY_NS) / 1e9
        for at_s, message in self._recording.messages(from_s, until_s):
            if not isinstance(message, Frame):
                continue
            frame_ns = round(at_s * 1e9)
            if event in message.events:
                return frame_ns
            if after_ns is None and frame_ns >= at_ns:
                after_ns = frame_ns
        return at_ns if after_ns is None else after_ns

    def _frame_times(self, from_ns: int, until_ns: int | None) -> Iterator[int]:
        until_s = None if until_ns is None else until_ns / 1e9
        for at_s, message in self._recording.messages(max(0, from_ns) / 1e9, until_s):
            if isinstance(message, Frame):
                yield round(at_s * 1e9)

    def grow(self) -> bool:
        """Read what was written since the last call. Returns whether the recording changed. Raises BadInput if it
        cannot be read at present.
        """
        has_changed = self._recording.grow()
        is_at_end = self._ahead is None and not self._is_behind
        if is_at_end and (has_changed or self._has_unread):
            self._has_unread = True  # retried by the next call if reading raises
            self._resume()
            self._has_unread = False
        return has_changed

    def skip_to_snapshot(self) -> None:
        """Skip messages until the next snapshot, because the mirror could not apply an update."""
        self._spans.continuity.mark_lost()

    def _read(self, until_ns: int, is_wanted: Callable[[], bool]) -> bool:
        num_read = 0
        while (ahead := self._next()) is not None and ahead[0] <= until_ns:
            self._apply(ahead)
            num_read += 1
            if num_read % _PROGRESS_EVERY == 0 and not is_wanted():
                return False
        return True

    def _next(self) -> tuple[int, TelemetryMessage] | None:
        """Return the next message without consuming it, or None if there is none yet."""
        if self._is_behind:
            self._advance()
        return self._ahead

    def _apply(self, ahead: tuple[int, TelemetryMessage]) -> None:
        at_ns, message = ahead
        if isinstance(message, MemoryBreakdown):
            self._memories[message.epoch] = message
        self._spans.add_message(at_ns, message)
        self._is_behind = True

    def _advance(self) -> None:
        self._is_behind = False
        following = next(self._messages, None)
        if following is None:
            self._ahead = None
            return
        at_ns = round(following[0] * 1e9)
        self._ahead = (at_ns, following[1])
        self._last_read = (at_ns, self._last_read[1] + 1 if at_ns == self._last_read[0] else 1)

    def _resume(self) -> None:
        at_ns, count = self._last_read
        self._messages = self._recording.messages(at_ns / 1e9, keyframes=True)
        for _ in range(count):
            following = next(self._messages, None)
            # The messages read before may have been deleted from the ring.
            if following is None or round(following[0] * 1e9) > at_ns:
                self._messages = self._recording.messages(at_ns / 1e9, keyframes=True)
                break
        self._advance()

    def _report_devices(self, time_ns: int) -> None:
        """Add the device readings as of `time_ns`, because the messages that restore a state do not include them."""
        epoch = self._spans.continuity.epoch
        devices = None if epoch is None else self._recording.devices_before(time_ns / 1e9, epoch)
        if devices is not None:
            self._spans.add_message(time_ns, devices)

    def _memory_before(self, time_ns: int, epoch: int) -> MemoryBreakdown | None:
        """Return the newest memory breakdown read so far for `epoch`. If there is none, search the recording
        backwards from `time_ns`.
        """
        if epoch not in self._memories and time_ns > self._searched_ns.get(epoch, -1):
            memory = self._recording.memory_before(time_ns / 1e9, epoch)
            if memory is not None:
                self._memories[epoch] = memory
            else:  # the file was searched up to there
                self._searched_ns[epoch] = time_ns
        return self._memories.get(epoch)


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    update: Update
    until_ns: int
    jumped: bool = False
    """Whether the update is the first after a seek, and does not continue the previous one."""


class UpdateBuilder:
    """Converts messages, added in order, to timed updates.

    `memory_before(time_ns, epoch)` is called to get an engine's memory breakdown if playback starts in the middle of
    its run.
    """

    def __init__(self, memory_before: Callable[[int, int], MemoryBreakdown | None]) -> None:
        self.continuity = Continuity()
        self._memory_before = memory_before
        self._done: list[TimedUpdate] = []
        self._frames: list[Frame] = []
        self._snapshot: Snapshot | None = None
        self._samples: list[DeviceSample] = []
        self._readings: list[Reading] = []
        self._devices: list[Devices] = []
        self._memory: MemoryBreakdown | None = None
        self._until_ns = 0
        self._built_until_ns = 0
        self._offset_ns = 0
        self._is_short = False
        self._has_heartbeats = False

    def begin_short(self, at_ns: int) -> None:
        """Split updates into short spans from `at_ns` on. Everything before is one span, split only at snapshots."""
        self.close()
        self._is_short, self._built_until_ns = True, at_ns

    def add_message(self, at_ns: int, message: TelemetryMessage) -> None:
        if isinstance(message, Frame):
            self._add_frame(at_ns, message)
        elif isinstance(message, Snapshot):
            self._add_snapshot(at_ns, message)
        elif isinstance(message, Heartbeat):
            self._has_heartbeats = True
            if message.epoch == self.continuity.epoch and self._is_short:
                self._add_heartbeat(at_ns)
        elif isinstance(message, DeviceSample) and message.epoch == self.continuity.epoch:
            self._samples.append(message)
        elif isinstance(message, Reading) and message.epoch == self.continuity.epoch:
            self._readings.append(message)
        elif isinstance(message, Devices) and message.epoch == self.continuity.epoch:
            self._devices.append(message)
        elif isinstance(message, MemoryBreakdown) and message.epoch == self.continuity.epoch:
            self._memory = message

    def close(self) -> None:
        if self._snapshot is None and not (
            self._frames or self._samples or self._devices or self._memory or self._readings
        ):
            return
        update = coalesce(
            self._frames,
            snapshot=self._snapshot,
            samples=self._samples,
            devices=self._devices,
            memory=self._memory,
            readings=self._readings,
        )
        self._done.append(TimedUpdate(update, self._until_ns))
        self._built_until_ns = self._until_ns
        self._frames, self._samples, self._devices, self._readings = [], [], [], []
        self._snapshot = self._memory = None

    def pass_time(self, until_ns: int) -> None:
        """Advance to `until_ns` without a message. Generates heartbeats if the recording has none."""
        if not self._is_short or until_ns - max(self._until_ns, self._built_until_ns) < HEARTBEAT_NS:
            return
        self.close()
        while (
            not self._has_heartbeats and until_ns - self._built_until_ns >= HEARTBEAT_NS and not self.continuity.is_lost
        ):
            self._add_heartbeat(self._built_until_ns + HEARTBEAT_NS)

    def drain_spans(self) -> list[TimedUpdate]:
        self.close()
        done, self._done = self._done, []
        return done

    def _add_frame(self, at_ns: int, frame: Frame) -> None:
        if not self.continuity.accepts(frame):
            return
        self.pass_time(at_ns - 1)
        self._frames.append(frame)
        self._set_times(at_ns, frame.time_ns)
        if self._is_short and at_ns - self._built_until_ns >= SPAN_NS:
            self.close()

    def _add_snapshot(self, at_ns: int, snapshot: Snapshot) -> None:
        before = self.continuity.epoch
        if not self.continuity.accepts(snapshot):
            return
        self.close()
        self._snapshot = snapshot
        self._set_times(at_ns, snapshot.time_ns)
        if snapshot.hello.epoch != before:
            self._memory = self._memory_before(at_ns, snapshot.hello.epoch)

    def _set_times(self, at_ns: int, time_ns: int) -> None:
        self._until_ns, self._offset_ns = at_ns, at_ns - time_ns

    def _add_heartbeat(self, at_ns: int) -> None:
        continuity = self.continuity
        if continuity.is_lost or continuity.epoch is None:
            return
        self.close()
        beat = Heartbeat(epoch=continuity.epoch, time_ns=at_ns - self._offset_ns, seq=continuity.seq, step=0)
        self._done.append(TimedUpdate(Update(heartbeat=beat), at_ns))
        self._until_ns = self._built_until_ns = at_ns
