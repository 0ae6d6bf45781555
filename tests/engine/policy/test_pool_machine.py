"""A state machine over the block pool: whatever is done in whatever order, the pool stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as check_machine

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.kv_groups import ONE_GROUP, find_prefix
from kvscope_engine.policy.prefixes.prefix_index import Prefix, pack_tokens

MAX_TABLES: Final = 12


class Text:
    """A block table and the tokens in it."""

    def __init__(self, owner: int, tokens: list[int], table: list[int], computed: int) -> None:
        self.owner = owner
        self.tokens = tokens
        self.table = table
        self.computed = computed


class PoolMachine(RuleBasedStateMachine):
    """Block tables are the model: the pool must agree with them after each rule."""

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 5),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def begin(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching, salt=b"machine")
        self.size = block_size
        self.texts: list[Text] = []
        self.step = 0
        self.next_owner = 1
        self.evicted = 0

    @rule(family=st.integers(0, 2), length=st.integers(1, 20))
    def admit(self, family: int, length: int) -> None:
        """A prompt takes what is cached of it, then new blocks, and is computed."""
        self.step += 1
        tokens = [family * 100 + place for place in range(length)]
        hits = self._find(tokens)
        missing = -(-length // self.size) - len(hits)
        if len(self.texts) >= MAX_TABLES or missing > self.pool.num_available - self.pool.num_idle(hits):
            return
        if hits:
            self.pool.hit(hits, self.step)
        text = Text(self.next_owner, tokens, list(hits), len(hits) * self.size)
        text.table += self.pool.allocate(missing, text.owner)
        self.next_owner += 1
        self.texts.append(text)
        self._compute(text)

    @precondition(lambda self: bool(self.texts))
    @rule(pick=st.integers(0, MAX_TABLES), token=st.integers(0, 1))
    def append(self, pick: int, token: int) -> None:
        """A token more: perhaps a new block, perhaps a copy of a shared tail."""
        self.step += 1
        text = self.texts[pick % len(self.texts)]
        slot = text.computed % self.size
        shared = slot != 0 and self.pool.ref_count(text.table[-1]) > 1
        if (slot == 0 or shared) and not self.pool.num_available:
            return
        if slot == 0:
            text.table += self.pool.allocate(1, text.owner)
        elif shared:
            (own,) = self.pool.allocate(1, text.owner)
            self.pool.release([text.table[-1]], self.step)
            text.table[-1] = own
        text.tokens.append(token)
        self._compute(text)

    @precondition(lambda self: 0 < len(self.texts) < MAX_TABLES)
    @rule(pick=st.integers(0, MAX_TABLES))
    def fork(self, pick: int) -> None:
        text = self.texts[pick % len(self.texts)]
        self.pool.share(text.table)
        self.texts.append(Text(self.next_owner, list(text.tokens), list(text.table), text.computed))
        self.next_owner += 1

    @precondition(lambda self: bool(self.texts))
    @rule(pick=st.integers(0, MAX_TABLES))
    def free(self, pick: int) -> None:
        """A request finishes, is aborted or preempted: to the pool it is all the same."""
        self.step += 1
        text = self.texts.pop(pick % len(self.texts))
        self.pool.release(text.table, self.step)

    @rule()
    def evict_all(self) -> None:
        """Somebody takes every block there is but pinned ones, and gives it back."""
        self.step += 1
        kept = self._num_kept()
        before = self.pool.evicted_blocks + self.pool.num_cached - kept
        blocks = self.pool.allocate(self.pool.num_available, self.next_owner)
        assert self.pool.evicted_blocks == before
        assert self.pool.num_available == 0
        self.pool.check_integrity([*self._tables(), blocks])
        self.pool.release(blocks, self.step)
        assert self.pool.num_cached == kept

    @rule(picks=st.sets(st.integers(0, 23), max_size=6))
    def pin(self, picks: set[int]) -> None:
        available = self.pool.num_available
        blocks = [block for block in picks if block < self.pool.num_blocks and self.pool.ledger.hash[block]]
        taken = self.pool.num_idle(blocks)
        self.pool.pin(blocks)
        assert set(blocks) <= self.pool.pinned
        assert self.pool.num_available == available - taken

    @rule(picks=st.sets(st.integers(0, 23), max_size=6))
    def unpin(self, picks: set[int]) -> None:
        self.pool.unpin(picks)
        assert not picks & self.pool.pinned

    @rule(picks=st.sets(st.integers(0, 23), max_size=6))
    def evict(self, picks: set[int]) -> None:
        blocks = [block for block in picks if self.pool.is_evictable(block)]
        free, pinned = self.pool.num_free, set(self.pool.pinned)
        if blocks:
            self.pool.evict(blocks)
        assert (self.pool.num_free, self.pool.pinned) == (free + len(blocks), pinned)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        assert self.pool.num_cached == len(self.pool.pinned) == 0

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity(self._tables())
        assert pool.num_free + pool.num_cached + pool.num_active == pool.num_blocks
        assert pool.num_active == len({block for table in self._tables() for block in table})
        for text in self.texts:
            filled = pool.ledger.filled[text.table].tolist()
            assert sum(filled) == text.computed == len(text.tokens)
            for place, block in enumerate(text.table):
                prefix = pool.prefix(block)
                span = tuple(text.tokens[place * self.size : (place + 1) * self.size])
                assert prefix is None or prefix.token_ids == span

    def _num_kept(self) -> int:
        return sum(self.pool.ref_count(block) == 0 for block in self.pool.pinned)

    def _tables(self) -> list[list[int]]:
        return [text.table for text in self.texts]

    def _find(self, tokens: list[int]) -> list[int]:
        if self.pool.index is None:
            return []
        digests: list[bytes] = []
        self.pool.index.extend(digests, tokens)
        found = find_prefix(ONE_GROUP, digests[: (len(tokens) - 1) // self.size], self.size, self.pool.index.get)
        return found.tables[0] if found.tables else []

    def _compute(self, text: Text) -> None:
        first, stop = text.computed // self.size, -(-len(text.tokens) // self.size)
        blocks = text.table[first:stop]
        filled = [min(self.size, len(text.tokens) - place * self.size) for place in range(first, stop)]
        self.pool.record_write(blocks, filled, [text.owner] * len(blocks), self.step)
        text.computed = len(text.tokens)
        if self.pool.index is None:
            return
        digests: list[bytes] = []
        self.pool.index.extend(digests, text.tokens)
        for place in range(first, len(digests)):
            span = text.tokens[place * self.size : (place + 1) * self.size]
            self.pool.seal(text.table[place], Prefix(digests[place], place * self.size, pack_tokens(span)))


def test_every_pool_keeps_its_books(storm: Callable[[int, int], int]) -> None:
    """The rules above over long histories."""
    few = settings(
        max_examples=storm(40, 200),
        stateful_step_count=40,
    )
    check_machine(PoolMachine, settings=few)
