"""How a KV memory is divided among states of recurrent layers and blocks. Knows sizes alone."""

from __future__ import annotations

from typing import Final

MIN_SLOTS: Final = 2
"""A request's, and one to copy from while another begins."""
STATES_SHARE: Final = 0.5
"""Of the KV memory, that states may take."""
MAX_EMPTY_BLOCKS: Final = 1 << 16


def slots_and_blocks(
    room: int, one_block: int, one_state: int, wanted: int, longest: int, num_pads: int = 0
) -> tuple[int, int]:
    """Slots for states, and blocks, in a KV memory of `room` bytes; no blocks where there is not enough of it.

    Slots for the states of `wanted` requests and prefixes, and one to copy from while another request begins, within
    half of it, beside `num_pads` that are nobody's. Where no layer has keys and values it may be all: blocks are texts'
    places in the prefix cache, `longest` for a request of the greatest length, and take nothing.
    """
    share = STATES_SHARE if one_block else 1.0
    slots = max(MIN_SLOTS, min(wanted + 1, int(share * max(room, 0)) // one_state - num_pads))
    left = room - (slots + num_pads) * one_state
    if left < 0:
        return slots, 0
    return slots, left // one_block if one_block else min(longest * slots, MAX_EMPTY_BLOCKS)


def host_slots(host_bytes: int, one_block: int, one_state: int, wanted: int) -> int:
    """Slots for states in `host_bytes` of host memory: as many as `wanted`, within half of it and beside a block. It
    may be all of it where no layer has keys and values."""
    share = STATES_SHARE if one_block else 1.0
    return min(wanted, max(0, min(int(share * host_bytes), host_bytes - one_block)) // one_state)
