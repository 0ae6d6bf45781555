"""The cells of a slot map: each shows what it contains, and together they show the proportions."""

from __future__ import annotations

import numpy as np

from kvscope_engine.simulator.what_if.slot_map import Spans, map_cells, slots_per_cell
from kvscope_telemetry.messages.what_if import MAX_CELLS, MapKind


def spans(*pairs: tuple[int, int]) -> Spans:
    both = np.array(pairs, np.int64).reshape(-1, 2)
    return Spans(both[:, 0], both[:, 1])


def test_map_never_has_more_cells_than_the_limit() -> None:
    for num_slots in (1, MAX_CELLS, MAX_CELLS + 1, 3 * MAX_CELLS - 1, 12_345_678):
        assert len(map_cells(num_slots, {})) == -(-num_slots // slots_per_cell(num_slots)) <= MAX_CELLS


def test_slot_map_rounds_a_span_that_ends_within_a_cell() -> None:
    cells = map_cells(4 * MAX_CELLS, {MapKind.USED: spans((0, 0), (2, 9), (40, 4))})
    assert cells[:12] == bytes([1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]), "9 slots are a little more than two cells"


def test_slot_map_shows_waste_spread_over_all_cells_in_proportion() -> None:
    """An eighth of each cell is wasted: in no cell most of it, but an eighth of the map must show it."""
    starts = np.arange(MAX_CELLS, dtype=np.int64) * 8
    lengths = np.full(MAX_CELLS, 7, np.int64)
    wasted = Spans(starts + 7, np.ones(MAX_CELLS, np.int64))
    cells = map_cells(8 * MAX_CELLS, {MapKind.USED: Spans(starts, lengths), MapKind.INTERNAL: wasted})
    assert cells.count(MapKind.INTERNAL) == MAX_CELLS // 8
    assert cells.count(MapKind.USED) == MAX_CELLS * 7 // 8


def test_slot_map_of_many_slots_shows_the_same_proportions_as_single_slots() -> None:
    rng = np.random.default_rng(5)
    num_slots = 7 * MAX_CELLS + 3
    kinds = np.repeat(rng.integers(0, 3, num_slots), rng.integers(1, 30, num_slots))[:num_slots]
    edges = np.flatnonzero(np.diff(kinds, prepend=-1))
    lengths = np.diff(edges, append=num_slots)
    of_kind = {kind: Spans(edges[kinds[edges] == kind], lengths[kinds[edges] == kind]) for kind in MapKind if kind}
    cells, size = np.frombuffer(map_cells(num_slots, of_kind), np.uint8), slots_per_cell(num_slots)
    for cell, shown in enumerate(cells):
        assert shown in kinds[cell * size : (cell + 1) * size]
    assert abs(int((cells == 1).sum()) * size - int((kinds == 1).sum())) <= 4 * size
