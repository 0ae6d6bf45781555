"""Reads and writes fixed-size records in an open file, many adjacent ones per call, and computes their checksums.

A record is a block's bytes padded to whole sectors. Its checksum is stored elsewhere, so that a lost or misplaced
record is detected as well as a changed one. CRC-32 is several times as fast as a drive (6.6 GB/s, where blake2b has 1.3
and sha256 1.9; `bench memory` measures it) and protects against accidents, not attacks.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvscope_engine.model.kv_cache.kv_offload.disk_open import SECTOR_BYTES, OpenFile

Bytes = npt.NDArray[np.uint8]
MAX_RECORDS_PER_CALL = 256
"""Maximum number of records per system call, below the system's limit of 1,024 buffers."""


def record_bytes(block_bytes: int) -> int:
    """Return the size of a record: the block's bytes rounded up to whole sectors."""
    return -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def checksum(payload: Bytes) -> int:
    return zlib.crc32(payload.data)


def record_buffers(num_records: int, size: int) -> Bytes:
    """Return zeroed memory for records, uint8 (num_records, size), page-aligned as direct I/O requires."""
    return np.frombuffer(mmap.mmap(-1, num_records * size), np.uint8).reshape(num_records, size)


def consecutive_ranges(slots: Sequence[int], at_most: int = MAX_RECORDS_PER_CALL) -> Iterator[range]:
    """Yield ranges of indices into ascending `slots` that have consecutive slots, of at most `at_most` indices each."""
    breaks = [index for index, (a, b) in enumerate(pairwise(slots), start=1) if b != a + 1]
    for low, high in pairwise([0, *breaks, len(slots)]):
        for start in range(low, high, at_most):
            yield range(start, min(start + at_most, high))


class DiskRecords:
    """Records of `size` bytes in an open file, addressed by index (`slot`)."""

    def __init__(self, file: OpenFile, size: int) -> None:
        self._file = file
        self._size = size

    def write(self, slot: int, records: Sequence[Bytes]) -> None:
        """Write whole records, starting at `slot`. Raises OSError, also for a partial write or if the file was
        removed."""
        if not self._file.is_at_path():
            raise FileNotFoundError(f"{self._file.path} was removed or replaced")
        written = os.pwritev(self._file.fd, [record.data for record in records], slot * self._size)
        expected = len(records) * self._size
        if written != expected:
            raise OSError(f"only {written} of {expected} bytes were written")

    def read(self, slot: int, records: Bytes) -> int:
        """Read into `records`, shape (n, size), starting at `slot`. Returns the number of whole records read; 0 on an
        error.
        """
        try:
            return os.preadv(self._file.fd, [records.data], slot * self._size) // self._size
        except OSError:
            return 0
