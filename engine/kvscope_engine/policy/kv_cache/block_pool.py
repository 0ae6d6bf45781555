"""The block pool: ledger row of every block, allocation and eviction of blocks, and the set of changed rows.

Owns the ledger, the free list, reference counts, the prefix index and the eviction order. Works with block ids and
request numbers; independent of requests and of the content of blocks.

All KV groups share the pool: a block belongs to the group that it was last allocated for, and a single eviction order
serves all groups (docs/internals/decisions/0020-kv-groups-share-one-pool.md). If a group has a window, block 0 is never
allocated (`NULL_BLOCK`).

A block is free (empty), active (held by `ref_count` block tables or reservations) or cached (not held, full and
hashed). Cached blocks can be reused by later prompts. They are evicted, oldest first, when no free block is left,
unless they are pinned. With the unmapped rows, which cannot be allocated, these numbers always add up to `num_blocks`.
`check_integrity` checks this and all other invariants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.kv_cache.cache_log import CacheLog
from kvscope_engine.policy.kv_cache.changed_rows import ChangedRows
from kvscope_engine.policy.kv_cache.eviction_order import EvictionOrder
from kvscope_engine.policy.kv_cache.free_list import FreeBlocks, FreeList, Ids
from kvscope_engine.policy.kv_cache.integrity import check_pool
from kvscope_engine.policy.kv_cache.move_log import MoveLog
from kvscope_engine.policy.kv_groups import NULL_BLOCK, ONE_GROUP, GroupRule
from kvscope_engine.policy.prefixes.prefix_history import PrefixHistory
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, published_hash
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, Tier
from kvscope_telemetry.tier_rows import TierRows

MAX_PREFIX_HITS: Final = np.iinfo(np.uint16).max


class LowerTier(Protocol):
    def offload(self, blocks: list[int], prefixes: list[Prefix]) -> list[bool]:
        """Copy the contents of `blocks`, which are about to be reused, to a lower tier.

        `prefixes` are the cached prefixes in the blocks. Returns, for each prefix, whether it can still be found in a
        lower tier.
        """


class BlockPool:
    """Pool of `num_blocks` blocks of `block_size` token slots, all free at first.

    The ledger has more rows after those of the blocks: one per slot of the lower tiers, which `LowerTiers` manages,
    then one per slot of recurrent states, on the device and in host memory, which `StatePool` manages.

    Args:
        num_blocks: Number of blocks.
        block_size: Token slots per block.
        prefix_caching: Whether full blocks can be found by their contents.
        salt: Seed of the prefix hashes; random if None.
        other_tiers: Number of ledger rows by tier, other than those of the blocks.
        free: Free list of the pool; a `FreeList` if None.
        groups: Rules of the KV groups that share the blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        salt: bytes | None = None,
        other_tiers: Mapping[Tier, int] | None = None,
        free: FreeBlocks | None = None,
        groups: tuple[GroupRule, ...] = ONE_GROUP,
    ) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        self.block_size = block_size
        self.rows_by_tier = TierRows({**(other_tiers or {}), Tier.HBM: num_blocks})
        self.num_host = len(self.rows_by_tier[Tier.HOST])
        self.num_disk = len(self.rows_by_tier[Tier.DISK])
        self.num_states = len(self.rows_by_tier[Tier.STATES])
        self.num_host_states = len(self.rows_by_tier[Tier.HOST_STATES])
        self.first_state = self.rows_by_tier.first_state
        self.ledger = Ledger(self.rows_by_tier.num_rows)
        self.rows_by_tier.write_tiers(self.ledger)
        self.index = PrefixIndex(block_size, salt) if prefix_caching else None
        self.history = PrefixHistory() if prefix_caching else None
        self.moves = MoveLog()
        self.lower_tier: LowerTier | None = None
        """Tier to which evicted blocks are offloaded; if None, the contents of evicted blocks are lost."""
        self.cache_log: CacheLog | None = None
        """Log of insertions into the prefix cache and removals from it; None if no KV events are published."""
        self.step = 0
        """Number of the step in progress, recorded with each change. Set by the scheduler."""
        self.evicted_blocks = 0
        """Number of cached blocks whose prefix was dropped from the pool since the start, because the block was
        reused or a user evicted it.
        """
        keeps_null = any(group.window for group in groups)
        self._free: FreeBlocks = free if free is not None else FreeList(num_blocks, keeps_null=keeps_null)
        self.num_usable = num_blocks - keeps_null
        """Number of blocks that can be allocated.

        Under `virtual`, where ledger rows are addresses, there may be memory for fewer.
        """
        if keeps_null:
            self.ledger.state[NULL_BLOCK] = BlockState.UNMAPPED
        self.changed_rows = ChangedRows(self.ledger.num_blocks)
        """Ledger rows changed since they were last drained. All code that changes the ledger must mark the rows
        here.
        """
        self._eviction_order = EvictionOrder(self.ledger.eviction_order, self.changed_rows)
        self._is_measured = False
        self._ref_counts = self.ledger.ref_count.data  # 3 x faster than numpy for one element
        self._hashes = self.ledger.hash.data
        self._parents = self.ledger.parent.data

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks that contain a cached prefix and that no block table holds."""
        return self._eviction_order.num_cached

    @property
    def num_active(self) -> int:
        return self.num_blocks - len(self._free) - self._eviction_order.num_cached - self.num_unmapped

    @property
    def num_unmapped(self) -> int:
        """Number of ledger rows that cannot be allocated: the null block, and under `virtual` the rows without
        memory.
        """
        return self._free.num_unmapped

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._eviction_order)

    @property
    def pinned(self) -> Set[int]:
        """Active or cached blocks that are protected from eviction."""
        return self._eviction_order.pinned

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def is_private(self, block: int) -> bool:
        """Whether an active block may be written to, because only one table holds it and it is not in the
        prefix cache.
        """
        return self._ref_counts[block] == 1 and not self._hashes[block]

    def prefix(self, block: int) -> Prefix | None:
        """Return the prefix of a hashed block, active or cached; None for any other block."""
        return self.index.prefix(block) if self.index is not None else None

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are cached and not pinned. Each of these blocks that is reused reduces
        `num_available` by one.
        """
        idle = self._eviction_order.idle
        return sum(block in idle for block in blocks)

    def allocate(self, count: int, owner: int, group: int = 0) -> list[int]:
        """Return `count` empty blocks, at most `num_available`, for request `owner` in a KV group, with one reference
        each.
        """
        if count == 1 and self._free:
            block = self._free.popleft()
            self._activate_one(block, owner, group)
            return [block]
        from_free = min(count, len(self._free))
        blocks = self._free.popleft_n(from_free)
        if count > from_free:
            blocks += self._evict(count - from_free)
        self._activate(np.array(blocks, np.int64), owner, group)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to active, distinct `blocks`."""
        ids = np.array(blocks, np.int64)
        self.ledger.ref_count[ids] += 1
        self.changed_rows.add(ids)

    def hit(self, blocks: Sequence[int], step: int) -> None:
        """Add a reference to distinct active or cached `blocks`, whose prefixes a prompt reuses."""
        ids, ledger = np.array(blocks, np.int64), self.ledger
        for block in ids[ledger.ref_count[ids] == 0].tolist():
            self._eviction_order.remove(block)
        ledger.ref_count[ids] += 1
        ledger.state[ids] = BlockState.ACTIVE
        ledger.prefix_hits[ids] += ledger.prefix_hits[ids] < MAX_PREFIX_HITS
        ledger.last_used_step[ids] = step
        self.changed_rows.add(ids)

    def release(self, blocks: Sequence[int], step: int) -> None:
        """Remove a reference to distinct `blocks`, given in the order of their block table.

        Of two blocks of one text, the later block is evicted first, because it can't be reused without the earlier
        block.
        """
        ids, ledger = np.array(blocks[::-1], np.int64), self.ledger
        counts = ledger.ref_count[ids] - 1
        assert not len(ids) or counts.min() >= 0, f"a block of {blocks} was released more often than held"
        ledger.ref_count[ids] = counts
        ledger.last_used_step[ids] = step
        self.changed_rows.add(ids)
        unreferenced = ids[counts == 0]
        is_hashed = ledger.hash[unreferenced] != 0
        self._mark_cached(unreferenced[is_hashed])
        self._clear(unreferenced[~is_hashed])

    def record_write(
        self, blocks: Sequence[int], filled: Sequence[int], owners: Sequence[int], step: int | Sequence[int]
    ) -> None:
        """Record that request `owners[i]` wrote to `blocks[i]`, which now has `filled[i]` used token slots.

        `step`: the step of all writes, or of each.
        """
        ids, ledger = np.array(blocks, np.int64), self.ledger
        ledger.filled[ids] = filled
        ledger.owner[ids] = owners
        ledger.last_used_step[ids] = step
        self.changed_rows.add(ids)

    def record_move(self, sources: Sequence[int], targets: Sequence[int], owner: int, step: int) -> None:
        """Record that request `owner`'s tokens were moved from each block `sources[i]`, which is now empty, to
        `targets[i]`.
        """
        filled = self.ledger.filled[np.array(sources, np.int64)].tolist()
        owners = [owner] * len(targets)
        self.record_write(sources, [0] * len(sources), owners, step)
        self.record_write(targets, filled, owners, step)

    def exchange_owners(self, block: int, other: int) -> None:
        """Exchange the owners and KV groups of two blocks that were allocated in this step."""
        for column in (self.ledger.owner, self.ledger.group):
            column[[block, other]] = column[[other, block]]
        self.changed_rows.add(np.array([block, other], np.int64))

    def record_attention(self, ids: Ids, attention: npt.NDArray[np.uint32], step: int) -> None:
        """Record measured attention (`ledger.attention_units`) of active blocks. If `ids` contains a block several
        times, the maximum is recorded.
        """
        self._is_measured = True
        order = np.argsort(attention, kind="stable")
        self.ledger.attention[ids[order]] = attention[order]  # of a repeated block, the last value stays
        self.ledger.attention_step[ids] = step
        self.changed_rows.add(ids)

    def record_skips(self, ids: Ids, skipped: npt.NDArray[np.uint32]) -> None:
        """Record how often sparse attention skipped each active block: `skipped` is the fraction of KV heads of sparse
        layers that did not read it, in `ledger.attention_units`.

        If `ids` contains a block several times, the minimum is recorded.
        """
        self._is_measured = True
        order = np.argsort(skipped, kind="stable")[::-1]
        self.ledger.skipped[ids[order]] = skipped[order]  # of a repeated block, the last value stays
        self.changed_rows.add(ids)

    def seal(self, block: int, prefix: Prefix) -> None:
        """Insert a full active block into the prefix cache.

        If another block has the same prefix, the new block remains unhashed and is freed when it is released.
        """
        if self.index is not None and self.index.insert(block, prefix):
            assert self.history is not None, "an index without a history"
            self.history.record_cached(prefix)
            self._hashes[block] = published_hash(prefix.digest)
            self._parents[block] = prefix.published_parent
            self.changed_rows.add_one(block)
            if self.cache_log is not None:
                self.cache_log.record_stored(prefix)

    def reset_prefix_cache(self) -> int:
        """Drop every prefix, including pinned ones. Returns the number of cached blocks that became free."""
        if self.index is None:
            return 0
        assert self.history is not None, "an index without a history"
        self.history.clear()
        if self.cache_log is not None:
            self.cache_log.record_cleared()
        hashed = np.array(self.index.clear(), np.int64)
        self._unhash(hashed)
        self.changed_rows.add(hashed)
        idle = np.array(self._eviction_order.clear(), np.int64)
        self._clear(idle)
        return len(idle)

    def pin(self, blocks: Sequence[int]) -> None:
        """Protect hashed blocks from eviction until `unpin`. Reduces `num_available` by up to `len(blocks)`."""
        assert all(self._hashes[block] for block in blocks), f"a block of {blocks} holds no prefix"
        self._eviction_order.pin(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Make blocks evictable again. Blocks that are not pinned are ignored."""
        self._eviction_order.unpin(blocks)

    def is_evictable(self, block: int) -> bool:
        return block in self._eviction_order

    def evict(self, blocks: Sequence[int]) -> None:
        """Drop the prefixes of evictable, distinct `blocks`, which become free."""
        for block in blocks:
            self._eviction_order.remove(block)
        self._drop_prefixes(list(blocks))
        self._clear(np.array(blocks, np.int64))

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool's data structures agree with each other and with `tables`.

        `tables` are the block tables of all requests. For requests that reserve blocks in advance, they are the
        reservations, which contain the block tables.
        """
        prefixes = self.index.items() if self.index is not None else []
        self._free.check()
        self._eviction_order.check(0, self.num_blocks)
        blocks = self.ledger.part(0, self.num_blocks)
        assert all(blocks.hash[block] for block in self.pinned), "a block is pinned that holds no prefix"
        check_pool(
            blocks, self.block_size, self._free.ids, self._eviction_order.cached, prefixes, tables, self._free.unmapped
        )

    def _activate_one(self, block: int, owner: int, group: int) -> None:
        # The other columns of a free block are zero already.
        self.ledger.state[block] = BlockState.ACTIVE
        self._ref_counts[block] = 1
        self.ledger.owner[block] = owner
        self.ledger.group[block] = group
        self.changed_rows.add_one(block)

    def _activate(self, ids: Ids, owner: int, group: int = 0) -> None:
        self._fill_rows(ids, BlockState.ACTIVE, owner, ref_count=1, group=group)

    def _clear(self, ids: Ids) -> None:
        if len(ids):
            self._fill_rows(ids, BlockState.FREE, NO_OWNER, ref_count=0, group=0)
            self._free.append_n(ids)

    def _fill_rows(self, ids: Ids, state: BlockState, owner: int, ref_count: int, group: int) -> None:
        ledger = self.ledger
        ledger.group[ids] = group
        ledger.state[ids] = state
        ledger.ref_count[ids] = ref_count
        ledger.owner[ids] = owner
        ledger.filled[ids] = 0
        ledger.prefix_hits[ids] = 0
        if self._is_measured:
            ledger.attention[ids] = 0
            ledger.attention_step[ids] = 0
            ledger.skipped[ids] = 0
        self.changed_rows.add(ids)

    def _unhash(self, ids: Ids) -> None:
        self.ledger.hash[ids] = 0
        self.ledger.parent[ids] = 0

    def _mark_cached(self, ids: Ids) -> None:
        """Mark hashed blocks without references as cached. The first of `ids` is evicted first."""
        self.ledger.state[ids] = BlockState.CACHED
        self._eviction_order.add(ids)

    def _evict(self, count: int) -> list[int]:
        assert count <= len(self._eviction_order), f"{count} blocks to evict, {len(self._eviction_order)} cached"
        blocks = self._eviction_order.pop(count)
        self._drop_prefixes(blocks)
        return blocks

    def _drop_prefixes(self, blocks: list[int]) -> None:
        """Drop or offload the prefixes of cached blocks that are no longer in the eviction order."""
        assert self.index is not None, "a block is cached without a prefix index"
        prefixes = [self.index.remove(block) for block in blocks]
        if self.cache_log is not None:
            self.cache_log.record_removed(prefixes)
        assert self.history is not None, "an index without a history"
        self.history.record_lost(prefixes if self.lower_tier is None else self._offload(blocks, prefixes), self.step)
        self._unhash(np.array(blocks, np.int64))
        self.evicted_blocks += len(blocks)
        self.moves.record_evicted(blocks)

    def _offload(self, blocks: list[int], prefixes: list[Prefix]) -> list[Prefix]:
        """Offload evicted blocks to the lower tier. Returns the prefixes that are lost."""
        assert self.lower_tier is not None, "there is no lower tier"
        are_kept = self.lower_tier.offload(blocks, prefixes)
        return [prefix for prefix, is_kept in zip(prefixes, are_kept, strict=True) if not is_kept]
