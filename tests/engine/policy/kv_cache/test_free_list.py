"""The free list: its order, and that it refuses what would corrupt it."""

from __future__ import annotations

import numpy as np
import pytest

from kvscope_engine.policy.kv_cache.free_list import FreeList


def test_a_fresh_list_hands_out_the_lowest_ids_first() -> None:
    free = FreeList(6)
    assert free.popleft_n(3) == [0, 1, 2]
    assert free.popleft() == 3
    assert len(free) == 2
    assert sorted(free.ids.tolist()) == [4, 5]


def test_what_was_given_back_last_goes_out_first() -> None:
    free = FreeList(6)
    free.popleft_n(6)
    free.append_n(np.array([4, 2]))
    assert free.popleft_n(2) == [2, 4]


def test_taking_nothing_changes_nothing() -> None:
    free = FreeList(2)
    assert free.popleft_n(0) == []
    assert len(free) == 2


def test_more_than_there_is_cannot_be_taken() -> None:
    free = FreeList(2)
    with pytest.raises(AssertionError, match="3 blocks were taken from a free list of 2"):
        free.popleft_n(3)
    free.popleft_n(2)
    with pytest.raises(AssertionError, match="empty"):
        free.popleft()


def test_more_than_the_pool_cannot_be_given_back() -> None:
    with pytest.raises(AssertionError, match="too many"):
        FreeList(2).append_n(np.array([0]))
