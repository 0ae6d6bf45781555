"""Stores blocks on disk: writes their bytes to slots of a file and reads them back.

Methods raise nothing after construction: errors appear in return values, `failure` and the result of `close`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile
from kvscope_engine.model.kv_cache.kv_offload.disk_records import (
    MAX_RECORDS_PER_CALL,
    Bytes,
    DiskRecords,
    checksum,
    consecutive_ranges,
    record_buffers,
    record_bytes,
)
from kvscope_engine.model.kv_cache.kv_offload.disk_writer import DiskWriter
from kvscope_engine.model.kv_cache.kv_offload.persistent_prefixes import PersistentPrefixes
from kvscope_engine.model.kv_cache.kv_storage import MIB
from kvscope_engine.policy.prefixes.prefix_index import Prefix

QUEUE_BYTES: Final = 256 * MIB
"""Maximum bytes of records waiting to be written. A long prompt may evict this many in one step."""
ASSUMED_READ_RATE: Final = 1e9
"""Bytes per second that reads are assumed to reach before the first one is measured."""
READ_BYTES: Final = 8 * MIB
"""Maximum bytes of adjacent records in one read."""


class DiskTier:
    """Disk tier with `num_slots` slots of `block_bytes` in `file`, which `close` closes. With `persistent`, the
    contents persist after this process ends.
    """

    def __init__(
        self,
        file: OpenFile,
        num_slots: int,
        block_bytes: int,
        persistent: PersistentPrefixes | None = None,
        *,
        max_queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        size = record_bytes(block_bytes)
        self.num_slots = num_slots
        self.is_direct = file.is_direct
        self.num_lost = 0
        self.num_read = 0
        self.read_seconds = 0.0
        self._file = file
        self._block_bytes = block_bytes
        self._persistent = persistent
        self._records = DiskRecords(file, size)
        self._read_buffers = record_buffers(_count(READ_BYTES, size, min(num_slots, MAX_RECORDS_PER_CALL)), size)
        self._writer = DiskWriter(self._records, size, block_bytes, _count(max_queue_bytes, size, num_slots))
        if persistent is not None:
            self._writer.add_recovered({block.slot: block.checksum for block in persistent.recovered})

    @property
    def read_seconds_per_block(self) -> float:
        """Measured average seconds to read one block; before the first read, computed from `ASSUMED_READ_RATE`."""
        if not self.num_read:
            return self._block_bytes / ASSUMED_READ_RATE
        return self.read_seconds / self.num_read

    @property
    def failure(self) -> str:
        """Why blocks can no longer be written; empty while writing works."""
        return self._writer.failure

    @property
    def num_offloadable(self) -> int:
        return self._writer.num_free

    @property
    def num_written(self) -> int:
        return self._writer.num_written

    @property
    def write_seconds(self) -> float:
        return self._writer.seconds

    def offload(self, rows: Sequence[Bytes], slots: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Queue `rows[i]` to be written to `slots[i]`. Returns, per slot, whether the block was accepted. Waits only
        while the queue is full.
        """
        if self._persistent is not None:
            for slot, prefix in zip(slots, prefixes, strict=True):
                self._persistent.record_offload(slot, prefix)
        return self._writer.enqueue(slots, rows)

    def load_from_disk(self, slots: Sequence[int], rows: Sequence[Bytes]) -> list[bool]:
        """Read `slots[i]` into `rows[i]`. Returns, per slot, whether its block was intact."""
        start_s = time.perf_counter()
        is_intact = [self._writer.read_queued(slot, row) for slot, row in zip(slots, rows, strict=True)]
        missing = sorted((slot, index) for index, slot in enumerate(slots) if not is_intact[index])
        for span in consecutive_ranges([slot for slot, _ in missing], len(self._read_buffers)):
            for index in self._read(missing[span.start : span.stop], rows):
                is_intact[index] = True
        self._discard_lost([slot for slot, intact in zip(slots, is_intact, strict=True) if not intact])
        self.num_read += sum(is_intact)
        self.read_seconds += time.perf_counter() - start_s
        return is_intact

    def forget_prefixes(self) -> None:
        if self._persistent is not None:
            self._persistent.clear()

    def recovered(self) -> list[tuple[int, Prefix]]:
        return [] if self._persistent is None else [(block.slot, block.prefix) for block in self._persistent.recovered]

    def close(self) -> str:
        """Close the file, after writing its index if it persists. Returns why the index was not written, or an empty
        string.
        """
        note = self._write_index() if self._persistent is not None else ""
        self._writer.close()
        os.close(self._file.fd)
        return note

    def drain(self) -> bool:
        """Wait until the queue is empty. Returns whether all queued records were written."""
        return self._writer.drain()

    def _read(self, missing: list[tuple[int, int]], rows: Sequence[Bytes]) -> list[int]:
        """Read adjacent slots, given as (slot, index into `rows`), in one call. Returns the indices of intact slots."""
        records = self._read_buffers[: len(missing)]
        num_whole = self._records.read(missing[0][0], records)
        intact = []
        for (slot, index), record in zip(missing[:num_whole], records, strict=False):
            payload = record[: self._block_bytes]
            if checksum(payload) == self._writer.checksum(slot):
                rows[index][:] = payload
                intact.append(index)
        return intact

    def _discard_lost(self, slots: list[int]) -> None:
        self.num_lost += len(slots)
        for slot in slots:
            self._writer.discard(slot)

    def _write_index(self) -> str:
        assert self._persistent is not None, "only a kept file gets an index"
        try:
            if not self._writer.drain():
                return f"the KV cache's file is not kept: {self._writer.failure or 'the drive is too slow'}"
            self._persistent.finish(self._writer.checksums())
        except OSError as error:
            return f"the KV cache's file is not kept: {error.strerror or error}"
        return ""


def _count(total_bytes: int, size: int, at_most: int) -> int:
    return max(1, min(total_bytes // size, at_most))
