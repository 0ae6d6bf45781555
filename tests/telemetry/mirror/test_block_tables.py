"""Block tables in one buffer: batched changes, and a buffer whose size stays in proportion to its contents."""

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


def test_later_change_of_a_block_table_in_one_batch_wins() -> None:
    tables = BlockTableBuffer(2)
    _write(tables, [0, 0], [(1, 0, [1, 2, 3]), (0, 0, [7]), (1, 1, [8, 9]), (1, 3, [4])])
    assert tables.first(1, 4).tolist() == [1, 8, 9, 4]
    assert tables.first(0, 1).tolist() == [7]


def test_block_tables_keep_their_entries_while_others_grow_or_are_removed() -> None:
    tables = BlockTableBuffer(2)
    _write(tables, [0, 0], [(0, 0, [1, 2]), (1, 0, [3])])
    tables.append_rows(1)
    _write(tables, [2, 1, 0], [(2, 0, list(range(5000))), (1, 1, list(range(100)))])
    tables.select_rows(np.array([2, 0]))
    assert tables.first(0, 5000).tolist() == list(range(5000))
    assert tables.first(1, 2).tolist() == [1, 2]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_block_tables_after_random_changes_equal_plain_lists(seed: int) -> None:
    """Runs long enough that gaps are compacted repeatedly while rows with spare capacity change next to them."""
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


def test_buffer_is_compacted_after_removals() -> None:
    tables = BlockTableBuffer(64)
    for turn in range(500):
        _write(tables, [0] * 64, [(turn % 64, 0, list(range(300)))])  # dropped before the next turn
        tables.select_rows(np.roll(np.arange(64), 1))
    assert tables.num_bytes < 64 * 300 * 4 * 4
