"""Numbers of free runs by size and second, from an overview, as keys. Imports no Qt."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_app.views.heatmap.address_rows import Keys
from kvscope_telemetry.summaries.session_overview import SessionOverview

IntArray = npt.NDArray[np.int64]
NO_RUNS: Final = 2
"""Cell key of a size class without any free run. The key increases by 1 for each doubling of the number of runs."""
MAX_LEVEL: Final = 12


def num_sizes(num_addresses: int) -> int:
    """Return the number of size classes (1, 2 to 3, 4 to 7, … blocks) of the free runs of a pool."""
    return max(int(num_addresses).bit_length(), 1)


def run_keys(overview: SessionOverview, indices: IntArray, num: int) -> Keys:
    """Return cell keys for the number of free runs in each of `num` size classes, longest runs first, shape
    (n, num).
    """
    counts = np.zeros((len(indices), num), np.int64)
    for row, index in enumerate(indices.tolist()):
        runs = overview.free_runs(index)[:num]
        counts[row, : len(runs)] = runs
    levels = np.minimum(np.frexp(counts.astype(np.float64))[1], MAX_LEVEL)
    return (NO_RUNS + levels[:, ::-1]).astype(np.uint8)


def size_text(exponent: int) -> str:
    """Return the range of run lengths of a size class, in blocks: `1`, `2 to 3`, `4 to 7`."""
    return "1" if exponent == 0 else f"{1 << exponent} to {(2 << exponent) - 1}"
