"""Maps address bins of pools of different sizes to rows of the picture. Uses numpy only.

A pool may change its size at a restart. The rows cover the addresses of the largest pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.summaries.address_bins import bin_edges
from kvscope_telemetry.summaries.summary import MAX_BINS

Keys = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
NO_ADDRESS: Final = 1
"""Key of an address that the pool did not have at that time."""


def num_cells(num_addresses: int) -> int:
    """Return the number of cell rows for `num_addresses` addresses."""
    return min(num_addresses, MAX_BINS)


def spread(keys: Keys, num_own: int, num_addresses: int) -> Keys:
    """Resample `keys`, shape (seconds, bins of a pool of `num_own` addresses), to the cells of `num_addresses`
    addresses."""
    if num_own == num_addresses:
        return keys
    own, wanted = bin_edges(num_own), bin_edges(num_addresses)
    known = wanted[:-1] < num_own
    first = np.searchsorted(own, wanted[:-1][known], "right") - 1
    last = np.searchsorted(own, np.minimum(wanted[1:][known], num_own) - 1, "right") - 1
    result = np.full((len(keys), len(wanted) - 1), NO_ADDRESS, np.uint8)
    result[:, known] = highest(keys, first, last + 1, axis=1)
    return result


def highest(keys: Keys, starts: IntArray, ends: IntArray, axis: int) -> Keys:
    """Return the highest key in each range [start, end) along `axis`; 0 for an empty range."""
    size = keys.shape[axis]
    if not size or not starts.size:
        shape = (starts.size, keys.shape[1]) if axis == 0 else (keys.shape[0], starts.size)
        return np.zeros(shape, np.uint8)
    empty = ends <= starts
    low, high = np.minimum(starts, size - 1), np.maximum(ends, starts + 1) - 1
    if not np.any(high > low):
        result = np.take(keys, low, axis)
    else:
        begin, stop = int(low.min()), int(min(high.max() + 1, size))
        part = keys[begin:stop] if axis == 0 else keys[:, begin:stop]
        pad = np.zeros_like(part[:1] if axis == 0 else part[:, :1])
        part = np.concatenate((part, pad), axis)  # reduceat accepts no end beyond the last index
        pairs = np.stack((low - begin, np.minimum(high + 1, size) - begin), axis=1).ravel()
        reduced = np.maximum.reduceat(part, pairs, axis)
        result = reduced[::2] if axis == 0 else reduced[:, ::2]
    if empty.any():
        result = result.copy()
        result[(slice(None),) * axis + (empty,)] = 0
    return np.asarray(result, np.uint8)


def picture_rows(num_rows: int, height: int) -> tuple[IntArray, IntArray]:
    """Return the first cell and one past the last cell of each of `height` pixel rows, shape (height,) each."""
    edges = np.arange(height + 1, dtype=np.int64) * num_rows // max(height, 1)
    return edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)
