"""Decides which frames are applied and when a snapshot is requested: the Clone pattern of the ZeroMQ guide.

Owns the outstanding snapshot requests and the buffered frames. A frame is passed on only if it directly follows the
previous one, so a mirror that applies these frames may be late but never has a wrong state. After a gap, no frame is
passed on until a snapshot arrives. Only a snapshot that answers a request made by `Sync` changes the epoch; stray
messages cannot. Must not depend on sockets, threads or clocks: callers pass `now_ns`, monotonic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot
from kvscope_telemetry.mirror.engine_clock import EngineClock
from kvscope_telemetry.mirror.state_continuity import StatePosition

MAX_FRAMES: Final = 20_000
MAX_BYTES: Final = 64 << 20
"""Maximum size of buffered frames, in bytes on the wire."""
REQUEST_INTERVAL_NS: Final = 1_000_000_000
"""Minimum time between two snapshot requests, in nanoseconds."""
MAX_INTERVAL_NS: Final = 30_000_000_000
"""Maximum time between two snapshot requests. The time doubles from `REQUEST_INTERVAL_NS` with each frame or
snapshot that cannot be decoded, because a new snapshot is likely to be undecodable too.
"""
MAX_ANSWER_NS: Final = 10_000_000_000
"""Maximum time to wait for the answer to a snapshot request before the request is repeated. The time starts at
one interval and doubles with each unanswered request.
"""
BEHIND_GRACE_NS: Final = 300_000_000
"""Time for which a frame announced by a heartbeat may still be in transit."""
FIRST_TAG: Final = 1 << 52
"""Lowest tag of the snapshot requests made by `Sync`, so that they do not collide with a caller's tags."""


@dataclass(slots=True)
class FrameRun:
    """A snapshot and the frames that follow it. The snapshot is None if the frames continue the previous run."""

    snapshot: Snapshot | None = None
    frames: list[Frame] = field(default_factory=list)


Passed = Callable[[Frame | Snapshot, bytes | None], None]
"""Callback for each snapshot or frame to be applied. The second argument is its encoded form, or None if that
is not available.
"""


class Sync:
    """Synchronization with one engine across restarts: processes messages and returns `FrameRun`s and snapshot
    requests.

    `on_passed` is called immediately and in order with each snapshot and frame that is added to a run.
    """

    def __init__(self, on_passed: Passed = lambda message, data: None) -> None:
        self._position = StatePosition()
        self._clock = EngineClock()
        self._on_passed = on_passed
        self.in_sync = False
        self.num_dropped = 0
        """Number of frames that were published by the engine but never received."""
        self.num_resyncs = 0
        """Number of snapshots applied after the first one."""
        self._runs: list[FrameRun] = []
        self._buffered = BufferedFrames()
        self._last_seen: int | None = None  # highest seq received of the epoch, None before the first frame
        self._last_frame_ns = 0
        self._announced: tuple[int, int] | None = None  # (seq announced by a heartbeat, time of its receipt)
        self._tag = FIRST_TAG - 1
        self._oldest_tag = FIRST_TAG  # answers to requests with lower tags are ignored
        self._wants_snapshot = False
        self._requested_ns: int | None = None
        self._answer_timeout_ns = REQUEST_INTERVAL_NS
        self._interval_ns = REQUEST_INTERVAL_NS

    @property
    def epoch(self) -> int | None:
        """Epoch of the engine; None before the first snapshot."""
        return self._position.epoch

    @property
    def seq(self) -> int:
        """Number of the last frame that was passed on."""
        return self._position.seq

    @property
    def is_idle(self) -> bool:
        """Whether the state is complete, no snapshot is needed, and no frame announced by a heartbeat is
        outstanding.
        """
        return self.in_sync and not self._wants_snapshot and self._announced is None

    def accepts_time(self, epoch: int, time_ns: int, now_ns: int) -> bool:
        """Return whether a message of the engine may have this time. A jump of the engine's clock is not plausible.

        Must be called before the message is passed to `frame` or `heartbeat`.
        """
        return epoch != self.epoch or self._clock.accepts(epoch, time_ns, now_ns)

    def frame(self, frame: Frame, now_ns: int, data: bytes | None = None) -> None:
        """Process a received frame. `data` is its encoded form."""
        if frame.epoch != self.epoch:
            self._buffered.append(frame, data)
            self.want_snapshot()
            return
        self._last_frame_ns = now_ns
        if self._last_seen is not None:
            self.num_dropped += max(0, frame.seq - self._last_seen - 1)
        self._last_seen = max(self._last_seen or 0, frame.seq)
        if not self.in_sync:
            self._buffered.append(frame, data)
        elif self._position.is_before(frame):
            self._pass_on(frame, data)
        elif not self._position.has(frame):
            self.lose()
            self._buffered.append(frame, data)

    def heartbeat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """Process a heartbeat, which may show that a frame was missed, or that the engine was restarted."""
        if heartbeat.epoch != self.epoch:
            self.want_snapshot()
        elif self._announced is None and (heartbeat.seq > self._newest or self._is_behind(heartbeat.seq)):
            self._announced = (heartbeat.seq, now_ns)

    def snapshot(self, snapshot: Snapshot, now_ns: int, data: bytes | None = None) -> bool:
        """Process a snapshot. Returns whether it was applied: it must answer a request, and the state must need it.

        `data` is its encoded form.
        """
        if not self.is_awaited(snapshot):
            return False
        self._wants_snapshot, self._oldest_tag = False, self._tag + 1
        self._answer_timeout_ns = REQUEST_INTERVAL_NS
        is_news = snapshot.hello.epoch != self.epoch or not self.in_sync
        if is_news:
            self._clock.start(snapshot.hello.epoch, snapshot.time_ns, now_ns)
            self._apply_snapshot(snapshot, data, now_ns)
            self._last_frame_ns = now_ns
            self._interval_ns = max(REQUEST_INTERVAL_NS, self._interval_ns // 2)
        if self.in_sync:
            self._buffered.clear()
        return is_news

    def is_awaited(self, snapshot: Snapshot) -> bool:
        return self._oldest_tag <= snapshot.tag <= self._tag

    def lose(self) -> None:
        """Mark the state as invalid. No frame is passed on until a snapshot arrives."""
        self.in_sync, self._announced = False, None
        self.want_snapshot()

    def unreadable(self) -> None:
        """Double the interval between requests, because a frame or snapshot could not be decoded."""
        self._interval_ns = min(2 * self._interval_ns, MAX_INTERVAL_NS)

    def want_snapshot(self) -> None:
        """Request a snapshot once the rate limit allows."""
        self._wants_snapshot = True

    def refused(self, tag: int) -> None:
        """Process the engine's refusal of request `tag`, which is then repeated after the interval."""
        if tag == self._tag:
            self._oldest_tag, self._answer_timeout_ns = tag + 1, REQUEST_INTERVAL_NS

    def tick(self, now_ns: int) -> None:
        """Request a snapshot if frames announced by a heartbeat did not arrive in time, and count them as dropped."""
        if self._announced is None:
            return
        seq, since_ns = self._announced
        num_missing = max(0, seq - self._newest)
        if not (num_missing or self._is_behind(seq)):
            self._announced = None
        elif now_ns - max(since_ns, self._last_frame_ns) > BEHIND_GRACE_NS:
            self._announced, self._last_seen = None, max(seq, self._newest)
            self.num_dropped += num_missing
            if self._is_behind(seq):
                self.lose()

    def next_request(self, now_ns: int) -> int | None:
        """Return the tag of a snapshot request to be sent now, or None. Once it is sent, the caller must call
        `sent`.
        """
        if not self._wants_snapshot:
            return None
        if self._requested_ns is None:
            return self._tag + 1
        is_waiting = self._tag >= self._oldest_tag
        pause_ns = max(self._answer_timeout_ns, self._interval_ns) if is_waiting else self._interval_ns
        return self._tag + 1 if now_ns - self._requested_ns >= pause_ns else None

    def sent(self, tag: int, now_ns: int) -> None:
        if self._tag >= self._oldest_tag:  # the previous request is unanswered: the engine is slow
            self._answer_timeout_ns = min(2 * self._answer_timeout_ns, MAX_ANSWER_NS)
        self._tag, self._requested_ns = tag, now_ns

    def disconnected(self) -> None:
        """Process the loss of the connection: outstanding answers will not arrive."""
        self._clock.reset()
        self._oldest_tag, self._answer_timeout_ns = self._tag + 1, REQUEST_INTERVAL_NS
        self._interval_ns = REQUEST_INTERVAL_NS
        self._wants_snapshot = self._wants_snapshot or not self.in_sync

    def drain_runs(self) -> list[FrameRun]:
        """Return and clear the runs to be applied, in order."""
        runs, self._runs = self._runs, []
        return runs

    @property
    def _newest(self) -> int:
        """Number of the newest frame of the epoch that was received or counted as dropped."""
        return self.seq if self._last_seen is None else self._last_seen

    def _is_behind(self, seq: int) -> bool:
        """Return whether the state lacks frame `seq`. A frame that was received or counted as dropped can be
        lacking too, if the last snapshot is older.
        """
        return self.in_sync and seq > self.seq

    def _apply_snapshot(self, snapshot: Snapshot, data: bytes | None, now_ns: int) -> None:
        """Replace the state with `snapshot`, and apply the buffered frames that follow it."""
        is_same_epoch = self.epoch == snapshot.hello.epoch
        self.num_resyncs += self.epoch is not None
        self._position.move_to(snapshot)
        self.in_sync = True
        self._announced = self._announced if is_same_epoch else None
        self._runs.append(FrameRun(snapshot))
        self._on_passed(snapshot, data)
        buffered = [
            (frame, frame_data)
            for frame, frame_data in self._buffered.drain()
            if frame.epoch == self.epoch and self.accepts_time(frame.epoch, frame.time_ns, now_ns)
        ]
        if not is_same_epoch:
            self._count_holes({frame.seq for frame, _ in buffered})
        following = {frame.seq: (frame, frame_data) for frame, frame_data in buffered if frame.seq > self.seq}
        for seq in sorted(following):
            frame, frame_data = following[seq]
            if self._position.is_before(frame):
                self._pass_on(frame, frame_data)
            else:
                self._buffered.append(frame, frame_data)
        if self._buffered:
            self.lose()

    def _count_holes(self, seqs: set[int]) -> None:
        """Count gaps among the first frames of a new epoch, which were not counted on arrival."""
        self._last_seen = max(seqs, default=None)
        if seqs:
            self.num_dropped += max(seqs) - min(seqs) + 1 - len(seqs)

    def _pass_on(self, frame: Frame, data: bytes | None) -> None:
        self._position.advance(frame)
        self._on_passed(frame, data)
        if not self._runs:
            self._runs.append(FrameRun())
        self._runs[-1].frames.append(frame)


class BufferedFrames:
    """Frames retained while a snapshot is outstanding, bounded in number and bytes.

    If there are too many, the older half is dropped, because the snapshot is more likely to contain older frames.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[Frame, bytes | None]] = []
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def append(self, frame: Frame, data: bytes | None = None) -> None:
        num_bytes = len(data or b"")
        while self._frames and (len(self._frames) >= MAX_FRAMES or self._num_bytes + num_bytes > MAX_BYTES):
            self._drop_older_half()
        self._frames.append((frame, data))
        self._num_bytes += num_bytes

    def drain(self) -> list[tuple[Frame, bytes | None]]:
        frames = self._frames
        self.clear()
        return frames

    def clear(self) -> None:
        self._frames, self._num_bytes = [], 0

    def _drop_older_half(self) -> None:
        num_dropped = -(-len(self._frames) // 2)
        self._num_bytes -= sum(len(data or b"") for _, data in self._frames[:num_dropped])
        del self._frames[:num_dropped]
