"""Which copies may be pending together: saves before loads, and never two to one target."""

from __future__ import annotations

import pytest

from kvscope_engine.model.kv_cache.kv_offload.staged_copies import PendingCopies


@pytest.fixture
def pending() -> PendingCopies:
    """Blocks 1 and 2 are to be saved to slots 11 and 12, slots 13 and 14 to be loaded into blocks 3 and 4."""
    pending = PendingCopies()
    pending.add_saves([1, 2], [11, 12])
    pending.add_loads([13, 14], [3, 4])
    return pending


def test_independent_copies_may_be_pending_together(pending: PendingCopies) -> None:
    assert pending.admits_saves([1, 5], [15, 16])
    assert pending.admits_loads([1, 2, 5])
    pending.add_saves([1], [15])
    pending.add_loads([11], [1])
    assert pending.saves == [(11, 1), (12, 2), (15, 1)]
    assert pending.loads == [(13, 3), (14, 4), (11, 1)]


@pytest.mark.parametrize(
    ("block", "slot", "why"),
    [
        (5, 11, "two saves to one place"),
        (5, 13, "the place is to be loaded first"),
        (3, 15, "the block is to be loaded first"),
    ],
)
def test_save_that_must_come_later_is_not_admitted(pending: PendingCopies, block: int, slot: int, why: str) -> None:
    assert not pending.admits_saves([6, block], [16, slot]), why


def test_two_loads_to_one_block_are_not_admitted(pending: PendingCopies) -> None:
    assert not pending.admits_loads([6, 4])


def test_slots_of_pending_block_copies_are_known(pending: PendingCopies) -> None:
    assert [pending.touches([slot]) for slot in (10, 11, 12, 13, 14, 15)] == [False, True, True, True, True, False]
    assert pending.slots == {11, 12, 13, 14}
