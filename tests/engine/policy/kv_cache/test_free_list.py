"""The free list: its order, and calls that would corrupt it."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_engine.policy.kv_cache.free_list import FreeList


def test_new_free_list_returns_the_lowest_block_ids_first() -> None:
    free = FreeList(6)
    assert free.popleft_n(3) == [0, 1, 2]
    assert free.popleft() == 3
    assert len(free) == 2
    assert sorted(free.ids.tolist()) == [4, 5]


def test_block_returned_last_to_the_free_list_is_taken_first() -> None:
    free = FreeList(6)
    free.popleft_n(6)
    free.append_n(np.array([4, 2]))
    assert free.popleft_n(2) == [2, 4]


def test_taking_no_blocks_changes_nothing() -> None:
    free = FreeList(2)
    assert free.popleft_n(0) == []
    assert len(free) == 2


def test_taking_more_blocks_than_the_free_list_has_is_an_error() -> None:
    free = FreeList(2)
    with pytest.raises(AssertionError, match="3 blocks were taken from a free list of 2"):
        free.popleft_n(3)
    free.popleft_n(2)
    with pytest.raises(AssertionError, match="empty"):
        free.popleft()


def test_returning_more_blocks_than_the_pool_has_to_the_free_list_is_an_error() -> None:
    with pytest.raises(AssertionError, match="too many"):
        FreeList(2).append_n(np.array([0]))
