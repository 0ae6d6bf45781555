"""Summarizes the pool as a small map: at most 1,024 bins of consecutive rows, with the shares of active and
cached blocks in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.summaries.address_bins import bin_edges


@dataclass(frozen=True, slots=True)
class PoolBins:
    """Shares of active and of cached blocks in each bin, one byte per bin: 0 to 255 stands for 0 to 1. A share that is
    not zero is at least 1.
    """

    active: bytes
    cached: bytes

    def __len__(self) -> int:
        return len(self.active)


def pool_bins(state: npt.NDArray[np.uint8]) -> PoolBins | None:
    """Summarize the pool's column `state`, shape (blocks,); None if there are no blocks."""
    edges = bin_edges(len(state))
    if len(edges) < 2:
        return None
    sizes = np.diff(edges)

    def share(block_state: BlockState) -> bytes:
        counts = np.add.reduceat(state == block_state, edges[:-1], dtype=np.int64)
        return bytes(np.maximum(counts * 255 // sizes, counts > 0).astype(np.uint8).tobytes())

    return PoolBins(share(BlockState.ACTIVE), share(BlockState.CACHED))
