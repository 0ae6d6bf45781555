"""The disk tier: blocks' bytes to places of a file and back. Nothing is raised; a failure is told once, in a line."""

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
"""Of records on their way to the drive, at most: what a long prompt evicts at once."""
ASSUMED_READ_RATE: Final = 1e9
"""Bytes a second."""
READ_BYTES: Final = 8 * MIB
"""Of neighbours in one read."""


class DiskTier:
    """`num_places` blocks of `block_bytes` in `file`, which it owns. With `kept` the file's content outlives it."""

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
        """Measured; before anything was read, what a common drive does."""
        if not self.num_read:
            return self._block_bytes / ASSUMED_READ_RATE
        return self.read_seconds / self.num_read

    @property
    def failure(self) -> str:
        """Why nothing can be written any more; empty while all is well."""
        return self._writer.failure

    @property
    def num_offloadable(self) -> int:
        """How many places `offload` takes now without waiting."""
        return self._writer.num_free

    @property
    def num_written(self) -> int:
        """Records that reached the file."""
        return self._writer.num_written

    @property
    def write_seconds(self) -> float:
        """Of the writer's thread."""
        return self._writer.seconds

    def offload(self, rows: Sequence[Bytes], places: Sequence[int], prefixes: Sequence[Prefix | None]) -> list[bool]:
        """`rows[i]` to `places[i]`; which are there now. Waits for the drive only while the queue is full."""
        if self._kept is not None:
            for place, prefix in zip(places, prefixes, strict=True):
                self._kept.offloaded(place, prefix)
        return self._writer.put(places, rows)

    def rise(self, places: Sequence[int], rows: Sequence[Bytes]) -> list[bool]:
        """`places[i]` to `rows[i]`; which came back whole."""
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
        """What is there now must not be found at the next start."""
        if self._kept is not None:
            self._kept.forget()

    def kept(self) -> list[tuple[int, Prefix]]:
        """The places that the file held at the start, and what they are found by."""
        return [] if self._kept is None else [(block.place, block.prefix) for block in self._kept.found]

    def close(self) -> str:
        """Let go of the file, with its index written when it is kept; why that was not done, in a line."""
        note = self._keep() if self._kept is not None else ""
        self._writer.close()
        os.close(self._file.fd)
        return note

    def drain(self) -> bool:
        """Wait until all that was offloaded is written; whether it was."""
        return self._writer.drain()

    def _read(self, asked: list[tuple[int, int]], rows: Sequence[Bytes]) -> list[int]:
        """Neighbours (place, index of its row) in one read; the indices of those that came whole."""
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
