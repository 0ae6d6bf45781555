"""Finds the request for which SGLang evicts cached pages: one of the batch being allocated, or the one being matched.

SGLang frees memory for a whole batch in one eviction. Its allocator assigns free pages in the order of the batch, so
the eviction is attributed to the first request that the previously free pages do not cover. Runs on the scheduler's
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvscope_inside.hooks import Hooks
from kvscope_inside.sglang.pools import full_allocator


class EvictedCounts(NamedTuple):
    num_tokens: int
    num_window_tokens: int
    num_states: int
    request: Any
    """SGLang's request for which memory was freed; None if unknown."""


class EvictionBeneficiary:
    """Hooks on a scheduler's radix tree and batches that find the request for which SGLang evicts.

    `on_eviction` is called after each eviction that freed tokens or states.
    """

    def __init__(self, scheduler: Any, hooks: Hooks, on_eviction: Callable[[EvictedCounts], None]) -> None:
        self._allocator = full_allocator(scheduler)
        self._page_size = int(self._allocator.page_size)
        self._on_eviction = on_eviction
        self._requests: Sequence[Any] = ()
        self._num_needed: Callable[[Any], int] = self._next_page
        """Function that returns for how many tokens a request needs new memory."""
        self._install_hooks(scheduler, hooks)

    def clear(self) -> None:
        """Drop the current requests. Evictions are then attributed to no request, until a hook on a batch or
        request is called again.
        """
        self._requests = ()

    def first_uncovered(self, num_free: int = 0) -> Any:
        """Return the first request of the batch for which `num_free` free tokens are not enough; None if unknown."""
        request = self._first_uncovered(num_free, self._num_needed)
        # SGLang reserves a page for each request
        return request if request is not None else self._first_uncovered(num_free, _one_token)

    def _first_uncovered(self, num_free: int, num_needed_of: Callable[[Any], int]) -> Any:
        page_size, last = self._page_size, None
        for request in self._requests:
            num_needed = num_needed_of(request)
            if num_needed > 0:
                last, num_free = request, num_free - -(-num_needed // page_size) * page_size
                if num_free < 0:
                    break
        return last

    def _install_hooks(self, scheduler: Any, hooks: Hooks) -> None:
        cache, batch_type = scheduler.tree_cache, type(getattr(scheduler, "running_batch", None))
        hooks.before(batch_type, "prepare_for_extend", self._before_extend)
        hooks.before(batch_type, "prepare_for_decode", self._before_decode)
        hooks.before(batch_type, "check_decode_mem", self._before_decode)
        if hasattr(cache, "checkpoint"):
            hooks.before(cache, "checkpoint", self._before_checkpoint)
        if hasattr(cache, "init_load_back"):
            hooks.before(cache, "init_load_back", self._before_request)
        if hasattr(cache, "supports_mamba") and cache.supports_mamba():
            hooks.before(cache, "match_prefix", self._before_request)
        # All evictions call `_evict`; older trees have only `evict`.
        hooks.around(
            cache, "_evict" if hasattr(cache, "_evict") else "evict", self._before_eviction, self._after_eviction
        )

    # Called on the scheduler's thread.

    def _before_extend(self, batch: Any, *_: Any, **__: Any) -> None:
        self._requests, self._num_needed = batch.reqs, _num_extend_tokens

    def _before_decode(self, batch: Any, selected: Sequence[int] | None = None, *_: Any, **kwargs: Any) -> None:
        indices = kwargs.get("selected_indices", selected)
        self._requests = batch.reqs if indices is None else [batch.reqs[index] for index in sorted(indices)]
        self._num_needed = self._next_page

    def _before_checkpoint(self, request: Any, *_: Any, **__: Any) -> None:
        self._requests, self._num_needed = (request,), _one_token

    def _before_request(self, params: Any, *_: Any, **__: Any) -> None:
        request = getattr(params, "req", None)
        self._requests, self._num_needed = () if request is None else (request,), _one_token

    def _next_page(self, request: Any) -> int:
        return int(request.kv.kv_committed_len % self._page_size == 0)

    def _before_eviction(self, *_: Any, **__: Any) -> int:
        return int(self._allocator.available_size())

    def _after_eviction(self, num_free: int, result: Any, *_: Any, **__: Any) -> None:
        names = ("num_tokens_evicted", "swa_num_tokens_evicted", "mamba_num_evicted")
        tokens, window_tokens, states = (int(getattr(result, name, 0) or 0) for name in names)
        if tokens or window_tokens or states:
            self._on_eviction(EvictedCounts(tokens, window_tokens, states, self.first_uncovered(num_free)))


def _num_extend_tokens(request: Any) -> int:
    return int(request.extend_len)


def _one_token(request: Any) -> int:
    return 1
