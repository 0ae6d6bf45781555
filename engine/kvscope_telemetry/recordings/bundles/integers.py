"""Integers as bytes that compress well: small ones of either sign first, then byte by byte, all lowest bytes together.

Knows no messages. What is read back is checked: ProtocolError where there are more or fewer than there should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError

Ints = npt.NDArray[np.int64]
_WIDTH: Final = 8
_FEW: Final = 4
"""So many bytes are put together one by one."""


def pack(values: Ints) -> bytes:
    """A byte that says how many bytes an integer has, then those; nothing but it where all are 0."""
    if not values.any():
        return b"\0"
    folded = ((values << 1) ^ (values >> 63)).astype("<i8", copy=False).view("<u8")
    width = (int(folded.max(initial=0)).bit_length() + 7) // 8
    return bytes([width]) + folded.view(np.uint8).reshape(-1, _WIDTH)[:, :width].T.tobytes()


def unpack(data: bytes, count: int) -> Ints:
    """The `count` integers that `pack` was given."""
    if not data or data[0] > _WIDTH or len(data) != 1 + data[0] * count:
        raise ProtocolError(f"a bundle with a column of {len(data)} bytes for {count} numbers")
    if not data[0]:
        return np.zeros(count, np.int64)
    planes = np.frombuffer(data, np.uint8, offset=1).reshape(data[0], count)
    if data[0] <= _FEW:
        return _few(planes)
    padded = np.zeros((count, _WIDTH), np.uint8)
    padded[:, : data[0]] = planes.T
    folded = padded.view("<u8").ravel()
    unfolded: Ints = (folded >> np.uint64(1)).astype(np.int64) ^ -(folded & np.uint64(1)).astype(np.int64)
    return unfolded


def _few(planes: npt.NDArray[np.uint8]) -> Ints:
    """The integers of up to four planes: half the memory of what they become is gone through."""
    folded = planes[0].astype(np.uint32)
    for place, plane in enumerate(planes[1:], 1):
        folded |= plane.astype(np.uint32) << (8 * place)
    signs = -(folded & 1)  # all bits of a negative one: unsigned numbers wrap round
    folded >>= 1
    folded ^= signs
    values: Ints = folded.view(np.int32).astype(np.int64)
    return values


def pack_deltas(values: Ints) -> bytes:
    """Each by its difference to the one before; what does not fit wraps round, and back when it is read."""
    return pack(differences(values))


def differences(values: Ints) -> Ints:
    """Each less the one before; the first as it is."""
    changed = values.copy()
    changed[1:] -= values[:-1]
    return changed


def unpack_deltas(data: bytes, count: int) -> Ints:
    """The `count` integers that `pack_deltas` was given."""
    summed: Ints = np.cumsum(unpack(data, count))
    return summed


def pack_table(columns: Sequence[Ints]) -> bytes:
    """Columns of the same length, each as `pack_deltas` takes it; to read them together costs little more than one."""
    return pack(np.concatenate([differences(column) for column in columns]))


def unpack_table(data: bytes, num_columns: int, count: int) -> Ints:
    """The columns that `pack_table` was given, shape (num_columns, count)."""
    summed: Ints = np.cumsum(unpack(data, num_columns * count).reshape(num_columns, count), axis=1)
    return summed


def starts_of(counts: Ints) -> Ints:
    """Where each group of so many rows begins, and where the last ends, shape (len(counts) + 1,)."""
    starts: Ints = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    return starts


def groups_of(counts: Ints) -> Ints:
    """The group of each row."""
    groups: Ints = np.repeat(np.arange(len(counts)), counts)
    return groups
