"""Finds SGLang's KV pools: pages of full attention, pages of sliding windows, and recurrent states.

Defines the ledger's row numbers: row 0 is the page to which padding is written, followed by the pages of full
attention, then those of windows. States are rows of a separate tier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvscope_inside.sglang.host_tier import host_tier_of


class Windows(NamedTuple):
    mapping: Any
    """Tensor with the window slot for each slot of full attention; 0 if there is none."""
    allocator: Any
    num_pages: int
    num_tokens: int
    """Window size: number of last tokens for which SGLang retains KV."""


class States(NamedTuple):
    table: Any
    """SGLang's `req_to_token_pool`, which has two tensors with the states of each table row."""
    allocator: Any
    num_states: int
    """Number of states, excluding state 0, to which padding is written."""

    @property
    def row_tensors(self) -> list[Any]:
        """Tensors with one row per request: first the state that the request writes, then (if SGLang has it)
        the states retained for the radix tree.
        """
        tracked = getattr(self.table, "req_index_to_mamba_ping_pong_track_buffer_mapping", None)
        own = self.table.req_index_to_mamba_index_mapping
        return [own] if tracked is None else [own, tracked]


class Pools(NamedTuple):
    full: Any
    """Allocator of the pages of full attention."""
    page_size: int
    num_pages: int
    windows: Windows | None
    states: States | None
    num_host_pages: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of ledger rows for pages of full attention and of windows, including row 0."""
        return 1 + self.num_pages + (self.windows.num_pages if self.windows is not None else 0)

    @property
    def window_row_offset(self) -> int:
        """Ledger row of a window page minus its page id."""
        return self.num_pages


def pools_of(scheduler: Any) -> Pools:
    """Return the scheduler's pools. Pools of an unknown structure are omitted."""
    full = full_allocator(scheduler)
    tier = host_tier_of(scheduler)
    return Pools(
        full,
        int(full.page_size),
        num_pages_of(full),
        _windows_of(scheduler),
        _states_of(scheduler),
        tier.num_pages if tier is not None and tier.page_size == int(full.page_size) else 0,
    )


def full_allocator(scheduler: Any) -> Any:
    allocator = scheduler.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def num_pages_of(allocator: Any) -> int:
    """Return the number of pages, excluding page 0, to which padding is written."""
    return int(getattr(allocator, "num_pages", 0) or int(allocator.size) // int(allocator.page_size))


def has_free_list(allocator: Any) -> bool:
    return getattr(allocator, "free_pages", None) is not None


def _windows_of(scheduler: Any) -> Windows | None:
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    window_allocator, mapping = (
        getattr(allocator, "swa_attn_allocator", None),
        getattr(allocator, "full_to_swa_index_mapping", None),
    )
    is_separate = (
        window_allocator is not None and mapping is not None and window_allocator is not full_allocator(scheduler)
    )
    if not is_separate or getattr(allocator, "swa_req_ring", False) or not has_free_list(window_allocator):
        return None
    window_size = getattr(cache, "swa_retain_window", None) or getattr(cache, "sliding_window_size", None)
    return Windows(mapping, window_allocator, num_pages_of(window_allocator), int(window_size or 0))


def _states_of(scheduler: Any) -> States | None:
    table = scheduler.req_to_token_pool
    allocator: Any = getattr(table, "mamba_allocator", None)
    is_known = hasattr(table, "req_index_to_mamba_index_mapping") and hasattr(allocator, "free_slots")
    return States(table, allocator, int(allocator.size)) if is_known else None
