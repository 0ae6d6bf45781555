"""Checks pinned blocks against requests: every unfinished request must be able to run without evicting them.

Without this rule, a request could block the queue forever. Each unfinished request must fit, running alone, into the
unpinned blocks and the pinned blocks with which its text starts. Reads the pool, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvscope_engine.policy.block_needs import BlockNeeds
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import group_digest
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.request_prefixes import usable_digests
from kvscope_telemetry import pins
from kvscope_telemetry.errors import BadInput


def check_fits_with_pins(pool: BlockPool, needs: BlockNeeds, request: Request) -> None:
    """Raise BadInput if pinned blocks leave too few blocks for the request. The message states how many blocks
    must be unpinned.
    """
    missing = _num_missing(pool, needs, request, pool.pinned)
    if missing > 0:
        needed = needs.max_blocks_of_request(request)
        raise BadInput(
            f"it needs {needed} blocks: {len(pool.pinned)} of the pool's {pool.num_usable} are"
            f" pinned, and {missing} of those must be unpinned first"
        )


def check_pins(pool: BlockPool, needs: BlockNeeds, requests: Iterable[Request], blocks: Iterable[int]) -> None:
    """Raise BadInput unless every request could still run if `blocks` were pinned as well."""
    pinned = pool.pinned | set(blocks)
    for request in requests:
        if _num_missing(pool, needs, request, pinned) > 0:
            raise BadInput(
                pins.refusal_for_request(
                    request.number,
                    num_needed=needs.max_blocks_of_request(request),
                    num_usable=pool.num_usable,
                    num_pinned=len(pinned),
                )
            )


def _num_missing(pool: BlockPool, needs: BlockNeeds, request: Request, pinned: Set[int]) -> int:
    """Return the number of blocks that the request, running alone, would lack if `pinned` were never evicted.

    Pinned blocks with which its text starts are not missing. In KV groups with a window, such blocks are not counted,
    since the request may not read them.
    """
    if not pinned:
        return 0
    num_own = 0
    for group in (group for group, rule in enumerate(pool.groups) if not rule.window):
        for digest in usable_digests(pool, request):
            block = pool.index.get(group_digest(digest, group)) if pool.index is not None else None
            if block not in pinned:
                break
            num_own += 1
    return pins.num_missing(
        num_needed=needs.max_blocks_of_request(request),
        num_own=num_own,
        num_usable=pool.num_usable,
        num_pinned=len(pinned),
    )
