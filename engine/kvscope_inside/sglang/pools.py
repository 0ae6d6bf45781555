"""Where the KV of a model's layers is in SGLang: a pool of pages that full attention has, beside it one of pages that
sliding windows have, and one of recurrent states.

Owns which rows of the ledger the pools of pages have: row 0 is where padding is written, in each of them, then come the
pages of full attention, and those of windows. States are rows of a tier of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvscope_inside.sglang.host_tier import host_tier_of


class Windows(NamedTuple):
    """Layers whose queries look back a little."""

    mapping: Any
    """A tensor: of each slot of full attention, which slot of this pool has the same token, 0 for none."""
    allocator: Any
    num_pages: int
    num_tokens: int
    """That a query looks back, as far as SGLang keeps them."""


class States(NamedTuple):
    """Layers that keep one state of all that was said."""

    table: Any
    """SGLang's own, of requests: it has two tensors that say which states a row has."""
    allocator: Any
    num_states: int
    """Without the first, which is nobody's."""

    @property
    def of_rows(self) -> list[Any]:
        """Tensors, a row each request: the state that it writes, and those that are kept for the tree."""
        tracked = getattr(self.table, "req_index_to_mamba_ping_pong_track_buffer_mapping", None)
        own = self.table.req_index_to_mamba_index_mapping
        return [own] if tracked is None else [own, tracked]


class Pools(NamedTuple):
    """Of one scheduler."""

    full: Any
    """The allocator."""
    page_size: int
    num_pages: int
    windows: Windows | None
    states: States | None
    num_host_pages: int = 0

    @property
    def num_blocks(self) -> int:
        """Rows of the ledger that are pages of any of them, and the first."""
        return 1 + self.num_pages + (self.windows.num_pages if self.windows is not None else 0)

    @property
    def first_window(self) -> int:
        """What is added to the number of a window's page."""
        return self.num_pages


def pools_of(scheduler: Any) -> Pools:
    """As SGLang has them; those that it keeps in another way than is known here are left out."""
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
    """Of the pages that full attention has."""
    allocator = scheduler.token_to_kv_pool_allocator
    return getattr(allocator, "full_attn_allocator", allocator)


def num_pages_of(allocator: Any) -> int:
    """Without the first, which is nobody's."""
    return int(getattr(allocator, "num_pages", 0) or int(allocator.size) // int(allocator.page_size))


def knows_free(allocator: Any) -> bool:
    """Whether it has a list of free pages."""
    return getattr(allocator, "free_pages", None) is not None


def _windows_of(scheduler: Any) -> Windows | None:
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    own, mapping = getattr(allocator, "swa_attn_allocator", None), getattr(allocator, "full_to_swa_index_mapping", None)
    is_apart = own is not None and mapping is not None and own is not full_allocator(scheduler)
    if not is_apart or getattr(allocator, "swa_req_ring", False) or not knows_free(own):
        return None
    looks_back = getattr(cache, "swa_retain_window", None) or getattr(cache, "sliding_window_size", None)
    return Windows(mapping, own, num_pages_of(own), int(looks_back or 0))


def _states_of(scheduler: Any) -> States | None:
    table = scheduler.req_to_token_pool
    allocator: Any = getattr(table, "mamba_allocator", None)
    is_known = hasattr(table, "req_index_to_mamba_index_mapping") and hasattr(allocator, "free_slots")
    return States(table, allocator, int(allocator.size)) if is_known else None
