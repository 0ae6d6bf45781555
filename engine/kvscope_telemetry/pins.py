"""Rule for pinned blocks: each unfinished request must fit alone into the blocks that are not pinned.

The engine refuses pins that break this rule, and the desktop disables the corresponding actions. Computes with numbers
only, independent of pool and mirror.
"""

from __future__ import annotations

from typing import Final

MAX_PINNED: Final = 4096
"""Maximum number of pinned blocks, for all clients together. Heartbeats list all of them twice a second."""


def max_held_blocks(num_tokens: int, *, window: int, max_chunk: int, block_size: int) -> int:
    """Return the maximum number of blocks of a KV group that a request of `num_tokens` tokens needs at a time.

    Args:
        num_tokens: Prompt and output tokens.
        window: Attention window in tokens; 0 if unlimited.
        max_chunk: Maximum tokens of the request in a step.
        block_size: Tokens per block.
    """
    num_all = -(-num_tokens // block_size)
    return min(num_all, -(-(window - 1 + max_chunk) // block_size) + 1) if window else num_all


def num_missing(*, num_needed: int, num_own: int, num_usable: int, num_pinned: int) -> int:
    """Return the number of blocks that a request could lack if pinned blocks are never evicted; 0 or less if it fits.

    Args:
        num_needed: Maximum number of blocks that the request needs at a time.
        num_own: Pinned blocks that are a prefix of the request's text.
        num_usable: Blocks available to requests.
        num_pinned: Pinned blocks.
    """
    return num_needed - num_own - (num_usable - num_pinned)


def refusal_for_request(number: int, *, num_needed: int, num_usable: int, num_pinned: int) -> str:
    """Return the text of a refusal to pin blocks, because too few would remain for request `number`."""
    return (
        f"pinning these would leave {num_usable - num_pinned} of {num_usable} blocks to others, and request {number}"
        f" may need {num_needed}"
    )


def refusal_of_many(num_blocks: int) -> str:
    return f"{num_blocks} blocks more would be pinned: at most {MAX_PINNED} are accepted in all"
