"""The block pool: every block's row of the ledger, who may have a block next, and which rows changed.

Owns the ledger, the free list, reference counts, the prefix index and the eviction order. Knows block ids
and request numbers, and neither the requests nor what is computed in a block.

All KV groups take their blocks from it: a block is of the group that it was given out to last, and one order of
eviction serves them all. Where a group lets go of blocks, block 0 is given to nobody (`NULL_BLOCK`).

A block is free (holds nothing), active (`ref_count` block tables or reservations hold it) or cached (held by nobody,
full and hashed; kept for a later prompt, evicted oldest first once no free block is left, unless it is pinned).
`free + cached + active = num_blocks`, always; `check_integrity` says where that, or anything else here, is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvscope_engine.policy.blocks.cache_log import CacheLog
from kvscope_engine.policy.blocks.eviction_order import ChangedRows, EvictionOrder
from kvscope_engine.policy.blocks.free_list import FreeBlocks, FreeList, Ids
from kvscope_engine.policy.blocks.integrity import check_pool
from kvscope_engine.policy.blocks.move_log import MoveLog
from kvscope_engine.policy.kv_groups import NULL_BLOCK, ONE_GROUP, GroupRule
from kvscope_engine.policy.prefixes.prefix_history import PrefixHistory
from kvscope_engine.policy.prefixes.prefix_index import Prefix, PrefixIndex, published_hash
from kvscope_telemetry.ledger import NO_OWNER, BlockState, Ledger, Tier

MAX_PREFIX_HITS: Final = np.iinfo(np.uint16).max


class LowerTier(Protocol):
    """Takes what is evicted."""

    def offload(self, blocks: list[int], prefixes: list[Prefix]) -> list[bool]:
        """`blocks`, which hold `prefixes`, are about to be given away. Returns which prefixes can still be found."""


class BlockPool:
    """`num_blocks` blocks of `block_size` slots, all free at first.

    `salt` seeds the prefix hashes (random when None). `free` says which free block is handed out next (a `FreeList`
    when None). The ledger has more rows behind those of the blocks: one a place of the lower tiers, which `LowerTiers`
    keeps, and then one a slot of recurrent states, on the device and in host memory, which are the `StatePool`'s.
    Methods that change blocks cost the same for one block as for some dozens: numpy is worth it from there on, and
    single blocks have a path of their own.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        salt: bytes | None = None,
        num_host: int = 0,
        num_disk: int = 0,
        num_states: int = 0,
        num_host_states: int = 0,
        free: FreeBlocks | None = None,
        groups: tuple[GroupRule, ...] = ONE_GROUP,
    ) -> None:
        self.num_blocks = num_blocks
        self.groups = groups
        self.block_size = block_size
        self.num_host = num_host
        self.num_disk = num_disk
        self.num_states = num_states
        self.num_host_states = num_host_states
        self.first_state = num_blocks + num_host + num_disk
        self.ledger = Ledger(self.first_state + num_states + num_host_states)
        self.ledger.tier[num_blocks:] = Tier.HOST
        self.ledger.tier[num_blocks + num_host :] = Tier.DISK
        self.ledger.tier[self.first_state :] = Tier.STATES
        self.ledger.tier[self.first_state + num_states :] = Tier.HOST_STATES
        self.index = PrefixIndex(block_size, salt) if prefix_caching else None
        self.history = PrefixHistory() if prefix_caching else None
        self.moves = MoveLog()
        self.lower_tier: LowerTier | None = None
        """Who is told of evicted blocks before they are given away; without one they are forgotten."""
        self.cache_log: CacheLog | None = None
        """Who is told of what enters and leaves the prefix cache; None where nobody wants to know."""
        self.step = 0
        """The step in progress, for who asks when something happened; the scheduler sets it."""
        self.evicted_blocks = 0
        """Cached blocks that lost their prefix since the start: given to another request, or dropped when asked."""
        keeps_null = any(group.window for group in groups)
        self._free: FreeBlocks = free if free is not None else FreeList(num_blocks, keeps_null=keeps_null)
        self.num_usable = num_blocks - keeps_null
        """Blocks that requests can have; where rows are addresses, there may be memory for fewer."""
        if keeps_null:
            self.ledger.state[NULL_BLOCK] = BlockState.UNMAPPED
        self._changed = ChangedRows(self.ledger.num_blocks)
        self._cached = self.make_eviction_order()
        self._is_measured = False
        self._ref_counts = self.ledger.ref_count.data  # 3 x faster than numpy for one element
        self._hashes = self.ledger.hash.data
        self._parents = self.ledger.parent.data

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds, kept for their prefix."""
        return self._cached.num_cached

    @property
    def num_active(self) -> int:
        """Blocks in at least one block table, or reserved for one."""
        return self.num_blocks - len(self._free) - self._cached.num_cached - self.num_unmapped

    @property
    def num_unmapped(self) -> int:
        """Rows that nobody can have: without memory, where rows are addresses, and the null block."""
        return self._free.num_unmapped

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def pinned(self) -> Set[int]:
        """Blocks that are not evicted, in use or cached."""
        return self._cached.pinned

    def ref_count(self, block: int) -> int:
        """How many block tables hold `block`."""
        return self._ref_counts[block]

    def is_private(self, block: int) -> bool:
        """Whether an active block may be written to: one table holds it, and no prompt can find it."""
        return self._ref_counts[block] == 1 and not self._hashes[block]

    def prefix(self, block: int) -> Prefix | None:
        """The tokens in a hashed block, active or cached; None for every other."""
        return self.index.prefix(block) if self.index is not None else None

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are cached and not pinned, so that a hit on them takes away from what is available."""
        idle = self._cached.idle
        return sum(block in idle for block in blocks)

    def allocate(self, count: int, owner: int, group: int = 0) -> list[int]:
        """`count` blocks of a KV group for request `owner`, at most `num_available`; each is held once and empty."""
        if count == 1 and self._free:
            block = self._free.take_one()
            self._activate_one(block, owner, group)
            return [block]
        from_free = min(count, len(self._free))
        blocks = self._free.popleft_n(from_free)
        if count > from_free:
            blocks += self._evict(count - from_free)
        self._activate(np.array(blocks, np.int64), owner, group)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more block table holds these active `blocks` (each once)."""
        ids = np.array(blocks, np.int64)
        self.ledger.ref_count[ids] += 1
        self._changed.add(ids)

    def hit(self, blocks: Sequence[int], step: int) -> None:
        """A prompt found its prefix in `blocks` (each once), active or cached: one more table holds them."""
        ids, ledger = np.array(blocks, np.int64), self.ledger
        for block in ids[ledger.ref_count[ids] == 0].tolist():
            self._cached.remove(block)
        ledger.ref_count[ids] += 1
        ledger.state[ids] = BlockState.ACTIVE
        ledger.prefix_hits[ids] += ledger.prefix_hits[ids] < MAX_PREFIX_HITS
        ledger.last_used_step[ids] = step
        self._changed.add(ids)

    def release(self, blocks: Sequence[int], step: int) -> None:
        """A block table, in its order, lets go of `blocks` (each once).

        The tail goes first: of two blocks of one text the later is evicted first, as it is of no use alone.
        """
        ids, ledger = np.array(blocks[::-1], np.int64), self.ledger
        counts = ledger.ref_count[ids] - 1
        assert not len(ids) or counts.min() >= 0, f"a block of {blocks} was released more often than held"
        ledger.ref_count[ids] = counts
        ledger.last_used_step[ids] = step
        self._changed.add(ids)
        unheld = ids[counts == 0]
        hashed = ledger.hash[unheld] != 0
        self._retire(unheld[hashed])
        self._clear(unheld[~hashed])

    def write(self, blocks: Sequence[int], filled: Sequence[int], owners: Sequence[int], step: int) -> None:
        """Tokens were written: `blocks[i]`, by request `owners[i]`, now has `filled[i]` slots in use."""
        ids, ledger = np.array(blocks, np.int64), self.ledger
        ledger.filled[ids] = filled
        ledger.owner[ids] = owners
        ledger.last_used_step[ids] = step
        self._changed.add(ids)

    def move(self, sources: Sequence[int], targets: Sequence[int], owner: int, step: int) -> None:
        """The tokens of a request go elsewhere: `targets[i]` has what `sources[i]` had, which is empty then."""
        filled = self.ledger.filled[np.array(sources, np.int64)].tolist()
        owners = [owner] * len(targets)
        self.write(sources, [0] * len(sources), owners, step)
        self.write(targets, filled, owners, step)

    def measure(self, ids: Ids, attention: npt.NDArray[np.uint32], step: int) -> None:
        """So much attention (`ledger.attention_units`) fell on active blocks; of a block that is there more than once,
        the most."""
        self._is_measured = True
        order = np.argsort(attention, kind="stable")
        self.ledger.attention[ids[order]] = attention[order]  # the last of a block stays
        self.ledger.attention_step[ids] = step
        self._changed.add(ids)

    def skip(self, ids: Ids, skipped: npt.NDArray[np.uint32]) -> None:
        """Decodes passed over so much (`ledger.attention_units`) of active blocks; of a block that is there more than
        once, the least."""
        self._is_measured = True
        order = np.argsort(skipped, kind="stable")[::-1]
        self.ledger.skipped[ids[order]] = skipped[order]  # the last of a block stays
        self._changed.add(ids)

    def seal(self, block: int, prefix: Prefix) -> None:
        """An active block is full: later prompts may find it.

        When another block holds the same text this one stays unhashed and is freed when it is let go.
        """
        if self.index is not None and self.index.insert(block, prefix):
            assert self.history is not None, "an index without a history"
            self.history.enter(prefix)
            self._hashes[block] = published_hash(prefix.digest)
            self._parents[block] = prefix.published_parent
            self._changed.add_one(block)
            if self.cache_log is not None:
                self.cache_log.stored(prefix)

    def forget(self, prefixes: Iterable[Prefix]) -> None:
        """No tier holds these any more: a later prompt that misses one is told when it went."""
        if self.history is not None:
            self.history.leave(prefixes, self.step)

    def reset_prefix_cache(self) -> int:
        """Forget every prefix, pinned ones too; returns how many cached blocks became free."""
        if self.index is None:
            return 0
        assert self.history is not None, "an index without a history"
        self.history.clear()
        if self.cache_log is not None:
            self.cache_log.cleared()
        hashed = np.array(self.index.clear(), np.int64)
        self._unhash(hashed)
        self._changed.add(hashed)
        idle = np.array(self._cached.clear(), np.int64)
        self._clear(idle)
        return len(idle)

    def pin(self, blocks: Sequence[int]) -> None:
        """These hashed blocks are not evicted until `unpin`; what is available may shrink by as many."""
        assert all(self._hashes[block] for block in blocks), f"a block of {blocks} holds no prefix"
        self._cached.pin(blocks)

    def unpin(self, blocks: Iterable[int]) -> None:
        """They may be evicted again; does nothing for those that are not pinned."""
        self._cached.unpin(blocks)

    def is_evictable(self, block: int) -> bool:
        """Whether a block of the pool is cached and not pinned."""
        return block in self._cached

    def evict(self, blocks: Sequence[int]) -> None:
        """These evictable `blocks` (each once) lose their prefix and become free."""
        for block in blocks:
            self._cached.remove(block)
        self._lose_prefixes(list(blocks))
        self._clear(np.array(blocks, np.int64))

    def make_eviction_order(self) -> EvictionOrder:
        """Return an empty order of eviction for rows of the ledger, which no other order may hold."""
        return EvictionOrder(self.ledger.eviction_order, self._changed)

    def touch_one(self, row: int) -> None:
        """A row of the ledger was changed by who keeps it."""
        self._changed.add_one(row)

    def touch(self, rows: Ids) -> None:
        """Rows of the ledger, each at most once, were changed by who keeps them."""
        self._changed.add(rows)

    def take_changed(self) -> npt.NDArray[np.uint32]:
        """Ids of the rows touched since the last call, sorted, each once."""
        return self._changed.drain()

    @property
    def has_changes(self) -> bool:
        """Whether any row was touched since `take_changed`."""
        return bool(self._changed)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError, saying what is wrong and where, unless all agrees with `tables`.

        They are the block tables, or where blocks are reserved the reservations, of which tables are a part.
        """
        prefixes = self.index.items() if self.index is not None else []
        self._free.check()
        self._cached.check(0, self.num_blocks)
        blocks = self.ledger.part(0, self.num_blocks)
        assert all(blocks.hash[block] for block in self.pinned), "a block is pinned that holds no prefix"
        check_pool(blocks, self.block_size, self._free.ids, self._cached.cached, prefixes, tables, self._free.unmapped)

    def _activate_one(self, block: int, owner: int, group: int) -> None:
        # A free block's other columns are zero already.
        self.ledger.state[block] = BlockState.ACTIVE
        self._ref_counts[block] = 1
        self.ledger.owner[block] = owner
        self.ledger.group[block] = group
        self._changed.add_one(block)

    def _activate(self, ids: Ids, owner: int, group: int = 0) -> None:
        self._fill_rows(ids, BlockState.ACTIVE, owner, ref_count=1, group=group)

    def _clear(self, ids: Ids) -> None:
        """Unheld, unhashed blocks become free."""
        if len(ids):
            self._fill_rows(ids, BlockState.FREE, NO_OWNER, ref_count=0, group=0)
            self._free.give(ids)

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
        self._changed.add(ids)

    def _unhash(self, ids: Ids) -> None:
        self.ledger.hash[ids] = 0
        self.ledger.parent[ids] = 0

    def _retire(self, ids: Ids) -> None:
        """Unheld, hashed blocks become cached, the first of `ids` the first to be evicted."""
        self.ledger.state[ids] = BlockState.CACHED
        self._cached.add(ids)

    def _evict(self, count: int) -> list[int]:
        assert count <= len(self._cached), f"{count} blocks to evict, {len(self._cached)} cached"
        blocks = self._cached.pop(count)
        self._lose_prefixes(blocks)
        return blocks

    def _lose_prefixes(self, blocks: list[int]) -> None:
        """Cached blocks that are out of the order of eviction already."""
        assert self.index is not None, "a block is cached without a prefix index"
        prefixes = [self.index.remove(block) for block in blocks]
        if self.cache_log is not None:
            self.cache_log.removed(prefixes)
        self.forget(prefixes if self.lower_tier is None else self._offload(blocks, prefixes))
        self._unhash(np.array(blocks, np.int64))
        self.evicted_blocks += len(blocks)
        self.moves.evicted(blocks)

    def _offload(self, blocks: list[int], prefixes: list[Prefix]) -> list[Prefix]:
        """Hand evicted blocks down; returns the prefixes that are lost."""
        assert self.lower_tier is not None, "nobody takes what is evicted"
        kept = self.lower_tier.offload(blocks, prefixes)
        return [prefix for prefix, is_kept in zip(prefixes, kept, strict=True) if not is_kept]
