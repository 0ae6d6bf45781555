"""What the pool of a simulated engine holds when the engine starts: cached texts, and requests that get no further."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tests.simulated_engine.background import BackgroundRequests, new_request
from tests.simulated_engine.hello import BLOCK_TOKENS

from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.request import Request
from kvscope_engine.policy.scheduling.scheduler import Scheduler

NUM_PARKED = 16
TEXT_BLOCKS = 100
"""Of a cached text. Every other one begins with the first half of the one before."""
ANY_NUMBER = 1 << 31


class NeverReady:
    """The grammar of an answer that is still being compiled: its request does not compute its prompt's last token."""

    is_ready = False
    has_ended = False

    def fill(self, words: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        """Never called: the request samples nothing."""

    def accept(self, token_id: int) -> None:
        """Never called: the request samples nothing."""


def fill(
    scheduler: Scheduler, pool: BlockPool, background: BackgroundRequests, num_cached: int, num_parked: int, now_ns: int
) -> None:
    """Have `num_cached` blocks hold texts that nobody uses, and `NUM_PARKED` requests hold `num_parked` blocks each.

    This is step 0, which no frame tells of.
    """
    limits = scheduler.limits.max_num_seqs, scheduler.limits.max_num_batched_tokens
    scheduler.limits.set(ANY_NUMBER, ANY_NUMBER)
    trunks, branches = _texts(background, num_cached)
    for texts in (trunks, branches):
        requests = [_request(background, text, now_ns) for text in texts]
        _run(scheduler, requests, now_ns)
        for request in requests:
            scheduler.finish(request, "length", now_ns)
            background.remember(request)
    if num_parked:
        prompts = [background.new_tokens(num_parked * BLOCK_TOKENS + 1) for _ in range(NUM_PARKED)]
        requests = [_request(background, prompt, now_ns) for prompt in prompts]
        for request in requests:
            request.matcher = NeverReady()
        _run(scheduler, requests, now_ns)
    scheduler.limits.set(*limits)
    scheduler.changes.drain()
    pool.changed_rows.drain()


def _texts(background: BackgroundRequests, num_blocks: int) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Texts of `num_blocks` different blocks together; the second list's begin like those of the first."""
    trunks: list[Sequence[int]] = []
    branches: list[Sequence[int]] = []
    half = TEXT_BLOCKS // 2
    while num_blocks > 0:
        trunks.append(background.new_tokens(min(TEXT_BLOCKS, num_blocks) * BLOCK_TOKENS))
        num_blocks -= TEXT_BLOCKS
        if num_blocks > 0:
            own = background.new_tokens(min(half, num_blocks) * BLOCK_TOKENS)
            branches.append((*trunks[-1][: half * BLOCK_TOKENS], *own))
            num_blocks -= half
    return trunks, branches


def _request(background: BackgroundRequests, prompt: Sequence[int], now_ns: int) -> Request:
    number = background.take_numbers(1)
    return new_request(number, f"simulated-{number}", prompt, 1, now_ns)


def _run(scheduler: Scheduler, requests: list[Request], now_ns: int) -> None:
    """Compute the prompts of `requests` in one step."""
    for request in requests:
        scheduler.add_request(request)
    scheduler.commit(scheduler.schedule(0, now_ns), 0, now_ns)
