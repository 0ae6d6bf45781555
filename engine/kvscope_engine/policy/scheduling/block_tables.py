"""Block tables: how they grow, are shared, swapped out and let go of. The only code that writes a request's table.

Owns nothing: pool, allocation policy and change log are the scheduler's. Knows no order of service.
"""

from __future__ import annotations

from kvscope_engine.policy.allocation.protocol import AllocationPolicy
from kvscope_engine.policy.blocks.block_pool import BlockPool
from kvscope_engine.policy.fit import num_blocks_for
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.changes import ChangeLog
from kvscope_engine.policy.scheduling.plan_builder import PlanBuilder
from kvscope_engine.policy.scheduling.request_prefixes import prefix_at
from kvscope_engine.policy.scheduling.reuse import Reusable
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers


class BlockTables:
    """Changes block tables and tells the pool and the change log."""

    def __init__(
        self, pool: BlockPool, allocation: AllocationPolicy, changes: ChangeLog, tiers: LowerTiers | None
    ) -> None:
        self._tiers = tiers
        self._forked: set[int] = set()
        """Requests whose last block another table may hold, or the prefix cache: forks and whom they came from."""
        self._pool = pool
        self._allocation = allocation
        self._changes = changes
        self._reserves = allocation.reserves

    @property
    def any_shares_tail(self) -> bool:
        """Whether a request may write next to a block that is not its alone."""
        return bool(self._forked)

    def num_needed(self, request: Request, stop: int) -> int:
        """New blocks it takes to write the request's tokens from the first not computed up to `stop`."""
        missing = -(-stop // self._pool.block_size) - len(request.block_table)
        shared = 1 if self._forked and self._shares_tail(request) else 0
        return shared + missing if missing > 0 else shared

    def num_available(self, request: Request) -> int:
        """Blocks that the request could be given now."""
        return self._allocation.num_available(request)

    def num_held(self, request: Request) -> int:
        """Blocks that `release` would let go of."""
        return self._allocation.num_held(request)

    def num_set_aside(self, request: Request) -> int:
        """Blocks that it gets at once when it starts, used or not; 0 where they come as tokens do."""
        return self._allocation.num_set_aside(request)

    def grow(self, request: Request, count: int, step: int, builder: PlanBuilder) -> None:
        """Give the request the `count` blocks that `num_needed` said."""
        evicted_before = self._pool.evicted_blocks
        copies = self._copy_shared_tail(request, step, builder)
        if self._reserves:
            self._move(request, count, step, builder)
        if count > copies:
            self._changes.table(request, len(request.block_table))
            request.block_table += self._allocation.allocate(request, count - copies)
            if self._reserves:
                request.num_reserved_tokens = self._allocation.num_reserved_tokens(request)
        self._note_evictions(evicted_before, request, builder)

    def start(self, request: Request, found: Reusable, step: int, builder: PlanBuilder) -> int:
        """The request starts with what was found for it; returns how many tokens that turned out to be.

        What comes from a lower tier gets blocks of its own, which `num_available` must have; what could not be read
        back ends it there.
        """
        if not found.sources:
            return 0
        if len(found.hits) == len(found.sources):
            self._pool.hit(found.hits, step)
            table, num_tokens = list(found.sources), found.num_tokens
        else:
            evicted_before = self._pool.evicted_blocks
            table, num_tokens = self._load(request, found, step, builder)
            self._note_evictions(evicted_before, request, builder)
        if self._tiers is not None and request.saved_rows:
            self._tiers.let_go(request)
        request.block_table[:] = table
        self._changes.table(request, 0)
        return num_tokens

    def swap_out(self, request: Request, step: int, builder: PlanBuilder) -> bool:
        """Release every block, and keep what the computed tokens' blocks hold in a lower tier.

        False, and nothing done, when there is none or it has no room.
        """
        size, tokens = self._pool.block_size, request.num_computed_tokens
        if self._tiers is None or not tokens:
            return False
        num_full = tokens // size
        blocks = [builder.content_of(block) for block in request.block_table[: num_blocks_for(tokens, size)]]
        prefixes = [prefix_at(self._pool, request, place) if place < num_full else None for place in range(len(blocks))]
        if not self._tiers.swap_out(request, blocks, prefixes):
            return False
        self.release(request, step, keep_saved=True)
        return True

    def share(self, parent: Request, child: Request) -> None:
        """The child's table becomes that of the parent's first tokens, as many as the child has computed."""
        held = num_blocks_for(child.num_computed_tokens, self._pool.block_size)
        child.block_table[:] = parent.block_table[:held]
        self._pool.share(child.block_table)
        self._forked |= {parent.number, child.number}
        self._changes.table(child, 0)

    def release(self, request: Request, step: int, *, keep_saved: bool = False) -> None:
        """Let go of every block of the request, and of what it saved in lower tiers."""
        if self._tiers is not None and request.saved_rows and not keep_saved:
            self._tiers.let_go(request)
            self._changes.table(request, 0)
        self._forked.discard(request.number)
        if request.block_table:
            self._allocation.release(request, step)
            request.block_table.clear()
            request.num_reserved_tokens = 0
            self._changes.table(request, 0)

    def trim(self, request: Request, step: int) -> None:
        """Let go of blocks behind those of the tokens computed: they were for drafts that were wrong."""
        held = num_blocks_for(request.num_computed_tokens, self._pool.block_size)
        spare = request.block_table[held:]
        if spare:
            del request.block_table[held:]
            self._pool.release(spare, step)
            self._changes.table(request, held)

    def settle(self, step: int) -> None:
        """The plan of the step was run."""
        if self._reserves:
            self._allocation.settle(step)

    def _note_evictions(self, evicted_before: int, request: Request, builder: PlanBuilder) -> None:
        """Remember for whom the first cached block of the step was evicted."""
        if self._pool.evicted_blocks > evicted_before:
            builder.evicted_for = builder.evicted_for or request.number

    def _load(self, request: Request, found: Reusable, step: int, builder: PlanBuilder) -> tuple[list[int], int]:
        """Hits as they are, and blocks for what comes from below; the table and the tokens in it."""
        assert self._tiers is not None, "rows of a lower tier without one"
        pool, size = self._pool, self._pool.block_size
        places = [place for place, source in enumerate(found.sources) if source >= pool.num_blocks]
        rows = [found.sources[place] for place in places]
        self._tiers.acquire(rows)
        pool.hit(found.hits, step)
        own = [self._unless_source(block, builder) for block in self._allocation.allocate(request, len(rows))]
        whole = self._tiers.load(rows, own)
        lost = [place for place, is_whole in zip(places, whole, strict=True) if not is_whole]
        end = lost[0] if lost else len(found.sources)
        table = list(found.sources)
        for place, block in zip(places, own, strict=True):
            table[place] = block
        kept = [(row, block) for place, row, block in zip(places, rows, own, strict=True) if place < end]
        self._write_loaded(request, kept, step)
        self._tiers.release(rows)
        pool.release(table[end:], step)
        return table[:end], min(found.num_tokens, end * size)

    def _write_loaded(self, request: Request, loaded: list[tuple[int, int]], step: int) -> None:
        """Blocks hold what rows of lower tiers held."""
        assert self._tiers is not None, "rows of a lower tier without one"
        blocks = [block for _, block in loaded]
        self._pool.write(blocks, [self._tiers.filled(row) for row, _ in loaded], [request.number] * len(blocks), step)
        for row, block in loaded:
            prefix = self._tiers.prefix(row)
            if prefix is not None:
                self._pool.seal(block, prefix)

    def _move(self, request: Request, count: int, step: int, builder: PlanBuilder) -> None:
        """All blocks go elsewhere when the policy says so; no target is a source of this step, as copies need it."""
        targets = self._allocation.move(request, count)
        if targets is None:
            return
        sources, owners = request.block_table, [request.number] * len(targets)
        filled = self._pool.ledger.filled[sources].tolist()
        self._pool.write(sources, [0] * len(sources), owners, step)
        self._pool.write(targets, filled, owners, step)
        for source, target in zip(sources, targets, strict=True):
            builder.copy(request, source, target)
        request.block_table[:] = targets
        self._changes.table(request, 0)

    def _shares_tail(self, request: Request) -> bool:
        """Whether the request's next token goes to a block that is not its alone to write to: only forks have such."""
        if request.number not in self._forked:
            return False
        place, slot = divmod(request.num_computed_tokens, self._pool.block_size)
        if slot and not self._pool.is_private(request.block_table[place]):
            return True
        self._forked.discard(request.number)  # what it writes to from now on is its own, until another fork
        return False

    def _copy_shared_tail(self, request: Request, step: int, builder: PlanBuilder) -> int:
        """Copy on write of a last block that is not the request's alone to write to; returns the blocks it took."""
        if not self._shares_tail(request):
            return 0
        place = request.num_computed_tokens // self._pool.block_size
        shared = request.block_table[place]
        (own,) = self._allocation.allocate(request, 1)
        own = self._unless_source(own, builder)
        self._pool.release([shared], step)
        request.block_table[place] = own
        builder.copy(request, shared, own)
        self._pool.moves.copied([own])
        builder.num_copied += 1
        self._changes.table(request, place)
        return 1

    def _unless_source(self, block: int, builder: PlanBuilder) -> int:
        """`block`, just taken to be copied or loaded to, or another when this step copies from it.

        Copies have no order, and come after loads. It was let go of in this step, so whoever copies from it may as
        well keep it, and gives its own target.
        """
        undone = builder.undo_copy_from(block)
        if undone is None:
            return block
        keeper, target = undone
        place = keeper.block_table.index(target)
        keeper.block_table[place] = block
        self._changes.table(keeper, place)
        return target
