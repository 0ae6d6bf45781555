"""The rule for pinned blocks: each unfinished request must fit, alone, beside them.

The engine refuses pins by it, and the desktop disables what would be refused. Knows numbers, and neither a pool nor a
mirror.
"""

from __future__ import annotations

from typing import Final

MAX_PINNED: Final = 4096
"""Blocks that can be pinned at a time, by all clients together: heartbeats name all of them, twice a second."""


def most_held(num_tokens: int, *, window: int, max_chunk: int, block_size: int) -> int:
    """Return the blocks of a KV group that a request of `num_tokens` tokens holds at most at a time.

    Args:
        num_tokens: Prompt and output.
        window: Tokens that a query reads at most; 0 for all before it.
        max_chunk: Tokens of the request that run in a step at most.
        block_size: Tokens in a block.
    """
    whole = -(-num_tokens // block_size)
    return min(whole, -(-(window - 1 + max_chunk) // block_size) + 1) if window else whole


def num_missing(*, num_needed: int, num_own: int, num_usable: int, num_pinned: int) -> int:
    """Return the blocks that a request could lack if pinned blocks were never evicted; 0 or less if it fits.

    Args:
        num_needed: Blocks that the request holds at most.
        num_own: Pinned blocks that its own text begins with.
        num_usable: Blocks that requests can have.
        num_pinned: Blocks that are pinned.
    """
    return num_needed - num_own - (num_usable - num_pinned)


def refusal_beside(number: int, *, num_needed: int, num_usable: int, num_pinned: int) -> str:
    """Return why blocks cannot be pinned that leave request `number` too few."""
    return (
        f"pinning these would leave {num_usable - num_pinned} of {num_usable} blocks to others, and request {number}"
        f" may need {num_needed}"
    )


def refusal_of_many(num_blocks: int) -> str:
    """Return why so many blocks cannot be pinned."""
    return f"{num_blocks} blocks more would be pinned: at most {MAX_PINNED} are accepted in all"
