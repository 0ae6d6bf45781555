"""Which frames are applied, and when a snapshot is asked for: the Clone pattern of the ZeroMQ guide.

Owns what is waited for and asked. A frame is passed on only when it is the very next one, so a mirror fed from
here is never wrong, at worst it waits; a hole ends that until a snapshot mends it. Only a snapshot, an answer
to a question of ours, moves to another epoch: a stray message cannot. Knows no sockets, threads or clocks:
`now_ns` is given, monotonic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot
from kvscope_telemetry.state.continuity import StatePlace
from kvscope_telemetry.state.engine_clock import EngineClock

MAX_FRAMES: Final = 20_000
MAX_BYTES: Final = 64 << 20
"""As they came over the wire."""
REQUEST_INTERVAL_NS: Final = 1_000_000_000
"""At most one snapshot is asked for in this time."""
MAX_INTERVAL_NS: Final = 30_000_000_000
"""The same where what the engine says of its state cannot be read: another snapshot is then no better."""
MAX_ANSWER_NS: Final = 10_000_000_000
"""An answer is waited for this long at most before asking again; at first one interval, then doubled."""
BEHIND_GRACE_NS: Final = 300_000_000
"""How long a frame that a heartbeat told of may still be on its way."""
FIRST_TAG: Final = 1 << 52
"""Tags of our own questions start here, so that they are never mistaken for a caller's."""


@dataclass(slots=True)
class FrameRun:
    """A snapshot (None when the run goes on from the one before) and the frames that follow it."""

    snapshot: Snapshot | None = None
    frames: list[Frame] = field(default_factory=list)


Passed = Callable[[Frame | Snapshot, bytes | None], None]
"""Told of what may be applied, and the bytes that it came as, where they were given."""


class Sync:
    """Follows one engine, over its restarts. Feed it messages; take out `FrameRun`s; ask when it says so.

    `passed` is told of each snapshot and frame that goes into a run, at once and in order.
    """

    def __init__(self, passed: Passed = lambda message, data: None) -> None:
        self._place = StatePlace()
        self._clock = EngineClock()
        self._passed = passed
        self.in_sync = False
        self.num_dropped = 0
        """Frames that never came."""
        self.num_resyncs = 0
        """Snapshots taken after the first."""
        self._runs: list[FrameRun] = []
        self._held = HeldFrames()
        self._last_seen: int | None = None  # highest seq received of the epoch, None before the first frame
        self._last_frame_ns = 0
        self._behind: tuple[int, int] | None = None  # (seq a heartbeat told of, when we learnt it)
        self._tag = FIRST_TAG - 1
        self._oldest_tag = FIRST_TAG  # answers to earlier questions are no longer wanted
        self._wants = False
        self._asked_ns: int | None = None
        self._patience_ns = REQUEST_INTERVAL_NS
        self._interval_ns = REQUEST_INTERVAL_NS

    @property
    def epoch(self) -> int | None:
        """Of the engine that is followed, None before the first snapshot."""
        return self._place.epoch

    @property
    def seq(self) -> int:
        """The last frame that was passed on."""
        return self._place.seq

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is missing, and nothing waited for."""
        return self.in_sync and not self._wants and self._behind is None

    def accepts_time(self, epoch: int, time_ns: int, now_ns: int) -> bool:
        """Whether a message of the engine that is followed may have this time: its clock does not jump.

        Ask before the message is given to `frame` or `heartbeat`.
        """
        return epoch != self.epoch or self._clock.accepts(epoch, time_ns, now_ns)

    def frame(self, frame: Frame, now_ns: int, data: bytes | None = None) -> None:
        """A frame arrived, as `data`."""
        if frame.epoch != self.epoch:
            self._held.hold(frame, data)
            self.want_snapshot()
            return
        self._last_frame_ns = now_ns
        if self._last_seen is not None:
            self.num_dropped += max(0, frame.seq - self._last_seen - 1)
        self._last_seen = max(self._last_seen or 0, frame.seq)
        if not self.in_sync:
            self._held.hold(frame, data)
        elif self._place.is_before(frame):
            self._pass_on(frame, data)
        elif not self._place.has(frame):
            self.lose()
            self._held.hold(frame, data)

    def heartbeat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """A heartbeat arrived: it may tell of a frame we never saw, or of another engine."""
        if heartbeat.epoch != self.epoch:
            self.want_snapshot()
        elif self._behind is None and (heartbeat.seq > self._newest or self._is_behind(heartbeat.seq)):
            self._behind = (heartbeat.seq, now_ns)

    def snapshot(self, snapshot: Snapshot, now_ns: int, data: bytes | None = None) -> bool:
        """An answer arrived, as `data`; whether it was taken. One that nobody waits for any more is not."""
        if not self.is_awaited(snapshot):
            return False
        self._wants, self._oldest_tag = False, self._tag + 1
        self._patience_ns = REQUEST_INTERVAL_NS
        is_news = snapshot.hello.epoch != self.epoch or not self.in_sync
        if is_news:
            self._clock.start(snapshot.hello.epoch, snapshot.time_ns, now_ns)
            self._begin(snapshot, data, now_ns)
            self._last_frame_ns = now_ns
            self._interval_ns = max(REQUEST_INTERVAL_NS, self._interval_ns // 2)
        if self.in_sync:
            self._held.clear()
        return is_news

    def is_awaited(self, snapshot: Snapshot) -> bool:
        """Whether `snapshot` answers a question that is still open."""
        return self._oldest_tag <= snapshot.tag <= self._tag

    def lose(self) -> None:
        """The state is not to be trusted any more: nothing is passed on until a snapshot came."""
        self.in_sync, self._behind = False, None
        self.want_snapshot()

    def unreadable(self) -> None:
        """A frame or snapshot came that cannot be read: asking is of less use each time."""
        self._interval_ns = min(2 * self._interval_ns, MAX_INTERVAL_NS)

    def want_snapshot(self) -> None:
        """Ask for a snapshot as soon as the rate allows."""
        self._wants = True

    def refused(self, tag: int) -> None:
        """The engine cannot answer question `tag` yet: it is asked again after the interval."""
        if tag == self._tag:
            self._oldest_tag, self._patience_ns = tag + 1, REQUEST_INTERVAL_NS

    def tick(self, now_ns: int) -> None:
        """Time went by: a frame that a heartbeat told of and that does not come is lost."""
        if self._behind is None:
            return
        seq, since_ns = self._behind
        num_missing = max(0, seq - self._newest)
        if not (num_missing or self._is_behind(seq)):
            self._behind = None
        elif now_ns - max(since_ns, self._last_frame_ns) > BEHIND_GRACE_NS:
            self._behind, self._last_seen = None, max(seq, self._newest)
            self.num_dropped += num_missing
            if self._is_behind(seq):
                self.lose()

    def next_request(self, now_ns: int) -> int | None:
        """The tag of a snapshot request to send now, None when none is due. Say `sent` once it went."""
        if not self._wants:
            return None
        if self._asked_ns is None:
            return self._tag + 1
        is_waiting = self._tag >= self._oldest_tag
        pause_ns = max(self._patience_ns, self._interval_ns) if is_waiting else self._interval_ns
        return self._tag + 1 if now_ns - self._asked_ns >= pause_ns else None

    def sent(self, tag: int, now_ns: int) -> None:
        """Request `tag` left."""
        if self._tag >= self._oldest_tag:  # the one before is still open: the answer takes its time
            self._patience_ns = min(2 * self._patience_ns, MAX_ANSWER_NS)
        self._tag, self._asked_ns = tag, now_ns

    def disconnected(self) -> None:
        """The connection went, and with it every answer that was on its way."""
        self._clock.forget()
        self._oldest_tag, self._patience_ns = self._tag + 1, REQUEST_INTERVAL_NS
        self._interval_ns = REQUEST_INTERVAL_NS
        self._wants = self._wants or not self.in_sync

    def take_runs(self) -> list[FrameRun]:
        """What may be applied since the last call, in order."""
        runs, self._runs = self._runs, []
        return runs

    @property
    def _newest(self) -> int:
        """The newest frame of the epoch that is accounted for."""
        return self.seq if self._last_seen is None else self._last_seen

    def _is_behind(self, seq: int) -> bool:
        """Whether the state lacks a frame that is not waited for: it may be accounted for and yet not in a snapshot."""
        return self.in_sync and seq > self.seq

    def _begin(self, snapshot: Snapshot, data: bytes | None, now_ns: int) -> None:
        """Take `snapshot` as the state, and apply the held frames that follow it."""
        is_same = self.epoch == snapshot.hello.epoch
        self.num_resyncs += self.epoch is not None
        self._place.go_to(snapshot)
        self.in_sync = True
        self._behind = self._behind if is_same else None
        self._runs.append(FrameRun(snapshot))
        self._passed(snapshot, data)
        held = [
            (frame, its_data)
            for frame, its_data in self._held.take()
            if frame.epoch == self.epoch and self.accepts_time(frame.epoch, frame.time_ns, now_ns)
        ]
        if not is_same:
            self._count_holes({frame.seq for frame, _ in held})
        following = {frame.seq: (frame, its_data) for frame, its_data in held if frame.seq > self.seq}
        for seq in sorted(following):
            frame, its_data = following[seq]
            if self._place.is_before(frame):
                self._pass_on(frame, its_data)
            else:
                self._held.hold(frame, its_data)
        if self._held:
            self.lose()

    def _count_holes(self, seqs: set[int]) -> None:
        """Among the frames of a new epoch, which were not counted as they came."""
        self._last_seen = max(seqs, default=None)
        if seqs:
            self.num_dropped += max(seqs) - min(seqs) + 1 - len(seqs)

    def _pass_on(self, frame: Frame, data: bytes | None) -> None:
        self._place.advance(frame)
        self._passed(frame, data)
        if not self._runs:
            self._runs.append(FrameRun())
        self._runs[-1].frames.append(frame)


class HeldFrames:
    """Frames kept while a snapshot is on its way: the newest of them, bounded in number and bytes.

    When there are too many the older half goes: the newest are what a snapshot will not have.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[Frame, bytes | None]] = []
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def hold(self, frame: Frame, data: bytes | None = None) -> None:
        """Keep one more, and the bytes it came as."""
        num_bytes = len(data or b"")
        while self._frames and (len(self._frames) >= MAX_FRAMES or self._num_bytes + num_bytes > MAX_BYTES):
            self._drop_older_half()
        self._frames.append((frame, data))
        self._num_bytes += num_bytes

    def take(self) -> list[tuple[Frame, bytes | None]]:
        """All of them; none are held afterwards."""
        frames = self._frames
        self.clear()
        return frames

    def clear(self) -> None:
        """Nobody needs them."""
        self._frames, self._num_bytes = [], 0

    def _drop_older_half(self) -> None:
        num_dropped = -(-len(self._frames) // 2)
        self._num_bytes -= sum(len(data or b"") for _, data in self._frames[:num_dropped])
        del self._frames[:num_dropped]
