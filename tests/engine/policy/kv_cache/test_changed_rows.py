"""Which rows of the ledger changed."""

from __future__ import annotations

import numpy as np

from kvscope_engine.policy.kv_cache.changed_rows import ChangedRows


def test_changed_rows_are_sorted_and_unique() -> None:
    changed = ChangedRows(10)
    changed.add_one(7)
    changed.add(np.array([9, 2, 7]))
    changed.add_one(2)
    rows = changed.drain()
    assert rows.dtype == np.uint32
    assert rows.tolist() == [2, 7, 9]


def test_changed_rows_are_reported_once() -> None:
    changed = ChangedRows(10)
    changed.add(np.array([3, 1]))
    assert changed
    changed.drain()
    assert not changed
    assert changed.drain().tolist() == []
    changed.add_one(3)
    assert changed.drain().tolist() == [3]


def test_changed_rows_are_bounded_by_the_number_of_rows() -> None:
    changed = ChangedRows(4)
    for _ in range(1000):
        changed.add(np.arange(4))
        changed.add_one(2)
    assert len(changed) == 4
