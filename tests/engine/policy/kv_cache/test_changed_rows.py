"""Which rows of the ledger changed."""

from __future__ import annotations

import numpy as np

from kvscope_engine.policy.kv_cache.eviction_order import ChangedRows


def test_rows_come_out_sorted_and_once() -> None:
    changed = ChangedRows(10)
    changed.add_one(7)
    changed.add(np.array([9, 2, 7]))
    changed.add_one(2)
    rows = changed.drain()
    assert rows.dtype == np.uint32
    assert rows.tolist() == [2, 7, 9]


def test_taking_forgets() -> None:
    changed = ChangedRows(10)
    changed.add(np.array([3, 1]))
    assert changed
    changed.drain()
    assert not changed
    assert changed.drain().tolist() == []
    changed.add_one(3)
    assert changed.drain().tolist() == [3]


def test_it_never_holds_more_than_the_rows_there_are() -> None:
    changed = ChangedRows(4)
    for _ in range(1000):
        changed.add(np.arange(4))
        changed.add_one(2)
    assert len(changed) == 4
