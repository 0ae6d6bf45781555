"""Finds the request for which SGLang evicts: one of the batch being allocated, or the one being matched.

SGLang frees space for a whole batch in one eviction. Its allocator hands out free pages in the order of the batch, so
the eviction is attributed to the first request that the previously free pages do not cover. Runs on the scheduler's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang.pools import full_allocator


class Evicted(NamedTuple):
    """Tokens and states that one eviction freed."""

    num_tokens: int
    num_window_tokens: int
    num_states: int
    request: Any
    """The request for which space was freed; None if unknown."""


class EvictionBeneficiary:
    """Hooks on a scheduler's radix tree and batches that find the request for which SGLang evicts.

    `evicted` is called after each eviction that freed something.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, evicted: Callable[[Evicted], None]) -> None:
        self._allocator = full_allocator(scheduler)
        self._page_size = int(self._allocator.page_size)
        self._on_eviction = evicted
        self._requests: Sequence[Any] = ()
        self._need: Callable[[Any], int] = self._next_page
        """Returns the number of tokens for which a request needs space."""
        self._install_hooks(scheduler, hooks)

    def clear(self) -> None:
        """Attribute no further evictions to the current requests, because their space is allocated."""
        self._requests = ()

    def first(self, num_free: int = 0) -> Any:
        """Return the first request of the batch for which `num_free` free tokens are not enough; None if unknown."""
        found = self._first(num_free, self._need)
        # SGLang reserves a page for each request
        return found if found is not None else self._first(num_free, _one_token)

    def _first(self, num_free: int, need_of: Callable[[Any], int]) -> Any:
        size, last = self._page_size, None
        for request in self._requests:
            need = need_of(request)
            if need > 0:
                last, num_free = request, num_free - -(-need // size) * size
                if num_free < 0:
                    break
        return last

    def _install_hooks(self, scheduler: Any, hooks: Hooks) -> None:
        cache, kind_of_batch = scheduler.tree_cache, type(getattr(scheduler, "running_batch", None))
        hooks.before(kind_of_batch, "prepare_for_extend", self._extends)
        hooks.before(kind_of_batch, "prepare_for_decode", self._decodes)
        hooks.before(kind_of_batch, "check_decode_mem", self._decodes)
        if hasattr(cache, "checkpoint"):
            hooks.before(cache, "checkpoint", self._for_one)
        if hasattr(cache, "init_load_back"):
            hooks.before(cache, "init_load_back", self._for_one_of)
        if hasattr(cache, "supports_mamba") and cache.supports_mamba():
            hooks.before(cache, "match_prefix", self._for_one_of)
        # All evictions call `_evict`; older trees have only `evict`.
        hooks.around(cache, "_evict" if hasattr(cache, "_evict") else "evict", self._before, self._after)

    # Called on the scheduler's thread.

    def _extends(self, batch: Any, *_: Any, **__: Any) -> None:
        self._requests, self._need = batch.reqs, _extension

    def _decodes(self, batch: Any, selected: Sequence[int] | None = None, *_: Any, **named: Any) -> None:
        chosen = named.get("selected_indices", selected)
        self._requests = batch.reqs if chosen is None else [batch.reqs[each] for each in sorted(chosen)]
        self._need = self._next_page

    def _for_one(self, request: Any, *_: Any, **__: Any) -> None:
        self._requests, self._need = (request,), _one_token

    def _for_one_of(self, params: Any, *_: Any, **__: Any) -> None:
        request = getattr(params, "req", None)
        self._requests, self._need = () if request is None else (request,), _one_token

    def _next_page(self, request: Any) -> int:
        return int(request.kv.kv_committed_len % self._page_size == 0)

    def _before(self, *_: Any, **__: Any) -> int:
        return int(self._allocator.available_size())

    def _after(self, num_free: int, result: Any, *_: Any, **__: Any) -> None:
        names = ("num_tokens_evicted", "swa_num_tokens_evicted", "mamba_num_evicted")
        tokens, of_windows, states = (int(getattr(result, name, 0) or 0) for name in names)
        if tokens or of_windows or states:
            self._on_eviction(Evicted(tokens, of_windows, states, self.first(num_free)))


def _extension(request: Any) -> int:
    return int(request.extend_len)


def _one_token(request: Any) -> int:
    return 1
