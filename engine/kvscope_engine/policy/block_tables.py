"""Block tables: how they grow, are shared and are let go of. The only code that writes a request's table.

Owns nothing: pool, allocation policy and change log are the scheduler's. Knows no order of service.
"""

from __future__ import annotations

from kvscope_engine.policy.allocation import AllocationPolicy
from kvscope_engine.policy.block_pool import BlockPool
from kvscope_engine.policy.changes import ChangeLog
from kvscope_engine.policy.draft import Draft
from kvscope_engine.policy.fit import num_blocks_for
from kvscope_engine.policy.request import Request


class BlockTables:
    """Changes block tables and tells the pool and the change log."""

    def __init__(self, pool: BlockPool, allocation: AllocationPolicy, changes: ChangeLog) -> None:
        self._pool = pool
        self._allocation = allocation
        self._changes = changes
        self._reserves = allocation.reserves

    def num_needed(self, request: Request, stop: int) -> int:
        """New blocks it takes to write the request's tokens from the first not computed up to `stop`."""
        start, size = request.num_computed_tokens, self._pool.block_size
        missing = -(-stop // size) - len(request.block_table)
        shared = start % size and self._pool.ref_count(request.block_table[start // size]) > 1
        return (missing if missing > 0 else 0) + (1 if shared else 0)

    def num_available(self, request: Request) -> int:
        """Blocks that the request could be given now."""
        return self._allocation.num_available(request)

    def num_held(self, request: Request) -> int:
        """Blocks that `release` would let go of."""
        return self._allocation.num_held(request)

    def grow(self, request: Request, count: int, step: int, draft: Draft) -> None:
        """Give the request the `count` blocks that `num_needed` said."""
        evicted_before = self._pool.evicted_blocks
        copies = self._copy_shared_tail(request, step, draft)
        if self._reserves:
            self._move(request, count, step, draft)
        if count > copies:
            self._changes.table(request, len(request.block_table))
            request.block_table += self._allocation.take(request, count - copies)
            if self._reserves:
                request.num_reserved_tokens = self._allocation.num_reserved_tokens(request)
        if self._pool.evicted_blocks > evicted_before:
            draft.evicted_for = draft.evicted_for or request.number

    def take_hits(self, request: Request, hits: list[int], step: int) -> None:
        """The request starts with blocks of the prefix cache."""
        if hits:
            self._pool.hit(hits, step)
            request.block_table[:] = hits
            self._changes.table(request, 0)

    def share(self, parent: Request, child: Request) -> None:
        """The child's table becomes that of the parent's computed tokens."""
        held = num_blocks_for(parent.num_computed_tokens, self._pool.block_size)
        child.block_table[:] = parent.block_table[:held]
        self._pool.share(child.block_table)
        self._changes.table(child, 0)

    def release(self, request: Request, step: int) -> None:
        """Let go of every block of the request."""
        if request.block_table:
            self._allocation.release(request, step)
            request.block_table.clear()
            request.num_reserved_tokens = 0
            self._changes.table(request, 0)

    def settle(self, step: int) -> None:
        """The plan of the step was run."""
        if self._reserves:
            self._allocation.settle(step)

    def _move(self, request: Request, count: int, step: int, draft: Draft) -> None:
        """All blocks go elsewhere when the policy says so; no target is a source of this step, as copies need it."""
        targets = self._allocation.move(request, count)
        if targets is None:
            return
        sources, owners = request.block_table, [request.number] * len(targets)
        filled = self._pool.ledger.filled[sources].tolist()
        self._pool.write(sources, [0] * len(sources), owners, step)
        self._pool.write(targets, filled, owners, step)
        for source, target in zip(sources, targets, strict=True):
            draft.copy(request, source, target)
        request.block_table[:] = targets
        self._changes.table(request, 0)

    def _copy_shared_tail(self, request: Request, step: int, draft: Draft) -> int:
        """Copy on write of a partial last block that another table holds too; returns the blocks it took."""
        place, slot = divmod(request.num_computed_tokens, self._pool.block_size)
        if not slot or self._pool.ref_count(request.block_table[place]) == 1:
            return 0
        shared = request.block_table[place]
        (own,) = self._allocation.take(request, 1)
        own = self._unless_source(own, draft)
        self._pool.release([shared], step)
        request.block_table[place] = own
        draft.copy(request, shared, own)
        self._changes.table(request, place)
        return 1

    def _unless_source(self, block: int, draft: Draft) -> int:
        """`block`, just taken to be copied to, or another when this step copies from it; copies have no order.

        It was freed in this step, by a preemption: so whoever copies from it may as well keep it, and gives its
        own target.
        """
        undone = draft.undo_copy_from(block)
        if undone is None:
            return block
        keeper, target = undone
        place = keeper.block_table.index(target)
        keeper.block_table[place] = block
        self._changes.table(keeper, place)
        return target
