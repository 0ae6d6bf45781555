"""Finds what a waiting request can start with: blocks of the pool, and rows of lower tiers where loading them pays.

Reads everything, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.request_prefixes import usable_digests
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers
from kvscope_engine.policy.tiers.swap_costs import PrefillRate


@dataclass(frozen=True, slots=True)
class Reusable:
    """The first blocks of a request's text, place by place: blocks of the pool, or rows of lower tiers."""

    sources: tuple[int, ...]
    hits: tuple[int, ...]
    """Those of them that are in the pool."""
    num_tokens: int
    """Tokens they hold."""
    num_stateless: int = 0
    """Tokens in blocks beyond these, that are of no use since no recurrent state was kept there."""


def find_reusable(
    pool: BlockPool, tiers: LowerTiers | None, rate: PrefillRate, request: Request, states: StatePool | None = None
) -> Reusable:
    """All that is known of the request's first tokens, of which one at least is left to compute.

    What a swapped-out request saved is used, unless the pool alone holds more of its text. Evicted prefixes are when
    loading them costs less than computing their tokens, both as measured. With `states`, what ends at one of them.
    """
    if states is not None:
        return _find_with_state(pool, request, states)
    if tiers is None or pool.index is None:
        found = [] if pool.index is None else pool.index.find(usable_digests(pool, request))
    else:
        found = _find_in_all(pool, tiers, usable_digests(pool, request))
    if request.saved_rows and _num_in_pool(pool, found) * pool.block_size <= request.num_saved_tokens:
        return _with_saved(pool, request, found)
    if tiers is not None:
        found = _worth_loading(pool, tiers, rate, found)
    return _reusable(pool, found, len(found) * pool.block_size)


def _find_with_state(pool: BlockPool, request: Request, states: StatePool) -> Reusable:
    """Blocks of the pool up to the last kept state that all of them are there for."""
    digests = usable_digests(pool, request)
    found = [] if pool.index is None else pool.index.find(digests)
    count = next(states.checkpoints(digests[: len(found)]), 0)
    size = pool.block_size
    return replace(_reusable(pool, found[:count], count * size), num_stateless=(len(found) - count) * size)


def _find_in_all(pool: BlockPool, tiers: LowerTiers, digests: list[bytes]) -> list[int]:
    assert pool.index is not None, "looked for prefixes without an index"
    sources = []
    for digest in digests:
        source = pool.index.get(digest)
        if source is None:
            source = tiers.find(digest)
        if source is None:
            break
        sources.append(source)
    return sources


def _num_in_pool(pool: BlockPool, found: list[int]) -> int:
    """Blocks of the pool before the first that is not there."""
    return next((place for place, source in enumerate(found) if source >= pool.num_blocks), len(found))


def _with_saved(pool: BlockPool, request: Request, found: list[int]) -> Reusable:
    """Its own rows, except where the pool still holds the same. A part of a block is its own: it is written to."""
    in_pool = found[: request.num_saved_tokens // pool.block_size]
    sources = [
        in_pool[place] if place < len(in_pool) and in_pool[place] < pool.num_blocks else row
        for place, row in enumerate(request.saved_rows)
    ]
    return _reusable(pool, sources, request.num_saved_tokens)


def _worth_loading(pool: BlockPool, tiers: LowerTiers, rate: PrefillRate, found: list[int]) -> list[int]:
    """`found`, cut before its first row of a lower tier when it is cheaper to compute the tokens from there on."""
    first = next((place for place, source in enumerate(found) if source >= pool.num_blocks), None)
    if first is None:
        return found
    lower = [source for source in found[first:] if source >= pool.num_blocks]
    to_compute = rate.seconds((len(found) - first) * pool.block_size)
    to_load = tiers.load_seconds(len(lower), sum(map(tiers.is_on_disk, lower)))
    return found if to_compute is None or to_load < to_compute else found[:first]


def _reusable(pool: BlockPool, sources: list[int], num_tokens: int) -> Reusable:
    hits = tuple(source for source in sources if source < pool.num_blocks)
    return Reusable(tuple(sources), hits, num_tokens)
