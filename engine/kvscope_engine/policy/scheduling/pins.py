"""Pinned blocks against requests: whoever is in the queue must be able to run beside them.

The rule that keeps a queue from standing still for ever: each unfinished request fits, alone, into the blocks that are
not pinned and the pinned ones that its own text begins with. Reads everything, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.fit import num_blocks_in_the_end
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.request_prefixes import usable_digests
from kvscope_telemetry.errors import BadInput


def check_fits_beside_pins(pool: BlockPool, request: Request) -> None:
    """Raise BadInput, with the numbers and the way out, when pinned blocks leave the request too little."""
    missing = num_missing(pool, request, pool.pinned)
    if missing > 0:
        raise BadInput(
            f"it needs {num_blocks_in_the_end(request, pool.block_size)} blocks: {len(pool.pinned)} of the pool's"
            f" {pool.num_blocks} are pinned, and {missing} of those must be unpinned first"
        )


def check_pins(pool: BlockPool, requests: Iterable[Request], blocks: Iterable[int]) -> None:
    """Raise BadInput unless every request could still run were `blocks` pinned as well."""
    pinned = pool.pinned | set(blocks)
    for request in requests:
        if num_missing(pool, request, pinned) > 0:
            raise BadInput(
                f"pinning these would leave {pool.num_blocks - len(pinned)} of {pool.num_blocks} blocks to others, and"
                f" request {request.number} may need {num_blocks_in_the_end(request, pool.block_size)}"
            )


def num_missing(pool: BlockPool, request: Request, pinned: Set[int]) -> int:
    """Blocks that the request could lack, alone, if `pinned` were never evicted."""
    if not pinned:
        return 0
    own = 0
    for digest in usable_digests(pool, request):
        block = pool.index.get(digest) if pool.index is not None else None
        if block not in pinned:
            break
        own += 1
    return num_blocks_in_the_end(request, pool.block_size) - own - (pool.num_blocks - len(pinned))
