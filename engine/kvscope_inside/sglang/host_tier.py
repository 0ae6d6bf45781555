"""Finds the pages that SGLang's HiCache stores in host memory, and reports their events.

Ids of host pages are available on the host. The ids of the pool's pages that they are copied from or to are on the
device, and arrive with the next copy of page tables (`pages`).
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
    """HiCache's host memory of one scheduler, for the pages of full attention."""

    cache: Any
    controller: Any
    pool: Any
    page_size: int
    num_pages: int


class HostPageEvent(NamedTuple):
    """An event of SGLang's host tier: pages that were copied, read or freed."""

    kind: str
    """One of "saves", "saved", "loads", "was read", "frees" and "nothing".

    "saves" and "loads" mark the start of a copy, "saved" and "was read" its end. "nothing" marks a dropped event.
    """
    node: int
    """Id of the radix tree's node whose pages are copied together; -1 if the event has no node."""
    pages: Ids
    num_entries: int = 0
    """Number of entries that belong to this event in the next copy of page tables. They are the ids of the
    pool's pages from or to which the host pages in `pages` are copied.
    """
    is_unchanged: bool = False
    """Whether the source pages still had their last published contents when they were copied.

    This holds if no page was evicted since they were published, or if the event itself evicts these pages.
    """

    def dropped(self) -> HostPageEvent:
        """Return an event of kind "nothing" in place of this event. It has the same number of page ids, which
        are ignored because the cache was emptied.
        """
        return self._replace(kind="nothing")


def host_tier_of(scheduler: Any) -> HostTier | None:
    """Return the scheduler's host tier; None if it has none, or if host memory is only a buffer for a lower tier."""
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


def hook_host_tier(hooks: Hooks, tier: HostTier, on_event: Callable[[HostPageEvent, Any], None]) -> None:
    """Install hooks on the host tier.

    `on_event` is called with each event and, if it copies pages, the tensor of the pool's slots that are copied
    (otherwise None).
    """

    def after_write(result: Any, device_indices: Any, *_: Any, node_id: int = -1, **__: Any) -> None:
        report_copy("saves", node_id, result, device_indices)

    def after_load(result: Any, host_indices: Any, *_: Any, node_id: int = -1, **__: Any) -> None:
        report_copy("loads", node_id, host_indices, result)

    def report_copy(kind: str, node: int, host: Any, device: Any) -> None:
        if host is not None and device is not None and len(host):
            pages = _pages(host, tier.page_size)
            on_event(
                HostPageEvent(kind, node, pages, len(pages), bool(getattr(tier.cache, "is_write_back", False))), device
            )

    def after_save(_: Any, node: int, *__: Any, **___: Any) -> None:
        on_event(HostPageEvent("saved", node, _NO_PAGES), None)

    def list_loading(*_: Any, **__: Any) -> list[int]:
        return list(tier.cache.ongoing_load_back)

    def report_loaded(before: list[int] | None, *_: Any, **__: Any) -> None:
        for node in before or ():
            if node not in tier.cache.ongoing_load_back:
                on_event(HostPageEvent("was read", node, _NO_PAGES), None)

    def before_free(indices: Any, *_: Any, **__: Any) -> None:
        if len(indices):
            on_event(HostPageEvent("frees", -1, _pages(indices, tier.page_size)), None)

    hooks.after(tier.controller, "write", after_write)
    hooks.after(tier.controller, "load", after_load)
    hooks.after(tier.cache, "_finish_write_through_ack", after_save)
    hooks.around(tier.cache, "loading_check", list_loading, report_loaded)
    hooks.before(tier.pool, "free", before_free)


_NO_PAGES: Final[Ids] = np.empty(0, np.int64)


def _pages(slots: Any, page_size: int) -> Ids:
    """Return the page numbers of slots in the host's pool. Raises TypeError if `slots` is not a CPU tensor."""
    if str(slots.device) != "cpu":
        raise TypeError(f"numbers of host pages are on {slots.device}")
    pages: Ids = slots.numpy()[::page_size] // page_size
    return pages
