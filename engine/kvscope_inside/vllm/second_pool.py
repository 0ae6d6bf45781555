"""Publishes the second pool of vLLM's SimpleCPUOffloadConnector, in host memory or on disk, as ledger rows below the
first pool.

Its blocks are of the same kind as those of the first pool, from which their contents and hashes were copied.
`hook_second_pool` is used on the engine core's thread, `SecondPoolRows` on the publishing thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from kvscope_inside.cached_texts import CachedTexts
from kvscope_inside.hooks import Hooks
from kvscope_inside.vllm.block_texts import hash_of_row
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.validity import MAX_BLOCKS
from kvscope_telemetry.producer.cache_state import CacheState

_COPIED = ("parent", "owner", "group", "filled")


class SecondPool(NamedTuple):
    pool: Any
    is_on_disk: bool

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the second pool, including the null block."""
        return len(self.pool.blocks)


def second_pool_of(connectors: Iterable[Any]) -> SecondPool | None:
    for connector in connectors:
        manager = getattr(connector, "scheduler_manager", None)
        pool = getattr(manager, "cpu_block_pool", None)
        if hasattr(pool, "free_blocks") and 0 < len(getattr(pool, "blocks", ())) <= MAX_BLOCKS:
            return SecondPool(pool, str(getattr(manager, "kv_event_medium", "CPU")).upper() != "CPU")
    return None


def hook_second_pool(hooks: Hooks, pool: Any, touched: list[Any], hook_free: Callable[[str], None]) -> None:
    """Install hooks that append changed blocks of the second pool to `touched`.

    `hook_free` is called with the name of the pool's method that frees blocks, and hooks it. That method needs a
    separate hook, because its argument may be an iterator, which can be read only once.
    """
    hooks.after(pool, "get_new_blocks", lambda blocks, *_, **__: touched.extend(blocks))
    hooks.after(pool, "touch", lambda _, blocks, *__, **___: touched.extend(blocks))
    hooks.after(
        pool, "reset_prefix_cache", lambda was_reset, *_, **__: touched.extend(pool.blocks if was_reset else ())
    )
    hook_free("free_blocks")


class SecondPoolRows:
    """Updates the ledger rows of the second pool, which follow those of the first pool.

    `texts`: tokens of the blocks of both pools, stored for at most `max_texts` blocks.
    """

    def __init__(self, state: CacheState, texts: CachedTexts, max_texts: int) -> None:
        self._state, self._texts, self._max_texts = state, texts, max_texts
        self._first = state.hello.cache.num_blocks
        state.set_blocks([self._first], state=BlockState.UNMAPPED)  # its null block

    def update(self, step: int, ids: list[int], ref_counts: list[int], hashes: list[Any]) -> list[int]:
        """Publish the state of touched blocks after a step. If a block occurs several times in `ids`, its last entry is
        valid.

        Returns the hashes of evicted blocks.
        """
        last = {block: index for index, block in enumerate(ids) if block}
        if not last:
            return []
        state, ledger, indices = self._state, self._state.ledger, list(last.values())
        rows = self._first + np.array(list(last), np.int64)
        refs = np.array([ref_counts[index] for index in indices], np.int32)
        hash_now = np.array([hash_of_row(hashes[index]) for index in indices], np.uint64)
        hash_before, refs_before = ledger.hash[rows].copy(), ledger.ref_count[rows].copy()
        is_lost, is_added = (hash_before != 0) & (hash_before != hash_now), (hash_now != 0) & (hash_before != hash_now)
        is_hit = (hash_now != 0) & (hash_before == hash_now) & (refs > refs_before)
        hits = np.where(is_lost, 0, state.more_hits(rows, is_hit))
        block_state = np.where(refs > 0, BlockState.ACTIVE, np.where(hash_now != 0, BlockState.CACHED, BlockState.FREE))
        self._clear(rows[is_lost])
        state.set_blocks(rows, state=block_state, ref_count=refs, hash=hash_now, prefix_hits=hits, last_used_step=step)
        self._copy(rows[is_added], hash_now[is_added])
        state.free_blocks(rows[block_state == BlockState.FREE])
        state.add_moves("evicted", rows[is_lost].tolist())
        state.add_moves("saved", rows[is_added].tolist())
        state.count(offloaded_blocks=int(is_added.sum()))
        return [int(value) for value in hash_before[is_lost]]

    def _clear(self, rows: Any) -> None:
        for row in rows.tolist():
            self._texts.discard(row)
        self._state.set_blocks(rows, filled=0, parent=0, owner=NO_OWNER, group=0, prefix_hits=0)

    def _copy(self, rows: Any, hashes: Any) -> None:
        """Copy the published contents of the first pool's blocks with these hashes to `rows`, if they are still
        cached there.
        """
        ledger = self._state.ledger
        sources = np.flatnonzero(np.isin(ledger.hash[: self._first], hashes))
        by_hash = dict(zip(ledger.hash[sources].tolist(), sources.tolist(), strict=True))
        for row, value in zip(rows.tolist(), hashes.tolist(), strict=True):
            source = by_hash.get(value)
            if source is None:
                self._state.set_blocks([row], filled=self._state.hello.cache.block_size)
                continue
            self._state.set_blocks([row], **{name: getattr(ledger, name)[source] for name in _COPIED})
            text = self._texts.get(source)
            if text is not None and len(self._texts) < self._max_texts:
                self._texts.set(row, text)
