"""The disk tier: writes blocks' bytes to slots of a file and reads them back.

After it is made, it raises nothing: errors appear in return values, `failure` and the result of `close`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from kvscope_engine.model.kv_cache.kv_offload.disk_open import OpenFile
from kvscope_engine.model.kv_cache.kv_offload.disk_records import (
    MAX_NEIGHBOURS,
    Bytes,
    DiskRecords,
    checksum,
    neighbours,
    record_buffers,
    record_bytes,
)
from kvscope_engine.model.kv_cache.kv_offload.disk_writer import DiskWriter
from kvscope_engine.model.kv_cache.kv_offload.kept_file import KeptFile
from kvscope_engine.model.kv_cache.kv_storage import MIB
from kvscope_engine.policy.prefixes.prefix_index import Prefix

QUEUE_BYTES: Final = 256 * MIB
"""Maximum bytes of records waiting to be written. A long prompt may evict this many at once."""
ASSUMED_READ_RATE: Final = 1e9
"""Bytes per second assumed before anything was read."""
READ_BYTES: Final = 8 * MIB
"""Maximum bytes of adjacent records in one read."""


class DiskTier:
    """`num_places` blocks of `block_bytes` in `file`, which it owns. With `kept`, the contents persist."""

    def __init__(
        self,
        file: OpenFile,
        num_places: int,
        block_bytes: int,
        kept: KeptFile | None = None,
        *,
        max_queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        size = record_bytes(block_bytes)
        self.num_places = num_places
        self.is_direct = file.is_direct
        self.num_lost = 0
        self.num_read = 0
        self.read_seconds = 0.0
        self._file = file
        self._block_bytes = block_bytes
        self._kept = kept
        self._records = DiskRecords(file, size)
        self._read_buffers = record_buffers(_count(READ_BYTES, size, min(num_places, MAX_NEIGHBOURS)), size)
        self._writer = DiskWriter(self._records, size, block_bytes, _count(max_queue_bytes, size, num_places))
        if kept is not None:
            self._writer.adopt({block.place: block.checksum for block in kept.found})

    @property
    def read_seconds_per_block(self) -> float:
        """Measured seconds per block read; before the first read, an assumption about a common drive."""
        if not self.num_read:
            return self._block_bytes / ASSUMED_READ_RATE
        return self.read_seconds / self.num_read

    @property
    def failure(self) -> str:
        """Why nothing can be written any more; empty if writing works."""
        return self._writer.failure

    @property
    def num_offloadable(self) -> int:
        """Number of blocks that `offload` accepts now without waiting."""
        return self._writer.num_free

    @property
    def num_written(self) -> int:
        return self._writer.num_written

    @property
    def write_seconds(self) -> float:
        return self._writer.seconds

    def offload(self, rows: Sequence[Bytes], places: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """Queue `rows[i]` to be written to `places[i]`. Returns which were accepted. Waits only while the queue is
        full."""
        if self._kept is not None:
            for place, prefix in zip(places, prefixes, strict=True):
                self._kept.offloaded(place, prefix)
        return self._writer.put(places, rows)

    def load_from_disk(self, places: Sequence[int], rows: Sequence[Bytes]) -> list[bool]:
        """Read `places[i]` into `rows[i]`. Returns which were intact."""
        started = time.perf_counter()
        came = [self._writer.take(place, row) for place, row in zip(places, rows, strict=True)]
        asked = sorted((place, index) for index, place in enumerate(places) if not came[index])
        for stretch in neighbours([place for place, _ in asked], len(self._read_buffers)):
            for index in self._read(asked[stretch.start : stretch.stop], rows):
                came[index] = True
        self._lose([place for place, whole in zip(places, came, strict=True) if not whole])
        self.num_read += sum(came)
        self.read_seconds += time.perf_counter() - started
        return came

    def forget_prefixes(self) -> None:
        if self._kept is not None:
            self._kept.forget()

    def recovered(self) -> list[tuple[int, Prefix]]:
        """Return the slots that held prefixes at the start, with these prefixes."""
        return [] if self._kept is None else [(block.place, block.prefix) for block in self._kept.found]

    def close(self) -> str:
        """Close the file, after writing the index if it persists. Returns why the index was not written, or an empty
        text."""
        note = self._keep() if self._kept is not None else ""
        self._writer.close()
        os.close(self._file.fd)
        return note

    def drain(self) -> bool:
        """Wait until everything queued has been written. Returns whether it was."""
        return self._writer.drain()

    def _read(self, asked: list[tuple[int, int]], rows: Sequence[Bytes]) -> list[int]:
        """Read adjacent slots, given as (slot, index of its row), in one call. Returns the indices that were
        intact."""
        records = self._read_buffers[: len(asked)]
        num_whole = self._records.read(asked[0][0], records)
        whole = []
        for (place, index), record in zip(asked[:num_whole], records, strict=False):
            payload = record[: self._block_bytes]
            if checksum(payload) == self._writer.checksum(place):
                rows[index][:] = payload
                whole.append(index)
        return whole

    def _lose(self, places: list[int]) -> None:
        self.num_lost += len(places)
        for place in places:
            self._writer.forget(place)

    def _keep(self) -> str:
        assert self._kept is not None, "only a kept file gets an index"
        try:
            if not self._writer.drain():
                return f"the KV cache's file is not kept: {self._writer.failure or 'the drive is too slow'}"
            self._kept.finish(self._writer.checksums())
        except OSError as error:
            return f"the KV cache's file is not kept: {error.strerror or error}"
        return ""


def _count(total_bytes: int, size: int, at_most: int) -> int:
    return max(1, min(total_bytes // size, at_most))
