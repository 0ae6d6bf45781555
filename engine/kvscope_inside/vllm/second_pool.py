"""The second pool of vLLM's SimpleCPUOffloadConnector, in host memory or on disk, published as rows below the first.

Its blocks are of the same kind as the first pool's, and their contents and hashes were copied from there.
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
    """Second pool of a scheduler's connector."""

    pool: Any
    is_on_disk: bool

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including the null block."""
        return len(self.pool.blocks)


def second_pool_of(connectors: Iterable[Any]) -> SecondPool | None:
    """Return the second pool of the first connector that has one; None without any."""
    for connector in connectors:
        manager = getattr(connector, "scheduler_manager", None)
        pool = getattr(manager, "cpu_block_pool", None)
        if hasattr(pool, "free_blocks") and 0 < len(getattr(pool, "blocks", ())) <= MAX_BLOCKS:
            return SecondPool(pool, str(getattr(manager, "kv_event_medium", "CPU")).upper() != "CPU")
    return None


def hook_second_pool(hooks: Hooks, pool: Any, touched: list[Any], free: Callable[[str], None]) -> None:
    """Install hooks that append changed blocks to `touched`.

    `free` hooks a method whose argument may be an iterator.
    """
    hooks.after(pool, "get_new_blocks", lambda blocks, *_, **__: touched.extend(blocks))
    hooks.after(pool, "touch", lambda _, blocks, *__, **___: touched.extend(blocks))
    hooks.after(
        pool, "reset_prefix_cache", lambda was_reset, *_, **__: touched.extend(pool.blocks if was_reset else ())
    )
    free("free_blocks")


class SecondPoolRows:
    """Ledger rows of the second pool, which follow those of the first. `texts` has the tokens of both."""

    def __init__(self, state: CacheState, texts: CachedTexts, max_texts: int) -> None:
        self._state, self._texts, self._max_texts = state, texts, max_texts
        self._first = state.hello.cache.num_blocks
        state.set_blocks([self._first], state=BlockState.UNMAPPED)  # its null block

    def update(self, step: int, ids: list[int], ref_counts: list[int], hashes: list[Any]) -> list[int]:
        """Publish the state of blocks after a step (the last entry of each counts).

        Returns the hashes of evicted ones.
        """
        last = {block: index for index, block in enumerate(ids) if block}
        if not last:
            return []
        state, ledger, indices = self._state, self._state.ledger, list(last.values())
        rows = self._first + np.array(list(last), np.int64)
        refs = np.array([ref_counts[index] for index in indices], np.int32)
        now = np.array([hash_of_row(hashes[index]) for index in indices], np.uint64)
        before, refs_before = ledger.hash[rows].copy(), ledger.ref_count[rows].copy()
        lost, added = (before != 0) & (before != now), (now != 0) & (before != now)
        is_hit = (now != 0) & (before == now) & (refs > refs_before)
        hits = np.where(lost, 0, state.more_hits(rows, is_hit))
        kind = np.where(refs > 0, BlockState.ACTIVE, np.where(now != 0, BlockState.CACHED, BlockState.FREE))
        self._clear(rows[lost])
        state.set_blocks(rows, state=kind, ref_count=refs, hash=now, prefix_hits=hits, last_used_step=step)
        self._copy(rows[added], now[added])
        state.free_blocks(rows[kind == BlockState.FREE])
        state.add_moves("evicted", rows[lost].tolist())
        state.add_moves("saved", rows[added].tolist())
        state.count(offloaded_blocks=int(added.sum()))
        return [int(value) for value in before[lost]]

    def _clear(self, rows: Any) -> None:
        for row in rows.tolist():
            self._texts.discard(row)
        self._state.set_blocks(rows, filled=0, parent=0, owner=NO_OWNER, group=0, prefix_hits=0)

    def _copy(self, rows: Any, hashes: Any) -> None:
        """Copy the contents of the first pool's blocks with these hashes, as far as they are still there."""
        ledger = self._state.ledger
        found = np.flatnonzero(np.isin(ledger.hash[: self._first], hashes))
        by_hash = dict(zip(ledger.hash[found].tolist(), found.tolist(), strict=True))
        for row, value in zip(rows.tolist(), hashes.tolist(), strict=True):
            source = by_hash.get(value)
            if source is None:
                self._state.set_blocks([row], filled=self._state.hello.cache.block_size)
                continue
            self._state.set_blocks([row], **{name: getattr(ledger, name)[source] for name in _COPIED})
            text = self._texts.get(source)
            if text is not None and len(self._texts) < self._max_texts:
                self._texts.set(row, text)
