"""Rows with and without memory, and who may take them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvscope_engine.policy.allocation.mapped_rows import Ids, MappedRows


def ids(*rows: int) -> Ids:
    return np.array(rows, np.int64)


def test_from_unmapped_to_free_to_used_and_back() -> None:
    rows = MappedRows(4)
    assert (len(rows), rows.num_unmapped, rows.unmapped.tolist()) == (0, 4, [0, 1, 2, 3])
    rows.add(ids(1, 2))
    rows.allocate(ids(2))
    assert (rows.ids.tolist(), rows.unmapped.tolist(), len(rows), rows.num_unmapped) == ([1], [0, 3], 1, 2)
    rows.append_n(ids(2))
    rows.remove(ids(1, 2))
    assert (len(rows), rows.num_unmapped) == (0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: rows.add(ids(2)),
        lambda rows: rows.remove(ids(1)),
        lambda rows: rows.allocate(ids(0)),
        lambda rows: rows.allocate(ids(1)),
        lambda rows: rows.append_n(ids(0)),
        lambda rows: rows.append_n(ids(2)),
        lambda rows: rows.popleft(),
        lambda rows: rows.popleft_n(1),
    ],
)
def test_what_cannot_be_is_an_error(wrong: Callable[[MappedRows], None]) -> None:
    """Row 0 has no memory, row 1 is used, row 2 is free."""
    rows = MappedRows(3)
    rows.add(ids(1, 2))
    rows.allocate(ids(1))
    with pytest.raises(AssertionError):
        wrong(rows)
