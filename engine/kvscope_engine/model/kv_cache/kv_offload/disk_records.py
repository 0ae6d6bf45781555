"""Records of one size in an open file, many neighbours in one read or write; and what guards each.

A record is a block's bytes, padded to whole sectors. Its checksum is kept elsewhere, so that a record that was lost
or put in the wrong place is noticed as well as one that changed. CRC-32 runs at several times a drive's rate (6.6
GB/s where blake2b does 1.3 and sha256 1.9, `bench memory` measures it); what it is against are accidents.
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
MAX_NEIGHBOURS = 256
"""Records in one call; the system takes at most 1,024 buffers."""


def record_bytes(block_bytes: int) -> int:
    """Size of a record: the block's bytes up to whole sectors."""
    return -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def checksum(payload: Bytes) -> int:
    """CRC-32 of a block's bytes."""
    return zlib.crc32(payload.data)


def record_buffers(num_records: int, size: int) -> Bytes:
    """Zeroed records (num_records, size), page-aligned as direct I/O needs them."""
    return np.frombuffer(mmap.mmap(-1, num_records * size), np.uint8).reshape(num_records, size)


def neighbours(places: Sequence[int], at_most: int = MAX_NEIGHBOURS) -> Iterator[range]:
    """Stretches of indices of `places`, which ascend, whose places lie one behind the other."""
    breaks = [index for index, (a, b) in enumerate(pairwise(places), start=1) if b != a + 1]
    for low, high in pairwise([0, *breaks, len(places)]):
        for start in range(low, high, at_most):
            yield range(start, min(start + at_most, high))


class DiskRecords:
    """Places of an open file."""

    def __init__(self, file: OpenFile, size: int) -> None:
        self._file = file
        self._size = size

    def write(self, place: int, records: Sequence[Bytes]) -> None:
        """Whole records from `place` on. Raises OSError, also when only a part was taken or the file was removed."""
        if not self._file.is_in_place():
            raise FileNotFoundError(f"{self._file.path} was removed or replaced")
        written = os.pwritev(self._file.fd, [record.data for record in records], place * self._size)
        expected = len(records) * self._size
        if written != expected:
            raise OSError(f"only {written} of {expected} bytes were taken")

    def read(self, place: int, records: Bytes) -> int:
        """Into `records` (n, size) from `place` on; how many came whole. An error is none."""
        try:
            return os.preadv(self._file.fd, [records.data], place * self._size) // self._size
        except OSError:
            return 0
