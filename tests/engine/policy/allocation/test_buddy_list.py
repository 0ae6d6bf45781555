"""The buddy allocator: runs are aligned and disjoint, split only as needed, and merged again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import examples

from kvscope_engine.policy.allocation.run_pool import BuddyList


def runs(free: BuddyList) -> list[tuple[int, int]]:
    return sorted(free.runs())


def block_range(start: int, length: int) -> np.ndarray:
    return np.arange(start, start + length)


def test_pool_starts_as_one_run_per_binary_digit() -> None:
    free = BuddyList(981)
    assert runs(free) == [(0, 512), (512, 256), (768, 128), (896, 64), (960, 16), (976, 4), (980, 1)]
    assert (len(free), free.longest) == (981, 512)
    assert free.ids.tolist() != []
    assert sorted(free.ids.tolist()) == list(range(981))


def test_pool_of_15700_slots_holds_seven_requests_of_2048() -> None:
    free = BuddyList(15_700 // 16)
    assert sorted(free.allocate_run(128) for _ in range(7)) == [0, 128, 256, 384, 512, 640, 768]
    assert free.longest == 64


def test_run_is_split_in_halves_and_merged_again() -> None:
    free = BuddyList(16)
    assert free.allocate_run(2) == 0
    assert runs(free) == [(2, 2), (4, 4), (8, 8)]
    assert free.allocate_run(4) == 4
    assert runs(free) == [(2, 2), (8, 8)]
    free.append_n(block_range(0, 2))
    assert runs(free) == [(0, 4), (8, 8)]
    free.append_n(block_range(4, 4))
    assert runs(free) == [(0, 16)]


def test_shortest_sufficient_run_is_split() -> None:
    free = BuddyList(12)
    assert free.allocate_run(2) == 8
    assert runs(free) == [(0, 8), (10, 2)]


def test_blocks_returned_to_the_buddy_list_in_any_order_are_merged() -> None:
    free = BuddyList(8)
    free.allocate_run(8)
    free.append_n(np.array([6, 1, 3, 2]))
    assert runs(free) == [(1, 1), (2, 2), (6, 1)]
    free.append_n(np.array([7, 0, 5, 4]))
    assert runs(free) == [(0, 8)]


def test_single_blocks_can_be_taken_from_the_buddy_list() -> None:
    free = BuddyList(5)
    assert free.popleft() == 4
    assert sorted(free.popleft_n(3)) == [0, 1, 2]
    assert (len(free), free.ids.tolist()) == (1, [3])


def test_buddy_of_a_run_can_be_taken() -> None:
    free = BuddyList(8)
    start = free.allocate_run(2)
    assert free.has_buddy(start, 2)
    assert free.allocate_buddy(start, 2) == 2
    assert not free.has_buddy(start, 2)
    assert free.allocate_buddy(0, 4) == 4
    assert (len(free), free.longest, runs(free)) == (0, 0, [])
    with pytest.raises(AssertionError, match="is not free"):
        free.allocate_buddy(0, 4)


@pytest.mark.parametrize("length", [0, 3, 16])
def test_invalid_run_length_is_refused(length: int) -> None:
    with pytest.raises(AssertionError, match=f"no run of {length} blocks is free"):
        BuddyList(8).allocate_run(length)


def test_returning_more_blocks_than_the_pool_has_to_the_buddy_list_is_refused() -> None:
    with pytest.raises(AssertionError, match="full buddy list"):
        BuddyList(4).append_n(block_range(0, 1))


def test_integrity_check_detects_unmerged_halves() -> None:
    free = BuddyList(4)
    free._starts = [{}, {0: None, 2: None}, {}]
    with pytest.raises(AssertionError, match="are apart"):
        free.check()


class BuddyMachine(RuleBasedStateMachine):
    """State machine: the taken runs and the free runs cover the pool without overlap."""

    @initialize(num_blocks=st.integers(1, 100))
    def begin(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = BuddyList(num_blocks)
        self.fresh = runs(self.free)
        self.taken: list[tuple[int, int]] = []

    @rule(order=st.integers(0, 6))
    def take(self, order: int) -> None:
        if 1 << order <= self.free.longest:
            self.taken.append((self.free.allocate_run(1 << order), 1 << order))

    @precondition(lambda self: bool(self.taken))
    @rule(pick=st.integers(0, 99))
    def append_n(self, pick: int) -> None:
        self.free.append_n(block_range(*self.taken.pop(pick % len(self.taken))))

    @precondition(lambda self: bool(self.taken))
    @rule(pick=st.integers(0, 99))
    def double(self, pick: int) -> None:
        place = pick % len(self.taken)
        start, length = self.taken[place]
        if self.free.has_buddy(start, length):
            self.taken[place] = (min(start, self.free.allocate_buddy(start, length)), 2 * length)

    @precondition(lambda self: bool(self.taken))
    @rule()
    def free_all(self) -> None:
        """After returning everything, the free runs are those of a new pool."""
        self.free.append_n(np.concatenate([block_range(*run) for run in self.taken])[::-1])
        self.taken = []
        assert runs(self.free) == self.fresh

    @invariant()
    def covers_the_pool(self) -> None:
        if not hasattr(self, "free"):
            return
        self.free.check()
        covered = [block for start, length in [*self.taken, *self.free.runs()] for block in block_range(start, length)]
        assert sorted(covered) == list(range(self.num_blocks))
        assert len(self.free) == self.num_blocks - sum(length for _, length in self.taken)
        assert all(start % length == 0 for start, length in self.taken)


BuddyMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestBuddyMachine = BuddyMachine.TestCase
