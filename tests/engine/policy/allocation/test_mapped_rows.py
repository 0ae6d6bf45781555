"""Rows with and without mapped memory, and which of them are free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvscope_engine.policy.allocation.mapped_rows import Ids, MappedRows


def ids(*rows: int) -> Ids:
    return np.array(rows, np.int64)


def test_memory_rows_change_between_unmapped_free_and_used() -> None:
    rows = MappedRows(4)
    assert (len(rows), rows.num_unmapped, rows.unmapped.tolist()) == (0, 4, [0, 1, 2, 3])
    rows.map(ids(1, 2))
    rows.allocate(ids(2))
    assert (rows.ids.tolist(), rows.unmapped.tolist(), len(rows), rows.num_unmapped) == ([1], [0, 3], 1, 2)
    rows.append_n(ids(2))
    rows.unmap(ids(1, 2))
    assert (len(rows), rows.num_unmapped) == (0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: rows.map(ids(2)),
        lambda rows: rows.unmap(ids(1)),
        lambda rows: rows.allocate(ids(0)),
        lambda rows: rows.allocate(ids(1)),
        lambda rows: rows.append_n(ids(0)),
        lambda rows: rows.append_n(ids(2)),
        lambda rows: rows.popleft(),
        lambda rows: rows.popleft_n(1),
    ],
)
def test_invalid_row_transition_is_an_error(wrong: Callable[[MappedRows], None]) -> None:
    """Row 0 is unmapped, row 1 used and row 2 free."""
    rows = MappedRows(3)
    rows.map(ids(1, 2))
    rows.allocate(ids(1))
    with pytest.raises(AssertionError):
        wrong(rows)
