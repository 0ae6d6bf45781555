"""Number of page groups that are mapped and needed in each slot of the address space.

As in vAttention (Prabhu et al. 2024, arXiv 2405.04437, section 6.1), a slot keeps its groups when its request ends
(deferred reclamation), and the next request gets the slot that fits it best. Groups are unmapped only when none is
free: always the last ones of a slot that has more than it needs.

Owns these counts. Independent of requests and blocks; maps no memory itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvscope_engine.policy.allocation.address_space import AddressSpace


class PageSlots:
    """Counts of page groups per slot. Initially, no slot is in use and no group is mapped."""

    def __init__(self, space: AddressSpace) -> None:
        self.space = space
        self._mapped = np.zeros(space.num_slots, np.int64)
        self._needed = np.zeros(space.num_slots, np.int64)
        self._is_used = np.zeros(space.num_slots, np.bool_)
        self._num_used = 0
        self._num_mapped = 0
        self._num_needed = 0

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_needed(self) -> int:
        """Number of page groups that requests need, summed over all slots."""
        return self._num_needed

    @property
    def num_free(self) -> int:
        return self.space.num_groups - self._num_mapped

    @property
    def num_available(self) -> int:
        """Number of page groups that no request needs: free groups, and mapped groups that can be unmapped."""
        return self.space.num_groups - self._num_needed

    def mapped(self, slot: int) -> int:
        """Return the number of page groups mapped behind the slot's first blocks."""
        return int(self._mapped[slot])

    def needed(self, slot: int) -> int:
        return int(self._needed[slot])

    def allocate_slot(self, num_groups: int) -> int:
        """Return a free slot for a request that needs `num_groups` page groups. There must be a free slot.

        Chooses the slot with the fewest mapped groups among those with enough, or, if none has enough, the slot with
        the most.
        """
        free = np.flatnonzero(~self._is_used)
        assert len(free), "every slot is taken"
        mapped = self._mapped[free]
        is_enough = mapped >= num_groups
        best = np.where(is_enough, mapped, np.iinfo(np.int64).max).argmin() if is_enough.any() else mapped.argmax()
        slot = int(free[best])
        self._is_used[slot] = True
        self._num_used += 1
        return slot

    def set_needed(self, slot: int, num_groups: int) -> None:
        """Record that the slot's request needs the first `num_groups` page groups, whether they are mapped or not."""
        self._num_needed += num_groups - int(self._needed[slot])
        self._needed[slot] = num_groups

    def free_slot(self, slot: int) -> None:
        """Mark the slot as unused. Its page groups remain mapped."""
        self.set_needed(slot, 0)
        self._is_used[slot] = False
        self._num_used -= 1

    def set_mapped(self, slot: int, num_groups: int) -> None:
        """Record that exactly the first `num_groups` page groups of the slot are mapped."""
        self._num_mapped += num_groups - int(self._mapped[slot])
        self._mapped[slot] = num_groups

    def surplus(self, num_groups: int) -> Iterator[tuple[int, int]]:
        """Yield the slots from which to unmap `num_groups` groups in total, as (slot, number of groups that remain
        mapped).

        Slots without a request come first, in descending order. At least `num_groups` mapped groups must be unneeded.
        """
        unneeded = np.maximum(self._mapped - self._needed, 0)
        order = np.flatnonzero(unneeded)[::-1]
        for slot in (*order[~self._is_used[order]].tolist(), *order[self._is_used[order]].tolist()):
            if num_groups <= 0:
                return
            count = min(num_groups, int(unneeded[slot]))
            num_groups -= count
            yield slot, self.mapped(slot) - count
        assert num_groups <= 0, f"{num_groups} groups more were to be taken away than are mapped and not needed"

    def check(self) -> None:
        space = self.space
        assert self._num_mapped == self._mapped.sum() <= space.num_groups, "more groups are mapped than there are"
        assert self._num_needed == self._needed.sum(), "the groups needed are miscounted"
        assert self._num_used == self._is_used.sum(), "the slots taken are miscounted"
        _assert_no_slot("has fewer groups mapped than needed", self._mapped < self._needed)
        _assert_no_slot("has no request and needs groups", ~self._is_used & (self._needed > 0))
        _assert_no_slot("has more groups than blocks for them", self._mapped > space.num_groups_for(space.slot_blocks))


def _assert_no_slot(fault: str, is_wrong: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    slots = np.flatnonzero(is_wrong)
    assert not len(slots), f"slot {slots[0]} {fault} ({len(slots)} slots, first: {slots[:8].tolist()})"
