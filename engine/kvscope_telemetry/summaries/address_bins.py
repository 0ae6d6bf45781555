"""Aggregates the ledger's rows into at most 1,024 address bins, and finds runs of free blocks."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import NO_OWNER, STATE_TIERS, BlockState, Ledger
from kvscope_telemetry.summaries.summary import MAX_BINS, AddressBins

IntArray = npt.NDArray[np.int64]
MAX_RUN_SIZES: Final = 32
"""Number of size classes of runs of free blocks. The last class contains runs of 2^31 blocks and more."""


def bin_edges(num_rows: int) -> IntArray:
    """Return the first ledger row of each bin, followed by `num_rows`: shape (bins + 1,)."""
    num_bins = min(num_rows, MAX_BINS)
    return np.arange(num_bins + 1, dtype=np.int64) * num_rows // max(num_bins, 1)


def bin_rows(ledger: Ledger, block_size: int) -> AddressBins:
    edges = bin_edges(ledger.num_blocks)
    if len(edges) < 2:
        return AddressBins()
    starts, sizes = edges[:-1], np.diff(edges)

    def share(mask: npt.NDArray[np.bool_]) -> bytes:
        return _scaled(np.add.reduceat(mask, starts, dtype=np.int64), sizes)

    is_state = np.isin(ledger.tier, STATE_TIERS)  # a state is always full, for any number of tokens
    slots = np.where(is_state & (ledger.filled > 0), block_size, ledger.filled)
    filled = np.add.reduceat(slots, starts, dtype=np.int64)
    owner = np.where(ledger.state == BlockState.ACTIVE, ledger.owner, NO_OWNER)
    return AddressBins(
        active=share(ledger.state == BlockState.ACTIVE),
        cached=share(ledger.state == BlockState.CACHED),
        shared=share(ledger.ref_count > 1),
        filled=_scaled(filled, sizes * max(block_size, 1)),
        owner=np.maximum.reduceat(owner, starts).astype("<i4").tobytes(),
    )


def free_run_lengths(state: npt.NDArray[np.uint8]) -> IntArray:
    """Return the lengths of the runs of free blocks in `state`, in address order, shape (runs,)."""
    is_free = np.concatenate(([False], state == BlockState.FREE, [False]))
    changes = np.flatnonzero(is_free[1:] != is_free[:-1])
    lengths: IntArray = changes[1::2] - changes[::2]
    return lengths


def count_by_size(lengths: IntArray) -> tuple[int, ...]:
    """Return how many `lengths` are 1, 2 to 3, 4 to 7, and so on, without trailing zeros."""
    if not lengths.size:
        return ()
    exponents = np.minimum(np.frexp(lengths.astype(np.float64))[1] - 1, MAX_RUN_SIZES - 1)
    return tuple(np.bincount(exponents).tolist())


def _scaled(counts: IntArray, totals: IntArray) -> bytes:
    """Return `counts / totals` scaled to 0 to 255, one byte each, and at least 1 where the count is not 0."""
    shares = np.maximum(counts * 255 // totals, counts > 0)
    return bytes(np.minimum(shares, 255).astype(np.uint8).tobytes())
