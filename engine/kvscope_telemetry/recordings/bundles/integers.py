"""Integers as bytes that compress well: small ones of either sign first, then byte by byte, all lowest bytes together.

Knows no messages. What is read back is checked: ProtocolError where there are more or fewer than there should be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError

Ints = npt.NDArray[np.int64]
_WIDTH: Final = 8
_FEW: Final = 4
"""So many bytes are put together one by one."""
_MANY: Final = 1000
"""To sort fewer numbers costs less than to look at them."""


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Whatever is wrong with `what` while it is read is a ProtocolError."""
    try:
        yield
    except (msgspec.DecodeError, ValueError, OverflowError, IndexError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ProtocolError(f"{what} that cannot be read: {reason}") from None
    except KeyError as error:
        raise ProtocolError(f"{what} without its column {error}") from None


def pack(values: Ints) -> bytes:
    """A byte that says how many bytes an integer has, then those; nothing but it where all are 0."""
    if not values.any():
        return b"\0"
    folded = ((values << 1) ^ (values >> 63)).astype("<i8", copy=False).view("<u8")
    width = (int(folded.max(initial=0)).bit_length() + 7) // 8
    return bytes([width]) + folded.view(np.uint8).reshape(-1, _WIDTH)[:, :width].T.tobytes()


def unpack(data: bytes, count: int) -> Ints:
    """The `count` integers that `pack` was given."""
    return _unfolded(_planes(data, count))


def unpack_each(parts: Sequence[bytes], counts: Sequence[int]) -> Ints:
    """The integers of several that `pack` was given, so many each, one after another."""
    if len(parts) == 1:
        return unpack(parts[0], counts[0])
    told = [_planes(data, count) for data, count in zip(parts, counts, strict=True)]
    planes = np.zeros((max(map(len, told), default=0), sum(counts)), np.uint8)
    end = 0
    for each, count in zip(told, counts, strict=True):
        begin, end = end, end + count
        planes[: len(each), begin:end] = each
    return _unfolded(planes)


def _planes(data: bytes, count: int) -> npt.NDArray[np.uint8]:
    """The bytes of what was packed, shape (how many each has, count)."""
    if not data or data[0] > _WIDTH or len(data) != 1 + data[0] * count:
        raise ProtocolError(f"a bundle with a column of {len(data)} bytes for {count} numbers")
    return np.frombuffer(data, np.uint8, offset=1).reshape(data[0], count)


def _unfolded(planes: npt.NDArray[np.uint8]) -> Ints:
    """The integers whose bytes are these, all lowest ones first."""
    return _narrow(planes).astype(np.int64, copy=False)


def _narrow(planes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32] | Ints:
    """The same, no wider than is needed: half the memory of what they may become is gone through."""
    width, count = planes.shape
    if width > _FEW:
        padded = np.zeros((count, _WIDTH), np.uint8)
        padded[:, :width] = planes.T
        wide = padded.view("<u8").ravel()
        unfolded: Ints = (wide >> np.uint64(1)).astype(np.int64) ^ -(wide & np.uint64(1)).astype(np.int64)
        return unfolded
    folded = planes[0].astype(np.uint32) if width else np.zeros(count, np.uint32)
    for place, plane in enumerate(planes[1:], 1):
        folded |= plane.astype(np.uint32) << (8 * place)
    signs = -(folded & 1)  # all bits of a negative one: unsigned numbers wrap round
    folded >>= 1
    folded ^= signs
    return folded.view(np.int32)


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


def unpack_deltas_as(data: bytes, count: int, form: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """The same as numbers of a `form`: what does not fit is cut off."""
    return np.cumsum(_narrow(_planes(data, count)), dtype=form)


def unpack_deltas_each(parts: Sequence[bytes], counts: Sequence[int]) -> Ints:
    """The integers of several that `pack_deltas` was given, so many each, one after another."""
    summed = starts_of(unpack_each(parts, counts))
    begins = summed[starts_of(np.array(counts, np.int64))[:-1]]
    told: Ints = summed[1:] - np.repeat(begins, counts)
    return told


def pack_table(columns: Sequence[Ints]) -> bytes:
    """Columns of the same length, each as `pack_deltas` takes it; to read them together costs little more than one."""
    return pack(np.concatenate([differences(column) for column in columns]))


def unpack_tables(parts: Sequence[bytes], num_columns: int, counts: Sequence[int]) -> Ints:
    """The columns of several that `pack_table` was given, so many rows each, one after another."""
    tables = np.empty((num_columns, sum(counts)), np.int64)
    end = 0
    for data, count in zip(parts, counts, strict=True):
        begin, end = end, end + count
        told = _narrow(_planes(data, num_columns * count)).reshape(num_columns, count)
        np.cumsum(told, axis=1, dtype=np.int64, out=tables[:, begin:end])
    return tables


def order_of(values: Ints) -> Ints:
    """As a stable argsort gives it; numpy sorts 16-bit numbers by counting, so those below 2^32 go in two halves."""
    if values.size < _MANY or int(values.min()) < 0 or (largest := int(values.max())) >= 1 << 32:
        return np.argsort(values, kind="stable")
    order = np.argsort(values.astype(np.uint16), kind="stable")
    if largest >= 1 << 16:
        order = order[np.argsort((values >> 16).astype(np.uint16)[order], kind="stable")]
    return order


def starts_of(counts: Ints) -> Ints:
    """Where each group of so many rows begins, and where the last ends, shape (len(counts) + 1,)."""
    starts: Ints = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    return starts


def groups_of(counts: Ints) -> Ints:
    """The group of each row."""
    groups: Ints = np.repeat(np.arange(len(counts)), counts)
    return groups
