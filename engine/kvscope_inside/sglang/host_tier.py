"""Pages that SGLang's HiCache keeps in host memory: where they are found, and what is noted as it happens.

Ids of host pages are on the host; which page of the pool was copied is told with the next look at the pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvscope_inside.hooks import Hooks
from kvscope_telemetry.messages.validity import MAX_BLOCKS

Ids = npt.NDArray[np.int64]
_METHODS: Final = ("write", "load")


class HostTier(NamedTuple):
    """Of one scheduler, for pages of full attention."""

    cache: Any
    controller: Any
    pool: Any
    page_size: int
    num_pages: int


class HostPageEvent(NamedTuple):
    """Something that happened to host pages."""

    word: str
    """"saves", "saved", "loads", "was read", "frees", or "nothing"."""
    node: int
    """Of the tree: what is copied at once."""
    pages: Ids
    num_entries: int = 0
    """Pages of the pool that come with the copy, which these were copied from, or to."""
    is_as_told: bool = False
    """What they were copied from held what was told of it last: nothing was evicted since, or it is evicted now."""

    def dropped(self) -> HostPageEvent:
        """The cache was emptied; what comes with the copy is nobody's."""
        return self._replace(word="nothing")


def host_tier_of(scheduler: Any) -> HostTier | None:
    """None: there is none, or it only passes pages on to a tier below."""
    cache = scheduler.tree_cache
    controller = getattr(cache, "cache_controller", None)
    pool = getattr(getattr(getattr(controller, "mem_pool_host", None), "anchor_entry", None), "host_pool", None)
    if pool is None or getattr(cache, "host_memory_mode", "cache") != "cache":
        return None
    if not all(hasattr(controller, name) for name in _METHODS) or not hasattr(pool, "free"):
        return None
    size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
    num_pages = int(getattr(pool, "logical_size", None) or pool.size) // size
    return HostTier(cache, controller, pool, size, num_pages) if 0 < num_pages <= MAX_BLOCKS else None


def note_host_tier(hooks: Hooks, tier: HostTier, happen: Callable[[HostPageEvent, Any], None]) -> None:
    """Hooks on it. `happen` is given what happened, and the tensor of slots of the pool that belong to it, or None."""

    def writes(result: Any, device_indices: Any, *_: Any, node_id: int = -1, **__: Any) -> None:
        copies("saves", node_id, result, device_indices)

    def loads(result: Any, host_indices: Any, *_: Any, node_id: int = -1, **__: Any) -> None:
        copies("loads", node_id, host_indices, result)

    def copies(word: str, node: int, host: Any, device: Any) -> None:
        if host is not None and device is not None and len(host):
            pages = _pages(host, tier.page_size)
            happen(
                HostPageEvent(word, node, pages, len(pages), bool(getattr(tier.cache, "is_write_back", False))), device
            )

    def saved(_: Any, node: int, *__: Any, **___: Any) -> None:
        happen(HostPageEvent("saved", node, _NONE), None)

    def loading(*_: Any, **__: Any) -> list[int]:
        return list(tier.cache.ongoing_load_back)

    def loaded(before: list[int] | None, *_: Any, **__: Any) -> None:
        for node in before or ():
            if node not in tier.cache.ongoing_load_back:
                happen(HostPageEvent("was read", node, _NONE), None)

    def frees(indices: Any, *_: Any, **__: Any) -> None:
        if len(indices):
            happen(HostPageEvent("frees", -1, _pages(indices, tier.page_size)), None)

    hooks.after(tier.controller, "write", writes)
    hooks.after(tier.controller, "load", loads)
    hooks.after(tier.cache, "_finish_write_through_ack", saved)
    hooks.around(tier.cache, "loading_check", loading, loaded)
    hooks.before(tier.pool, "free", frees)


_NONE: Final[Ids] = np.empty(0, np.int64)


def _pages(slots: Any, page_size: int) -> Ids:
    """Of slots of the host's pool, whose numbers are on the host."""
    if str(slots.device) != "cpu":
        raise TypeError(f"numbers of host pages are on {slots.device}")
    pages: Ids = slots.numpy()[::page_size] // page_size
    return pages
