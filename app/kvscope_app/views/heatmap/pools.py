"""`CacheInfo` of each engine start, which divides the rows of an overview into the pool and the lower tiers.

An overview contains only the number of rows. How they are divided is known only from the engine, for its current start.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvscope_app.views.heatmap.address_rows import Keys, num_cells, resample_keys
from kvscope_app.views.heatmap.cell_keys import HeatMode, cell_keys
from kvscope_telemetry.messages.telemetry import CacheInfo
from kvscope_telemetry.summaries.address_bins import bin_edges
from kvscope_telemetry.summaries.session_overview import SessionOverview

IntArray = npt.NDArray[np.int64]


class PoolRegistry:
    """`CacheInfo` of all engine starts seen so far, by epoch."""

    def __init__(self) -> None:
        self._caches: dict[int, CacheInfo] = {}
        self._newest: CacheInfo | None = None

    def record(self, epoch: int, cache: CacheInfo) -> bool:
        """Record the `CacheInfo` of an engine start. Returns whether it differs from what was recorded before."""
        is_new = self._caches.get(epoch) != cache
        self._caches[epoch] = self._newest = cache
        return is_new

    def cache_of(self, epoch: int, num_rows: int) -> CacheInfo | None:
        """Return the `CacheInfo` of an engine start, or None if it has another number of rows than `num_rows`.

        If the start was not recorded, the `CacheInfo` recorded last is used. Returns None if none was recorded.
        """
        cache = self._caches.get(epoch, self._newest)
        return cache if cache is not None and cache.num_rows == num_rows else None

    def tiers(self, epoch: int, num_rows: int) -> IntArray:
        """Return the tier of each bin's first row, shape (bins,). If the cache is unknown, all tiers are `Tier.HBM`."""
        result = np.zeros(num_cells(num_rows), np.int64)
        cache = self.cache_of(epoch, num_rows)
        if cache is not None:
            result[:] = cache.rows_by_tier.tiers_of(bin_edges(num_rows)[:-1])
        return result

    def keys(self, mode: HeatMode, overview: SessionOverview, indices: IntArray, num_addresses: int) -> Keys:
        """Return the cell keys of the seconds at `indices`, shape (n, cells), for a heatmap of `num_addresses`
        addresses.
        """
        result = np.zeros((len(indices), num_cells(num_addresses)), np.uint8)
        epochs, rows = overview.epoch[indices], overview.column("num_rows")[indices].astype(np.int64)
        boundaries = np.flatnonzero((np.diff(epochs) != 0) | (np.diff(rows) != 0)) + 1
        for part in np.split(np.arange(len(indices)), boundaries):
            num_rows = int(rows[part[0]]) if part.size else 0
            if num_rows:
                tiers = self.tiers(int(epochs[part[0]]), num_rows)
                pool_keys = cell_keys(mode, overview, indices[part], tiers)
                result[part] = resample_keys(pool_keys, num_rows, num_addresses)
        return result
