"""The hand-over from the reader thread: bounded, in order, and never a change without the state before it."""

from __future__ import annotations

from tests.simulated_engine.engine import SimulatedEngine

from kvscope_telemetry.messages.telemetry import DeviceSample, Frame
from kvscope_telemetry.mirror.coalesce import PendingUpdates, coalesce
from kvscope_telemetry.source import Update


def _frame(seq: int) -> Update:
    return coalesce([Frame(epoch=1, seq=seq, step=seq, time_ns=seq)])


def _seqs(update: Update | None) -> list[int]:
    assert update is not None
    return update.series["seq"].tolist() if update.series else []


def _snapshot(epoch: int = 1) -> Update:
    return Update(snapshot=SimulatedEngine(num_blocks=10, epoch=epoch).snapshot())


def test_pending_frames_come_as_one_update() -> None:
    pending = PendingUpdates()
    for seq in (1, 2, 3):
        pending.put(_frame(seq))
    assert _seqs(pending.poll_update()) == [1, 2, 3]
    assert pending.poll_update() is None


def test_snapshot_starts_a_new_update() -> None:
    pending = PendingUpdates()
    for update in (_frame(1), _frame(2), _snapshot(2), _frame(3), _snapshot(3)):
        pending.put(update)
    assert _seqs(pending.poll_update()) == [1, 2]
    second = pending.poll_update()
    assert _seqs(second) == [3]
    assert second is not None
    assert second.snapshot is not None
    assert second.snapshot.hello.epoch == 2
    assert pending.poll_update() is not None
    assert pending.poll_update() is None


def test_absent_consumer_costs_bounded_memory_and_one_snapshot() -> None:
    pending = PendingUpdates(max_entries=100)
    for seq in range(1, 1000):
        pending.put(_frame(seq))
    assert pending.poll_update() is None
    assert pending.num_frames_discarded == 999
    assert pending.pop_overflow()
    assert not pending.pop_overflow()
    pending.put(_frame(1000))
    assert pending.poll_update() is None, "a frame must not come without the state before it"
    pending.put(_snapshot())
    pending.put(_frame(1001))
    assert _seqs(pending.poll_update()) == [1001]


def test_device_samples_are_delivered_while_a_snapshot_is_awaited() -> None:
    pending = PendingUpdates()
    pending.put(_frame(1))
    pending.discard()
    pending.put(_frame(2))
    pending.put(coalesce((), samples=[DeviceSample(epoch=1, time_ns=5)]))
    update = pending.poll_update()
    assert _seqs(update) == []
    assert update is not None
    assert len(update.samples) == 1


def test_single_update_larger_than_the_pending_limit_is_delivered() -> None:
    pending = PendingUpdates(max_entries=1)
    pending.put(coalesce([SimulatedEngine(num_blocks=500).advance()]))
    assert _seqs(pending.poll_update()) == [1]


def test_bytes_of_long_texts_count_towards_the_bound() -> None:
    pending = PendingUpdates(max_entries=1_000)
    pending.put(_snapshot())
    for seq in range(1, 100):
        pending.put(_frame(seq), num_bytes=10_000)
    assert pending.pop_overflow()
    assert pending.num_frames_discarded > 0
