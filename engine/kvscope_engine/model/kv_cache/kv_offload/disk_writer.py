"""Write-behind for the disk tier: a bounded queue of records and the thread that writes them.

Owns what is in the queue and which places of the file hold what they should. A record counts as stored once it is
in the queue, and is read from there until the file has it. The first failed write ends writing for good, and what
was in the queue is lost; what the file has stays readable.
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
    neighbours,
    record_buffers,
)

MAX_WAIT_S: Final = 30.0
"""A drive that takes nothing for so long counts as failed, so that the engine goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    place: int
    buffer: int


class DiskWriter:
    """Up to `num_buffers` records of `size` bytes on their way to the file; the first `block_bytes` of each matter."""

    def __init__(self, records: DiskRecords, size: int, block_bytes: int, num_buffers: int) -> None:
        self._records = records
        self._block_bytes = block_bytes
        self._buffers = record_buffers(num_buffers, size)
        self._free = list(range(num_buffers))
        self._queue: deque[_Entry] = deque()
        self._latest: dict[int, _Entry] = {}
        """Of each place in the queue, what it is to hold in the end."""
        self._checksums: dict[int, int] = {}
        """Of each place that the file holds."""
        self._changed = threading.Condition()
        self._closing = False
        self.failure = ""
        """Why nothing is written any more."""
        self.num_written = 0
        self.seconds = 0.0
        """That the thread spent on checksums and writing."""
        self._thread = threading.Thread(target=self._run, name="kvscope-disk-tier", daemon=True)
        self._thread.start()

    @property
    def num_free(self) -> int:
        """How many records `put` takes now without waiting."""
        with self._changed:
            return len(self._free)

    def put(self, places: Sequence[int], payloads: Sequence[Bytes]) -> list[bool]:
        """Take blocks' bytes for `places`; which were. Waits only while the queue is full.

        What was at a place before is lost either way.
        """
        done = 0
        while done < len(places):
            buffers = self._take_buffers(places[done:])
            if not buffers:
                break
            for buffer, payload in zip(buffers, payloads[done:], strict=False):
                self._buffers[buffer, : self._block_bytes] = payload
            if not self._enqueue(list(map(_Entry, places[done:], buffers))):
                break
            done += len(buffers)
        return [True] * done + [False] * (len(places) - done)

    def take(self, place: int, target: Bytes) -> bool:
        """Copy what waits in the queue for `place`; False when nothing does."""
        with self._changed:
            entry = self._latest.get(place)
            if entry is not None:
                target[:] = self._buffers[entry.buffer, : self._block_bytes]
            return entry is not None

    def checksum(self, place: int) -> int | None:
        """Of what the file holds at `place`; None when it holds nothing."""
        with self._changed:
            return self._checksums.get(place)

    def checksums(self) -> dict[int, int]:
        """Of every place that the file holds."""
        with self._changed:
            return dict(self._checksums)

    def adopt(self, checksums: dict[int, int]) -> None:
        """Places that the file holds from an earlier run."""
        with self._changed:
            self._checksums.update(checksums)

    def forget(self, place: int) -> None:
        """What `place` held is of no use."""
        with self._changed:
            self._checksums.pop(place, None)

    def drain(self) -> bool:
        """Wait until the queue is empty; whether all of it was written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._latest or self.failure, MAX_WAIT_S)
            return not self._latest and not self.failure

    def close(self) -> None:
        """End the thread; what waits in the queue is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(MAX_WAIT_S)

    def _take_buffers(self, places: Sequence[int]) -> list[int]:
        """For as many of `places` as there is room, at least one; none when nothing is written any more."""
        with self._changed:
            for place in places:
                self._checksums.pop(place, None)
            if not self._changed.wait_for(lambda: self._free or self.failure, MAX_WAIT_S):
                self._fail(f"the drive took nothing for {MAX_WAIT_S:.0f} s")
            if self.failure:
                return []
            taken = self._free[: len(places)]
            del self._free[: len(places)]
            return taken

    def _enqueue(self, entries: list[_Entry]) -> bool:
        """All at once, so that neighbours are written together; False when nothing is written any more."""
        with self._changed:
            if not self.failure:
                for entry in entries:
                    self._checksums.pop(entry.place, None)  # a record before may have been stored meanwhile
                    self._latest[entry.place] = entry
                self._queue += entries
                self._changed.notify_all()
            return not self.failure

    def _run(self) -> None:
        while batch := self._next_batch():
            started = time.perf_counter()
            try:
                self._write(batch)
            except OSError as error:
                with self._changed:
                    self._fail(error.strerror or str(error))
            self.seconds += time.perf_counter() - started

    def _next_batch(self) -> list[_Entry]:
        """All that waits, by place; empty at the end. What a later record replaces is left out."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._closing or self.failure)
                if self._closing or self.failure:
                    return []
                taken = list(self._queue)
                self._queue.clear()
                batch = [entry for entry in taken if self._latest.get(entry.place) is entry]
                self._release([entry for entry in taken if self._latest.get(entry.place) is not entry])
                if batch:
                    return sorted(batch, key=lambda entry: entry.place)

    def _write(self, batch: list[_Entry]) -> None:
        for stretch in neighbours([entry.place for entry in batch]):
            entries = [batch[index] for index in stretch]
            sums = [checksum(self._buffers[entry.buffer, : self._block_bytes]) for entry in entries]
            self._records.write(entries[0].place, [self._buffers[entry.buffer] for entry in entries])
            with self._changed:
                self._stored(entries, sums)

    def _stored(self, entries: list[_Entry], sums: list[int]) -> None:
        self.num_written += len(entries)
        for entry, value in zip(entries, sums, strict=True):
            if self._latest.get(entry.place) is entry:
                del self._latest[entry.place]
                self._checksums[entry.place] = value
        self._release(entries)

    def _release(self, entries: list[_Entry]) -> None:
        self._free += [entry.buffer for entry in entries]
        self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        """Every place in the queue holds nothing any more."""
        self.failure = self.failure or reason
        self._latest.clear()
        self._queue.clear()
        self._changed.notify_all()
