"""Lengths of a batch in host memory, and grouping of similar lengths so that padding costs little. Imports no torch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Rows = NDArray[np.intp]


class HostLengths(NamedTuple):
    """Lengths of a step's prefills, known on the host without reading the device. Each request has at least one
    new token.
    """

    query_start: NDArray[np.int32]
    """(batch + 1,), ascending from 0: index of each request's first new token, followed by the total number."""
    seq_lens: NDArray[np.int32]
    """(batch,): number of tokens of each request, including the new ones."""


def similar_groups(costs: Lengths, worth: int) -> Iterator[Rows]:
    """Yield groups of indices into `costs`. Each group is to be run padded to its largest member.

    A group of n members costs n * max(costs). The sorted costs are split recursively at the best position, as long as a
    split saves more than `worth`, the cost of one more call. Equal costs stay in one group.
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
    """Return the best position to split sorted costs in two, and the cost saved."""
    if len(ascending) < 2:
        return 0, 0
    saved = np.arange(1, len(ascending)) * (ascending[-1] - ascending[:-1])
    best = int(saved.argmax())
    return best + 1, int(saved[best])
