"""Finds the cached blocks that a waiting request can start with: in the pool, and in lower tiers if loading is faster.

Reads pool and tiers, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import NO_PREFIX, PrefixMatch, find_prefix, group_digest
from kvscope_engine.policy.kv_offload.lower_tiers import LowerTiers
from kvscope_engine.policy.kv_offload.swap_costs import PrefillRate
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.request_prefixes import usable_digests
from kvscope_engine.policy.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class Reusable:
    """Cached first blocks of a request's text, in each KV group: blocks of the pool, or ledger rows of lower tiers."""

    tables: tuple[list[int], ...]
    num_null_blocks: tuple[int, ...]
    """Number of leading `NULL_BLOCK` entries of each table."""
    num_tokens: int
    hits: list[int]
    """Table entries that are blocks of the pool, one KV group after another."""
    num_to_load: int
    """Number of table entries in lower tiers."""
    is_saved: bool = False
    """Whether the tables are those that the request saved when it was swapped out, together with its recurrent state.
    """
    num_stateless: int = 0
    """Number of tokens in further cached blocks that cannot be used, since no recurrent state was retained after them.
    """

    def __bool__(self) -> bool:
        return self.num_tokens > 0


def find_reusable(
    pool: BlockPool, tiers: LowerTiers | None, rate: PrefillRate, request: Request, states: StatePool | None = None
) -> Reusable:
    """Return the cached first blocks of the request's text, leaving at least one token to compute.

    The blocks saved by a swapped-out request are used, unless the pool alone holds more of its text. Evicted prefixes
    are used if loading them is faster than computing their tokens, by measured rates. With `states`, the result ends at
    a retained recurrent state.
    """
    digests, index, size = usable_digests(pool, request), pool.index, pool.block_size
    found = in_pool = NO_PREFIX if index is None else find_prefix(pool.groups, digests, size, index.get)
    if states is not None and index is not None:
        found = next(_prefixes_with_state(pool, states, in_pool, digests, index.get, include_host=False), NO_PREFIX)
    if request.saved_tables and found.num_blocks * size <= request.num_saved_tokens:
        return _saved_or_pooled(pool, request, digests)
    if tiers is not None and index is not None and found.num_blocks < len(digests):
        found = _longest_worth_loading(pool, tiers, rate, found, digests, states)
    reusable = _reusable(pool, found.tables, found.num_null_blocks, found.num_blocks * size)
    if states is None:
        return reusable
    return replace(reusable, num_stateless=max(0, in_pool.num_blocks - found.num_blocks) * size)


def _prefixes_with_state(
    pool: BlockPool,
    states: StatePool,
    found: PrefixMatch,
    digests: list[bytes],
    get: Callable[[bytes], int | None],
    *,
    include_host: bool,
) -> Iterator[PrefixMatch]:
    """Yield the leading parts of `found` that end at a retained recurrent state and are fully cached, longest first."""
    for count in states.checkpoints(digests[: found.num_blocks], include_host=include_host):
        is_whole = count == found.num_blocks
        shorter = found if is_whole else find_prefix(pool.groups, digests[:count], pool.block_size, get)
        if shorter.num_blocks == count:
            yield shorter


def _saved_or_pooled(pool: BlockPool, request: Request, digests: list[bytes]) -> Reusable:
    """Return the blocks that the request saved in lower tiers, or blocks of the pool with the same content
    where they exist.
    """
    index, num_full = pool.index, request.num_saved_tokens // pool.block_size
    tables = []
    for group, (saved, num_null) in enumerate(zip(request.saved_tables, request.num_null_blocks, strict=True)):
        table = list(saved)
        if index is not None:
            for block_index in range(num_null, min(num_full, len(digests))):
                block = index.get(group_digest(digests[block_index], group))
                table[block_index] = table[block_index] if block is None else block
        tables.append(table)
    found = _reusable(pool, tuple(tables), request.num_null_blocks, request.num_saved_tokens)
    return replace(found, is_saved=True)


def _longest_worth_loading(
    pool: BlockPool,
    tiers: LowerTiers,
    rate: PrefillRate,
    in_pool: PrefixMatch,
    digests: list[bytes],
    states: StatePool | None,
) -> PrefixMatch:
    """Return the longest cached prefix in any tier, or `in_pool` if computing the additional tokens is faster
    than loading.
    """
    index = pool.index
    assert index is not None, "looked for prefixes without an index"

    def get(digest: bytes) -> int | None:
        block = index.get(digest)
        return tiers.find(digest) if block is None else block

    longest = find_prefix(pool.groups, digests, pool.block_size, get)
    candidates = (
        [longest] if states is None else _prefixes_with_state(pool, states, longest, digests, get, include_host=True)
    )
    for found in candidates:
        if found.num_blocks <= in_pool.num_blocks:
            break
        rows_to_load = [row for table in found.tables for row in table if row >= pool.num_blocks]
        compute_s = rate.seconds((found.num_blocks - in_pool.num_blocks) * pool.block_size)
        load_s = tiers.load_seconds(len(rows_to_load), sum(map(tiers.is_on_disk, rows_to_load)))
        if states is not None:
            load_s += states.load_seconds(digests[found.num_blocks - 1])
        if compute_s is None or load_s < compute_s:
            return found
    return in_pool


def _reusable(
    pool: BlockPool, tables: tuple[list[int], ...], num_null_blocks: tuple[int, ...], num_tokens: int
) -> Reusable:
    held = [block for table, num_null in zip(tables, num_null_blocks, strict=True) for block in table[num_null:]]
    hits = [block for block in held if block < pool.num_blocks]
    return Reusable(tables, num_null_blocks, num_tokens, hits, len(held) - len(hits))
