"""Write-behind for the disk tier: a bounded queue of records and the thread that writes them.

Owns the queue's contents, and which slots of the file hold valid records. A record counts as stored once it is in the
queue, and is read from the queue until it is in the file. After the first failed write, nothing more is written, and
queued records are lost; records in the file stay readable.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvscope_engine.model.kv_cache.kv_offload.disk_records import (
    Bytes,
    DiskRecords,
    checksum,
    consecutive_ranges,
    record_buffers,
)

MAX_WAIT_S: Final = 30.0
"""Seconds without progress after which the drive is treated as failed, so that the engine continues."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    slot: int
    buffer: int


class DiskWriter:
    """Writes up to `num_buffers` queued records of `size` bytes, of which the first `block_bytes` are payload.

    Thread-safe; one writer thread is started.
    """

    def __init__(self, records: DiskRecords, size: int, block_bytes: int, num_buffers: int) -> None:
        self._records = records
        self._block_bytes = block_bytes
        self._buffers = record_buffers(num_buffers, size)
        self._free = list(range(num_buffers))
        self._queue: deque[_Entry] = deque()
        self._latest: dict[int, _Entry] = {}
        """Newest queued entry of each slot in the queue."""
        self._checksums: dict[int, int] = {}
        """Checksum of each slot of the file with a valid record."""
        self._changed = threading.Condition()
        self._closing = False
        self.failure = ""
        """Why records are no longer written; empty while writing works."""
        self.num_written = 0
        self.seconds = 0.0
        """Seconds that the thread spent on checksums and writing."""
        self._thread = threading.Thread(target=self._run, name="kvscope-disk-tier", daemon=True)
        self._thread.start()

    @property
    def num_free(self) -> int:
        """Number of records that `enqueue` accepts without waiting."""
        with self._changed:
            return len(self._free)

    def enqueue(self, slots: Sequence[int], payloads: Sequence[Bytes]) -> list[bool]:
        """Queue blocks' bytes for `slots`. Returns, per slot, whether the bytes were accepted. Waits only while the
        queue is full.

        The previous contents of all `slots` are lost, even if the new bytes were not accepted.
        """
        num_accepted = 0
        while num_accepted < len(slots):
            buffers = self._acquire_buffers(slots[num_accepted:])
            if not buffers:
                break
            for buffer, payload in zip(buffers, payloads[num_accepted:], strict=False):
                self._buffers[buffer, : self._block_bytes] = payload
            if not self._enqueue(list(map(_Entry, slots[num_accepted:], buffers))):
                break
            num_accepted += len(buffers)
        return [True] * num_accepted + [False] * (len(slots) - num_accepted)

    def read_queued(self, slot: int, target: Bytes) -> bool:
        """Copy the record queued for `slot` to `target`. Returns False if no record is queued for it."""
        with self._changed:
            entry = self._latest.get(slot)
            if entry is not None:
                target[:] = self._buffers[entry.buffer, : self._block_bytes]
            return entry is not None

    def checksum(self, slot: int) -> int | None:
        """Return the checksum of the record in the file at `slot`; None if the slot has no valid record."""
        with self._changed:
            return self._checksums.get(slot)

    def checksums(self) -> dict[int, int]:
        with self._changed:
            return dict(self._checksums)

    def add_recovered(self, checksums: dict[int, int]) -> None:
        """Add the checksums of records from an earlier run, by slot."""
        with self._changed:
            self._checksums.update(checksums)

    def discard(self, slot: int) -> None:
        with self._changed:
            self._checksums.pop(slot, None)

    def drain(self) -> bool:
        """Wait until the queue is empty. Returns whether all records were written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._latest or self.failure, MAX_WAIT_S)
            return not self._latest and not self.failure

    def close(self) -> None:
        """End the thread. Queued records are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(MAX_WAIT_S)

    def _acquire_buffers(self, slots: Sequence[int]) -> list[int]:
        """Return free buffers for the first of `slots`: at least one, after waiting if necessary; none if writing has
        failed.
        """
        with self._changed:
            for slot in slots:
                self._checksums.pop(slot, None)
            if not self._changed.wait_for(lambda: self._free or self.failure, MAX_WAIT_S):
                self._fail(f"the drive took nothing for {MAX_WAIT_S:.0f} s")
            if self.failure:
                return []
            buffers = self._free[: len(slots)]
            del self._free[: len(slots)]
            return buffers

    def _enqueue(self, entries: list[_Entry]) -> bool:
        """Queue all entries together, so that adjacent ones are written together. Returns False if writing has
        failed."""
        with self._changed:
            if not self.failure:
                for entry in entries:
                    self._checksums.pop(entry.slot, None)  # the place's previous record may have been stored meanwhile
                    self._latest[entry.slot] = entry
                self._queue += entries
                self._changed.notify_all()
            return not self.failure

    def _run(self) -> None:
        while batch := self._next_batch():
            start_s = time.perf_counter()
            try:
                self._write(batch)
            except OSError as error:
                with self._changed:
                    self._fail(error.strerror or str(error))
            self.seconds += time.perf_counter() - start_s

    def _next_batch(self) -> list[_Entry]:
        """Wait for queued entries and return them by slot, without superseded ones; empty when the thread must end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closing or self.failure)
                if self._closing or self.failure:
                    return []
                entries = list(self._queue)
                self._queue.clear()
                batch = [entry for entry in entries if self._latest.get(entry.slot) is entry]
                self._release([entry for entry in entries if self._latest.get(entry.slot) is not entry])
                if batch:
                    return sorted(batch, key=lambda entry: entry.slot)

    def _write(self, batch: list[_Entry]) -> None:
        for indices in consecutive_ranges([entry.slot for entry in batch]):
            entries = [batch[index] for index in indices]
            sums = [checksum(self._buffers[entry.buffer, : self._block_bytes]) for entry in entries]
            self._records.write(entries[0].slot, [self._buffers[entry.buffer] for entry in entries])
            with self._changed:
                self._record_written(entries, sums)

    def _record_written(self, entries: list[_Entry], sums: list[int]) -> None:
        self.num_written += len(entries)
        for entry, value in zip(entries, sums, strict=True):
            if self._latest.get(entry.slot) is entry:
                del self._latest[entry.slot]
                self._checksums[entry.slot] = value
        self._release(entries)

    def _release(self, entries: list[_Entry]) -> None:
        self._free += [entry.buffer for entry in entries]
        self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._latest.clear()
        self._queue.clear()
        self._changed.notify_all()
