"""Lengths of a batch as the host knows them, and groups of unequal ones in which padding costs little.

Knows no tensors.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Rows = NDArray[np.intp]


class HostLengths(NamedTuple):
    """Of the prefills of a step, each of which has new tokens, without asking the device."""

    query_start: NDArray[np.int32]
    """(batch + 1,), from 0."""
    seq_lens: NDArray[np.int32]
    """(batch,)"""


def similar_groups(costs: Lengths, worth: int) -> Iterator[Rows]:
    """Rows of `costs` in groups that are run padded to their largest member.

    A group of n rows costs n * max(costs). Sorted rows are cut where that saves most, again and again, while
    each cut saves more than `worth`, the cost of one more call. Equal costs stay one group.
    """
    order = np.argsort(costs, kind="stable")
    pending = [order]
    while pending:
        rows = pending.pop()
        cut, saved = _best_cut(costs[rows])
        if saved <= worth:
            yield rows
        else:
            pending += [rows[:cut], rows[cut:]]


def _best_cut(ascending: Lengths) -> tuple[int, int]:
    """Where to cut sorted costs in two, and what that saves."""
    if len(ascending) < 2:
        return 0, 0
    saved = np.arange(1, len(ascending)) * (ascending[-1] - ascending[:-1])
    best = int(saved.argmax())
    return best + 1, int(saved[best])
