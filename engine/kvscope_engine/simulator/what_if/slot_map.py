"""A small map of a large memory: each cell represents the same number of consecutive slots. Uses only numpy.

Chooses the `MapKind` that each cell shows. It is always a kind that occurs among the cell's slots. Over the whole map,
the number of cells of a kind is proportional to the number of its slots, so that small amounts of waste in many cells
remain visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.messages.what_if import MAX_CELLS, MapKind

Slots = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Ranges of slots: `lengths[i]` slots starting at `starts[i]`. Sorted and disjoint; ranges may be empty."""

    starts: Slots
    lengths: Slots


def slots_per_cell(num_slots: int) -> int:
    """Return the smallest number of slots per cell for which the map has at most `MAX_CELLS` cells."""
    return max(1, -(-num_slots // MAX_CELLS))


def map_cells(num_slots: int, spans: Mapping[MapKind, Spans]) -> bytes:
    """Return a `MapKind` per cell as bytes, in the order of addresses. Slots that are in none of `spans` are free."""
    size = slots_per_cell(num_slots)
    edges = np.minimum(np.arange(-(-num_slots // size) + 1, dtype=np.int64) * size, num_slots)
    counts = np.zeros((len(edges) - 1, len(MapKind)), np.int64)
    for kind, kind_spans in spans.items():
        counts[:, kind] += np.diff(_num_before(edges, kind_spans))
    counts[:, MapKind.FREE] = np.diff(edges) - counts.sum(axis=1)
    return _kinds(counts, size)


def _num_before(edges: Slots, spans: Spans) -> Slots:
    starts, lengths = spans
    if not len(starts):
        return np.zeros(len(edges), np.int64)
    before = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(starts, edges, side="left")  # spans that begin before the edge
    last = np.maximum(index - 1, 0)
    cut_off = np.where(index > 0, np.maximum(starts[last] + lengths[last] - edges, 0), 0)
    result: Slots = before[index] - cut_off
    return result


def _kinds(counts: Slots, size: int) -> bytes:
    """Return the kind of each cell. Slots of the kinds that a cell does not show count towards the choice for
    the following cells.
    """
    kinds: npt.NDArray[np.uint8] = counts.argmax(axis=1).astype(np.uint8)
    deficits = [0] * counts.shape[1]
    mixed = np.flatnonzero(counts.max(axis=1) < size)
    for cell, row in zip(mixed.tolist(), counts[mixed].tolist(), strict=True):
        deficits = [deficit + count for deficit, count in zip(deficits, row, strict=True)]
        best = max((kind for kind in reversed(range(len(row))) if row[kind]), key=deficits.__getitem__)
        deficits[best] -= size
        kinds[cell] = best
    return kinds.tobytes()
