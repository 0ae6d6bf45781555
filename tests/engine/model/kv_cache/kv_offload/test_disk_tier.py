"""Records on disk under every failure: never an exception, never wrong bytes."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile, open_disk_file
from kvscope_engine.model.kv_cache.kv_offload.disk_records import Bytes, DiskRecords
from kvscope_engine.model.kv_cache.kv_offload.disk_tier import DiskTier
from kvscope_engine.model.kv_cache.kv_offload.disk_writer import DiskWriter

PLACES, BLOCK_BYTES, RECORD = 12, 5000, 8192


@pytest.fixture
def file(tmp_path: Path) -> OpenFile:
    return open_disk_file(tmp_path / "kv", PLACES * RECORD, keep=True)


@pytest.fixture
def tier(file: OpenFile) -> Iterator[DiskTier]:
    tier = DiskTier(file, PLACES, BLOCK_BYTES)
    yield tier
    tier.close()


@pytest.fixture
def rows() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, (PLACES, BLOCK_BYTES), dtype=np.uint8)


def offload(tier: DiskTier, rows: Bytes, slots: list[int]) -> list[bool]:
    return tier.offload([rows[slot] for slot in slots], slots, [None] * len(slots))


def load(tier: DiskTier, rows: Bytes, slots: list[int]) -> list[bool]:
    """Return which records were loaded; checks that those have the right bytes and the other targets are unchanged."""
    targets = np.full((len(slots), BLOCK_BYTES), 7, np.uint8)
    came = tier.load_from_disk(slots, list(targets))
    for target, slot, whole in zip(targets, slots, came, strict=True):
        assert np.array_equal(target, rows[slot]) if whole else (target == 7).all()
    return came


def test_every_disk_tier_slot_returns_the_block_written_to_it(tier: DiskTier, rows: Bytes) -> None:
    assert all(offload(tier, rows, list(range(PLACES))))
    assert tier.drain()
    assert all(load(tier, rows, [5, 4, 3, 9, 0, 11, 1, 5]))
    assert tier.num_written == PLACES
    assert tier.failure == ""


def test_disk_slot_written_twice_returns_the_later_block(tier: DiskTier, rows: Bytes) -> None:
    for last in (1, 2, 3):
        assert all(tier.offload([rows[0], rows[last]], [6, 6], [None, None]))
        target = np.empty(BLOCK_BYTES, np.uint8)
        assert tier.load_from_disk([6], [target]) == [True]
        assert np.array_equal(target, rows[last])
    assert tier.drain()
    assert tier.load_from_disk([6], [target]) == [True]
    assert np.array_equal(target, rows[3])


def test_flipped_bit_loses_only_its_record(tier: DiskTier, rows: Bytes, tmp_path: Path) -> None:
    offload(tier, rows, [2, 3, 4])
    assert tier.drain()
    with open(tmp_path / "kv", "r+b") as raw:
        raw.seek(3 * RECORD + 4999)
        last = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([last ^ 1]))
    assert load(tier, rows, [2, 3, 4]) == [True, False, True]
    assert (tier.num_lost, tier.failure) == (1, "")
    assert load(tier, rows, [3]) == [False], "a lost record must stay lost"
    assert offload(tier, rows, [3]) == [True]
    assert load(tier, rows, [3]) == [True]


def test_disk_blocks_exchanged_in_the_file_are_detected_and_not_loaded(
    tier: DiskTier, rows: Bytes, tmp_path: Path
) -> None:
    offload(tier, rows, [0, 1])
    assert tier.drain()
    whole = (tmp_path / "kv").read_bytes()
    with open(tmp_path / "kv", "r+b") as raw:
        raw.write(whole[RECORD : 2 * RECORD] + whole[:RECORD])
    assert load(tier, rows, [0, 1]) == [False, False]


def test_truncated_file_loses_only_the_records_cut_off(tier: DiskTier, rows: Bytes, tmp_path: Path) -> None:
    offload(tier, rows, list(range(PLACES)))
    assert tier.drain()
    os.truncate(tmp_path / "kv", 3 * RECORD + 100)
    assert load(tier, rows, [1, 2, 3, 4, 5]) == [True, True, False, False, False]
    assert offload(tier, rows, [5]) == [True]
    assert tier.drain()
    assert load(tier, rows, [5]) == [True]


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_file_stops_writing_and_keeps_written_records(
    tier: DiskTier, rows: Bytes, tmp_path: Path, replaced: bool
) -> None:
    offload(tier, rows, [0, 1])
    assert tier.drain()
    (tmp_path / "kv").unlink()
    if replaced:
        (tmp_path / "kv").write_bytes(b"another's")
    offload(tier, rows, [2])
    assert not tier.drain()
    assert tier.failure
    assert "kv was removed or replaced" in tier.failure
    assert load(tier, rows, [0, 1, 2]) == [True, True, False]
    assert offload(tier, rows, [0]) == [False]
    assert load(tier, rows, [0]) == [False], "a failed write must invalidate the record"
    assert not replaced or (tmp_path / "kv").read_bytes() == b"another's"


def test_full_drive_stops_writing(tier: DiskTier, file: OpenFile, rows: Bytes) -> None:
    offload(tier, rows, [0, 1])
    assert tier.drain()
    ours, full = os.dup(file.fd), os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file.fd)
    os.fstat(file.fd)
    object.__setattr__(file, "path", None)  # no longer the file that its name refers to
    offload(tier, rows, [2, 3])
    assert not tier.drain()
    os.dup2(ours, file.fd)
    os.close(ours)
    os.close(full)
    assert tier.failure == "No space left on device"
    assert load(tier, rows, [0, 1, 2, 3]) == [True, True, False, False]


def test_file_size_limit_stops_writing(tier: DiskTier, rows: Bytes) -> None:
    """The limit causes a real short write, then failing writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * RECORD, hard))
    try:
        offload(tier, rows, [1, 2])
        assert tier.drain()
        offload(tier, rows, [9, 4, 5, 6])
        assert not tier.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert any(reason in tier.failure for reason in ("File too large", "bytes were written"))
    assert load(tier, rows, [1, 2, 5, 6, 9]) == [True, True, False, False, False]


def test_unreadable_file_raises_nothing(tier: DiskTier, file: OpenFile, rows: Bytes) -> None:
    offload(tier, rows, [0])
    assert tier.drain()
    ours, shut = os.dup(file.fd), os.open("/dev/null", os.O_WRONLY)
    os.dup2(shut, file.fd)
    assert load(tier, rows, [0]) == [False]
    os.dup2(ours, file.fd)
    os.close(ours)
    os.close(shut)


class WriteGate:
    """Blocks writes until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.writes: list[tuple[int, int]] = []
        """(first place, records) of each."""
        write = DiskRecords.write

        def held(records: DiskRecords, slot: int, buffers: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            self.writes.append((slot, len(buffers)))
            write(records, slot, buffers)

        monkeypatch.setattr(DiskRecords, "write", held)


def test_write_queue_is_bounded_and_readable(file: OpenFile, rows: Bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = WriteGate(monkeypatch)
    tier = DiskTier(file, PLACES, BLOCK_BYTES, max_queue_bytes=3 * RECORD + 1)
    assert all(offload(tier, rows, [0, 1, 2])), "three records must fit"
    assert gate.reached.wait(60)
    assert all(load(tier, rows, [0, 1, 2]))
    done: list[bool] = []
    fourth = threading.Thread(target=lambda: done.extend(offload(tier, rows, [3])))
    fourth.start()
    fourth.join(0.05)
    assert not done, "a fourth record was accepted although only three fit"
    gate.open.set()
    fourth.join(60)
    assert done == [True]
    assert tier.drain()
    assert all(load(tier, rows, [0, 1, 2, 3]))
    tier.close()


def test_adjacent_records_are_written_together_and_replaced_ones_not_at_all(
    tier: DiskTier, rows: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = WriteGate(monkeypatch)
    offload(tier, rows, [0])
    assert gate.reached.wait(60)
    offload(tier, rows, [7, 5, 6, 2, 5])
    gate.open.set()
    assert tier.drain()
    assert gate.writes == [(0, 1), (2, 1), (5, 3)]
    assert all(load(tier, rows, [0, 2, 5, 6, 7]))


def test_failed_queued_write_loses_its_record(
    tier: DiskTier, rows: Bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = WriteGate(monkeypatch)
    assert all(offload(tier, rows, [0, 1]))
    (tmp_path / "kv").unlink()
    gate.open.set()
    assert not tier.drain()
    assert load(tier, rows, [0, 1]) == [False, False]


def test_older_record_is_never_returned_for_one_that_could_not_be_written(
    tier: DiskTier, rows: Bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The older record of the slot reaches the file while the newer one is being queued."""
    gate = WriteGate(monkeypatch)
    old = rows[::-1].copy()
    assert all(offload(tier, old, [0]))
    assert gate.reached.wait(60)
    enqueue = DiskWriter._enqueue

    def late(writer: DiskWriter, entries: Any) -> bool:
        gate.open.set()
        assert writer.drain(), "the older one is in the file"
        (tmp_path / "kv").unlink()  # so that the newer record never reaches the file
        return enqueue(writer, entries)

    monkeypatch.setattr(DiskWriter, "_enqueue", late)
    assert all(offload(tier, rows, [0]))
    assert not tier.drain()
    assert load(tier, rows, [0]) == [False]


def test_disk_tier_stops_if_the_drive_takes_no_writes_for_too_long(
    file: OpenFile, rows: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = WriteGate(monkeypatch)
    monkeypatch.setattr("kvscope_engine.model.kv_cache.kv_offload.disk_writer.MAX_WAIT_S", 0.05)
    tier = DiskTier(file, PLACES, BLOCK_BYTES, max_queue_bytes=RECORD)
    assert offload(tier, rows, [0, 1]) == [True, False]
    assert "the drive took nothing for" in tier.failure
    assert load(tier, rows, [0, 1]) == [False, False]
    gate.open.set()
    monkeypatch.undo()
    tier.close()
