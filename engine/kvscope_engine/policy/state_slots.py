"""Divides KV memory between states of recurrent layers and KV blocks. Computes with sizes only."""

from __future__ import annotations

from typing import Final

MIN_SLOTS: Final = 2
"""Minimum number of state slots: one for a request, and one to copy from while another request starts."""
STATES_SHARE: Final = 0.5
"""Maximum fraction of the KV memory that recurrent states may use."""
MAX_EMPTY_BLOCKS: Final = 1 << 16


def slots_and_blocks(
    num_bytes: int, one_block: int, one_state: int, num_wanted: int, blocks_per_slot: int, num_pads: int = 0
) -> tuple[int, int]:
    """Return the number of state slots and of KV blocks in a memory of `num_bytes` bytes; 0 blocks if it is too small.

    There are slots for the states of `num_wanted` requests and prefixes, plus one to copy from while another request
    starts, within half of the memory, and `num_pads` padding slots, which belong to no request. If no layer has keys
    and values, states may use all of the memory. Blocks are then only positions of texts in the prefix cache and use no
    memory; there are `blocks_per_slot` per slot.

    Args:
        num_bytes: KV memory in bytes.
        one_block: Bytes of a block; 0 if no layer has keys and values.
        one_state: Bytes of a state.
        num_wanted: Number of requests and prefixes that should have a slot.
        blocks_per_slot: Number of blocks of a request of maximum length.
        num_pads: Number of slots for padding.
    """
    share = STATES_SHARE if one_block else 1.0
    slots = max(MIN_SLOTS, min(num_wanted + 1, int(share * max(num_bytes, 0)) // one_state - num_pads))
    remaining = num_bytes - (slots + num_pads) * one_state
    if remaining < 0:
        return slots, 0
    return slots, remaining // one_block if one_block else min(blocks_per_slot * slots, MAX_EMPTY_BLOCKS)


def host_slots(host_bytes: int, one_block: int, one_state: int, num_wanted: int) -> int:
    """Return the number of state slots, at most `num_wanted`, in `host_bytes` of host memory.

    The slots take at most half of the memory and leave space for a block. If no layer has keys and values, the slots
    may take all of the memory.
    """
    share = STATES_SHARE if one_block else 1.0
    return min(num_wanted, max(0, min(int(share * host_bytes), host_bytes - one_block)) // one_state)
