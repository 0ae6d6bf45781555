"""Synchronization over a channel that loses, repeats and reorders, and across restarts: never wrong, and finally in
sync.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import examples
from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.telemetry import Frame, Heartbeat, Snapshot
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.sync import BEHIND_GRACE_NS, MAX_BYTES, REQUEST_INTERVAL_NS, BufferedFrames, Sync

MS = 1_000_000
S = 1_000 * MS


@dataclass
class LossyWorld:
    """An engine, a lossy channel and a client, with time in milliseconds."""

    rng: random.Random
    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    answer_loss: float = 0.0
    answer_delay_ns: int = 5 * MS
    now_ns: int = 10 * S
    epoch: int = 1
    sync: Sync = field(default_factory=Sync)
    mirror: Mirror = field(default_factory=Mirror)
    truth: dict[tuple[int, int], bytes] = field(default_factory=dict)
    asked_ns: list[int] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self._delayed: list[Frame] = []
        self._answers: list[tuple[int, Snapshot]] = []
        self._start()

    def _start(self) -> None:
        self.engine = SimulatedEngine(num_blocks=40, num_running=3, epoch=self.epoch, seed=self.epoch)
        self.remember()

    def remember(self) -> None:
        rows = self.engine.ledger.pack_all()
        self.truth[self.epoch, self.engine.seq] = b"".join(getattr(rows, n) for n in rows.__struct_fields__)

    def restart(self) -> None:
        self.epoch += 1
        self._answers.clear()
        self._start()

    def step(self) -> None:
        frame = self.engine.advance()
        self.remember()
        if self.rng.random() < self.loss:
            self.lost += 1
        elif self.rng.random() < self.reorder:
            self._delayed.append(frame)
        else:
            for each in [frame, *self._delayed]:
                self.sync.frame(each, self.now_ns)
                if self.rng.random() < self.repeat:
                    self.sync.frame(each, self.now_ns)
            self._delayed.clear()
        self.pass_time()

    def beat(self) -> None:
        beat = self.engine.heartbeat()
        self.sync.heartbeat(Heartbeat(epoch=beat.epoch, time_ns=1, seq=self.engine.seq, step=beat.step), self.now_ns)

    def pass_time(self, ns: int = MS) -> None:
        self.now_ns += ns
        self.sync.tick(self.now_ns)
        tag = self.sync.next_request(self.now_ns)
        if tag is not None:
            self.sync.sent(tag, self.now_ns)
            self.asked_ns.append(self.now_ns)
            if self.rng.random() >= self.answer_loss:
                self._answers.append((self.now_ns + self.answer_delay_ns, self.engine.snapshot(tag)))
        due = [snapshot for due_ns, snapshot in self._answers if due_ns <= self.now_ns]
        self._answers = [(due_ns, s) for due_ns, s in self._answers if due_ns > self.now_ns]
        for snapshot in due:
            self.sync.snapshot(snapshot, self.now_ns)
        self._settle()

    def _settle(self) -> None:
        """Apply what may be applied. The mirror always equals a state that the engine once had."""
        for run in self.sync.drain_runs():
            self.mirror.apply(coalesce(run.frames, snapshot=run.snapshot))
            rows = self.mirror.ledger.pack_all()
            shown = b"".join(getattr(rows, n) for n in rows.__struct_fields__)
            assert self.mirror.epoch is not None
            assert shown == self.truth[self.mirror.epoch, self.mirror.seq]

    def apply_pending(self) -> None:
        """Make the channel reliable; the engine only sends heartbeats."""
        self.loss = self.repeat = self.reorder = self.answer_loss = 0.0
        for _ in range(100):
            self.beat()
            self.pass_time(500 * MS)
            if self.is_right:
                return
        pytest.fail(f"at {self.mirror.epoch}/{self.mirror.seq} of {self.epoch}/{self.engine.seq}")

    @property
    def is_right(self) -> bool:
        same = (self.mirror.epoch, self.mirror.seq) == (self.epoch, self.engine.seq)
        return same and self.sync.in_sync and self.mirror.ledger.equals(self.engine.ledger)


shares = st.floats(0.0, 0.4)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    loss=shares,
    repeat=shares,
    reorder=shares,
    answer_loss=shares,
    delay_ms=st.integers(1, 2500),
    restarts=st.integers(0, 2),
)
@example(seed=0, loss=0.0, repeat=0.0, reorder=0.25, answer_loss=0.0, delay_ms=40, restarts=0)
def test_mirror_is_never_wrong_and_finally_in_sync(
    seed: int, loss: float, repeat: float, reorder: float, answer_loss: float, delay_ms: int, restarts: int
) -> None:
    world = LossyWorld(random.Random(seed), loss, repeat, reorder, answer_loss, delay_ms * MS)
    for segment in range(restarts + 1):
        if segment:
            world.restart()
        for i in range(120):
            world.step()
            if i % 20 == 0:
                world.beat()
            if i % 40 == 0:
                world.pass_time(400 * MS)
    world.apply_pending()
    gaps = [b - a for a, b in zip(world.asked_ns, world.asked_ns[1:], strict=False)]
    assert all(gap >= REQUEST_INTERVAL_NS for gap in gaps)


def _in_sync() -> LossyWorld:
    world = LossyWorld(random.Random(1))
    for _ in range(20):
        world.step()
    assert world.is_right
    return world


def test_reliable_channel_needs_one_snapshot() -> None:
    world = _in_sync()
    for _ in range(500):
        world.step()
    assert world.is_right
    assert len(world.asked_ns) == 1
    assert world.sync.num_dropped == world.sync.num_resyncs == 0


def test_gap_is_detected_counted_and_repaired() -> None:
    world = _in_sync()
    world.pass_time(2 * S)
    world.loss = 1.0
    for _ in range(3):
        world.step()
    world.loss = 0.0
    world.step()
    assert not world.sync.in_sync
    assert world.sync.num_dropped == 3
    for _ in range(20):
        world.step()
    assert world.is_right
    assert world.sync.num_resyncs == 1
    assert world.sync.num_dropped == 3


def test_lost_last_frame_is_detected_by_the_heartbeat() -> None:
    world = _in_sync()
    world.pass_time(2 * S)
    world.loss = 1.0
    world.step()
    world.beat()
    world.pass_time(BEHIND_GRACE_NS // 2)
    assert world.sync.in_sync, "the frame may still be in flight"
    world.pass_time(BEHIND_GRACE_NS)
    assert not world.sync.in_sync
    world.pass_time()
    world.pass_time(10 * MS)
    assert world.is_right
    assert world.sync.num_dropped == 1


def test_repeated_and_late_frames_change_nothing() -> None:
    world = _in_sync()
    frame = world.engine.advance()
    world.remember()
    for _ in range(3):
        world.sync.frame(frame, world.now_ns)
    world.pass_time()
    assert world.is_right
    assert world.sync.num_dropped == 0


def test_stray_frame_of_another_epoch_changes_nothing() -> None:
    world = _in_sync()
    world.pass_time(2 * S)
    stray = SimulatedEngine(num_blocks=40, epoch=99).advance()
    world.sync.frame(stray, world.now_ns)
    for _ in range(30):
        world.step()
        assert world.sync.in_sync
    assert world.is_right
    assert world.sync.num_resyncs == 0


def test_restart_without_frames_is_detected_by_the_heartbeat() -> None:
    world = _in_sync()
    world.pass_time(2 * S)
    world.restart()
    world.beat()
    world.pass_time()
    world.pass_time(10 * MS)
    assert world.is_right
    assert world.sync.num_resyncs == 1


def test_unrequested_snapshot_is_ignored() -> None:
    world = _in_sync()
    old = world.engine.snapshot(1 << 52)
    world.step()
    assert not world.sync.snapshot(old, world.now_ns)
    assert not world.sync.snapshot(world.engine.snapshot(5), world.now_ns)
    assert world.is_right


def test_slow_snapshot_is_accepted() -> None:
    """A large snapshot over a slow channel takes longer than the request interval; the first that arrives is used."""
    world = LossyWorld(random.Random(1), answer_delay_ns=2500 * MS)
    for _ in range(6):
        world.step()
        world.pass_time(500 * MS)
    assert world.sync.in_sync
    assert len(world.asked_ns) == 2


def test_snapshot_is_requested_again_after_a_refusal_or_disconnect() -> None:
    sync = Sync()
    sync.want_snapshot()
    tag = sync.next_request(0)
    assert tag is not None
    sync.sent(tag, 0)
    assert sync.next_request(S // 2) is None
    sync.refused(tag)
    again = sync.next_request(S)
    assert again is not None
    sync.sent(again, S)
    sync.disconnected()
    assert sync.next_request(2 * S) is not None


def test_number_of_held_frames_is_bounded() -> None:
    sync = Sync()
    for seq in range(1, 100_000):
        sync.frame(Frame(epoch=1, seq=seq, step=seq, time_ns=1), seq)
    assert len(sync._buffered.drain()) <= 20_000


def test_bytes_of_held_frames_are_bounded() -> None:
    held, data = BufferedFrames(), bytes(MAX_BYTES // 10)
    for seq in range(1, 1_000):
        held.append(Frame(epoch=1, seq=seq, step=seq, time_ns=1), data)
    frames = held.drain()
    assert len(frames) <= 10
    assert frames[-1][0].seq == 999
    held.append(frames[0][0], bytes(2 * MAX_BYTES))
    assert held, "a single frame is kept whatever its size"


def test_mirror_sync_is_idle_only_if_no_frame_is_missing_or_pending() -> None:
    world = LossyWorld(random.Random(0))
    assert not world.sync.is_idle
    world.beat()
    world.apply_pending()
    assert world.sync.is_idle
    world.loss = 1.0
    world.step()
    world.beat()
    assert not world.sync.is_idle, "a frame is in flight or lost"
    world.apply_pending()
    assert world.sync.is_idle
