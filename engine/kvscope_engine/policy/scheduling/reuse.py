"""Finds what a waiting request can start with: blocks of the pool, and rows of lower tiers where loading them pays.

Reads everything, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import NOTHING, PrefixMatch, find_prefix, group_digest
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.request_prefixes import usable_digests
from kvscope_engine.policy.state_pool import StatePool
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers
from kvscope_engine.policy.tiers.swap_costs import PrefillRate


@dataclass(frozen=True, slots=True)
class Reusable:
    """The first blocks of a request's text, place by place in each KV group: blocks of the pool, or rows of lower
    tiers."""

    tables: tuple[list[int], ...]
    num_let_go: tuple[int, ...]
    """Of each table, the places from the first that are `NULL_BLOCK`."""
    num_tokens: int
    """Tokens they hold."""
    hits: list[int]
    """What of it is in the pool, one group after another."""
    num_to_load: int
    """Blocks that are in lower tiers."""
    is_saved: bool = False
    """Whether it is what the request saved when it was swapped out, with the state of its recurrent layers."""
    num_stateless: int = 0
    """Tokens in blocks beyond these, that are of no use since no recurrent state was kept there."""

    def __bool__(self) -> bool:
        return self.num_tokens > 0


def find_reusable(
    pool: BlockPool, tiers: LowerTiers | None, rate: PrefillRate, request: Request, states: StatePool | None = None
) -> Reusable:
    """All that is known of the request's first tokens, of which one at least is left to compute.

    What a swapped-out request saved is used, unless the pool alone holds more of its text. Evicted prefixes are when
    loading them costs less than computing their tokens, both as measured. With `states`, what ends at one of them.
    """
    digests, index, size = usable_digests(pool, request), pool.index, pool.block_size
    found = in_pool = NOTHING if index is None else find_prefix(pool.groups, digests, size, index.get)
    if states is not None and index is not None:
        found = next(_with_states(pool, states, in_pool, digests, index.get, below=False), NOTHING)
    if request.saved_tables and found.num_places * size <= request.num_saved_tokens:
        return _with_saved(pool, request, digests)
    if tiers is not None and index is not None and found.num_places < len(digests):
        found = _worth_loading(pool, tiers, rate, found, digests, states)
    reusable = _reusable(pool, found.tables, found.num_let_go, found.num_places * size)
    if states is None:
        return reusable
    return replace(reusable, num_stateless=max(0, in_pool.num_places - found.num_places) * size)


def _with_states(
    pool: BlockPool,
    states: StatePool,
    found: PrefixMatch,
    digests: list[bytes],
    get: Callable[[bytes], int | None],
    *,
    below: bool,
) -> Iterator[PrefixMatch]:
    """What is found, up to each kept state that all blocks are there for, longest first."""
    for count in states.checkpoints(digests[: found.num_places], below=below):
        is_all = count == found.num_places
        shorter = found if is_all else find_prefix(pool.groups, digests[:count], pool.block_size, get)
        if shorter.num_places == count:
            yield shorter


def _with_saved(pool: BlockPool, request: Request, digests: list[bytes]) -> Reusable:
    """Its own rows, except where the pool still holds the same. A part of a block is its own: it is written to."""
    index, num_full = pool.index, request.num_saved_tokens // pool.block_size
    tables = []
    for group, (saved, let_go) in enumerate(zip(request.saved_tables, request.num_let_go, strict=True)):
        table = list(saved)
        if index is not None:
            for place in range(let_go, min(num_full, len(digests))):
                block = index.get(group_digest(digests[place], group))
                table[place] = table[place] if block is None else block
        tables.append(table)
    found = _reusable(pool, tuple(tables), request.num_let_go, request.num_saved_tokens)
    return replace(found, is_saved=True)


def _worth_loading(
    pool: BlockPool,
    tiers: LowerTiers,
    rate: PrefillRate,
    in_pool: PrefixMatch,
    digests: list[bytes],
    states: StatePool | None,
) -> PrefixMatch:
    """What is in any tier, or `in_pool` where it is cheaper to compute the tokens from there on."""
    index = pool.index
    assert index is not None, "looked for prefixes without an index"

    def get(digest: bytes) -> int | None:
        block = index.get(digest)
        return tiers.find(digest) if block is None else block

    longest = find_prefix(pool.groups, digests, pool.block_size, get)
    some = [longest] if states is None else _with_states(pool, states, longest, digests, get, below=True)
    for found in some:
        if found.num_places <= in_pool.num_places:
            break
        lower = [row for table in found.tables for row in table if row >= pool.num_blocks]
        to_compute = rate.seconds((found.num_places - in_pool.num_places) * pool.block_size)
        to_load = tiers.load_seconds(len(lower), sum(map(tiers.is_on_disk, lower)))
        if states is not None:
            to_load += states.load_seconds(digests[found.num_places - 1])
        if to_compute is None or to_load < to_compute:
            return found
    return in_pool


def _reusable(pool: BlockPool, tables: tuple[list[int], ...], num_let_go: tuple[int, ...], num_tokens: int) -> Reusable:
    held = [block for table, let_go in zip(tables, num_let_go, strict=True) for block in table[let_go:]]
    hits = [block for block in held if block < pool.num_blocks]
    return Reusable(tables, num_let_go, num_tokens, hits, len(held) - len(hits))
