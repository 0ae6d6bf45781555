"""Checks that the data structures of a block pool agree with each other and with the block tables.

Reads everything, changes nothing. O(pool): for tests, the debug switch and after a failure, not for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.prefixes.prefix_index import Prefix, published_hash
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, Tier

Mask = npt.NDArray[np.bool_]


def check_pool(
    ledger: Ledger,
    block_size: int,
    free: npt.NDArray[np.int64],
    cached: Sequence[int],
    prefixes: Sequence[tuple[int, Prefix]],
    tables: Iterable[Sequence[int]],
    unmapped: npt.ArrayLike = (),
) -> None:
    """Raise AssertionError with the first disagreement found and the blocks that show it.

    `free`, `cached` and `unmapped` are the pool's lists of ids, `prefixes` the content of its index, `tables` all block
    tables.
    """
    num_blocks = ledger.num_blocks
    is_free = _membership_mask("the free list", num_blocks, free)
    is_cached = _membership_mask("the eviction order", num_blocks, np.array(cached, np.int64))
    is_hashed = _membership_mask("the prefix index", num_blocks, np.array([b for b, _ in prefixes], np.int64))
    is_unmapped = _membership_mask("the rows without memory", num_blocks, np.array(unmapped, np.int64))
    _assert_no_block("has no memory and is free or cached", is_unmapped & (is_free | is_cached))
    _assert_no_block("has no memory and its state is not UNMAPPED", is_unmapped & (ledger.state != BlockState.UNMAPPED))
    is_active = ~(is_free | is_cached | is_unmapped)
    _assert_no_block("is both free and cached", is_free & is_cached)
    _check_references(ledger, tables)
    _check_states(ledger, is_free, is_cached, is_active)
    _check_contents(ledger, block_size, is_free | is_unmapped, is_hashed)
    _check_hashes(ledger, block_size, prefixes)


def _check_references(ledger: Ledger, tables: Iterable[Sequence[int]]) -> None:
    num_tables = np.zeros(ledger.num_blocks, np.int64)
    for table in tables:
        ids = np.array(table, np.int64)
        num_tables += _membership_mask("a block table", ledger.num_blocks, ids)
    disagreeing = np.flatnonzero(num_tables != ledger.ref_count)
    if len(disagreeing):
        block = disagreeing[0]
        raise AssertionError(
            f"block {block} has ref_count {ledger.ref_count[block]} and is in {num_tables[block]} block tables"
            f" ({len(disagreeing)} blocks disagree)"
        )


def _check_states(ledger: Ledger, is_free: Mask, is_cached: Mask, is_active: Mask) -> None:
    _assert_no_block("is in the free list and its state is not FREE", is_free & (ledger.state != BlockState.FREE))
    _assert_no_block(
        "is in the eviction order and its state is not CACHED",
        is_cached & (ledger.state != BlockState.CACHED),
    )
    _assert_no_block("is in neither list and its state is not ACTIVE", is_active & (ledger.state != BlockState.ACTIVE))
    _assert_no_block("is not active and has references", ~is_active & (ledger.ref_count != 0))
    _assert_no_block("is active and has no reference", is_active & (ledger.ref_count < 1))


def _check_contents(ledger: Ledger, block_size: int, is_free: Mask, is_hashed: Mask) -> None:
    _assert_no_block("is free and filled", is_free & (ledger.filled != 0))
    _assert_no_block("is filled beyond its slots", ledger.filled > block_size)
    _assert_no_block("is free and has an owner", is_free & (ledger.owner != NO_OWNER))
    _assert_no_block("is not free and has no owner", ~is_free & (ledger.owner < 0))
    _assert_no_block("is free and has prefix_hits", is_free & (ledger.prefix_hits != 0))
    _assert_no_block("is free and was attended to", is_free & ((ledger.attention != 0) | (ledger.attention_step != 0)))
    _assert_no_block("is free and was skipped", is_free & (ledger.skipped != 0))
    _assert_no_block("is not in HBM", ledger.tier != Tier.HBM)
    _assert_no_block("is hashed and not in the prefix index", (ledger.hash != 0) & ~is_hashed)
    _assert_no_block("is in the prefix index and not hashed", (ledger.hash == 0) & is_hashed)
    _assert_no_block("is not hashed and has a parent", (ledger.parent != 0) & ~is_hashed)
    _assert_no_block("is hashed and not full", is_hashed & (ledger.filled != block_size))
    _assert_no_block("is cached and not hashed", (ledger.state == BlockState.CACHED) & ~is_hashed)


def _check_hashes(ledger: Ledger, block_size: int, prefixes: Sequence[tuple[int, Prefix]]) -> None:
    for block, prefix in prefixes:
        assert ledger.hash[block] == published_hash(prefix.digest), f"block {block} shows the hash of another"
        assert ledger.parent[block] == prefix.published_parent, f"block {block} shows the parent of another"
        assert len(prefix.tokens) == 4 * block_size, f"the prefix of block {block} is not a full block"


def _membership_mask(list_name: str, num_blocks: int, ids: npt.NDArray[np.int64]) -> Mask:
    """Return a mask of the blocks in `ids`. Raises AssertionError for ids that do not exist or appear twice."""
    outside = ids[(ids < 0) | (ids >= num_blocks)]
    if len(outside):
        raise AssertionError(f"block {outside[0]} in {list_name} does not exist")
    counts = np.bincount(ids, minlength=num_blocks)
    _assert_no_block(f"is in {list_name} more than once", counts > 1)
    return counts > 0


def _assert_no_block(fault: str, is_wrong: Mask) -> None:
    ids = np.flatnonzero(is_wrong)
    if len(ids):
        raise AssertionError(f"block {ids[0]} {fault} ({len(ids)} blocks, first: {ids[:8].tolist()})")
