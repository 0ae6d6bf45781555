"""Maps address bins of pools of different sizes to rows of cells, and cells to pixel rows. Imports no Qt.

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
"""Cell key of an address that did not exist, because the pool was smaller at that time."""


def num_cells(num_addresses: int) -> int:
    return min(num_addresses, MAX_BINS)


def resample_keys(keys: Keys, num_own: int, num_addresses: int) -> Keys:
    """Resample the cell keys of a pool of `num_own` addresses to a heatmap of `num_addresses` addresses.

    `keys` has shape (seconds, bins of the pool), the result (seconds, cells).
    """
    if num_own == num_addresses:
        return keys
    own_edges, picture_edges = bin_edges(num_own), bin_edges(num_addresses)
    exists = picture_edges[:-1] < num_own
    first = np.searchsorted(own_edges, picture_edges[:-1][exists], "right") - 1
    last = np.searchsorted(own_edges, np.minimum(picture_edges[1:][exists], num_own) - 1, "right") - 1
    result = np.full((len(keys), len(picture_edges) - 1), NO_ADDRESS, np.uint8)
    result[:, exists] = max_over_ranges(keys, first, last + 1, axis=1)
    return result


def max_over_ranges(keys: Keys, starts: IntArray, ends: IntArray, axis: int) -> Keys:
    """Return the highest key in each range [start, end) along `axis`, or 0 for an empty range."""
    size = keys.shape[axis]
    if not size or not starts.size:
        shape = (starts.size, keys.shape[1]) if axis == 0 else (keys.shape[0], starts.size)
        return np.zeros(shape, np.uint8)
    is_empty = ends <= starts
    first, last = np.minimum(starts, size - 1), np.maximum(ends, starts + 1) - 1
    if not np.any(last > first):
        result = np.take(keys, first, axis)
    else:
        start, stop = int(first.min()), int(min(last.max() + 1, size))
        keys_in_range = keys[start:stop] if axis == 0 else keys[:, start:stop]
        pad = np.zeros_like(keys_in_range[:1] if axis == 0 else keys_in_range[:, :1])
        keys_in_range = np.concatenate((keys_in_range, pad), axis)  # reduceat accepts no end beyond the last index
        pairs = np.stack((first - start, np.minimum(last + 1, size) - start), axis=1).ravel()
        reduced = np.maximum.reduceat(keys_in_range, pairs, axis)
        result = reduced[::2] if axis == 0 else reduced[:, ::2]
    if is_empty.any():
        result = result.copy()
        result[(slice(None),) * axis + (is_empty,)] = 0
    return np.asarray(result, np.uint8)


def picture_rows(num_rows: int, height: int) -> tuple[IntArray, IntArray]:
    """Return the first cell and one past the last cell for each pixel row, shape (height,) each."""
    edges = np.arange(height + 1, dtype=np.int64) * num_rows // max(height, 1)
    return edges[:-1], np.maximum(edges[1:], edges[:-1] + 1)
