"""Grows, shares, swaps out and frees the block tables of requests. No other module writes to them.

Independent of the scheduling order. The scheduler owns the pool, the allocation policy and the change log.
"""

from __future__ import annotations

from kvscope_engine.policy.allocation.allocation_policy import AllocationPolicy
from kvscope_engine.policy.block_needs import num_blocks_for
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import NULL_BLOCK
from kvscope_engine.policy.kv_offload.lower_tiers import LowerTiers
from kvscope_engine.policy.request import NO_NULL_BLOCKS, Request
from kvscope_engine.policy.scheduling.change_log import ChangeLog
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.request_prefixes import prefix_at
from kvscope_engine.policy.scheduling.reusable_blocks import Reusable


class BlockTables:
    """Changes block tables, and records the changes in the pool and the change log."""

    def __init__(
        self, pool: BlockPool, allocation: AllocationPolicy, changes: ChangeLog, tiers: LowerTiers | None
    ) -> None:
        self._tiers = tiers
        self._forked: set[int] = set()
        """Numbers of forked requests and their parents, whose last block may be shared with another table or
        the prefix cache.
        """
        self._pool = pool
        self._allocation = allocation
        self._changes = changes
        self.reserves = allocation.reserves
        """Whether requests may hold blocks that are not in their block tables yet."""
        self._no_null_blocks = NO_NULL_BLOCKS * len(pool.groups)
        self._windows = [(group, rule) for group, rule in enumerate(pool.groups) if rule.window]

    def init_tables(self, request: Request) -> None:
        request.block_tables = tuple([] for _ in self._pool.groups)
        request.num_null_blocks = self._no_null_blocks

    @property
    def has_shared_last_blocks(self) -> bool:
        """Whether any request may have to copy a shared last block before it writes to it."""
        return bool(self._forked)

    def num_needed(self, request: Request, stop: int) -> int:
        """Return the number of new blocks needed to write the request's uncomputed tokens up to position `stop`."""
        tables = request.block_tables
        missing = -(-stop // self._pool.block_size) - len(tables[0])
        if not self._forked:  # fast path: nearly always so, and called for each request in each step
            return missing * len(tables) if missing > 0 else 0
        return len(self._shared_tails(request)) + max(0, missing) * len(tables)

    def num_available(self, request: Request) -> int:
        return self._allocation.num_available(request)

    def num_held(self, request: Request) -> int:
        return self._allocation.num_held(request)

    def num_reserved_blocks(self, request: Request) -> int:
        return self._allocation.num_reserved_blocks(request)

    def grow(self, request: Request, count: int, step: int, builder: PlanBuilder) -> None:
        """Allocate the `count` blocks that `num_needed` returned."""
        evicted_before = self._pool.evicted_blocks
        copies = self._copy_shared_tails(request, step, builder)
        if self.reserves:
            self._move(request, count, step, builder)
        if count > copies:
            tables = request.block_tables
            self._changes.record_table(request, len(tables[0]))
            for group, table in enumerate(tables):
                table += self._allocation.allocate(request, (count - copies) // len(tables), group)
            if self.reserves:
                request.num_reserved_tokens = self._allocation.num_reserved_tokens(request)
        self._record_evictions(evicted_before, request, builder)

    def start(self, request: Request, found: Reusable, step: int, builder: PlanBuilder) -> int:
        """Start the request with the cached blocks in `found`. Returns the number of tokens in them.

        Blocks in lower tiers are loaded into newly allocated blocks, for which `num_available` must suffice. If a block
        cannot be read, the tokens end before it.
        """
        if not found:
            return 0
        if not found.num_to_load:
            self._pool.hit(found.hits, step)
            tables, num_tokens = tuple(list(table) for table in found.tables), found.num_tokens
        else:
            evicted_before = self._pool.evicted_blocks
            tables, num_tokens = self._load(request, found, step, builder)
            self._record_evictions(evicted_before, request, builder)
        if self._tiers is not None and request.saved_tables:
            self._tiers.release_saved(request)
        request.block_tables = tables
        request.num_null_blocks = found.num_null_blocks if num_tokens else self._no_null_blocks
        self._changes.record_table(request, 0)
        return num_tokens

    def free_unread(self, request: Request, step: int) -> None:
        """Free blocks that no later token of the request reads. Their prefixes stay in the prefix cache."""
        size = self._pool.block_size
        for group, rule in self._windows:
            first, stop = request.num_null_blocks[group], rule.num_unread(request.num_computed_tokens, size)
            if stop > first:
                table = request.block_tables[group]
                self._pool.release(table[first:stop], step)
                table[first:stop] = [NULL_BLOCK] * (stop - first)
                counts = request.num_null_blocks
                request.num_null_blocks = (*counts[:group], stop, *counts[group + 1 :])
                self._changes.record_table(request, first, group)

    @property
    def has_windows(self) -> bool:
        """Whether any KV group has a window, so that blocks are freed while their request runs."""
        return bool(self._windows)

    def swap_out(self, request: Request, step: int, builder: PlanBuilder) -> bool:
        """Move the content of the request's computed blocks to a lower tier, and release all its blocks.

        Returns False, and does nothing, if nothing is computed, there is no lower tier, or the lower tier has no space.
        """
        size, num_tokens = self._pool.block_size, request.num_computed_tokens
        if self._tiers is None or not num_tokens:
            return False
        num_full, num_filled = num_tokens // size, num_blocks_for(num_tokens, size)
        entries = [
            (group, index)
            for group, num_null in enumerate(request.num_null_blocks)
            for index in range(num_null, num_filled)
        ]
        blocks = [builder.content_of(request.block_tables[group][index]) for group, index in entries]
        prefixes = [
            prefix_at(self._pool, request, index, group) if index < num_full else None for group, index in entries
        ]
        rows = self._tiers.swap_out(
            request, blocks, prefixes, [min(size, num_tokens - index * size) for _, index in entries]
        )
        if rows is None:
            return False
        request.saved_tables = tuple([NULL_BLOCK] * num_filled for _ in request.block_tables)
        for (group, index), row in zip(entries, rows, strict=True):
            request.saved_tables[group][index] = row
        request.num_saved_tokens = num_tokens
        self.release(request, step, keep_saved=True)
        return True

    def share(self, parent: Request, child: Request) -> None:
        """Put the parent's blocks with the child's computed tokens into the child's block tables, and add
        references to these blocks.
        """
        held = num_blocks_for(child.num_computed_tokens, self._pool.block_size)
        child.block_tables = tuple(table[:held] for table in parent.block_tables)
        child.num_null_blocks = parent.num_null_blocks
        self._pool.share(child.held_blocks)
        self._forked |= {parent.number, child.number}
        self._changes.record_table(child, 0)

    def release(self, request: Request, step: int, *, keep_saved: bool = False) -> None:
        """Release every block of the request, and its blocks in lower tiers unless `keep_saved`."""
        if self._tiers is not None and request.saved_tables and not keep_saved:
            self._tiers.release_saved(request)
            self._changes.record_table(request, 0)
        self._forked.discard(request.number)
        if request.block_table:
            self._allocation.release(request, step)
            for table in request.block_tables:
                table.clear()
            request.num_reserved_tokens = 0
            self._changes.record_table(request, 0)
        if not keep_saved:
            request.num_null_blocks = self._no_null_blocks

    def trim(self, request: Request, step: int) -> None:
        """Release the blocks after the last computed token, which were allocated for rejected drafts or could not be
        loaded.
        """
        held = num_blocks_for(request.num_computed_tokens, self._pool.block_size)
        if len(request.block_table) > held:
            self._pool.release([block for table in request.block_tables for block in table[held:]], step)
            for table in request.block_tables:
                del table[held:]
            self._changes.record_table(request, held)

    def commit(self, step: int) -> None:
        if self.reserves:
            self._allocation.commit(step)

    def _record_evictions(self, evicted_before: int, request: Request, builder: PlanBuilder) -> None:
        """If cached blocks were evicted since the count `evicted_before`, record that `request` needed them,
        unless another request is recorded for this step already.
        """
        if self._pool.evicted_blocks > evicted_before:
            builder.evicted_for = builder.evicted_for or request.number

    def _load(
        self, request: Request, found: Reusable, step: int, builder: PlanBuilder
    ) -> tuple[tuple[list[int], ...], int]:
        """Load blocks in lower tiers into new blocks. Returns the resulting block tables and the number of tokens in
        them.

        The tables end before the first block that could not be read. If there is such a block and a KV group has a
        window, the tables are empty, because earlier blocks cannot be used without the unreadable block.
        """
        assert self._tiers is not None, "rows of a lower tier without one"
        pool, size = self._pool, self._pool.block_size
        tables = tuple(list(table) for table in found.tables)
        entries = [
            (group, index)
            for group, table in enumerate(tables)
            for index, row in enumerate(table)
            if row >= pool.num_blocks
        ]
        rows = [tables[group][index] for group, index in entries]
        self._tiers.acquire(rows)
        pool.hit(found.hits, step)
        new_blocks = [
            self._avoid_copy_source(block, builder)
            for group, table in enumerate(tables)
            for block in self._allocation.allocate(request, sum(row >= pool.num_blocks for row in table), group)
        ]
        are_read = self._tiers.load(rows, new_blocks)
        lost = [index for (_, index), is_whole in zip(entries, are_read, strict=True) if not is_whole]
        end = len(tables[0]) if not lost else 0 if self._windows else min(lost)
        for (group, index), block in zip(entries, new_blocks, strict=True):
            tables[group][index] = block
        loaded = [(row, block) for (_, index), row, block in zip(entries, rows, new_blocks, strict=True) if index < end]
        self._write_loaded(request, loaded, step)
        self._tiers.release(rows)
        for table, num_null in zip(tables, found.num_null_blocks, strict=True):
            pool.release(table[max(end, num_null) :], step)
            del table[end:]
        return tables, min(found.num_tokens, end * size)

    def _write_loaded(self, request: Request, loaded: list[tuple[int, int]], step: int) -> None:
        """Record loaded blocks in the ledger and the prefix cache.

        `loaded` contains a pair (ledger row in a lower tier, block of the pool) for each block.
        """
        assert self._tiers is not None, "rows of a lower tier without one"
        blocks = [block for _, block in loaded]
        self._pool.record_write(
            blocks, [self._tiers.filled(row) for row, _ in loaded], [request.number] * len(blocks), step
        )
        for row, block in loaded:
            prefix = self._tiers.prefix(row)
            if prefix is not None:
                self._pool.seal(block, prefix)

    def _move(self, request: Request, count: int, step: int, builder: PlanBuilder) -> None:
        """Copy all blocks of the request to new blocks, if the allocation policy requires that to add `count` blocks.

        No target is the source of another copy of this step, because copies run in any order.
        """
        targets = self._allocation.move(request, count)
        if targets is None:
            return
        self._pool.record_move(request.block_table, targets, request.number, step)
        for source, target in zip(request.block_table, targets, strict=True):
            builder.copy(request, source, target)
        request.block_table[:] = targets
        self._changes.record_table(request, 0)

    def _shared_tails(self, request: Request) -> list[int]:
        """Return the KV groups in which the request's next token would be written to a shared block."""
        if request.number not in self._forked:
            return []
        index, slot = divmod(request.num_computed_tokens, self._pool.block_size)
        shared = [
            group
            for group, table in enumerate(request.block_tables)
            if slot and not self._pool.is_private(table[index])
        ]
        if not shared:
            self._forked.discard(request.number)  # it writes only to its own blocks until the next fork
        return shared

    def _copy_shared_tails(self, request: Request, step: int, builder: PlanBuilder) -> int:
        """Copy shared last blocks before the request writes to them (copy on write).

        Returns the number of blocks allocated.
        """
        groups = self._shared_tails(request) if self._forked else []
        index = request.num_computed_tokens // self._pool.block_size
        for group in groups:
            shared = request.block_tables[group][index]
            (new_block,) = self._allocation.allocate(request, 1, group)
            new_block = self._avoid_copy_source(new_block, builder)
            self._pool.release([shared], step)
            request.block_tables[group][index] = new_block
            builder.copy(request, shared, new_block)
            self._pool.moves.record_copied([new_block])
            builder.num_copied += 1
            self._changes.record_table(request, index, group)
        return len(groups)

    def _avoid_copy_source(self, block: int, builder: PlanBuilder) -> int:
        """Return a block as the target of a copy or a load: the newly allocated `block`, or another one if this step
        copies from `block`.

        A step's copies run after its loads and in any order, so a block must not be both a source and a target. If
        another request copies from `block` in this step, that copy is cancelled: the other request keeps `block`, and
        the former target of its copy is returned.
        """
        cancelled_copy = builder.undo_copy_from(block)
        if cancelled_copy is None:
            return block
        copying_request, target = cancelled_copy
        group = next(group for group, table in enumerate(copying_request.block_tables) if target in table)
        index = copying_request.block_tables[group].index(target)
        copying_request.block_tables[group][index] = block
        self._pool.exchange_owners(block, target)
        self._changes.record_table(copying_request, index, group)
        return target
