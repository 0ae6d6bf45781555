"""Rows of many frames, one after another: how many each has, and back to packed bytes a frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.recordings.bundles.integers import Ints, groups_of, pack, starts_of, unpack

MAX_ROWS: Final = 1 << 20
"""Of all frames of a bundle together, in each of its tables."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows one after another, so many a group."""

    counts: Ints
    starts: Ints
    of: Ints
    """The group of each row."""

    @classmethod
    def counted(cls, counts: Ints) -> Groups:
        """Of these sizes."""
        return cls(counts, starts_of(counts), groups_of(counts))

    @classmethod
    def together(cls, groups: Groups) -> Groups:
        """The rows of all `groups` as one."""
        return cls.counted(np.array([groups.num_rows]))

    @property
    def num_rows(self) -> int:
        """Of all groups."""
        return int(self.starts[-1])

    def sums(self, values: npt.NDArray[np.int64 | np.bool_]) -> Ints:
        """Of the `values` of each group's rows, which may be true or false."""
        found: Ints = np.diff(starts_of(values.astype(np.int64, copy=False))[self.starts])
        return found


def joined(parts: Sequence[bytes], form: str) -> tuple[Ints, Groups]:
    """The numbers of all parts, and how many each has. Raises ValueError for a part of a number."""
    counts, rest = np.divmod(lengths_of(parts), np.dtype(form).itemsize)
    if rest.any():
        raise ValueError(f"a part that is not a whole number of {form}")
    return np.frombuffer(b"".join(parts), form).astype(np.int64), Groups.counted(counts)


def joined_as(parts: Sequence[bytes], form: str | np.dtype[np.generic], counts: Ints) -> Ints:
    """The numbers of all parts, which have so many each. Raises ValueError where one has not."""
    if not np.array_equal(lengths_of(parts), counts * np.dtype(form).itemsize):
        raise ValueError("a column that is longer or shorter than the others of its rows")
    return np.frombuffer(b"".join(parts), form).astype(np.int64)


def with_zeros(parts: Sequence[bytes], num_bytes: int, counts: Sequence[int]) -> list[bytes]:
    """Parts of so many rows each, of so many bytes; those that are empty as zeros."""
    return [part or bytes(num_bytes * count) for part, count in zip(parts, counts, strict=True)]


def cut_up(column: Ints, form: str | np.dtype[np.generic], groups: Groups) -> list[bytes]:
    """The rows of each group, packed; what does not fit is cut off, as damage would be."""
    if not groups.num_rows:
        return [b""] * len(groups.counts)
    form = np.dtype(form)
    data, starts = column.astype(form).tobytes(), (groups.starts * form.itemsize).tolist()
    return [data[begin:end] for begin, end in pairwise(starts)]


def lengths_of(parts: Sequence[bytes]) -> Ints:
    """Bytes of each."""
    return np.fromiter(map(len, parts), np.int64, len(parts))


def pack_counts(groups: Groups) -> bytes:
    """How many rows each frame has."""
    return pack(groups.counts)


def unpack_counts(data: bytes, num_frames: int) -> Groups:
    """The groups that `pack_counts` was given."""
    return accepted(unpack(data, num_frames))


def accepted(counts: Ints) -> Groups:
    """Groups of these sizes. Raises ProtocolError for more rows than are accepted."""
    if counts.size and (counts.min() < 0 or counts.max() > MAX_ROWS or counts.sum() > MAX_ROWS):
        raise ProtocolError("a bundle with more rows than are accepted")
    return Groups.counted(counts)
