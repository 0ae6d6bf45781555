"""Which slot a request gets, and which pages are unmapped first."""

from __future__ import annotations

import pytest

from kvscope_engine.policy.allocation.address_space import AddressSpace
from kvscope_engine.policy.allocation.page_slots import PageSlots


def slots_with(*mapped: int, num_groups: int = 20) -> PageSlots:
    """Return free slots with the given numbers of mapped groups."""
    slots = PageSlots(AddressSpace(len(mapped), 8, num_groups))
    for slot, count in enumerate(mapped):
        slots.set_mapped(slot, count)
    slots.check()
    return slots


def test_virtual_memory_slot_with_the_fewest_sufficient_page_groups_is_chosen() -> None:
    slots = slots_with(2, 5, 3, 0, 4)
    assert [slots.allocate_slot(3) for _ in range(5)] == [2, 4, 1, 0, 3]
    assert slots.num_used == 5


def test_freed_virtual_memory_slot_is_reused_first() -> None:
    slots = slots_with(1, 1)
    first, second = slots.allocate_slot(1), slots.allocate_slot(1)
    slots.set_needed(first, 1)
    slots.set_needed(second, 1)
    slots.free_slot(second)
    assert (slots.num_used, slots.num_needed, slots.num_available, slots.num_free) == (1, 1, 19, 18)
    assert slots.allocate_slot(7) == second


def test_surplus_pages_come_from_free_slots_then_from_unneeded_ones() -> None:
    slots = slots_with(4, 3, 2, 2)
    assert [slots.allocate_slot(3), slots.allocate_slot(4)] == [1, 0]
    slots.set_needed(0, 1)
    slots.set_needed(1, 3)
    assert list(slots.surplus(3)) == [(3, 0), (2, 1)]
    assert list(slots.surplus(7)) == [(3, 0), (2, 0), (0, 1)]
    assert list(slots.surplus(0)) == list(slots.surplus(-2)) == []
    with pytest.raises(AssertionError, match="1 groups more were to be taken away"):
        list(slots.surplus(8))


def test_integrity_check_detects_inconsistent_counts() -> None:
    slots = slots_with(2, 0)
    slots.set_needed(slots.allocate_slot(2), 3)
    with pytest.raises(AssertionError, match="slot 0 has fewer groups mapped than needed"):
        slots.check()
    slots.set_needed(0, 2)
    slots.check()
    slots.set_mapped(0, 9)
    with pytest.raises(AssertionError, match="slot 0 has more groups than blocks for them"):
        slots.check()
    slots.set_mapped(0, 8)
    slots._needed[1] = 1
    with pytest.raises(AssertionError, match="the groups needed are miscounted"):
        slots.check()
    with pytest.raises(AssertionError, match="more groups are mapped than there are"):
        slots_with(8, 8, num_groups=15)
