"""Block tables in one buffer: any changes in one call, and a buffer that stays in proportion to what it holds."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope_telemetry.mirror.request_mirror import BlockTableBuffer


def _write(tables: BlockTableBuffer, lengths: list[int], changes: list[tuple[int, int, list[int]]]) -> None:
    rows, starts = np.array([row for row, _, _ in changes]), np.array([start for _, start, _ in changes])
    counts = np.array([len(blocks) for _, _, blocks in changes])
    blocks = np.array([block for _, _, each in changes for block in each], np.int32)
    tables.write(np.array(lengths, np.int32), rows, starts, counts, blocks)


def test_of_several_changes_of_a_row_the_later_stands() -> None:
    tables = BlockTableBuffer(2)
    _write(tables, [0, 0], [(1, 0, [1, 2, 3]), (0, 0, [7]), (1, 1, [8, 9]), (1, 3, [4])])
    assert tables.first(1, 4).tolist() == [1, 8, 9, 4]
    assert tables.first(0, 1).tolist() == [7]


def test_rows_keep_their_entries_when_others_come_go_and_outgrow_their_room() -> None:
    tables = BlockTableBuffer(2)
    _write(tables, [0, 0], [(0, 0, [1, 2]), (1, 0, [3])])
    tables.append_rows(1)
    _write(tables, [2, 1, 0], [(2, 0, list(range(5000))), (1, 1, list(range(100)))])
    tables.keep(np.array([2, 0]))
    assert tables.first(0, 5000).tolist() == list(range(5000))
    assert tables.first(1, 2).tolist() == [1, 2]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_changes_of_many_rows_in_one_call_are_those_of_lists(seed: int) -> None:
    """Long enough that holes are taken out again and again, while rows with room to spare change beside them."""
    generator = random.Random(seed)
    tables, model = BlockTableBuffer(6), [list[int]() for _ in range(6)]
    for _ in range(60):
        lengths, changes = [len(row) for row in model], []
        for _ in range(generator.randint(1, 12)):
            row = generator.randrange(len(model))
            start = generator.choice((0, len(model[row]), len(model[row]), generator.randint(0, len(model[row]))))
            blocks = [generator.randrange(1000) for _ in range(generator.choice((0, 1, 1, 2, 70)))]
            model[row] = model[row][:start] + blocks
            changes.append((row, start, blocks))
        _write(tables, lengths, changes)
        assert [tables.first(row, len(held)).tolist() for row, held in enumerate(model)] == model


def test_what_counts_for_nothing_any_more_makes_room() -> None:
    tables = BlockTableBuffer(64)
    for turn in range(500):
        _write(tables, [0] * 64, [(turn % 64, 0, list(range(300)))])  # and is let go of before the next
        tables.keep(np.roll(np.arange(64), 1))
    assert tables.num_bytes < 64 * 300 * 4 * 4
